"""The simulator against theory, against its own single steps, and against what must always hold."""

from __future__ import annotations

import itertools
import random

import msgspec
import pytest
import simpy

from kvlink.cluster import PoolState
from kvlink.planning import (
    DEVICES,
    MODELS,
    Arrival,
    Elastic,
    Failure,
    Scenario,
    Switch,
    Trace,
    simulate,
    summarize_request_mix,
    synthetic_trace,
)
from kvlink.planning.cost import Assumptions, Roofline, TokenCost, steps_within
from kvlink.planning.simulation import run as runs
from kvlink.planning.simulation.fleet import Fleet
from kvlink.planning.simulation.space import KVSpace

PLENTY = 1 << 50
SMALL = Scenario(workers=4, model=MODELS["llama-3-8b"], devices=1)
TRAFFIC = synthetic_trace("rate=4,prompt=3000,decode=80,requests=150,spread=0.8", seed=3)


def arrivals(*rows, **common):
    """(time, prompt, decode[, blocks]) rows as a trace."""
    return Trace(
        name="rows",
        block_tokens=16,
        arrivals=tuple(
            Arrival(
                name=f"r{i}", at_seconds=row[0], prompt_tokens=row[1], decode_tokens=row[2], blocks=row[3:], **common
            )
            for i, row in enumerate(rows)
        ),
    )


def observed(monkeypatch, trace, scenario, **how):
    """Run it; returns the fleet and the flights beside the result."""
    seen = {}
    make = runs.make_result

    def keep(*given):
        seen["fleet"], seen["flights"] = given[2], given[3]
        return make(*given)

    monkeypatch.setattr(runs, "make_result", keep)
    return simulate(trace, scenario, **how), seen["fleet"], seen["flights"]


# --- theory -----------------------------------------------------------------------------------------------------------

SERVICE = 100_000
"""Tokens of a mean service of one second: so fine that rounding does not count."""
ONE_SERVER = Scenario(workers=1, max_running=1, token_budget=1 << 40)


def queue_of(requests, load, *, exponential, seed=0):
    chance, at, rows = random.Random(seed), 0.0, []
    for _ in range(requests):
        at += chance.expovariate(load)
        rows.append((at, max(round(chance.expovariate(1) * SERVICE), 1) if exponential else SERVICE, 1))
    return arrivals(*rows)


@pytest.mark.parametrize(("exponential", "load", "expected"), [(True, 0.3, 0.3 / 0.7), (False, 0.5, 0.5 / 0.5 / 2)])
def test_waiting_in_one_server_is_within_3_percent_of_theory(exponential, load, expected):
    """M/M/1: rho / (1 - rho) services; M/D/1: half of that (Pollaczek-Khinchine)."""
    trace = queue_of(30_000, load, exponential=exponential, seed=1)
    result = simulate(trace, ONE_SERVER, cost=TokenCost(1 / SERVICE), room_tokens=PLENTY)
    service = sum(arrival.prompt_tokens for arrival in trace.arrivals) / SERVICE / len(trace.arrivals)
    assert result.ttft.mean - service == pytest.approx(expected, rel=0.03)
    assert result.pools[0].queue_seconds.mean == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("exponential", [True, False])
def test_every_single_wait_is_lindleys(monkeypatch, exponential):
    """W(n+1) = max(0, W(n) + S(n) - A(n)), request by request."""
    trace = queue_of(1000, 0.8, exponential=exponential)
    _, _, flights = observed(monkeypatch, trace, ONE_SERVER, cost=TokenCost(1 / SERVICE), room_tokens=PLENTY)
    wait = 0.0
    for flight, following in itertools.pairwise(flights):
        service = flight.arrival.prompt_tokens / SERVICE
        assert flight.first_token_at == pytest.approx(flight.arrival.at_seconds + wait + service)
        wait = max(wait + service - (following.arrival.at_seconds - flight.arrival.at_seconds), 0.0)


# --- cost -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", sorted(MODELS))
@pytest.mark.parametrize(("batch", "context"), [(1, 10), (7, 9000), (200, 3000), (400, 4_000_000)])
def test_a_stretch_of_decode_is_the_sum_of_its_steps(model, batch, context):
    for device in DEVICES.values():
        cost = Roofline(MODELS[model], device, 8, Assumptions())
        contexts = [context + batch * step for step in range(300)]
        one_by_one = sum(cost.step_seconds(batch, now, now) for now in contexts)
        assert cost.decode_seconds(batch, context, 300) == pytest.approx(one_by_one, rel=1e-9)


