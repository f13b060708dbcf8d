"""The JSON of a bench is a contract: its keys, and what its numbers are made of."""

from __future__ import annotations

import io
import json

import msgspec
import pytest
from rich.console import Console

from kvlink.cli.bench import messages as m
from kvlink.cli.bench import table
from kvlink.cli.bench.case import Case, Side
from kvlink.cli.bench.report import Report, Runs, make_report
from kvlink.cli.bench.tally import PHASES, Pair, Span, Tally, Transfer, Window, median, percentile
from kvlink.cli.models import MODELS
from kvlink.layout import DType

KEYS = {
    "schema": None, "kvlink": None, "evidence_level": None,
    "environment": [
        "host", "cpus", "python", "ucx_version", "ucx_origin", "ucx_transports", "gpu", "date", "load_before",
    ],
    "case": [
        "model", "layers", "kv_heads", "head_dim",
        "tokens", "dtype", "source", "target", "flow", "transport", "transport_reason", "path", "path_reason",
        "ucx_tls", "device", "requests", "concurrency", "integrity", "fault",
        "kill_target_every", "source_engines", "target_engines", "max_gbps",
    ],
    "bytes_per_request": None,
    "runs": ["count", "bytes"],
    "requests": ["completed", "failed", "retried"],
    "verified": None,
    "throughput_gb_s": ["median", "min", "max"],
    "cpu_seconds_per_gb": ["source", "target"],
    "latency_s": ["p50", "p95", "p99"],
    "phases_s": ["handshake", "reserve", "plan", "gather", "wire", "scatter", "verify", "commit", "install"],
    "limit": ["name", "gb_s", "how"],
    "fraction_of_limit": None,
    "cold": ["open_seconds", "latency_seconds", "throughput_gb_s"],
    "between_engines_gb_s": None,
    "streamed": None,
    "peers": None,
}  # fmt: skip
"""DESIGN's section on contracts; beyond it ``cold``, and what of the model's geometry flags may have changed."""

CASE = Case(
    geometry=MODELS["llama-3-8b"],
    source=Side(tp=2, pp=1, block_size=16, layout="nhd"),
    target=Side(tp=4, pp=1, block_size=64, layout="hnd"),
    prompts=(100, 100, 300),
    warmup=1,
    concurrency=1,
    flow="fetch",
    transport="ucx",
    integrity=True,
    limit_check=True,
    ucx_tls=None,
    ucx_origin="auto",
    seed=0,
)


def move(wire_seconds: float) -> m.RankMove:
    return m.RankMove(
        bytes=5, rereads=0, transport="ucx", transport_reason="asked for", path="direct", path_reason="only",
        phases={"wire": wire_seconds},
    )  # fmt: skip


def transfer(request: int, seconds: float) -> Transfer:
    span = Span(start_seconds=100.0, end_seconds=100.0 + seconds)
    return Transfer(request=request, payload_bytes=10**9, span=span, moves=(move(seconds / 2), move(seconds / 4)))


def tally() -> Tally:
    measured = (transfer(1, 0.5), transfer(2, 0.25))
    return Tally(
        cold=transfer(0, 2.0),
        open_seconds=1.5,
        windows=[Window(transfers=(one,), source_cpu_seconds=0.1, target_cpu_seconds=0.3) for one in measured],
        pairs=[
            Pair(payload_bytes=10**9, transfer_seconds=one.span.seconds, raw_seconds=raw)
            for one, raw in zip(measured, (0.25, 0.2), strict=True)
        ],
        completed=2,
        verified=2,
    )


def report(of: Tally) -> dict:
    opened = m.Opened(cards=(), seconds=0.0, ucx_version="1.22.0", ucx_origin="wheel", ucx_transports="tcp")
    made = make_report(CASE, of, opened, Runs(count=3, bytes=7), ("ucx_get", "raw"))
    text = msgspec.json.encode(made)
    assert msgspec.json.decode(text, type=Report) == made
    return json.loads(text)


def test_the_object_has_exactly_the_keys_that_scripts_rely_on():
    made = report(tally())
    assert list(made) == list(KEYS)
    for key, inner in KEYS.items():
        if inner is not None:
            assert list(made[key]) == inner, key
    assert all(list(phase) == ["p50", "p95", "p99"] for phase in made["phases_s"].values())
    for side in ("source", "target"):
        assert list(made["case"][side]) == ["tp", "pp", "block_size", "layout", "dtype"]
    assert made["schema"] == "kvlink.bench/1"
    assert list(PHASES) == KEYS["phases_s"]


