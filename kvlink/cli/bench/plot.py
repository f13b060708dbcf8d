"""Bandwidth against size as a picture, by matplotlib, which is optional."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from kvlink.cli.bench.chart import size_label
from kvlink.cli.bench.points import Point
from kvlink.cli.bench.report import Report
from kvlink.cli.bench.sweeps import Sweep
from kvlink.errors import KVLinkError, UnavailableError

AXES = {
    "tokens": "size of a request (bytes)",
    "run-bytes": "contiguous run (bytes)",
    "concurrency": "requests in flight",
}
"""What a sweep's points lie over, with its unit."""


def position(sweep: Sweep, point: Point) -> int:
    """Where a point lies on the axis of its sweep."""
    if sweep.name == "tokens":
        return point.bytes_per_request
    if sweep.name == "run-bytes":
        return point.run_bytes
    return point.value or 0


def subject(report: Report) -> str:
    """What was moved, how: one line."""
    case = report.case
    sides = f"TP {case.source.tp} to {case.target.tp}, {case.source.layout} to {case.target.layout}"
    way = case.transport if case.transport == case.path else f"{case.transport}, {case.path}"
    return f"{case.model}, {sides}: {case.flow} over {way}, integrity {'on' if case.integrity else 'off'}"


def check() -> None:
    """Say now that there is nothing to draw with.

    Raises:
        UnavailableError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise UnavailableError("--plot needs matplotlib: pip install 'kvlink[plot]'; --html draws without it")


def draw(file: str, report: Report, points: Sequence[Point], sweep: Sweep) -> None:
    """Draw the points, their spread and the limit into ``file``, in the form that its name's ending says.

    Raises:
        KVLinkError: the file cannot be written, or its ending is none that matplotlib knows.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415 - optional, and slow to load

    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    axes = figure.subplots()
    sizes = [position(sweep, point) for point in points]
    rates = [point.gb_s for point in points]
    axes.plot(sizes, rates, marker="o", label="KVLink, median")
    axes.fill_between(
        sizes, [point.lowest_gb_s for point in points], [point.highest_gb_s for point in points], alpha=0.2,
        label="slowest to fastest request",
    )  # fmt: skip
    limited = [(size, point.limit_gb_s) for size, point in zip(sizes, points, strict=True) if point.limit_gb_s]
    if limited:
        name = next(point.limit_name for point in points if point.limit_name)
        axes.plot(*zip(*limited, strict=True), linestyle="--", color="black", marker=".", label=f"limit: {name}")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [size_label(size) for size in sizes])
    axes.set_ylim(bottom=0)
    axes.set_xlabel(AXES[sweep.name])
    axes.set_ylabel("payload bandwidth (GB/s, 1 GB = 1e9 bytes)")
    axes.set_title(subject(report), fontsize=9)
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    try:
        figure.savefig(file)
    except (OSError, ValueError) as error:
        raise KVLinkError(f"the plot could not be written to --plot {file}: {error}") from error
