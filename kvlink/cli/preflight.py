"""``kvlink preflight``: can this machine run the measured comparison, co-located against split, and what is missing?

It looks and imports nothing: an engine or torch is found by its package's metadata. What it writes is a record with
evidence level ``environment_preflight``: it says what is there, never how fast it is.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Final, Literal

import msgspec
from rich.console import Console

from kvlink.cli.output import check_outputs, print_table, write_result
from kvlink.errors import ConfigError, UnavailableError
from kvlink.version import VERSION

ENGINES: Final = ("vllm", "sglang")
SERVERS: Final = 2
"""Engines that the comparison runs at a time."""
MIN_MEMORY_GIB: Final = 8.0
"""Host memory for two servers of a small model, each with its runtime."""
QUERY_SECONDS: Final = 10.0


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One thing looked at. ``remedy`` is what to do where it is missing."""

    name: str
    found: str | None
    enough: bool
    remedy: str


class Preflight(msgspec.Struct, frozen=True, kw_only=True):
    """``kvlink.preflight/1``.

    Attributes:
        able: two servers can be run and measured here.
        comparison: on what: ``gpu`` with a GPU for each server, else ``cpu``; ``None`` where not able.
        missing: names of the checks that stand in the way.
    """

    schema: Literal["kvlink.preflight/1"] = "kvlink.preflight/1"
    kvlink: str = VERSION
    evidence_level: Literal["environment_preflight"] = "environment_preflight"
    able: bool
    comparison: Literal["gpu", "cpu"] | None
    missing: tuple[str, ...]
    checks: tuple[Check, ...]


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``preflight`` to the command line."""
    parser = commands.add_parser(
        "preflight",
        help="can this machine run two engines and measure them, and what is missing",
        description="Looks for an engine, torch, GPUs and memory, without importing or starting any. Exit codes: 0 the "
        "measured comparison can be run here, 2 bad arguments, 3 something is missing (the record is written).",
    )
    parser.add_argument("--json", metavar="FILE", help="write the record as JSON; - is standard output")
    parser.add_argument(
        "--memory-gib",
        type=float,
        default=MIN_MEMORY_GIB,
        metavar="N",
        help="host memory that the two servers need, GiB (%(default)s)",
    )


def run(arguments: argparse.Namespace) -> bool:
    """Look, show and write.

    Raises:
        ConfigError: an argument is wrong.
        UnavailableError: something is missing; says what, and the remedy.
    """
    if not arguments.memory_gib > 0:
        raise ConfigError(f"--memory-gib is {arguments.memory_gib}; it must be above zero")
    check_outputs(arguments)
    found = examine(arguments.memory_gib)
    write_result(found, arguments.json, lambda console: _show(found, console))
    if not found.able:
        lacking = [check for check in found.checks if check.name in found.missing]
        raise UnavailableError("; ".join(f"{check.name} is missing: {check.remedy}" for check in lacking))
    return True


def examine(memory_gib: float = MIN_MEMORY_GIB) -> Preflight:
    """Look at this machine; ``memory_gib`` is what the servers need."""
    engines = {name: version for name in ENGINES if (version := _version(name)) is not None}
    gpus, host_gib = _gpus(), _memory_gib()
    torch = _version("torch")
    checks = (
        Check(
            name="engine",
            found=", ".join(f"{name} {version}" for name, version in engines.items()) or None,
            enough=bool(engines),
            remedy="pip install vllm, the CPU build where there is no GPU",
        ),
        Check(name="torch", found=torch, enough=torch is not None, remedy="it comes with the engine"),
        Check(
            name="memory",
            found=f"{host_gib:.1f} GiB",
            enough=host_gib >= memory_gib,
            remedy=f"{memory_gib:g} GiB are asked for; free some, or lower --memory-gib for a smaller model",
        ),
        Check(
            name="processors",
            found=str(os.cpu_count()),
            enough=(os.cpu_count() or 1) >= SERVERS,
            remedy=f"{SERVERS} servers need {SERVERS}",
        ),
        Check(
            name="GPU",
            found=", ".join(gpus) or None,
            enough=len(gpus) >= SERVERS,
            remedy=f"{SERVERS} for a comparison on GPUs; without them it runs on CPUs and says nothing about GPUs",
        ),
    )
    missing = tuple(check.name for check in checks if not check.enough and check.name != "GPU")
    able = not missing
    on: Literal["gpu", "cpu"] = "gpu" if checks[-1].enough else "cpu"
    return Preflight(able=able, comparison=on if able else None, missing=missing, checks=checks)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _memory_gib() -> float:
    """Memory that can be had now, by the kernel's estimate."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) / 1024**2
    return 0.0


def _gpus() -> list[str]:
    """Names and memory of NVIDIA GPUs, by the driver's own tool; none where it is not there or does not answer."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = [tool, "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, timeout=QUERY_SECONDS, check=True)  # noqa: S603 - the driver's tool
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in told.stdout.splitlines() if line.strip()]


def _show(found: Preflight, console: Console) -> None:
    rows = [
        (check.name, check.found or "not found", "yes" if check.enough else "no", "" if check.enough else check.remedy)
        for check in found.checks
    ]
    print_table(("", "found", "enough", "remedy"), rows, console)
    on = f"can be run here, on {found.comparison.upper()}s" if found.comparison else "cannot be run here"
    console.print(f"The measured comparison {on}. Evidence level: {found.evidence_level}; nothing was measured.")