def test_transfers_side_by_side_are_rated_by_the_wall_clock_over_all_of_them():
    """J4: from the first start to the last install, neither by the last one's time nor by the sum of times."""
    spans = Span(start_seconds=0.0, end_seconds=3.0), Span(start_seconds=2.0, end_seconds=4.0)
    both = tuple(Transfer(request=n, payload_bytes=10**9, span=span, moves=()) for n, span in enumerate(spans))
    assert Window(transfers=both, source_cpu_seconds=0.0, target_cpu_seconds=0.0).gb_s == pytest.approx(0.5)


def test_the_numbers_are_warm_medians_and_the_fraction_is_of_pairs():
    made = report(tally())
    assert made["throughput_gb_s"] == pytest.approx({"median": 3.0, "min": 2.0, "max": 4.0})
    assert made["latency_s"]["p50"] == pytest.approx(0.375)
    assert made["cpu_seconds_per_gb"] == pytest.approx({"source": 0.1, "target": 0.3})
    assert made["fraction_of_limit"] == pytest.approx((0.5 + 0.8) / 2)
    assert made["limit"]["gb_s"] == pytest.approx((4.0 + 5.0) / 2)
    assert made["cold"] == pytest.approx({"open_seconds": 1.5, "latency_seconds": 2.0, "throughput_gb_s": 0.5})
    assert made["bytes_per_request"] == 200 * 32 * 2 * 8 * 128 * 2
    assert made["case"]["tokens"] == 200
    assert made["phases_s"]["wire"]["p99"] == pytest.approx(0.25, rel=0.1)
    assert made["phases_s"]["gather"] == {"p50": 0, "p95": 0, "p99": 0}


@pytest.mark.parametrize(
    "change", [{"failed": 1}, {"faults": ["layer 0"]}, {"verified": 1}, {"completed": 0, "verified": 0}]
)
def test_anything_wrong_or_unchecked_is_not_verified(change):
    of = tally()
    for name, value in change.items():
        setattr(of, name, value)
    assert report(of)["verified"] is False


def test_no_pairs_no_limit_and_nothing_moved_is_still_a_report():
    made = report(Tally(failed=2))
    assert made["limit"] is None
    assert made["fraction_of_limit"] is None
    assert made["throughput_gb_s"] == {"median": 0, "min": 0, "max": 0}


def test_the_table_tells_the_same():
    console = Console(file=io.StringIO(), width=120)
    opened = m.Opened(cards=(), seconds=0.0)
    table.show(make_report(CASE, tally(), opened, Runs(count=3, bytes=65536), ("ucx_get", "raw")), console)
    text = console.file.getvalue()
    for words in ("3.00 GB/s median", "65% of it reached", "every byte", "TP 2, PP 1, blocks of 16, nhd", "64 KiB"):
        assert words in text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"concurrency": 2}, "one request of one pair"),
        ({"source_engines": 3}, "one request of one pair"),
        ({"kill_target_every": 2, "tries": 2}, "kills"),
        ({"target": Side(tp=2, pp=1, block_size=16, layout="nhd", dtype=DType.FLOAT8_E4M3)}, "converts nothing"),
    ],
)
def test_a_limit_that_was_not_measured_is_told_with_the_reason(change, words):
    case = msgspec.structs.replace(CASE, limit_check=False, **change)
    opened = m.Opened(cards=(), seconds=0.0)
    without = make_report(case, Tally(completed=1, verified=1), opened, Runs(count=3, bytes=7), ("ucx_get", "raw"))
    assert without.limit is None
    console = Console(file=io.StringIO(), width=200)
    table.show(without, console)
    (told,) = [line for line in console.file.getvalue().splitlines() if line.startswith("limit")]
    assert "not measured" in told
    assert words in told


def test_percentiles():
    assert percentile([], 50) == median([]) == 0
    assert percentile([3, 1, 2], 50) == 2
    assert percentile([0, 10], 95) == pytest.approx(9.5)
    assert percentile([4], 99) == 4
