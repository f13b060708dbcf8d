"""The result of a bench: one typed object, written as JSON and as a table."""

from __future__ import annotations

import os
import platform
import time
from typing import Literal

import msgspec

from kvlink.cli.bench import messages as m
from kvlink.cli.bench.case import Case, SideName
from kvlink.cli.bench.peers import Comparison
from kvlink.cli.bench.tally import PHASES, Tally, median, percentile
from kvlink.version import VERSION

SCHEMA = "kvlink.bench/1"


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """The machine. ``ucx_*`` and ``gpu`` are null where none was used; ``load_before`` is its load of a minute."""

    host: str
    cpus: int
    python: str
    ucx_version: str | None
    ucx_origin: str | None
    ucx_transports: str | None
    gpu: str | None
    date: str = ""
    load_before: float = 0.0


class SideReport(msgspec.Struct, frozen=True, kw_only=True):
    """One engine."""

    tp: int
    pp: int
    block_size: int
    layout: str
    dtype: str


class CaseReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was run.

    ``tokens`` of a trace is the mean prompt; ``device`` is where the caches lie; ``fault`` is what chunks suffered.
    Of every ``kill_target_every`` requests one had its target killed; ``max_gbps`` capped what a target read.
    """

    model: str
    layers: int
    kv_heads: int
    head_dim: int
    tokens: int
    dtype: str
    source: SideReport
    target: SideReport
    flow: str
    transport: str
    transport_reason: str
    path: str
    path_reason: str
    ucx_tls: str | None
    device: str
    requests: int
    concurrency: int
    integrity: bool
    fault: str | None = None
    kill_target_every: int | None = None
    source_engines: int = 1
    target_engines: int = 1
    max_gbps: float | None = None


class Runs(msgspec.Struct, frozen=True, kw_only=True):
    """Mean number of contiguous runs of a request, and their mean length."""

    count: int
    bytes: int


class Requests(msgspec.Struct, frozen=True, kw_only=True):
    """Measured requests; ``retried``: tries beyond each request's first, warm-up included."""

    completed: int
    failed: int
    retried: int


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Of a rate."""

    median: float
    min: float
    max: float


class PerSide(msgspec.Struct, frozen=True, kw_only=True):
    """CPU seconds per 1e9 bytes; both halves of a loopback run share a process, counted at the target."""

    source: float
    target: float


class Percentiles(msgspec.Struct, frozen=True, kw_only=True):
    """Of seconds."""

    p50: float
    p95: float
    p99: float


class Streamed(msgspec.Struct, frozen=True, kw_only=True):
    """What a push left to do once its last layer was computed, each layer taking ``layer_seconds``.

    ``exposed_s``: from the last layer, before KVLink is told of it, to ``exposed_until``: all ranks *installed* or,
    where the two sides are on different hosts and so have no clock in common, *heard* by the source.
    ``layer_transfer_s``: what a layer took on the wire, on average over the run's; ``exposed_in_layers``: the median
    of the one in terms of the other. ``layer_raw_s``: a layer's share of the raw moves beside, null without them.
    """

    layer_seconds: float
    exposed_s: Percentiles
    exposed_until: Literal["installed", "heard"]
    layer_transfer_s: float
    exposed_in_layers: float
    layer_raw_s: float | None


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """What the wire alone does with the same bytes."""

    name: str
    gb_s: float
    how: str


class Cold(msgspec.Struct, frozen=True, kw_only=True):
    """The first request of all, and what opening the links (registration) took: apart from all warm figures."""

    open_seconds: float
    latency_seconds: float
    throughput_gb_s: float


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """``kvlink.bench/1``: a contract that scripts rely on.

    ``latency_s``: first call to installed. ``phases_s``: what a rank spent in each phase of a request.
    ``between_engines_gb_s``: over pairs of engines, where there are several, of each pair's median over its requests.
    ``peers``: other libraries at this run length, where they were asked for.
    """

    schema: str
    kvlink: str
    evidence_level: Literal["measured_host", "measured_gpu", "stand_in"]
    environment: Environment
    case: CaseReport
    bytes_per_request: int
    runs: Runs
    requests: Requests
    verified: bool
    throughput_gb_s: Spread
    cpu_seconds_per_gb: PerSide
    latency_s: Percentiles
    phases_s: dict[str, Percentiles]
    limit: Limit | None
    fraction_of_limit: float | None
    cold: Cold
    between_engines_gb_s: Spread | None
    streamed: Streamed | None = None
    peers: Comparison | None = None


def make_report(case: Case, tally: Tally, opened: m.Opened, runs: Runs, limit: tuple[str, str]) -> Report:
    """Put what was measured in order. ``limit``: the name of what the pairs were measured against, and how."""
    rates = tally.rates()
    latencies = [transfer.span.seconds for transfer in tally.transfers]
    source_cpu, target_cpu = tally.cpu_seconds_per_gb()
    measured = case.prompts[case.warmup :]
    return Report(
        schema=SCHEMA,
        kvlink=VERSION,
        evidence_level=_evidence(opened),
        environment=_environment(opened, tally),
        case=_case(case, tally),
        bytes_per_request=sum(measured) * case.payload_token_bytes // len(measured),
        runs=runs,
        requests=Requests(completed=tally.completed, failed=tally.failed, retried=tally.retried),
        verified=tally.sound,
        throughput_gb_s=Spread(median=median(rates), min=min(rates, default=0.0), max=max(rates, default=0.0)),
        cpu_seconds_per_gb=PerSide(source=source_cpu, target=target_cpu),
        latency_s=_percentiles(latencies),
        phases_s={name: _percentiles(tally.phase(name)) for name in PHASES},
        limit=_limit(tally, *limit),
        fraction_of_limit=median(pair.fraction for pair in tally.pairs)
        if tally.pairs and case.layer_seconds is None
        else None,
        cold=_cold(tally),
        between_engines_gb_s=_between_engines(case, tally),
        streamed=_streamed(case, tally),
    )


def why_no_limit(report: Report) -> str:
    """Why a report has no limit, in words."""
    case = report.case
    if case.concurrency > 1 or case.source_engines + case.target_engines > 2:
        return "not measured: a raw move is paired with one request of one pair of engines at a time"
    if case.kill_target_every is not None:
        return "not measured: not beside kills"
    if case.source.dtype != case.target.dtype:
        return "not measured: a raw move converts nothing"
    return "not measured" if report.requests.completed else "not measured: nothing was moved"


def _evidence(opened: m.Opened) -> Literal["measured_host", "measured_gpu", "stand_in"]:
    if opened.gpu is None:
        return "measured_host"
    return "stand_in" if opened.stand_in else "measured_gpu"


def _percentiles(seconds: list[float]) -> Percentiles:
    return Percentiles(p50=percentile(seconds, 50), p95=percentile(seconds, 95), p99=percentile(seconds, 99))


def _environment(opened: m.Opened, tally: Tally) -> Environment:
    return Environment(
        host=platform.node(),
        cpus=len(os.sched_getaffinity(0)),
        python=platform.python_version(),
        ucx_version=opened.ucx_version,
        ucx_origin=opened.ucx_origin,
        ucx_transports=opened.ucx_transports,
        gpu=opened.gpu,
        date=time.strftime("%Y-%m-%d"),
        load_before=round(tally.load_before, 2),
    )


def _case(case: Case, tally: Tally) -> CaseReport:
    move = next((move for transfer in tally.transfers for move in transfer.moves), None)
    measured = case.prompts[case.warmup :]
    return CaseReport(
        model=case.geometry.model,
        layers=case.geometry.layers,
        kv_heads=case.geometry.kv_heads,
        head_dim=case.geometry.head_dim,
        tokens=sum(measured) // len(measured),
        dtype=case.geometry.dtype.value,
        source=_side(case, "source"),
        target=_side(case, "target"),
        flow=case.flow,
        transport=move.transport if move else case.transport,
        transport_reason=move.transport_reason if move else "nothing was moved",
        path=move.path if move else "direct",
        path_reason=move.path_reason if move else "nothing was moved",
        ucx_tls=case.ucx_tls,
        device=case.device,
        requests=case.requests,
        concurrency=case.concurrency,
        integrity=case.integrity,
        kill_target_every=case.kill_target_every,
        source_engines=case.source_engines,
        target_engines=case.target_engines,
        max_gbps=case.max_gbps,
        fault=None
        if case.fault is None
        else ",".join(f"{n}={r:g}" for n, r in msgspec.structs.asdict(case.fault).items()),
    )


def _side(case: Case, name: SideName) -> SideReport:
    side = case.side(name)
    return SideReport(
        tp=side.tp, pp=side.pp, block_size=side.block_size, layout=side.layout, dtype=case.dtype(name).value
    )


def _limit(tally: Tally, name: str, how: str) -> Limit | None:
    if not tally.pairs:
        return None
    rate = median(pair.raw_gb_s for pair in tally.pairs)
    return Limit(name=name, gb_s=rate, how=f"{how}; median of {len(tally.pairs)} pairs")


def _streamed(case: Case, tally: Tally) -> Streamed | None:
    if case.layer_seconds is None:
        return None
    layers, exposed = case.geometry.layers, tally.exposed
    layer = median(tally.phase("wire")) / layers
    return Streamed(
        layer_seconds=case.layer_seconds,
        exposed_s=_percentiles(exposed),
        exposed_until="installed" if tally.one_clock else "heard",
        layer_transfer_s=layer,
        exposed_in_layers=median(exposed) / layer if layer else 0.0,
        layer_raw_s=median(pair.raw_seconds for pair in tally.pairs) / layers if tally.pairs else None,
    )


def _between_engines(case: Case, tally: Tally) -> Spread | None:
    if case.engines == 1:
        return None
    rates: dict[int, list[float]] = {}
    for transfer in tally.transfers:
        rates.setdefault(transfer.request % case.engines, []).append(transfer.gb_s)
    middles = [median(own) for own in rates.values()]
    return Spread(median=median(middles), min=min(middles, default=0.0), max=max(middles, default=0.0))


def _cold(tally: Tally) -> Cold:
    cold = tally.cold
    return Cold(
        open_seconds=tally.open_seconds,
        latency_seconds=cold.span.seconds if cold else 0.0,
        throughput_gb_s=cold.gb_s if cold else 0.0,
    )