def test_the_stretch_turns_from_one_roof_to_the_other():
    """A latent is read once for many heads: its arithmetic overtakes its memory traffic as the context grows."""
    cost = Roofline(MODELS["deepseek-v3"], DEVICES["h100-sxm"], 8, Assumptions(flops_fraction=0.05))
    slopes = [cost.step_seconds(10, c + 1000, c + 1000) - cost.step_seconds(10, c, c) for c in (10**6, 2 * 10**6)]
    assert slopes[1] > slopes[0] * 1.4
    one_by_one = sum(cost.step_seconds(10, c, c) for c in range(10**6, 10**6 + 10 * 20_000, 10))
    assert cost.decode_seconds(10, 10**6, 20_000) == pytest.approx(one_by_one, rel=1e-9)


def test_the_step_under_way_is_found():
    cost = TokenCost(1.0, decode=0.5)
    assert [steps_within(cost, 1, 0, 10, seconds) for seconds in (0.0, 0.4, 0.5, 0.6, 5.0, 9.0)] == [1, 1, 1, 2, 10, 10]


def test_jumps_give_what_single_steps_give(monkeypatch):
    """Every worker is interrupted all the time, so that it makes its steps one by one."""
    for scenario in (SMALL, SMALL.split(2)):
        jumps, _, _ = observed(monkeypatch, TRAFFIC, scenario)

        class Nervous(Fleet):
            def __init__(self, env, *rest):
                super().__init__(env, *rest)
                env.process(self.wake_all(env))

            def wake_all(self, env):
                while True:
                    yield env.timeout(0.003)
                    for worker in self.workers:
                        worker._wake()

        monkeypatch.setattr(runs, "Fleet", Nervous)
        steps, _, _ = observed(monkeypatch, TRAFFIC, scenario)
        monkeypatch.undo()
        for name in ("ttft", "tpot", "e2e"):
            assert msgspec.structs.astuple(getattr(jumps, name)) == pytest.approx(
                msgspec.structs.astuple(getattr(steps, name)), rel=1e-6
            )


# --- what must always hold --------------------------------------------------------------------------------------------

STORM = {
    "failures": (Failure(worker=0, at_seconds=5, down_seconds=4), Failure(worker=3, at_seconds=9, down_seconds=6)),
    "switch": Switch(at_seconds=14, restart_seconds=3),
    "cancelled": 0.2,
    "patience_seconds": 3.0,
}


@pytest.mark.parametrize("prefill", [0, 1, 2, 3])
@pytest.mark.parametrize("seed", [0, 1])
def test_every_request_has_one_end_and_every_token_of_room_comes_back(monkeypatch, prefill, seed):
    scenario = msgspec.structs.replace(SMALL, prefill_workers=prefill, seed=seed, **STORM)
    trace = TRAFFIC.faster(2.5)
    result, fleet, flights = observed(monkeypatch, trace, scenario, room_tokens=40_000)
    counts = result.requests
    assert counts.total == len(trace.arrivals) == len(flights)
    assert counts.done + counts.cancelled + counts.too_large == counts.total
    assert counts.cancelled > 0
    assert counts.restarted > 0
    for flight in flights:
        if flight.end == "done":
            assert flight.generated == flight.arrival.decode_tokens
            assert flight.arrival.at_seconds < flight.first_token_at <= flight.ended_at
    for worker in fleet.workers:
        assert (worker.space.held, worker.promised, worker.pending_tokens, len(worker.flights)) == (0, 0, 0, 0)
        assert (worker._context, len(worker._running)) == (0, 0)
        assert not worker.space._holders
        assert not any(worker.tenants.values())
    assert fleet.waiting == 0


def test_the_same_seed_gives_the_same_bytes_and_another_does_not():
    scenario = msgspec.structs.replace(SMALL, prefill_workers=2, **STORM)
    first, again = (msgspec.json.encode(simulate(TRAFFIC, scenario)) for _ in range(2))
    assert first == again
    assert first != msgspec.json.encode(simulate(TRAFFIC, msgspec.structs.replace(scenario, seed=1)))


def test_one_request_alone_takes_what_its_steps_take():
    cost = TokenCost(0.001, decode=0.01)
    shared = simulate(arrivals((0.0, 100, 5)), Scenario(workers=2), cost=cost)
    assert (shared.ttft.p50, shared.e2e.p50) == pytest.approx((0.1, 0.1 + 4 * 0.01))
    split = simulate(arrivals((0.0, 100, 5)), Scenario(workers=2, prefill_workers=1), cost=cost)
    hand_over = Scenario(workers=2).transfer.seconds(100 * 327_680)
    assert split.ttft.p50 == pytest.approx(0.1 + hand_over + 0.01)
    assert split.e2e.p50 == pytest.approx(0.1 + hand_over + 5 * 0.01)
    assert split.moves.total_bytes == 100 * 327_680


