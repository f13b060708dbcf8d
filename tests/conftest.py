"""What all tests share: they test the kvlink that is installed, and so do the processes they start."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import kvlink
from kvlink.errors import UnavailableError

HOME = Path(kvlink.__file__).parent
HERE = Path(__file__).parent


def pytest_configure() -> None:
    """Stop at once, in one sentence, where every test would fail for the same reason."""
    try:
        import kvlink._native  # noqa: F401, PLC0415
    except UnavailableError as error:
        reason = f"{error}.\nThe tests would import {HOME}, which has no native core for this Python. "
        if HOME.parent == HERE.parent:
            reason += "For the installed package run `pytest`, not `python -m pytest`, and leave PYTHONPATH unset."
        pytest.exit(reason, returncode=3)


def pytest_report_header() -> str:
    return f"kvlink {kvlink.__version__} from {HOME}"


# A child process started from the root of a checkout would import the checkout's kvlink, compiled or not: `python -m`
# puts the current folder first. It must be ours, and the helpers beside the tests must be found.
os.environ["PYTHONSAFEPATH"] = "1"
os.environ["PYTHONPATH"] = os.pathsep.join([str(HOME.parent), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])

# Before anybody imports it: its asserts then show the values that differ, as those of test files do.
pytest.register_assert_rewrite("kvlink.testing.conformance")
