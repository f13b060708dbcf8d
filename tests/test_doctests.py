"""Every example in a docstring of kvlink does what it shows."""

from __future__ import annotations

import doctest
import pkgutil
from importlib import import_module

import pytest

import kvlink

MODULES = [
    "kvlink",
    *(
        found.name
        for found in pkgutil.walk_packages(kvlink.__path__, "kvlink.")
        if not found.name.endswith(("__main__", "._kvlink"))  # one runs the command, the other is compiled
        and ".adapters." not in found.name  # those import their engines
    ),
]
FINDER = doctest.DocTestFinder(exclude_empty=True)
EXAMPLES = [example for name in MODULES for example in FINDER.find(import_module(name), name) if example.examples]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_the_example_does_what_it_shows(example: doctest.DocTest) -> None:
    told: list[str] = []
    failed = doctest.DocTestRunner(verbose=False).run(example, out=told.append, clear_globs=False).failed
    assert not failed, "".join(told)


def test_the_examples_are_found() -> None:
    """A finder that finds nothing passes, too."""
    assert {"kvlink", "kvlink.testing.clock.VirtualClock"} <= {example.name for example in EXAMPLES}