def test_a_link_moves_one_request_at_a_time():
    cost = TokenCost(1e-9, decode=0.01)
    result = simulate(arrivals((0.0, 1000, 2), (0.0, 1000, 2)), Scenario(workers=2, prefill_workers=1), cost=cost)
    wire = 1000 * 327_680 / Scenario(workers=2).transfer.bytes_per_second
    assert result.moves.wait_seconds.p99 == pytest.approx(wire, rel=1e-3)


# --- prefixes, room, adapters -----------------------------------------------------------------------------------------


def test_a_prefix_that_is_there_is_neither_computed_nor_moved():
    cost = TokenCost(0.001, decode=0.01)
    trace = arrivals((0.0, 40, 2, 1, 2), (10.0, 40, 2, 1, 2), (20.0, 40, 2, 1, 9))
    result = simulate(trace, Scenario(workers=2, prefill_workers=1), cost=cost)
    assert result.moves.total_bytes == (40 + 8 + 24) * 327_680
    assert result.prefixes.hit_tokens == pytest.approx((32 + 16) / 120)
    assert result.prefixes.warm_requests == 1
    assert result.prefixes.warm_ttft.p50 < 0.6 * result.prefixes.cold_ttft.p50


def test_a_prompt_that_is_there_whole_still_computes_its_last_token():
    trace = arrivals((0.0, 32, 1, 1, 2), (10.0, 32, 1, 1, 2))
    result = simulate(trace, Scenario(workers=1), cost=TokenCost(0.001))
    assert result.ttft.p50 == pytest.approx(0.001)


def test_the_longest_unused_block_gives_way_and_a_held_one_never_does():
    space = KVSpace(64, 16)
    space.pin((1, 2))
    assert space.hold(32)
    space.unpin((1, 2))
    space.hold(-32)
    assert space.match((1, 2, 3)) == 2
    assert space.hold(48)
    assert (space.match((1, 2)), space.free) == (1, 16)
    space.pin((1,))
    assert space.hold(16)
    assert space.match((1,)) == 1
    assert not space.hold(1)


def test_a_prefix_is_kept_while_room_is_made_for_the_rest_of_its_request():
    """The decode worker has room for one request; making it must not evict what the request was about to use."""
    scenario = Scenario(workers=2, prefill_workers=1, growth_tokens=16)
    trace = arrivals((0.0, 32, 1, 1, 2), (10.0, 40, 1, 1, 2))
    result = simulate(trace, scenario, cost=TokenCost(0.001), room_tokens=64)
    assert result.moves.total_bytes == (32 + 8) * 327_680


def test_a_tenant_that_floods_the_fleet_waits_behind_one_that_does_not_h3(monkeypatch):
    """H3: room for three at a time; the modest tenant's request came last and is the next to get a place."""
    flood = arrivals(*((0.0, 100, 10) for _ in range(10)), tenant="flood")
    modest = msgspec.structs.replace(flood.arrivals[0], name="modest", at_seconds=0.01, tenant="modest")
    trace = msgspec.structs.replace(flood, arrivals=(*flood.arrivals, modest))
    scenario = Scenario(workers=1, growth_tokens=10)
    _, _, flights = observed(monkeypatch, trace, scenario, cost=TokenCost(0.001, decode=0.1), room_tokens=340)
    earlier = [flight for flight in flights if flight.admitted_at < flights[-1].admitted_at]
    assert len(earlier) == 3


def test_a_higher_priority_goes_first(monkeypatch):
    low = arrivals(*((0.0, 100, 10) for _ in range(4)))
    high = msgspec.structs.replace(low.arrivals[0], name="high", at_seconds=0.01, priority=1)
    trace = msgspec.structs.replace(low, arrivals=(*low.arrivals, high))
    scenario = Scenario(workers=1, growth_tokens=10)
    _, _, flights = observed(monkeypatch, trace, scenario, cost=TokenCost(0.001, decode=0.1), room_tokens=120)
    assert sorted(flights, key=lambda flight: flight.admitted_at)[1].arrival.name == "high"


def test_the_ledger_has_what_planning_asks_for():
    ledger = []
    trace = arrivals((0.0, 40, 2, 1, 2), (0.0, 40, 2, 3, 4), (10.0, 40, 3, 1, 9))
    simulate(trace, Scenario(workers=1, max_running=1), cost=TokenCost(0.001, decode=0.01), ledger=ledger)
    assert [entry.prefix_hit_tokens for entry in ledger] == [0, 0, 16]
    assert [entry.queue_seconds for entry in ledger] == pytest.approx([0, 0.05, 0])
    assert summarize_request_mix(ledger, 39) == {"prefill_heavy": 3, "decode_heavy": 0, "mixed": 0}


def test_a_request_that_can_never_fit_is_refused_at_once_h2():
    result = simulate(arrivals((0.0, 1000, 1), (0.0, 10, 1)), Scenario(workers=1), cost=TokenCost(0.1), room_tokens=600)
    assert (result.requests.too_large, result.requests.done) == (1, 1)


