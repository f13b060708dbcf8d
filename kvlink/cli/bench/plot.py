"""Bandwidth against size as a picture, by matplotlib, which is optional."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kvlink.cli.bench.chart import size_label
from kvlink.cli.bench.points import Point
from kvlink.cli.bench.report import Report
from kvlink.cli.bench.sweeps import Sweep
from kvlink.errors import ConfigError, KVLinkError, UnavailableError

AXES: Final = {
    "tokens": "KV of a request",
    "run-bytes": "contiguous run, the same on both sides",
    "concurrency": "requests in flight",
}
"""What a sweep's points lie over; sizes have their unit at each tick."""
RATE_AXIS: Final = "payload bandwidth (GB/s, 1 GB = 1e9 bytes)"
LIMITS: Final = {
    "ucx_get": "limit: UCX gets of the same runs",
    "socket": "limit: plain sockets",
    "memcpy": "limit: one thread's copy of the same plan",
}
"""Legends, by the limit's name."""


def position(sweep: Sweep, point: Point) -> int:
    """Where a point lies on the axis of its sweep."""
    if sweep.name == "tokens":
        return point.bytes_per_request
    if sweep.name == "run-bytes":
        return point.run_bytes
    return point.value or 0


def tick(sweep: Sweep, place: float) -> str:
    """The words at a place of the axis."""
    return f"{place:g}" if sweep.name == "concurrency" else size_label(place)


def limit_legend(points: Sequence[Point]) -> str:
    """What the limit's line is, by the name that the points have for it."""
    name = next((point.limit_name for point in points if point.limit_name), "")
    return LIMITS.get(name, f"limit: {name}")


def subject(reports: Sequence[Report]) -> str:
    """What was moved, how: one line over all runs, whose paths may differ."""
    case = reports[0].case
    sides = f"TP {case.source.tp} to {case.target.tp}, {case.source.layout} to {case.target.layout}"
    paths = " and ".join(dict.fromkeys(report.case.path for report in reports))
    way = case.transport if case.transport == paths else f"{case.transport}, {paths}"
    sizes = {report.bytes_per_request for report in reports}, {report.runs.bytes for report in reports}
    # What is the same all over; the other is what the axis shows.
    same = [
        words.format(size_label(figures.pop()))
        for words, figures in zip(("{} a request", "runs of {}"), sizes, strict=True)
        if len(figures) == 1
    ]
    moved = ", ".join([f"{case.model}, {case.layers} layers", sides, *same])
    return f"{moved}: {case.flow} over {way}, integrity {'on' if case.integrity else 'off'}"


def circumstances(reports: Sequence[Report], points: int) -> str:
    """Where, when and how often: one line."""
    first = reports[0]
    machine = first.environment
    often = f"{first.case.requests} requests a run, runs a point: {len(reports) // points}"
    return f"{often}; {machine.cpus} CPUs, load before {machine.load_before:g}; KVLink {first.kvlink}, {machine.date}"


def check(file: str) -> None:
    """Say now that there is nothing to draw with, or no form to draw in.

    Raises:
        UnavailableError: matplotlib is not installed.
        ConfigError: the ending of ``file`` is none that it knows.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise UnavailableError("--plot needs matplotlib: pip install 'kvlink[plot]'; --html draws without it")
    from matplotlib.figure import Figure  # noqa: PLC0415 - optional, and slow to load

    known = Figure().canvas.get_supported_filetypes()
    if Path(file).suffix.removeprefix(".").lower() not in known:
        raise ConfigError(f"--plot {file}: its ending says in which form it is drawn; give .png, or {', '.join(known)}")


def draw(file: str, reports: Sequence[Report], points: Sequence[Point], sweep: Sweep) -> None:
    """Draw the points, their spread and the limit into ``file``, in the form that its name's ending says.

    Raises:
        KVLinkError: the file cannot be written.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415 - optional, and slow to load

    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    axes = figure.subplots()
    places = [position(sweep, point) for point in points]
    axes.plot(places, [point.gb_s for point in points], marker="o", label="KVLink, median")
    axes.fill_between(
        places, [point.lowest_gb_s for point in points], [point.highest_gb_s for point in points], alpha=0.2,
        label="slowest to fastest",
    )  # fmt: skip
    limited = [(place, point.limit_gb_s) for place, point in zip(places, points, strict=True) if point.limit_gb_s]
    if limited:
        axes.plot(*zip(*limited, strict=True), linestyle="--", color="black", marker=".", label=limit_legend(points))
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, [tick(sweep, place) for place in places])
    axes.set_xticks([], minor=True)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(AXES[sweep.name])
    axes.set_ylabel(RATE_AXIS)
    axes.set_title(f"{subject(reports)}\n{circumstances(reports, len(points))}", fontsize=9)
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    try:
        figure.savefig(file)
    except OSError as error:
        raise KVLinkError(f"the plot could not be written to --plot {file}: {error}") from error
