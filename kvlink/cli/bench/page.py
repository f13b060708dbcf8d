"""A series as one HTML page that needs nothing else: what was run, where, a chart, and tables."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from kvlink.cli.bench.chart import chart
from kvlink.cli.bench.plot import AXES, position, subject
from kvlink.cli.bench.points import Point
from kvlink.cli.bench.report import Report
from kvlink.cli.bench.sweeps import Sweep

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: 1rem 0 } td, th { padding: .2rem .8rem; text-align: right }
tr:nth-child(even) { background: #f4f4f4 } th { border-bottom: 1px solid #888 } code { background: #f4f4f4 }
.bad { color: #b00; font-weight: bold }
"""


def render(command: str, reports: Sequence[Report], points: Sequence[Point], sweep: Sweep | None) -> str:
    """The page. ``points`` are the reports' in order of size, over their repeats."""
    first = reports[0]
    machine = first.environment
    sound = all(report.verified for report in reports)
    verdict = (
        "every byte of every target cache compared and right" if sound else '<span class="bad">NOT VERIFIED</span>'
    )
    parts = [
        f"<h1>kvlink bench</h1><p>{html.escape(subject(first))}</p>",
        f"<p><code>{html.escape(command)}</code></p>",
        _paragraph(
            f"{verdict}. Evidence: {first.evidence_level}; {machine.cpus} CPUs, Python {machine.python}, "
            f"UCX {html.escape(machine.ucx_version or 'not used')}; KVLink {first.kvlink}."
        ),
    ]
    if sweep is not None:
        lines = {"KVLink, median": [(position(sweep, point), point.gb_s) for point in points]}
        limited = [(position(sweep, point), point.limit_gb_s) for point in points if point.limit_gb_s is not None]
        if limited:
            lines[f"limit: {points[0].limit_name}"] = limited
        parts.append(chart(lines, x_title=AXES[sweep.name], y_title="GB/s (1 GB = 1e9 bytes)"))
    parts += [
        "<h2>Points</h2>",
        _points(points, sweep),
        "<h2>Runs</h2>",
        _runs(reports),
        "<h2>Phases</h2>",
        _phases(reports),
    ]
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>kvlink bench</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _paragraph(inner: str) -> str:
    return f"<p>{inner}</p>"


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
            "" if point.value is None else f"{point.value:,}", f"{point.bytes_per_request / 1e6:,.2f}",
            f"{point.run_bytes:,}", f"{point.gb_s:.2f}", f"{point.lowest_gb_s:.2f}", f"{point.highest_gb_s:.2f}",
            "" if point.limit_gb_s is None else f"{point.limit_gb_s:.2f}",
            "" if point.fraction is None else f"{point.fraction:.2f}",
        )
        for point in points
    ))  # fmt: skip


def _runs(reports: Sequence[Report]) -> str:
    head = ("run", "done", "failed", "retried", "GB/s", "p50 ms", "p95 ms", "p99 ms", "cold ms", "open ms",
            "CPU s/GB source", "target")  # fmt: skip
    return _table(head, (
        (
            str(number), str(report.requests.completed), str(report.requests.failed), str(report.requests.retried),
            f"{report.throughput_gb_s.median:.2f}", _ms(report.latency_s.p50), _ms(report.latency_s.p95),
            _ms(report.latency_s.p99), _ms(report.cold.latency_seconds), _ms(report.cold.open_seconds),
            f"{report.cpu_seconds_per_gb.source:.3f}", f"{report.cpu_seconds_per_gb.target:.3f}",
        )
        for number, report in enumerate(reports, 1)
    ))  # fmt: skip


def _phases(reports: Sequence[Report]) -> str:
    head = ("run", "phase", "p50 ms", "p95 ms", "p99 ms")
    return _table(head, (
        (str(number), name, _ms(phase.p50), _ms(phase.p95), _ms(phase.p99))
        for number, report in enumerate(reports, 1)
        for name, phase in report.phases_s.items()
        if phase.p99 > 0
    ))  # fmt: skip


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    cells = "".join(f"<th>{html.escape(title)}</th>" for title in head)
    body = "\n".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{cells}</tr></thead>\n<tbody>{body}</tbody></table>"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"
