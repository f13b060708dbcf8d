"""A series as one HTML page that needs nothing else: what was run, where, a chart, and tables."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from functools import partial

from kvlink.cli.bench.chart import chart
from kvlink.cli.bench.plot import AXES, RATE_AXIS, circumstances, limit_legend, position, subject, tick
from kvlink.cli.bench.points import Point
from kvlink.cli.bench.report import Report, why_no_limit
from kvlink.cli.bench.sweeps import Sweep
from kvlink.cli.bench.tally import PHASES

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: 1rem 0 }
td, th { padding: .2rem .6rem; text-align: right; white-space: nowrap }
tr:nth-child(even) { background: #f4f4f4 } th { border-bottom: 1px solid #888 } code { background: #f4f4f4 }
.bad { color: #b00; font-weight: bold }
"""


def render(command: str, reports: Sequence[Report], points: Sequence[Point], sweep: Sweep | None) -> str:
    """The page. ``points`` are the reports' in order of size, over their repeats."""
    first = reports[0]
    machine = first.environment
    sound = all(report.verified for report in reports)
    verdict = (
        "Every byte of every target cache was compared and right"
        if sound
        else '<span class="bad">NOT VERIFIED</span>: see standard error of the run'
    )
    where = (
        f"Evidence: {first.evidence_level}. {html.escape(circumstances(reports, len(points)))}; "
        f"Python {machine.python}, UCX {html.escape(machine.ucx_version or 'not used')}"
    )
    parts = [
        f"<h1>kvlink bench</h1><p>{html.escape(subject(reports))}</p>",
        f"<p><code>{html.escape(command)}</code></p>",
        f"<p>{verdict}. {where}.</p>",
    ]
    if sweep is not None:
        lines = {"KVLink, median": [(position(sweep, point), point.gb_s) for point in points]}
        limited = [(position(sweep, point), point.limit_gb_s) for point in points if point.limit_gb_s is not None]
        if limited:
            lines[limit_legend(points)] = limited
        parts.append(chart(lines, x_title=AXES[sweep.name], y_title=RATE_AXIS, x_tick=partial(tick, sweep)))
    parts += [
        f"<p>Limit: {html.escape(_limit(reports))}.</p>",
        "<h2>Points</h2>",
        _points(points, sweep),
        "<h2>Runs</h2>",
        _runs(reports, points, sweep),
        "<h2>Phases of a request, on one rank: p50 / p95 / p99, us</h2>",
        _phases(reports),
    ]
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>kvlink bench</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _limit(reports: Sequence[Report]) -> str:
    """How it was measured; where some runs have none, why not."""
    words = (why_no_limit(report) if report.limit is None else report.limit.how for report in reports)
    return "; ".join(dict.fromkeys(words))


def _points(points: Sequence[Point], sweep: Sweep | None) -> str:
    head = (
        sweep.name if sweep else "",
        "MB a request",
        "run bytes",
        "GB/s",
        "lowest",
        "highest",
        "limit GB/s",
        "of it",
    )
    return _table(head, (
        (
            _value(point), f"{point.bytes_per_request / 1e6:,.2f}",
            f"{point.run_bytes:,}", f"{point.gb_s:.2f}", f"{point.lowest_gb_s:.2f}", f"{point.highest_gb_s:.2f}",
            "" if point.limit_gb_s is None else f"{point.limit_gb_s:.2f}",
            "" if point.fraction is None else f"{point.fraction:.2f}",
        )
        for point in points
    ))  # fmt: skip


def _runs(reports: Sequence[Report], points: Sequence[Point], sweep: Sweep | None) -> str:
    head = ("run", sweep.name if sweep else "", "path", "done", "failed", "retried", "GB/s", "p50 ms", "p95 ms",
            "p99 ms", "cold ms", "open ms", "CPU s/GB source", "target")  # fmt: skip
    return _table(head, (
        (
            str(number + 1), _value(points[number % len(points)]), report.case.path,
            str(report.requests.completed), str(report.requests.failed), str(report.requests.retried),
            f"{report.throughput_gb_s.median:.2f}", _ms(report.latency_s.p50), _ms(report.latency_s.p95),
            _ms(report.latency_s.p99), _ms(report.cold.latency_seconds), _ms(report.cold.open_seconds),
            f"{report.cpu_seconds_per_gb.source:.3f}", f"{report.cpu_seconds_per_gb.target:.3f}",
        )
        for number, report in enumerate(reports)
    ))  # fmt: skip


def _phases(reports: Sequence[Report]) -> str:
    """A row a run, a column for each phase that any of them had."""
    had = [name for name in PHASES if any(report.phases_s[name].p99 > 0 for report in reports)]
    return _table(("run", *had), (
        (
            str(number),
            *(
                " / ".join(f"{seconds * 1e6:.0f}" for seconds in (phase.p50, phase.p95, phase.p99))
                for phase in (report.phases_s[name] for name in had)
            ),
        )
        for number, report in enumerate(reports, 1)
    ))  # fmt: skip


def _value(point: Point) -> str:
    return "" if point.value is None else f"{point.value:,}"


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    cells = "".join(f"<th>{html.escape(title)}</th>" for title in head)
    body = "\n".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{cells}</tr></thead>\n<tbody>{body}</tbody></table>"


def _ms(seconds: float) -> str:
    """Three digits: more are noise."""
    return f"{seconds * 1e3:.3g}" if seconds < 1 else f"{seconds * 1e3:.0f}"
