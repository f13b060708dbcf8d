"""``kvlink report``: results of all kinds in one experiment table, each evidence level in a table of its own."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``report`` to the command line."""
    parser = commands.add_parser(
        "report",
        help="one table of what was simulated and measured, evidence levels kept apart",
        description="Reads results of kvlink advise, simulate, bench and preflight, and measured serving runs "
        "(kvlink.experiment/1, see docs/planning.md). Exit codes: 0 done, 1 ran and failed, 2 a file is no result, "
        "3 something is missing.",
    )
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULT", help="JSON files")
    parser.add_argument("--json", metavar="FILE", help="the table as JSON; - is standard output")
    parser.add_argument("--html", type=Path, metavar="FILE", help="one self-contained page")
    parser.add_argument(
        "--png", type=Path, metavar="FOLDER", help="the plots, into a folder, which is made where there is none"
    )


def run(arguments: argparse.Namespace) -> bool:
    """See `kvlink.cli.report.command.run`; imported late: other commands need not load it."""
    from kvlink.cli.report.command import run as run_report  # noqa: PLC0415 - see above

    return run_report(arguments)
