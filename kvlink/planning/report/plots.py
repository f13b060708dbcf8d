"""Plots of a plan, as PNG bytes. Co-located is grey and dashed, split blue, an objective a thin red line.

Every plot says in its title that it is simulated. The same plan gives the same bytes (with one version of matplotlib).
"""

from __future__ import annotations

import io
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final

from kvlink.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from kvlink.planning.advice import Plan
    from kvlink.planning.report.experiments import Report
    from kvlink.planning.simulation.results import SimulationResult, Spread

BASELINE: Final = "#6b7280"
SPLIT: Final = "#2563eb"
OBJECTIVE: Final = "#dc2626"
DOTS_PER_INCH: Final = 110
STYLE: Final[Any] = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e5e7eb",
    "legend.frameon": False,
}


def plots_of(plan: Plan) -> dict[str, bytes]:
    """All plots of a plan by name, in the order in which they are to be read.

    Raises:
        UnavailableError: matplotlib is not installed.
    """
    with _styled():
        plots = {"latency": _png(_latency(plan))}
        if len(plan.splits) > 1:
            plots["ratios"] = _png(_ratios(plan))
        if plan.links:
            plots["links"] = _png(_links(plan))
    return plots


def _styled() -> AbstractContextManager[None]:
    """Draw in this room's style.

    Raises:
        UnavailableError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl  # noqa: PLC0415 - optional, and slow to load
    except ImportError as error:
        raise UnavailableError("plots need matplotlib: pip install 'kvlink[plan]'") from error
    return mpl.rc_context(STYLE)


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DOTS_PER_INCH, metadata={"Software": None})
    return buffer.getvalue()


def _figure(columns: int, title: str, *, width: float = 3.9, height: float = 3.9) -> tuple[Figure, list[Axes]]:
    """A figure of its own, outside pyplot's global state."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - see plots_of

    figure = Figure(figsize=(width * columns, height), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    axes = figure.subplots(1, columns)
    return figure, [axes] if columns == 1 else list(axes)


def _latency(plan: Plan) -> Figure:
    """TTFT, TPOT and end to end, p50 to p99, co-located beside the best split."""
    figure, axes = _figure(3, f"{plan.trace}: latency, {plan.workers} workers (simulated)")
    panels = (
        ("Time to first token, s", "ttft", 1.0, plan.objectives.ttft_seconds),
        ("Time per output token, ms", "tpot", 1e3, plan.objectives.tpot_seconds * 1e3),
        ("End to end, s", "e2e", 1.0, None),
    )
    for axis, (title, name, scale, objective) in zip(axes, panels, strict=True):
        _percentiles(axis, (plan.baseline, plan.best_split), name, scale)
        axis.set_title(title)
        if objective is not None:
            _objective(axis, objective)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower left", ncols=3)
    return figure


def _percentiles(axis: Axes, runs: tuple[SimulationResult, SimulationResult], name: str, scale: float) -> None:
    width = 0.38
    for offset, colour, run in ((-width / 2, BASELINE, runs[0]), (width / 2, SPLIT, runs[1])):
        spread: Spread = getattr(run, name)
        heights = [(value or 0.0) * scale for value in (spread.p50, spread.p95, spread.p99)]
        bars = axis.bar([x + offset for x in range(3)], heights, width, color=colour, label=run.configuration)
        axis.bar_label(bars, [_short(height) for height in heights], fontsize=8, padding=1)
    axis.set_xticks(range(3), ["p50", "p95", "p99"])
    axis.grid(visible=False, axis="x")
    axis.margins(y=0.12)


def _objective(axis: Axes, value: float, label: str = "objective") -> None:
    axis.axhline(value, color=OBJECTIVE, linewidth=1.2, label=label)


_Panel = tuple[str, "Callable[[SimulationResult], float | None]", float | None]
"""Title, what to show of a run, and its objective."""


def _ratios(plan: Plan) -> Figure:
    """What each ratio of pools does, with the co-located baseline as a line across."""
    figure, axes = _figure(3, f"{plan.trace}: how many of {plan.workers} workers should prefill? (simulated)")
    panels: tuple[_Panel, ...] = (
        ("Goodput, requests/s", lambda run: run.goodput_rps, None),
        ("TTFT p95, s", lambda run: run.ttft.p95, plan.objectives.ttft_seconds),
        ("TPOT p95, ms", lambda run: 1e3 * (run.tpot.p95 or 0.0), plan.objectives.tpot_seconds * 1e3),
    )
    counts = [run.prefill_workers for run in plan.splits]
    for axis, (title, value, objective) in zip(axes, panels, strict=True):
        heights = [value(run) or 0.0 for run in plan.splits]
        axis.plot(counts, heights, "o-", color=SPLIT, label="split")
        axis.axhline(value(plan.baseline) or 0.0, color=BASELINE, linestyle="--", label="co-located")
        axis.plot([counts[plan.best]], [heights[plan.best]], "o", color=SPLIT, markersize=11, fillstyle="none")
        if objective is not None:
            _objective(axis, objective)
        _axis_from_zero(axis, heights, value(plan.baseline), objective)
        axis.set_title(title)
        axis.set_xlabel("prefill workers (ring: the best)")
        axis.set_xticks(counts)
    figure.legend(*axes[1].get_legend_handles_labels(), loc="outside lower left", ncols=3)
    return figure


def _axis_from_zero(axis: Axes, heights: list[float], baseline: float | None, objective: float | None) -> None:
    """Start at zero, or turn logarithmic where an overloaded pool would flatten all others."""
    shown = [height for height in (*heights, baseline, objective) if height]
    if shown and max(shown) > 30 * min(shown) and min(shown) > 0 and objective is not None:
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter("{x:,g}")
    else:
        axis.set_ylim(bottom=0)


def _links(plan: Plan) -> Figure:
    """Over which link the best split reaches the baseline: the crossover."""
    split = plan.best_split.configuration
    figure, axes = _figure(2, f"{plan.trace}: {split} over links of other rates (simulated)")
    rates = [point.link_gb_s for point in plan.links]
    panels: tuple[tuple[str, list[float], float | None, float | None], ...] = (
        ("Goodput, requests/s", [point.goodput_rps for point in plan.links], plan.baseline.goodput_rps, None),
        ("TTFT p95, s", [p.ttft_p95 or 0.0 for p in plan.links], plan.baseline.ttft.p95, plan.objectives.ttft_seconds),
    )
    for axis, (title, heights, baseline, objective) in zip(axes, panels, strict=True):
        axis.plot(rates, heights, "o-", color=SPLIT, label=f"split, {split}")
        axis.axhline(baseline or 0.0, color=BASELINE, linestyle="--", label="co-located: no link needed")
        if objective is not None:
            _objective(axis, objective)
        if plan.crossover_gb_s is not None:
            axis.axvline(plan.crossover_gb_s, color="black", linewidth=1, linestyle=":", label="crossover of goodput")
        axis.set_xscale("log")
        axis.set_xticks(rates, _apart(rates))
        axis.minorticks_off()
        _axis_from_zero(axis, heights, baseline, objective)
        axis.set_title(title)
        axis.set_xlabel("link of one worker, GB/s")
    if plan.crossover_gb_s is not None:
        axes[0].annotate(
            f"{plan.crossover_gb_s:.2g} GB/s",
            (plan.crossover_gb_s, 0.06),
            xycoords=("data", "axes fraction"),
            xytext=(5, 0),
            textcoords="offset points",
        )
    figure.legend(*axes[1].get_legend_handles_labels(), loc="outside lower left", ncols=2)
    return figure


def _apart(rates: list[float]) -> list[str]:
    """Labels of rising rates on a logarithmic axis, but for those that would touch the one before."""
    labels, last = [], 0.0
    for rate in rates:
        clear = rate >= 1.45 * last
        labels.append(f"{rate:g}" if clear else "")
        last = rate if clear else last
    return labels


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def experiment_plots(report: Report) -> dict[str, bytes]:
    """Bars of the experiments, a plot for each kind and evidence level: ``serving-LEVEL``, ``hand-over-LEVEL``.

    Raises:
        UnavailableError: matplotlib is not installed.
    """
    plots = {}
    with _styled():
        for level, experiments in report.levels.items():
            serving = [
                (one.row.configuration, one.row.throughput_rps, one.row.p95_latency_ms / 1e3)
                for one in experiments
                if one.row.throughput_rps is not None and one.row.p95_latency_ms is not None
            ]
            if serving:
                titles = ("Throughput, requests/s", "P95 end to end, s")
                plots[f"serving-{level}"] = _png(_bars(f"Serving ({level})", titles, serving))
            moved = [
                (
                    f"{one.row.configuration.removeprefix('hand-over: ')}\n{one.file}",
                    one.rate_gb_s,
                    one.row.hand_over_ms,
                )
                for one in experiments
                if one.rate_gb_s is not None and one.row.hand_over_ms is not None
            ]
            if moved:
                titles = ("Rate, GB/s", "Hand-over of a request, ms, p50")
                plots[f"hand-over-{level}"] = _png(_bars(f"KV hand-over ({level})", titles, moved))
    return plots


def _bars(title: str, titles: tuple[str, str], rows: list[tuple[str, float, float]]) -> Figure:
    """Two panels of horizontal bars, in the order given from top to bottom."""
    figure, axes = _figure(2, title, width=5.2, height=1.4 + 0.42 * len(rows))
    for index, axis in enumerate(axes):
        values = [row[1] if index == 0 else row[2] for row in rows]
        bars = axis.barh(range(len(rows)), values, color=SPLIT, height=0.55)
        axis.bar_label(bars, [_short(value) for value in values], fontsize=8, padding=2)
        axis.set_yticks(range(len(rows)), [row[0] for row in rows] if index == 0 else [""] * len(rows), fontsize=8)
        axis.invert_yaxis()
        axis.set_title(titles[index])
        axis.tick_params(axis="y", length=0)
        axis.grid(visible=False, axis="y")
        axis.margins(x=0.15)
    return figure
