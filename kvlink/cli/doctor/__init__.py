"""``kvlink doctor``: what this machine has for KVLink, what it lacks, and the remedy for each.

`libraries` looks at what is loaded, `machine` at what the kernel says, `speed` measures with a second process
(`partner`); all make `findings`, which `table` shows.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path

import msgspec
from rich.console import Console

from kvlink.cli.doctor.findings import DoctorReport, make_report
from kvlink.config import Config
from kvlink.errors import ConfigError, UnavailableError


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``doctor`` to the command line."""
    parser = commands.add_parser(
        "doctor",
        help="what this machine has for KVLink, what it lacks, and the remedy",
        description="Looks at UCX, RDMA, GPU, memory, pages, permissions and processors, and measures copies, sockets "
        "and UCX between two processes; under the configuration that a link here would have. Changes nothing. "
        "Exit codes: 0 KVLink works here, 2 bad arguments or configuration, 3 it cannot work.",
    )
    parser.add_argument("--json", metavar="FILE", help="write the findings as JSON; - is standard output")
    parser.add_argument("--no-measure", action="store_true", help="look only; start no second process")


def run(arguments: argparse.Namespace) -> bool:
    """Look, show and write.

    Raises:
        ConfigError: the configuration, or an argument, is wrong.
        UnavailableError: KVLink cannot work here; says what is missing and the remedy.
    """
    report = asyncio.run(examine(Config.load(), measured=not arguments.no_measure))
    if arguments.json != "-":
        show_report(report)
    if arguments.json is not None:
        _write(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n", arguments.json)
    for finding in report.findings:
        if finding.severity == "fatal":
            raise UnavailableError(f"{finding.text}; {finding.remedy}")
    return True


async def examine(config: Config, *, measured: bool) -> DoctorReport:
    """Everything there is to find under ``config``; without ``measured``, only what needs no second process."""
    from kvlink.cli.doctor import libraries, machine, speed  # noqa: PLC0415 - other commands need not load them

    start = time.monotonic()
    findings = list(libraries.look_at_libraries(config))
    rdma = any(finding.check == "ucx.rdma" and finding.severity == "ok" for finding in findings)
    findings += machine.look_at_machine(rdma=rdma)
    if measured:
        findings += await speed.measure(config)
    return make_report(findings, time.monotonic() - start)


def show_report(report: DoctorReport) -> None:
    """Print it as a table."""
    from kvlink.cli.doctor.table import show  # noqa: PLC0415 - see above

    show(report, Console(highlight=False))


def _write(data: bytes, file: str) -> None:
    if file == "-":
        sys.stdout.write(data.decode())
        return
    try:
        Path(file).write_bytes(data)
    except OSError as error:
        msg = f"--json {file} cannot be written: {error.strerror}"
        raise ConfigError(msg) from error
