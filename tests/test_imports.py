"""What importing kvlink loads and costs, and what its sources must not import or call."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import kvlink

HOME = Path(kvlink.__file__).parent
MAX_IMPORT_SECONDS = 0.2
FRESH_INTERPRETERS = 5
HEAVY = ("kvlink._native", "libucx", "numpy", "asyncio", "msgspec", "rich")
OPTIONAL = ("torch", "cupy", "matplotlib", "simpy")

SPY = f"""
import sys
class Spy:
    def find_spec(self, name, path=None, target=None):
        if name in {OPTIONAL}:
            print(name)
sys.meta_path.insert(0, Spy())
"""
"""Prints the optional packages that somebody tries to import, whether they are installed or not."""
TIME_THE_IMPORT = "import time; start = time.perf_counter(); import kvlink; print(time.perf_counter() - start)"
USE_EVERY_NAME = "import kvlink; [getattr(kvlink, name) for name in kvlink.__all__]"


def fresh(program: str) -> str:
    ran = subprocess.run([sys.executable, "-c", program], check=True, timeout=60, capture_output=True, text=True)
    return ran.stdout.strip()


def test_importing_kvlink_loads_nothing_heavy() -> None:
    assert fresh(f"{SPY}import kvlink; print([name for name in {HEAVY} if name in sys.modules])") == "[]"


def test_the_package_runs_as_the_command() -> None:
    ran = subprocess.run([sys.executable, "-m", "kvlink", "--version"], check=True, capture_output=True, text=True)
    assert ran.stdout.strip() == f"kvlink {kvlink.__version__}"


def test_using_every_public_name_asks_for_no_optional_package() -> None:
    assert fresh(SPY + USE_EVERY_NAME) == ""


def test_importing_kvlink_takes_less_than_its_bound() -> None:
    """The best of several, because a busy machine says nothing about kvlink."""
    assert min(float(fresh(TIME_THE_IMPORT)) for _ in range(FRESH_INTERPRETERS)) < MAX_IMPORT_SECONDS


def test_nothing_inside_imports_a_name_from_the_front_door() -> None:
    """It would make every room depend on all of them, and the layers contract does not see it."""
    rooms = {path.stem for path in HOME.iterdir() if path.suffix == ".py" or path.is_dir()}
    found = [
        f"{path.relative_to(HOME)}:{node.lineno}: from kvlink import {alias.name}"
        for path in HOME.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module == "kvlink" and not node.level
        for alias in node.names
        if alias.name not in rooms
    ]
    assert not found


def test_every_import_inside_is_absolute() -> None:
    """So that the test above, and a reader with a search box, find them."""
    found = [
        f"{path.relative_to(HOME)}:{node.lineno}"
        for path in HOME.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert not found


def test_nothing_unpickles_or_evaluates() -> None:
    """K1: bytes from outside are decoded by typed schemas only."""
    modules, calls = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}, {"eval", "exec", "compile"}
    found = []
    for path in HOME.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = {alias.name.partition(".")[0] for alias in node.names} & modules
            elif isinstance(node, ast.ImportFrom):
                names = {(node.module or "").partition(".")[0]} & modules
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                names = {node.func.id} & calls
            else:
                continue
            found += [f"{path.relative_to(HOME)}:{node.lineno}: {name}" for name in names]
    assert not found
