"""What a simulation says: percentiles, goodput, pools, transfers, prefixes. Plain data, schema ``kvlink.simulation/1``.

Times are seconds. Every number here is ``simulated``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final, Literal

import msgspec

from kvlink.planning.simulation.fleet import Fleet
from kvlink.planning.simulation.flight import End, Flight
from kvlink.planning.simulation.scenario import Objectives, Scenario
from kvlink.planning.trace import Trace

SCHEMA: Final = "kvlink.simulation/1"


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Of a quantity over requests; nearest-rank percentiles. ``None`` where no request has it."""

    mean: float | None
    p50: float | None
    p95: float | None
    p99: float | None


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """Requests by their end; together all that came. ``restarted``: at least once."""

    total: int
    done: int
    cancelled: int
    too_large: int
    restarted: int


class PoolResult(msgspec.Struct, frozen=True, kw_only=True):
    """One pool.

    Attributes:
        workers: at the start.
        utilisation: part of its workers' time in which they ran steps.
        queue_seconds: prefill: admitted until the prompt begins; decode: KV there until the first token.
        peak_room: largest part of a worker's KV room that was promised to requests.
    """

    name: str
    workers: int
    utilisation: float
    queue_seconds: Spread
    peak_room: float


class Moves(msgspec.Struct, frozen=True, kw_only=True):
    """Transfers between pools. ``seconds``: of the transfer itself; ``wait_seconds``: for a link that others used."""

    bytes_per_request: Spread
    total_bytes: int
    seconds: Spread
    wait_seconds: Spread
    origin: str


