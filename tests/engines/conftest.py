"""Models made once for all engines, and a place for their logs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

MAKE_MODEL = Path(__file__).parents[2] / "examples" / "vllm_pd" / "make_model.py"


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny model of this kind."""
    home = tmp_path_factory.mktemp("models")

    def made(kind: str) -> Path:
        if not (home / kind).exists():
            subprocess.run([sys.executable, str(MAKE_MODEL), kind, str(home / kind)], check=True, capture_output=True)
        return home / kind

    return made


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")