def test_who_outgrows_the_room_begins_anew_and_still_ends():
    """Two requests grow past what they were promised; the younger gives way, and its tokens are computed again."""
    scenario = Scenario(workers=1, growth_tokens=10, growth_step=10)
    trace = arrivals((0.0, 100, 60), (0.1, 100, 60))
    result = simulate(trace, scenario, cost=TokenCost(0.001, decode=0.01), room_tokens=260)
    assert (result.requests.done, result.requests.restarted) == (2, 1)
    assert result.recomputed_tokens > 100


def test_requests_wait_in_line_for_room_h1():
    scenario = Scenario(workers=2, prefill_workers=1, growth_tokens=10)
    trace = arrivals(*((0.0, 100, 10) for _ in range(4)))
    result = simulate(trace, scenario, cost=TokenCost(0.001, decode=0.1), room_tokens=230)
    assert result.line_seconds.p99 > 1.0
    assert result.pools[1].peak_room == pytest.approx(220 / 230)


def test_an_adapter_is_loaded_once_and_waited_for():
    trace = arrivals((0.0, 10, 1), (10.0, 10, 1), adapter="lora")
    result = simulate(trace, Scenario(workers=1), cost=TokenCost(0.01))
    assert (result.ttft.p99, result.ttft.p50) == pytest.approx((1.1, 0.1))


# --- happenings -------------------------------------------------------------------------------------------------------


def test_after_a_failure_generated_tokens_are_part_of_the_new_prompt(monkeypatch):
    scenario = Scenario(workers=2, failures=(Failure(worker=0, at_seconds=1.055, down_seconds=9),))
    cost = TokenCost(0.001, decode=0.01)
    result, _, flights = observed(monkeypatch, arrivals((0.0, 1000, 50)), scenario, cost=cost)
    assert (flights[0].tries, flights[0].prompt) == (1, 1006)
    assert flights[0].excluded == {"w0"}
    assert result.recomputed_tokens == 1005
    assert result.ttft.p50 == pytest.approx(1.0)
    assert result.e2e.p50 == pytest.approx(1.055 + 1.006 + 43 * 0.01)


def test_prefill_and_decode_are_always_of_one_revision(monkeypatch):
    pairs = set()
    place = Fleet._place

    def watch(self, flight):
        placed = place(self, flight)
        if placed:
            pairs.add((flight.first.worker.revision, flight.second.worker.revision, self._env.now > 10))
            assert flight.first.worker.state is flight.second.worker.state is PoolState.ACTIVE
        return placed

    monkeypatch.setattr(Fleet, "_place", watch)
    scenario = msgspec.structs.replace(SMALL, prefill_workers=2, switch=Switch(at_seconds=10, restart_seconds=2))
    result, fleet, _ = observed(monkeypatch, TRAFFIC, scenario)
    assert result.requests.done == len(TRAFFIC.arrivals)
    assert {(first, second) for first, second, _ in pairs} == {(1, 1), (2, 2)}
    assert {worker.revision for worker in fleet.workers} == {2}


def test_elastic_pools_give_a_worker_to_the_pressed_one(monkeypatch):
    heavy = synthetic_trace("rate=6,prompt=8000,decode=4,requests=300,spread=0", seed=1)
    scenario = msgspec.structs.replace(SMALL, prefill_workers=1, elastic=Elastic(period_seconds=5, switch_seconds=1))
    moved, fleet, _ = observed(monkeypatch, heavy, scenario)
    fixed = simulate(heavy, msgspec.structs.replace(scenario, elastic=None))
    assert len(fleet.pool("prefill")) > 1
    assert moved.ttft.p95 < fixed.ttft.p95 / 2


def test_progress_is_told_to_the_end():
    told = []
    simulate(TRAFFIC, SMALL, progress=told.append)
    assert (told[0], told[-1]) == (0, len(TRAFFIC.arrivals))


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"workers": 0}, "workers is 0"),
        ({"prefill_workers": 4}, "prefill_workers is 4"),
        ({"token_budget": 0}, "token_budget is 0"),
        ({"cancelled": 1.5}, "cancelled is 1.5"),
        ({"failures": (Failure(worker=4, at_seconds=0, down_seconds=1),)}, "failure of worker 4"),
        ({"failures": (Failure(worker=0, at_seconds=-1, down_seconds=1),)}, "failure of worker 0"),
        ({"elastic": Elastic()}, "elastic pools need"),
    ],
)
def test_a_fleet_that_cannot_be_is_refused_by_name(changes, word):
    with pytest.raises(ValueError, match=word):
        msgspec.structs.replace(SMALL, **changes)


def test_simpy_is_what_time_is_kept_by():
    assert runs.simpy_module() is simpy
