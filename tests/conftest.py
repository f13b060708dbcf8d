"""What all tests share: they test the kvlink that is installed, and so do the processes they start."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import kvlink
from kvlink.errors import UnavailableError

if TYPE_CHECKING:
    from stand_in import StandIn

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


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandIn]:
    """The stand-in for a CUDA driver, which KVLink opens meanwhile; kernels are compiled once a module."""
    from stand_in import StandIn  # noqa: PLC0415 - it imports the native core

    with pytest.MonkeyPatch.context() as patch:
        it = StandIn()
        patch.setenv("KVLINK_CUDA_LIBRARY", it.library)
        patch.setenv("KVLINK_KERNEL_CACHE", str(tmp_path_factory.mktemp("kernels")))
        yield it
        it.reset()


@pytest.fixture
def stand_in(driver: StandIn) -> Iterator[StandIn]:
    """The same, as it is at first; in the end nothing of it may be held, once timers and threads have let go."""
    yield driver
    driver.reset()
    for _ in range(100):
        gc.collect()
        if not driver.held():
            break
        time.sleep(0.02)
    assert not driver.held()


# A child process started from the root of a checkout would import the checkout's kvlink, compiled or not: `python -m`
# puts the current folder first. It must be ours, and the helpers beside the tests must be found.
os.environ["PYTHONSAFEPATH"] = "1"
os.environ["PYTHONPATH"] = os.pathsep.join([str(HOME.parent), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])

# Before anybody imports it: its asserts then show the values that differ, as those of test files do.
pytest.register_assert_rewrite("kvlink.testing.conformance")
