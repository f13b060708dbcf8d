"""What planning rests on: traces, the transfer's fit, and the verdict drawn from two runs."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from kvlink.planning import (
    Arrival,
    BenchRecord,
    Scenario,
    Trace,
    Verdict,
    advice,
    assumed_transfer,
    fit_transfer,
    make_plan,
    read_trace,
    simulate,
    synthetic_trace,
)
from kvlink.planning.transfer import read_record

RECORDS = Path(__file__).resolve().parent.parent / "benchmarks" / "records"


# --- traces -----------------------------------------------------------------------------------------------------------


def written(tmp_path, *lines, name="t.jsonl"):
    (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path / name


def test_a_trace_is_read_in_order_of_arrival_from_its_first_on(tmp_path):
    path = written(
        tmp_path,
        {"timestamp": 9000, "input_length": 5, "output_length": 2, "tenant": "t", "priority": 3, "adapter": "a"},
        {"timestamp": 4000, "input_length": 7, "output_length": 0, "unknown": [1]},
    )
    trace = read_trace(path)
    assert [(a.name, a.at_seconds, a.prompt_tokens, a.decode_tokens) for a in trace.arrivals] == [
        ("r2", 0.0, 7, 1),
        ("r1", 5.0, 5, 2),
    ]
    assert (trace.arrivals[1].tenant, trace.arrivals[1].priority, trace.arrivals[1].adapter) == ("t", 3, "a")
    assert trace.seconds == 5.0


def test_only_full_blocks_are_shared(tmp_path):
    path = written(tmp_path, {"input_length": 1030, "output_length": 1, "hash_ids": [7, 8, 9]})
    assert read_trace(path).arrivals[0].blocks == (7, 8)
    assert read_trace(path, block_tokens=300).arrivals[0].blocks == (7, 8, 9)


def test_no_more_is_read_than_asked_for(tmp_path):
    path = written(tmp_path, *({"input_length": n, "output_length": 1} for n in (1, 2, 3)))
    path.write_text(path.read_text() + "not json")
    assert [a.prompt_tokens for a in read_trace(path, requests=3).arrivals] == [1, 2, 3]


def test_requests_without_a_time_arrive_at_the_rate_asked_for(tmp_path):
    path = written(tmp_path, *({"input_length": 1, "output_length": 1} for _ in range(4000)))
    trace = read_trace(path, rate=20, seed=2)
    assert trace.seconds == pytest.approx(200, rel=0.05)
    assert trace == read_trace(path, rate=20, seed=2) != read_trace(path, rate=20, seed=3)


def test_ties_are_spread_up_to_the_next_stamp_and_arrivals_sped_up():
    arrivals = [
        Arrival(name=str(i), at_seconds=at, prompt_tokens=1, decode_tokens=1) for i, at in enumerate((0, 0, 0, 6))
    ]
    trace = Trace(name="x", arrivals=tuple(arrivals))
    assert [a.at_seconds for a in trace.spread_ties().arrivals] == [0, 2, 4, 6]
    assert [a.at_seconds for a in trace.faster(3).arrivals] == [0, 0, 0, 2]
    with pytest.raises(ValueError, match="rate factor is 0"):
        trace.faster(0)


def test_a_synthetic_trace_has_the_means_it_was_asked_for():
    trace = synthetic_trace("rate=5,prompt=2000,decode=100,requests=4000,spread=0.6", seed=4)
    count = len(trace.arrivals)
    assert count / trace.seconds == pytest.approx(5, rel=0.05)
    assert sum(a.prompt_tokens for a in trace.arrivals) / count == pytest.approx(2000, rel=0.05)
    assert sum(a.decode_tokens for a in trace.arrivals) / count == pytest.approx(100, rel=0.05)
    alike = synthetic_trace("prompt=2000,decode=100,requests=5,spread=0")
    assert {(a.prompt_tokens, a.decode_tokens) for a in alike.arrivals} == {(2000, 100)}


# --- transfer ---------------------------------------------------------------------------------------------------------


def record(size, seconds, **changes):
    """Of a wire with 4 ms fixed, one a phase."""
    phases = {name: {"p50": 0.001} for name in ("reserve", "plan", "commit", "install")} | {"wire": {"p50": 9.0}}
    raw = {"schema": "kvlink.bench/1", "evidence_level": "measured_host", "verified": True, "fraction_of_limit": 0.8,
           "case": {"transport": "ucx", "concurrency": 1}, "bytes_per_request": size,
           "latency_s": {"p50": seconds}, "phases_s": phases}  # fmt: skip
    return msgspec.convert(raw | changes, BenchRecord)


def test_a_line_is_fitted_to_what_was_measured():
    model = fit_transfer([record(size, 0.004 + size / 2e9) for size in (10**6, 10**8, 10**9)])
    assert (model.fixed_seconds, model.bytes_per_second) == pytest.approx((0.004, 2e9))
    assert model.largest_error == pytest.approx(0, abs=1e-9)
    assert model.seconds(4 * 10**9) == pytest.approx(2.004)
    assert model.seconds(0) == 0.0
    assert "3 measured_host records of ucx" in model.origin


def test_what_does_not_lie_on_the_line_is_told():
    model = fit_transfer([record(10**8, 0.054), record(10**8, 0.104)])
    assert model.largest_error > 0.2


def test_another_link_takes_over_the_fraction_and_the_fixed_part():
    model = fit_transfer([record(10**8, 0.054)], link_bytes_per_second=50e9)
    assert (model.bytes_per_second, model.fixed_seconds, model.fraction) == pytest.approx((40e9, 0.004, 0.8))
    assert model.largest_error is None


def test_what_was_not_verified_or_ran_beside_others_is_not_used():
    good = record(10**8, 0.054)
    bad = [
        record(10**8, 9.0, verified=False),
        record(10**8, 9.0, case={"transport": "ucx", "concurrency": 4}),
    ]
    assert fit_transfer([good, *bad]) == fit_transfer([good])
    with pytest.raises(ValueError, match="transports none"):
        fit_transfer(bad)


def test_records_that_say_nothing_together_are_refused():
    with pytest.raises(ValueError, match="transports stream, ucx"):
        fit_transfer([record(1, 1.0), record(1, 1.0, case={"transport": "stream", "concurrency": 1})])
    with pytest.raises(ValueError, match="fraction_of_limit"):
        fit_transfer([record(10**8, 1.0, fraction_of_limit=None)], 1e9)
    with pytest.raises(ValueError, match="link_bytes_per_second is 0"):
        assumed_transfer(0)


def test_the_records_of_this_repository_are_read_and_fitted():
    model = fit_transfer([read_record(path) for path in sorted(RECORDS.glob("host-tcp-*.json"))])
    assert model.bytes_per_second > 0
    assert model.fixed_seconds > 0
    assert model.largest_error is not None


# --- the verdict ------------------------------------------------------------------------------------------------------

QUIET = synthetic_trace("rate=4,prompt=4000,decode=60,requests=30", seed=1)
FLEET = Scenario(workers=2, prefill_workers=1)
RESULTS = {0: simulate(QUIET, FLEET.split(0)), 1: simulate(QUIET, FLEET)}


@pytest.mark.parametrize(
    ("together", "apart", "verdict", "words"),
    [
        # goodput, attainment, p95 end to end
        ((1.0, 0.80, 9.0), (1.10, 0.90, 9.0), Verdict.ACCEPT, "Split: 1 prefill"),
        ((1.0, 0.80, 9.0), (1.10, 0.90, 9.5), Verdict.TUNE, "take 0.5 s longer"),
        ((1.0, 0.80, 9.0), (1.02, 0.82, 8.0), Verdict.TUNE, "too little to pay for itself"),
        ((1.0, 0.99, 9.0), (1.02, 1.00, 8.0), Verdict.REJECT, "Keep 2 co-located workers"),
        ((1.0, 0.80, 9.0), (0.98, 0.79, 8.0), Verdict.REJECT, "Keep 2"),
        ((1.0, 0.80, 9.0), (1.02, 0.82, 9.5), Verdict.REJECT, "Keep 2"),
        ((0.0, 0.00, 9.0), (0.50, 0.90, 8.0), Verdict.ACCEPT, "Split"),
    ],
)
def test_the_verdict_follows_from_gain_tail_and_cost(monkeypatch, together, apart, verdict, words):
    def faked(trace, scenario, **_):
        goodput, attainment, p95 = apart if scenario.prefill_workers else together
        real = RESULTS[scenario.prefill_workers]
        e2e = msgspec.structs.replace(real.e2e, p95=p95)
        return msgspec.structs.replace(real, goodput_rps=goodput, attainment=attainment, e2e=e2e)

    monkeypatch.setattr(advice, "simulate", faked)
    plan = make_plan(QUIET, FLEET, ratios=(1,))
    assert (plan.verdict, words in plan.advice) == (verdict, True)


def test_the_baseline_is_the_best_of_its_step_sizes(monkeypatch):
    def faked(trace, scenario, **_):
        real = RESULTS[scenario.prefill_workers]
        good = 2.0 if scenario.token_budget == 1024 else 1.0
        return msgspec.structs.replace(real, goodput_rps=good, configuration=str(scenario.token_budget))

    monkeypatch.setattr(advice, "simulate", faked)
    plan = make_plan(QUIET, FLEET, ratios=(1,))
    assert [run.configuration for run in plan.together] == ["512", "1024", "2048"]
    assert plan.baseline.configuration == "1024"
    assert plan.decision["throughput_gain"] == -1.0


def test_the_crossover_is_closed_in_on(monkeypatch):
    """Goodput that rises with the link: 3 GB/s is where it reaches the baseline's."""

    def faked(trace, scenario, **_):
        link = scenario.transfer.bytes_per_second / scenario.transfer.fraction / 1e9
        return msgspec.structs.replace(
            RESULTS[scenario.prefill_workers], goodput_rps=link if scenario.prefill_workers else 3.0
        )

    monkeypatch.setattr(advice, "simulate", faked)
    plan = make_plan(QUIET, FLEET, ratios=(1,), links_gb_s=(10.0, 1.0))
    assert [point.link_gb_s for point in plan.links] == [1.0, 1.8, 3.2, 10.0]
    assert plan.crossover_gb_s == pytest.approx(3, rel=0.05)


def test_a_plan_is_read_back_as_it_was_written():
    plan = make_plan(QUIET, FLEET, ratios=(1,), links_gb_s=(50.0, 1.0))
    assert msgspec.json.decode(msgspec.json.encode(plan), type=advice.Plan) == plan
    assert [point.link_gb_s for point in plan.links] == [1.0, 50.0]
    assert plan.links[0].ttft_p95 > plan.links[1].ttft_p95
