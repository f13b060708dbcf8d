"""The experiment table: simulated, measured and environment rows side by side on one page, never in one table.

`kvlink.experiment/1` is the file in which measured serving runs are entered::

    {"schema": "kvlink.experiment/1",
     "evidence_level": "measured_host",
     "rows": [{"configuration": "co-located", "backend": "vllm 0.11 cpu", "model": "facebook/opt-125m",
               "dtype": "bfloat16", "workers": 2, "prompt_tokens": 512, "decode_tokens": 32, "concurrency": 4,
               "ttft_ms": 180.2, "tpot_ms": 31.0, "throughput_rps": 3.1, "p95_latency_ms": 1410.0,
               "peak_memory_gib": 3.2},
              {"configuration": "split 1 + 1", "compares_to": "co-located", "hand_over_ms": 12.5}]}

What was not measured is left out (or ``null``) and stays empty in the table. A row that names another of its file as
``compares_to`` gets its decision from `evaluate_pd_decision` over ``throughput_rps`` and ``p95_latency_ms``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec

from kvlink import limits
from kvlink.errors import ConfigError
from kvlink.planning.advice import Plan
from kvlink.planning.decision import evaluate_pd_decision
from kvlink.planning.simulation.results import SimulationResult

Level = Literal["measured_gpu", "measured_host", "stand_in", "simulated", "environment_preflight"]
LEVELS: Final[tuple[Level, ...]] = ("measured_gpu", "measured_host", "stand_in", "simulated", "environment_preflight")
"""In the order in which they are shown: what was measured first."""

Measure = Annotated[float, msgspec.Meta(ge=0)]
Number = Annotated[int, msgspec.Meta(ge=0)]
Text = Annotated[str, msgspec.Meta(max_length=limits.MAX_TEXT_BYTES)]


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """One measured run. ``None``: not measured. Times are milliseconds: TTFT, TPOT and hand-over medians."""

    configuration: Text
    backend: Text | None = None
    model: Text | None = None
    dtype: Text | None = None
    workers: Number | None = None
    prompt_tokens: Measure | None = None
    decode_tokens: Measure | None = None
    concurrency: Measure | None = None
    ttft_ms: Measure | None = None
    tpot_ms: Measure | None = None
    throughput_rps: Measure | None = None
    p95_latency_ms: Measure | None = None
    hand_over_ms: Measure | None = None
    peak_memory_gib: Measure | None = None
    compares_to: Text | None = None


class Experiment(msgspec.Struct, frozen=True, kw_only=True):
    """A row with all that the table shows of it. ``rate_gb_s``: of a bench, which serves no requests."""

    row: Row
    evidence_level: Level
    decision: str | None
    file: str
    rate_gb_s: float | None = None


class ExperimentFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What `kvlink.experiment/1` holds; ``evidence_level`` is that of all its rows."""

    schema: Literal["kvlink.experiment/1"]
    evidence_level: Literal["measured_gpu", "measured_host", "stand_in"]
    rows: Annotated[tuple[Row, ...], msgspec.Meta(min_length=1, max_length=10_000)]
    notes: Text | None = None


class _Side(msgspec.Struct, frozen=True):
    tp: int
    pp: int


class _Case(msgspec.Struct, frozen=True):
    model: str
    dtype: str
    tokens: float
    flow: str
    transport: str
    path: str
    concurrency: int
    source: _Side
    target: _Side


class _Percentiles(msgspec.Struct, frozen=True):
    p50: float
    p95: float


class _Rate(msgspec.Struct, frozen=True):
    median: float


class _Bench(msgspec.Struct, frozen=True):
    """What the table shows of a ``kvlink.bench/1`` result."""

    evidence_level: Literal["measured_gpu", "measured_host", "stand_in"]
    case: _Case
    latency_s: _Percentiles
    throughput_gb_s: _Rate
    verified: bool


class _Preflight(msgspec.Struct, frozen=True):
    """What the table shows of a ``kvlink.preflight/1`` result."""

    able: bool
    missing: tuple[str, ...]


class _Head(msgspec.Struct, frozen=True):
    """By what a result is known; a record holds one as ``result``, beside the command that gave it."""

    schema: str | None = None
    result: msgspec.Raw = msgspec.Raw()


