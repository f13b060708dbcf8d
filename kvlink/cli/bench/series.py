"""Runs the points of a series in turn, and makes one result of their reports."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvlink.cli.bench import command, page, plot, sheet
from kvlink.cli.bench.points import SCHEMA, Point, SeriesReport, points_of
from kvlink.cli.bench.report import Report
from kvlink.cli.bench.sweeps import Series, Sweep
from kvlink.cli.output import check_writable, standard_output, write_file, write_result
from kvlink.errors import ConfigError, UnavailableError
from kvlink.version import VERSION


def run(series: Series) -> bool:
    """Run every point as often as asked for, and write what is wanted; whether all was verified.

    Raises:
        ConfigError: a point cannot be run as it is asked for.
        UnavailableError: the machine lacks something; for a plot, matplotlib.
        KVLinkError: a run could not be run to its end, or a result not be written.
    """
    if series.plot is not None:
        plot.check(series.plot)
    for flag, file in (
        ("--json", series.json),
        ("--csv", series.csv),
        ("--html", series.html),
        ("--plot", series.plot),
    ):
        if file not in (None, "-"):
            check_writable(flag, Path(file))
    for index, options in enumerate(series.points):
        try:
            command.check_case(options)
        except (ConfigError, UnavailableError) as error:
            raise type(error)(f"{_named(series, index)}{error}") from error
    reports = _run_all(series)
    result = SeriesReport(
        schema=SCHEMA,
        kvlink=VERSION,
        command=shlex.join(["kvlink", *sys.argv[1:]]),
        sweep=series.sweep,
        points=len(series.points),
        repeat=series.repeat,
        verified=all(report.verified for report in reports),
        reports=tuple(reports),
    )
    _write(series, result)
    return result.verified


def _run_all(series: Series) -> list[Report]:
    """Repeats go round the points, so that a noisy minute does not spoil all runs of one."""
    reports: list[Report] = []
    total = len(series.points) * series.repeat
    for _ in range(series.repeat):
        for index, options in enumerate(series.points):
            if total > 1 and not series.quiet:
                sys.stderr.write(f"{_named(series, index)}run {len(reports) + 1} of {total}\n")
            reports.append(command.run_case(options))
    return reports


def _named(series: Series, index: int) -> str:
    """What tells a point from the others, before words about it."""
    return "" if series.sweep is None else f"{series.sweep.name}={series.sweep.values[index]}: "


def _write(series: Series, result: SeriesReport) -> None:
    points = points_of(result)
    if series.csv is not None:
        _write_text("--csv", series.csv, sheet.rows(result.reports))
    if series.html is not None:
        _write_text("--html", series.html, page.render(result.command, result.reports, points, result.sweep))
    if series.plot is not None and result.sweep is not None:
        plot.draw(series.plot, result.reports, points, result.sweep)
    taken = "-" in (series.csv, series.html)
    write_result(result, series.json, (lambda _console: None) if taken else partial(_table, points, result.sweep))


def _write_text(flag: str, destination: str, text: str) -> None:
    if destination != "-":
        write_file(flag, Path(destination), text.encode())
        return
    with standard_output():
        sys.stdout.write(text)


def _table(points: Sequence[Point], sweep: Sweep | None, console: Console) -> None:
    table = Table(box=None, pad_edge=False)
    for title in (
        sweep.name if sweep else "",
        "MB a request",
        "run bytes",
        "GB/s",
        "limit",
        "of it",
        "p50 ms",
        "p99 ms",
    ):
        table.add_column(title, justify="right")
    for point in points:
        table.add_row(
            "" if point.value is None else f"{point.value:,}",
            f"{point.bytes_per_request / 1e6:,.2f}",
            f"{point.run_bytes:,}",
            f"{point.gb_s:.2f}",
            "" if point.limit_gb_s is None else f"{point.limit_gb_s:.2f}",
            "" if point.fraction is None else f"{point.fraction:.0%}",
            f"{point.latency_p50_s * 1e3:.3g}",
            f"{point.latency_p99_s * 1e3:.3g}",
        )
    console.print(table)