class Prefixes(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that found at least half of their prompt in a cache (warm), and the others (cold).

    ``hit_tokens`` is the part of all prompt tokens that was found.
    """

    warm_requests: int
    cold_requests: int
    hit_tokens: float
    warm_ttft: Spread
    cold_ttft: Spread


class SimulationResult(msgspec.Struct, frozen=True, kw_only=True):
    """One run.

    Attributes:
        configuration: in words: the pools.
        seconds: first arrival to last end.
        throughput_rps: requests done a second.
        goodput_rps: requests done a second that met both objectives.
        attainment: part of all requests but the cancelled that met both.
        line_seconds: in line, until a worker had room.
        recomputed_tokens: computed a second time, after a failure or for want of room.
        explanations: of some routing choices, in words.
    """

    schema: Literal["kvlink.simulation/1"] = SCHEMA
    evidence_level: Literal["simulated"] = "simulated"
    trace: str
    configuration: str
    prefill_workers: int
    decode_workers: int
    requests: Counts
    seconds: float
    throughput_rps: float
    output_tokens_per_second: float
    goodput_rps: float
    attainment: float
    ttft: Spread
    tpot: Spread
    e2e: Spread
    line_seconds: Spread
    pools: tuple[PoolResult, ...]
    moves: Moves | None
    prefixes: Prefixes
    recomputed_tokens: int
    explanations: tuple[str, ...]

    @property
    def throughput(self) -> float:
        """What `evaluate_pd_decision` compares: goodput."""
        return self.goodput_rps

    @property
    def p95_latency_ms(self) -> float:
        """What `evaluate_pd_decision` compares: end to end."""
        return 1e3 * (self.e2e.p95 or 0.0)


def spread(values: Iterable[float]) -> Spread:
    """Mean and nearest-rank percentiles."""
    ordered = sorted(values)
    if not ordered:
        return Spread(mean=None, p50=None, p95=None, p99=None)
    ranks = (ordered[max(math.ceil(part * len(ordered)) - 1, 0)] for part in (0.5, 0.95, 0.99))
    p50, p95, p99 = ranks
    return Spread(mean=math.fsum(ordered) / len(ordered), p50=p50, p95=p95, p99=p99)


def ttft(flight: Flight) -> float:
    """Arrival to first token."""
    assert flight.first_token_at is not None
    return flight.first_token_at - flight.arrival.at_seconds


def tpot(flight: Flight) -> float | None:
    """Mean time of a token after the first; ``None`` where there is only one."""
    assert flight.ended_at is not None
    assert flight.first_token_at is not None
    later = flight.arrival.decode_tokens - 1
    return (flight.ended_at - flight.first_token_at) / later if later else None


def is_good(flight: Flight, objectives: Objectives) -> bool:
    """Done, and within both objectives."""
    if flight.end is not End.DONE:
        return False
    return ttft(flight) <= objectives.ttft_seconds and (tpot(flight) or 0.0) <= objectives.tpot_seconds


def make_result(trace: Trace, scenario: Scenario, fleet: Fleet, flights: Sequence[Flight]) -> SimulationResult:
    """Sum up a run that has ended."""
    done = [flight for flight in flights if flight.end is End.DONE]
    ends = [flight.ended_at for flight in flights if flight.ended_at is not None]
    assert len(ends) == len(flights), "every request has an end"
    seconds = max(max(ends) - flights[0].arrival.at_seconds, 1e-9)
    good = sum(is_good(flight, scenario.objectives) for flight in flights)
    kept = [flight for flight in flights if flight.end is not End.CANCELLED]
    split = scenario.prefill_workers > 0
    decode = scenario.workers - scenario.prefill_workers
    return SimulationResult(
        trace=trace.name,
        configuration=(
            f"{scenario.prefill_workers} prefill + {decode} decode"
            if split
            else f"{decode} co-located, {scenario.token_budget}/step"
        ),
        prefill_workers=scenario.prefill_workers,
        decode_workers=decode,
        requests=Counts(
            total=len(flights),
            done=len(done),
            cancelled=len(flights) - len(kept),
            too_large=len(kept) - len(done),
            restarted=sum(flight.tries > 0 for flight in flights),
        ),
        seconds=seconds,
        throughput_rps=len(done) / seconds,
        output_tokens_per_second=sum(flight.arrival.decode_tokens for flight in done) / seconds,
        goodput_rps=good / seconds,
        attainment=good / len(kept) if kept else 0.0,
        ttft=spread(map(ttft, done)),
        tpot=spread(value for value in map(tpot, done) if value is not None),
        e2e=spread(f.ended_at - f.arrival.at_seconds for f in done if f.ended_at is not None),
        line_seconds=spread(flight.waited_seconds for flight in done),
        pools=_pools(fleet, done, seconds),
        moves=_moves(scenario, done) if split else None,
        prefixes=_prefixes(done),
        recomputed_tokens=sum(flight.recomputed_tokens for flight in flights),
        explanations=tuple(fleet.explanations),
    )


def _pools(fleet: Fleet, done: Sequence[Flight], seconds: float) -> tuple[PoolResult, ...]:
    results = []
    for name, workers in fleet.initial_pools.items():
        served = fleet.role_seconds(name)
        results.append(
            PoolResult(
                name=name,
                workers=workers,
                utilisation=min(sum(w.busy_seconds[name] for w in fleet.workers) / (served or seconds), 1.0),
                queue_seconds=spread(
                    f.first_token_at - f.installed_at
                    for f in done
                    if f.first_token_at is not None and f.installed_at is not None and not f.tries
                )
                if name == "decode"
                else spread(flight.prefill_queue_seconds for flight in done),
                peak_room=fleet.peak_room[name],
            )
        )
    return tuple(results)


def _moves(scenario: Scenario, done: Sequence[Flight]) -> Moves:
    return Moves(
        bytes_per_request=spread(flight.moved_bytes for flight in done),
        total_bytes=sum(flight.moved_bytes for flight in done),
        seconds=spread(flight.transfer_seconds for flight in done),
        wait_seconds=spread(flight.link_wait_seconds for flight in done),
        origin=scenario.transfer.origin,
    )


def _prefixes(done: Sequence[Flight]) -> Prefixes:
    warm = [flight for flight in done if flight.prefix_tokens * 2 >= flight.arrival.prompt_tokens]
    cold = [flight for flight in done if flight.prefix_tokens * 2 < flight.arrival.prompt_tokens]
    prompts = sum(flight.arrival.prompt_tokens for flight in done)
    return Prefixes(
        warm_requests=len(warm),
        cold_requests=len(cold),
        hit_tokens=sum(flight.prefix_tokens for flight in done) / prompts if prompts else 0.0,
        warm_ttft=spread(map(ttft, warm)),
        cold_ttft=spread(map(ttft, cold)),
    )
