"""What README and docs show is what runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_an_example_runs_and_says_nothing_on_standard_error(example: Path) -> None:
    run = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, timeout=60, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout


@pytest.mark.parametrize("script", ["doc-examples", "doc-figures", "field-cases", "protocol-diagrams"])
def test_a_script_that_writes_pages_refuses_what_it_does_not_know(script: str) -> None:
    """A mistyped ``--check`` must not write."""
    run = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / script), "--chekc"], capture_output=True, text=True, check=False
    )
    assert run.returncode == 2
    assert "usage: " in run.stderr


def test_pages_show_the_example_files_as_they_are() -> None:
    run = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "doc-examples"), "--check"], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
