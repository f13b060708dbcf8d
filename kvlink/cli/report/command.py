"""Runs ``kvlink report``."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from kvlink.cli.output import check_writable, write_file, write_result
from kvlink.errors import ConfigError
from kvlink.planning.report.experiments import (
    COLUMNS,
    Report,
    experiment_cells,
    make_report,
    read_experiments,
)
from kvlink.planning.report.page import Page
from kvlink.planning.report.plots import experiment_plots


def run(arguments: argparse.Namespace) -> bool:
    """Read, show and write.

    Raises:
        ConfigError: an argument or a file is wrong.
        UnavailableError: plots are asked for, and matplotlib is not installed.
    """
    if arguments.json not in (None, "-"):
        check_writable("--json", Path(arguments.json))
    if arguments.html is not None:
        check_writable("--html", arguments.html)
    if arguments.png is not None and not arguments.png.is_dir():
        raise ConfigError(f"--png {arguments.png} is no folder; make it first")
    report = make_report([one for path in arguments.results for one in read_experiments(path)])
    if arguments.png is not None:
        for name, png in experiment_plots(report).items():
            write_file("--png", arguments.png / f"{name}.png", png)
    if arguments.html is not None:
        write_file("--html", arguments.html, _page(report))
    write_result(report, arguments.json, lambda console: _show(report, console))
    return True


def _show(report: Report, console: Console) -> None:
    """Each experiment as a block of what it states: seventeen columns fit no terminal."""
    for level, experiments in report.levels.items():
        console.print(f"{level}\n", style="bold")
        for one in experiments:
            cells = dict(zip(COLUMNS, experiment_cells(one), strict=True))
            console.print(f"  {cells.pop('configuration')}", soft_wrap=True)
            del cells["evidence"]
            stated = [f"{name} {text}" for name, text in cells.items() if text]
            console.print(f"    {', '.join(stated)}", soft_wrap=True)
        console.print()


def _page(report: Report) -> bytes:
    page = Page("Experiments", f"evidence levels: {', '.join(report.levels)}")
    page.paragraph("A field without a measurement is empty. Levels are kept apart: do not compare across them.")
    plots = experiment_plots(report)
    for level, experiments in report.levels.items():
        page.heading(level)
        page.table((COLUMNS, [experiment_cells(one) for one in experiments]))
        page.plots({name: png for name, png in plots.items() if name.endswith(f"-{level}")})
    return page.render()
