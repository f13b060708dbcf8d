"""Runs ``kvlink report``."""

from __future__ import annotations

import argparse

from rich.console import Console

from kvlink.cli.output import check_outputs, print_table, write_file, write_pictures, write_result
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
    check_outputs(arguments)
    report = make_report([one for path in arguments.results for one in read_experiments(path)])
    if arguments.png is not None:
        write_pictures(arguments.png, experiment_plots(report))
    if arguments.html is not None:
        write_file("--html", arguments.html, _page(report))
    write_result(report, arguments.json, lambda console: _show(report, console))
    return True


def _show(report: Report, console: Console) -> None:
    """Tables that fit a terminal: serving and hand-over apart, and what all rows share above the table."""
    for level, experiments in report.levels.items():
        console.print(f"evidence level: {level}\n", style="bold")
        for moved in (False, True):
            rows = [experiment_cells(one) for one in experiments if (one.rate_gb_s is not None) is moved]
            if rows:
                _show_rows(rows, console)


def _show_rows(rows: list[tuple[str, ...]], console: Console) -> None:
    values = {name: [row[index] for row in rows] for index, name in enumerate(COLUMNS) if name != "evidence"}
    stated = {name: cells for name, cells in values.items() if any(cells)}
    shared = {name for name, cells in stated.items() if len(rows) > 1 == len(set(cells)) and name != "configuration"}
    if shared:
        console.print(", ".join(f"{name} {stated[name][0]}" for name in stated if name in shared), soft_wrap=True)
    own = [name for name in stated if name not in shared]
    print_table(own, zip(*(stated[name] for name in own), strict=True), console)


def _page(report: Report) -> bytes:
    page = Page("Experiments", f"evidence levels: {', '.join(report.levels)}", wide=True)
    page.paragraph("A field without a measurement is empty. Levels are kept apart: do not compare across them.")
    plots = experiment_plots(report)
    for level, experiments in report.levels.items():
        page.heading(level)
        page.table((COLUMNS, [experiment_cells(one) for one in experiments]))
        page.plots({name: png for name, png in plots.items() if name.endswith(f"-{level}")})
    return page.render()