def read_experiments(path: Path) -> tuple[Experiment, ...]:
    """The rows of one result file, of any schema that KVLink writes or takes.

    Args:
        path: ``kvlink.plan/1``, ``kvlink.bench/1`` (or a record that holds one as ``result``), ``kvlink.preflight/1``
            or ``kvlink.experiment/1``.

    Raises:
        ConfigError: (a ValueError) it cannot be read, or is none of these; the message says where it differs.
    """
    try:
        with path.open("rb") as file:
            data = file.read(limits.MAX_PLAN_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    if len(data) > limits.MAX_PLAN_FILE_BYTES:
        raise ConfigError(f"{path} has more than {limits.MAX_PLAN_FILE_BYTES} bytes")
    try:
        schema, raw = _schema_of(data)
        if schema is None:
            raise ConfigError(f"{path} has no `schema`; known are {', '.join(_READERS)}")
        read = _READERS.get(schema)
        if read is None:
            raise ConfigError(f"{path} has schema {schema[:100]!r}; known are {', '.join(_READERS)}")
        return read(raw, path.name)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is no result that can be shown: {error}") from error


def _schema_of(data: bytes) -> tuple[str | None, bytes]:
    """The schema of a result, if it names one, and the result itself, taken out of its record."""
    head = msgspec.json.decode(data, type=_Head)
    inner = bytes(head.result)
    if head.schema is not None or not inner:
        return head.schema, data
    return msgspec.json.decode(inner, type=_Head).schema, inner


def _of_experiment(data: bytes, file: str) -> tuple[Experiment, ...]:
    found = msgspec.json.decode(data, type=ExperimentFile)
    by_name = {row.configuration: row for row in found.rows}
    return tuple(
        Experiment(row=row, evidence_level=found.evidence_level, decision=_decided(row, by_name, file), file=file)
        for row in found.rows
    )


def _decided(row: Row, by_name: dict[str, Row], file: str) -> str | None:
    if row.compares_to is None:
        return None
    baseline = by_name.get(row.compares_to)
    if baseline is None or baseline is row:
        raise ConfigError(f"{file}: {row.configuration} compares_to {row.compares_to!r}, which is no other row of it")
    decision = evaluate_pd_decision(*({
        "name": one.configuration, "throughput": one.throughput_rps, "p95_latency_ms": one.p95_latency_ms,
    } for one in (baseline, row)))  # fmt: skip
    word = "keep split" if decision["keep_split"] else "do not split"
    return f"{word}: {decision['throughput_gain']:+.3g} /s, p95 {decision['latency_delta_ms']:+.4g} ms"


def _of_bench(data: bytes, file: str) -> tuple[Experiment, ...]:
    bench = msgspec.json.decode(data, type=_Bench)
    case = bench.case
    row = Row(
        configuration=f"hand-over: {case.flow} over {case.transport}, {case.path}",
        backend="kvlink bench",
        model=case.model,
        dtype=case.dtype,
        workers=case.source.tp * case.source.pp + case.target.tp * case.target.pp,
        prompt_tokens=case.tokens,
        concurrency=case.concurrency,
        hand_over_ms=bench.latency_s.p50 * 1e3,
    )
    decision = None if bench.verified else "NOT VERIFIED"
    rate = bench.throughput_gb_s.median
    return (Experiment(row=row, evidence_level=bench.evidence_level, decision=decision, file=file, rate_gb_s=rate),)


def _of_plan(data: bytes, file: str) -> tuple[Experiment, ...]:
    plan = msgspec.json.decode(data, type=Plan)
    return tuple(
        Experiment(
            row=_simulated(plan, run),
            evidence_level="simulated",
            decision=plan.verdict.value if run == plan.best_split else None,
            file=file,
        )
        for run in (*plan.together, *plan.splits)
    )


def _simulated(plan: Plan, run: SimulationResult) -> Row:
    moves = run.moves
    return Row(
        configuration=run.configuration,
        backend=f"simulation of {plan.device.name}",
        model=plan.model.name,
        dtype=plan.model.kv_dtype.value,
        workers=plan.workers,
        prompt_tokens=plan.workload.prompt_tokens.mean,
        decode_tokens=plan.workload.decode_tokens.mean,
        concurrency=run.throughput_rps * (run.e2e.mean or 0.0),
        ttft_ms=_ms(run.ttft.p50),
        tpot_ms=_ms(run.tpot.p50),
        throughput_rps=run.throughput_rps,
        p95_latency_ms=_ms(run.e2e.p95),
        hand_over_ms=None if moves is None else _ms(moves.seconds.p50),
    )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _of_preflight(data: bytes, file: str) -> tuple[Experiment, ...]:
    found = msgspec.json.decode(data, type=_Preflight)
    words = "able to run the measured comparison" if found.able else f"missing: {', '.join(found.missing)}"
    row = Row(configuration="preflight")
    return (Experiment(row=row, evidence_level="environment_preflight", decision=words, file=file),)


_READERS: Final[dict[str, Callable[[bytes, str], tuple[Experiment, ...]]]] = {
    "kvlink.plan/1": _of_plan,
    "kvlink.bench/1": _of_bench,
    "kvlink.preflight/1": _of_preflight,
    "kvlink.experiment/1": _of_experiment,
}


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All experiments by evidence level; levels without any are left out."""

    schema: Literal["kvlink.report/1"] = "kvlink.report/1"
    levels: dict[str, tuple[Experiment, ...]]


def make_report(experiments: Sequence[Experiment]) -> Report:
    """Sort experiments into their levels, order kept within each."""
    levels = {level: tuple(one for one in experiments if one.evidence_level == level) for level in LEVELS}
    return Report(levels={level: rows for level, rows in levels.items() if rows})


COLUMNS: Final = (
    "configuration", "backend", "model", "dtype", "workers", "prompt tokens", "decode tokens", "concurrency",
    "TTFT ms", "TPOT ms", "throughput", "P95 ms", "hand-over ms", "peak GiB", "evidence", "decision", "file",
)  # fmt: skip


def experiment_cells(one: Experiment) -> tuple[str, ...]:
    """One row of the experiment table; what was not measured is empty."""
    row = one.row
    throughput = _cell(row.throughput_rps) + " /s" if row.throughput_rps is not None else ""
    if one.rate_gb_s is not None:
        throughput = f"{one.rate_gb_s:.3g} GB/s"
    return (
        row.configuration, row.backend or "", row.model or "", row.dtype or "", _cell(row.workers),
        _cell(row.prompt_tokens), _cell(row.decode_tokens), _cell(row.concurrency), _cell(row.ttft_ms),
        _cell(row.tpot_ms), throughput, _cell(row.p95_latency_ms), _cell(row.hand_over_ms),
        _cell(row.peak_memory_gib), one.evidence_level, one.decision or "", one.file,
    )  # fmt: skip


def _cell(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 1000 or value == int(value) else f"{value:.3g}"
