"""The public names, their signatures and fields, as a text: a change of the API is seen in a diff.

To accept a change: ``KVLINK_WRITE_API=1 pytest tests/test_api_snapshot.py``, and say it in CHANGELOG.md.
"""

from __future__ import annotations

import difflib
import enum
import inspect
import os
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import FunctionType, MemberDescriptorType, ModuleType
from typing import ForwardRef

import pytest

SNAPSHOT = Path(__file__).parent / "snapshots" / "api.txt"
MODULES = (
    "kvlink",
    "kvlink.errors",
    "kvlink.observe",
    "kvlink.planning",
    "kvlink.transports.base",
    "kvlink.testing.clock",
    "kvlink.testing.conformance",
    "kvlink.testing.explorer",
    "kvlink.testing.harness",
)
SPECIAL = ("__aenter__", "__aexit__", "__call__", "__enter__", "__exit__")
"""Methods with such names that callers rely on."""
ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def test_the_public_api_is_the_one_in_the_snapshot() -> None:
    api = "".join(f"{line}\n" for name in MODULES for line in module_lines(import_module(name)))
    if os.environ.get("KVLINK_WRITE_API"):
        SNAPSHOT.parent.mkdir(exist_ok=True)
        SNAPSHOT.write_text(api)
    recorded = SNAPSHOT.read_text()
    if api != recorded:
        diff = difflib.unified_diff(recorded.splitlines(), api.splitlines(), "recorded", "now", lineterm="", n=0)
        pytest.fail("\n".join(["the public API changed", *diff, *__doc__.splitlines()[2:]]), pytrace=False)


class Bare(str):
    """An annotation, printed as it was written."""

    __slots__ = ()
    __repr__ = str.__str__


def module_lines(module: ModuleType) -> Iterator[str]:
    yield f"[{module.__name__}]"
    for name in sorted(public_names(module)):
        value = getattr(module, name)
        home = getattr(value, "__module__", module.__name__)
        if home != module.__name__ and home in MODULES:
            yield f"{name} = {home}.{name}"
        else:
            yield from lines_of(name, value)
    yield ""


def public_names(module: ModuleType) -> list[str]:
    """Those it lists, else the classes and functions it defines."""
    if hasattr(module, "__all__"):
        return [name for name in module.__all__ if name != "__version__"]
    defined = [(name, value) for name, value in vars(module).items() if isinstance(value, type | FunctionType)]
    return [name for name, value in defined if name[0] != "_" and value.__module__ == module.__name__]


def lines_of(name: str, value: object) -> Iterator[str]:
    if isinstance(value, dict):
        yield f"{name}: {', '.join(value)}"
        return
    if not isinstance(value, type):
        yield f"{name}{signature(value)}"
        return
    bases = ", ".join(base.__name__ for base in value.__bases__ if base is not object)
    yield f"class {name}({bases})" if bases else f"class {name}"
    if issubclass(value, enum.Enum):
        yield from (f"    {member.name} = {member.value!r}" for member in value)
    elif is_made_by_callers(value):
        yield f"    {signature(value)}"
    yield from (f"    {line}" for line in sorted(member_lines(value)))


def is_made_by_callers(cls: type) -> bool:
    """Rather than only inherited from: it has fields or an ``__init__`` of its own."""
    own = {*vars(cls), *(["__struct_fields__"] if hasattr(cls, "__struct_fields__") else [])}
    return "_is_protocol" not in own and bool(own & {"__init__", "__struct_fields__", "_fields"})


def member_lines(cls: type) -> Iterator[str]:
    """What the class itself adds: methods, properties, and class variables that hold plain values."""
    fields = getattr(cls, "__dataclass_fields__", getattr(cls, "_fields", ()))
    for name, member in vars(cls).items():
        if name in fields or (name.startswith("_") and name not in SPECIAL):
            continue
        if isinstance(member, classmethod | staticmethod):
            yield f"@{type(member).__name__} {name}{signature(member.__func__)}"
        elif isinstance(member, FunctionType):
            asynchronous = "async " if inspect.iscoroutinefunction(member) else ""
            yield f"{asynchronous}{name}{signature(member)}"
        elif isinstance(member, property):
            yield f"{name}: {member.fget.__annotations__.get('return', '?')}"
        elif isinstance(member, MemberDescriptorType) and not hasattr(cls, "__struct_fields__"):
            yield f"{name}"
        elif isinstance(member, bool | int | str) and not issubclass(cls, enum.Enum):
            yield f"{name} = {member!r}"


def signature(value: object) -> str:
    """With annotations as the source writes them, without addresses: the same in every run and on every Python."""
    made = inspect.signature(value)
    written = annotations_of(value) if isinstance(value, type) else {}
    parameters = [
        parameter.replace(annotation=bare(written.get(parameter.name, parameter.annotation)))
        for parameter in made.parameters.values()
    ]
    made = made.replace(parameters=parameters, return_annotation=bare(made.return_annotation))
    return ADDRESS.sub("", str(made)).removesuffix(" -> None")


def annotations_of(cls: type) -> dict[str, object]:
    """Those of the fields, inherited ones included; a dataclass's and a Struct's own signature resolves some."""
    return {name: written for base in reversed(cls.__mro__) for name, written in inspect.get_annotations(base).items()}


def bare(annotation: object) -> object:
    if isinstance(annotation, ForwardRef):  # as a NamedTuple keeps them
        annotation = annotation.__forward_arg__
    return Bare(annotation) if isinstance(annotation, str) else annotation
