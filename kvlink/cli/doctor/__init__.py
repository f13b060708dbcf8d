"""``kvlink doctor``: what this machine has for KVLink, what it lacks, and the remedy for each.

`libraries` looks at what is loaded, `gpus` at GPUs and their kernels, `machine` and `containers` at what the kernel
says, `speed` measures with a second process (`partner`), `choice` says what a link here would do by itself; all make
`findings`, which `table` shows.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from functools import partial
from pathlib import Path

from kvlink.cli.doctor.findings import DoctorReport, make_report
from kvlink.cli.output import check_writable, native_words_aside, write_result
from kvlink.config import Config
from kvlink.errors import UnavailableError


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
    from kvlink.cli.doctor.table import show  # noqa: PLC0415 - other commands need not load it

    if arguments.json not in (None, "-"):
        check_writable("--json", Path(arguments.json))
    with native_words_aside():
        report = asyncio.run(examine(Config.load(), measured=not arguments.no_measure))
    write_result(report, arguments.json, partial(show, report))
    for finding in report.findings:
        if finding.severity == "fatal":
            raise UnavailableError(f"{finding.text}; {finding.remedy}")
    return True


async def examine(config: Config, *, measured: bool) -> DoctorReport:
    """Everything there is to find under ``config``; without ``measured``, only what needs no second process."""
    from kvlink.cli.doctor import choice, containers, gpus, libraries, machine, speed  # noqa: PLC0415 - other commands need not load them

    start = time.monotonic()
    findings = list(libraries.look_at_libraries(config))
    rdma = any(finding.check == "ucx.rdma" and finding.severity == "ok" for finding in findings)
    findings += gpus.look_at_gpus(config)
    findings += machine.look_at_machine(rdma=rdma)
    findings += containers.look_at_containers()
    if measured:
        findings += await speed.measure(config)
    findings += choice.look_at_choice(config, measured=measured)
    return make_report(findings, time.monotonic() - start)
