"""The result of a bench for people: one table."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from kvlink.cli.bench.chart import size_label
from kvlink.cli.bench.report import Cold, Report, SideReport, why_no_limit


def show(report: Report, console: Console) -> None:
    """Print the report."""
    case = report.case
    model = f"{case.model}, {case.layers} layers of {case.kv_heads} KV heads of {case.head_dim} {case.dtype}"
    title = f"{model}, {case.tokens:,} tokens: {case.flow} over {case.transport}, {case.path}"
    table = Table(title=title, show_header=False, title_justify="left", box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for label, text in _rows(report):
        table.add_row(label, text)
    console.print(table)


def _rows(report: Report) -> list[tuple[str, str]]:
    case, requests = report.case, report.requests
    rate, cpu, latency = report.throughput_gb_s, report.cpu_seconds_per_gb, report.latency_s
    verdict = "every byte of every target cache as it must be" if report.verified else "NOT VERIFIED"
    payload, runs = _bytes(report.bytes_per_request), report.runs
    rows = [
        ("source", _side(case.source)),
        ("target", _side(case.target)),
        ("transport", f"{case.transport} ({case.transport_reason}); {case.path} ({case.path_reason})"),
        ("payload", f"{payload} a request in {runs.count:,} runs of {_bytes(runs.bytes)}"),
        ("requests", f"{requests.completed} done, {requests.failed} failed, {requests.retried} retried"),
        ("in flight", str(case.concurrency)),
        ("verified", verdict),
        ("integrity", "digests on" if case.integrity else "digests off"),
        ("throughput", f"{rate.median:.2f} GB/s median, {rate.min:.2f} to {rate.max:.2f}"),
        ("limit", _limit(report)),
        ("latency", f"{_ms(latency.p50)} p50, {_ms(latency.p95)} p95, {_ms(latency.p99)} p99"),
        *_engines(report),
        *_streamed(report),
        ("CPU", f"{cpu.source:.2f} s/GB source, {cpu.target:.2f} s/GB target"),
        ("cold", _cold(report.cold)),
        *_peers(report),
    ]
    rows += [
        ("  " + name, f"{_ms(phase.p50)} p50, {_ms(phase.p95)} p95, {_ms(phase.p99)} p99")
        for name, phase in report.phases_s.items()
        if phase.p99 > 0
    ]
    return rows


def _side(side: SideReport) -> str:
    return f"TP {side.tp}, PP {side.pp}, blocks of {side.block_size}, {side.layout}, {side.dtype}"


def _engines(report: Report) -> list[tuple[str, str]]:
    case, spread = report.case, report.between_engines_gb_s
    if spread is None:
        return []
    each = f"a request of a pair at {spread.median:.2f} GB/s median, {spread.min:.2f} to {spread.max:.2f}"
    return [("engines", f"{case.source_engines} read by {case.target_engines}; {each}")]


def _streamed(report: Report) -> list[tuple[str, str]]:
    streamed = report.streamed
    if streamed is None:
        return []
    exposed = streamed.exposed_s
    text = f"{_ms(exposed.p50)} p50, {_ms(exposed.p95)} p95 from the last layer to {streamed.exposed_until}: "
    text += f"{streamed.exposed_in_layers:.2f} times a layer's {_ms(streamed.layer_transfer_s)} on the wire"
    return [("exposed", text if streamed.layer_raw_s is None else f"{text} ({_ms(streamed.layer_raw_s)} raw)")]


def _limit(report: Report) -> str:
    if report.limit is None:
        return why_no_limit(report)
    limit = report.limit
    if report.fraction_of_limit is None:
        return f"{limit.gb_s:.2f} GB/s {limit.name} ({limit.how})"
    return f"{limit.gb_s:.2f} GB/s {limit.name}: {report.fraction_of_limit:.0%} of it reached ({limit.how})"


def _peers(report: Report) -> list[tuple[str, str]]:
    """Each of KVLink's modes against the best of the peers', in fragments of about this bench's runs."""
    beside = report.peers
    if beside is None:
        return []
    best, size = beside.ratios.best_peer, size_label(beside.fragment_bytes)
    rows = [
        ("peers", f"{name} {beside.results[name].gb_s.median:.2f} GB/s, fragments of {size}: {ratio:.2f} times {best}")
        for name, ratio in beside.ratios.over_best_peer.items()
    ]
    return rows + [("", f"{name} was not measured: {why}") for name, why in beside.absent.items()]


def _cold(cold: Cold) -> str:
    first = f"{_ms(cold.latency_seconds)} first request ({cold.throughput_gb_s:.2f} GB/s)"
    return f"{first}, {_ms(cold.open_seconds)} opening and registration"


def _bytes(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return size_label(count)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.2f} s"
