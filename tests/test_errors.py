"""The tree of errors, and the page that tells what each means (docs/errors.md)."""

from __future__ import annotations

import pkgutil
import re
from importlib import import_module
from pathlib import Path

import pytest

import kvlink
from kvlink import errors
from kvlink.cli import exit_code
from kvlink.errors import BusyError, ConfigError, KVLinkError, LayoutError, MismatchError, UnavailableError

PAGE = Path(__file__).parent.parent / "docs" / "errors.md"
ROW = re.compile(r"^\| `(\w+)` \| `(\w+)` \| (yes|no) \| (.+) \| (.+) \|$", re.MULTILINE)


def all_errors() -> list[type[KVLinkError]]:
    """Those of every module of kvlink, loaded for it; not those of tests."""
    for found in pkgutil.walk_packages(kvlink.__path__, "kvlink."):
        if not found.name.endswith("__main__") and ".adapters." not in found.name:  # those import their engines
            import_module(found.name)
    classes, waiting = [], [KVLinkError]
    while waiting:
        cls = waiting.pop()
        classes.append(cls)
        waiting += [child for child in cls.__subclasses__() if child.__module__.startswith("kvlink.")]
    return classes


def test_the_page_tells_of_every_error_and_of_no_other() -> None:
    told = {(code, name, retryable) for code, name, retryable, _, _ in ROW.findall(PAGE.read_text())}
    there = {(cls.code, cls.__name__, "yes" if cls.default_retryable else "no") for cls in all_errors()}
    assert told == there


def test_codes_are_unique_because_they_cross_the_wire() -> None:
    codes = [cls.code for cls in all_errors()]
    assert len(codes) == len(set(codes))


def test_the_tree_that_is_drawn_is_the_tree_that_is() -> None:
    """Depth in the drawing is depth below the root; a parent is the last line above that is less deep."""
    path: list[str] = []
    drawn = {}
    for line in (errors.__doc__ or "").splitlines():
        found = re.match(r"(?P<branch>[ │├└─]*)(?P<name>\w+Error)\b", line)
        if found and line.startswith("    "):
            depth = len(found["branch"]) // 4 - 1
            path[depth:] = [found["name"]]
            drawn[found["name"]] = path[depth - 1] if depth else "Exception"
    there = {cls.__name__: cls.__bases__[0].__name__ for cls in all_errors() if cls.__module__ == errors.__name__}
    assert drawn == there


def test_an_error_says_where_it_happened() -> None:
    error = KVLinkError("it broke", request_id="1:r", peer="decode/0/1@b", stage="read")
    assert str(error) == "it broke [request 1:r, peer decode/0/1@b, stage read]"
    assert str(KVLinkError("it broke")) == "it broke"


def test_the_error_has_the_last_word_on_a_retry() -> None:
    assert BusyError("full").retryable
    assert not KVLinkError("it broke").retryable
    assert KVLinkError("it broke", retryable=True).retryable


def test_a_mismatch_names_the_field_both_values_and_both_sides() -> None:
    error = MismatchError("dtype", "float16", "int8", source="prefill/0/0", target="decode/0/0")
    for said in ("dtype", "'float16'", "'int8'", "prefill/0/0", "decode/0/0"):
        assert said in str(error)


@pytest.mark.parametrize("cls", [ConfigError, LayoutError])
def test_what_the_caller_got_wrong_is_a_value_error_too(cls: type[KVLinkError]) -> None:
    with pytest.raises(ValueError, match="wrong"):
        raise cls("wrong")


@pytest.mark.parametrize("cls", all_errors(), ids=lambda cls: cls.code)
def test_the_page_gives_the_exit_code_of_the_command(cls: type[KVLinkError]) -> None:
    error = cls("f", 1, 2) if issubclass(cls, MismatchError) else cls("it broke")
    expected = {ConfigError: 2, LayoutError: 2, UnavailableError: 3}.get(cls, 1)
    assert exit_code(error) == expected
