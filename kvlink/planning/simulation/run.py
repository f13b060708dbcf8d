"""Runs a workload through a fleet."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from types import ModuleType
from typing import TYPE_CHECKING

from kvlink.errors import UnavailableError
from kvlink.planning.cost import Roofline, StepCost
from kvlink.planning.ledger import LedgerEntry
from kvlink.planning.simulation import happenings
from kvlink.planning.simulation.fleet import Fleet
from kvlink.planning.simulation.flight import End, Flight
from kvlink.planning.simulation.results import SimulationResult, make_result
from kvlink.planning.simulation.scenario import Scenario
from kvlink.planning.trace import Trace

if TYPE_CHECKING:
    import simpy

Progress = Callable[[int], None]
"""Told now and then how many requests have arrived."""
PROGRESS_EVERY = 256


def simulate(
    trace: Trace,
    scenario: Scenario,
    *,
    cost: StepCost | None = None,
    room_tokens: int | None = None,
    progress: Progress | None = None,
    ledger: list[LedgerEntry] | None = None,
) -> SimulationResult:
    """Send every request of ``trace`` through the fleet of ``scenario`` until each has its end.

    The same trace, scenario and seed give the same result, to the last bit.

    Args:
        trace: the workload.
        scenario: the fleet.
        cost: of a worker's steps; the scenario's roofline by default.
        room_tokens: KV room of a worker; what the scenario's memory leaves by default.
        progress: called as requests arrive.
        ledger: gets an entry for each request that was done, in order of arrival.

    Raises:
        ConfigError: (a ValueError) the model does not fit its devices.
        UnavailableError: SimPy is not installed.
    """
    env = simpy_module().Environment()
    if cost is None:
        cost = Roofline(scenario.model, scenario.device, scenario.devices, scenario.assumptions)
    room = scenario.room_tokens if room_tokens is None else room_tokens
    fleet = Fleet(env, scenario, cost, room, trace.block_tokens)
    flights: list[Flight] = []
    env.process(_arrivals(env, fleet, trace, flights, progress or (lambda _: None)))
    for failure in scenario.failures:
        env.process(happenings.fail(env, fleet, failure))
    if scenario.switch is not None:
        env.process(happenings.switch(env, fleet, scenario.switch))
    if scenario.elastic is not None:
        env.process(happenings.resize(env, fleet, scenario.elastic))
    while len(flights) < len(trace.arrivals) or fleet.unfinished:
        env.step()
    if ledger is not None:
        ledger += [_entry(flight) for flight in flights if flight.end is End.DONE]
    return make_result(trace, scenario, fleet, flights)


def _entry(flight: Flight) -> LedgerEntry:
    return LedgerEntry(
        name=flight.arrival.name,
        prompt_tokens=flight.arrival.prompt_tokens,
        decode_tokens=flight.arrival.decode_tokens,
        prefix_hit_tokens=flight.prefix_tokens,
        queue_seconds=flight.waited_seconds + flight.prefill_queue_seconds,
    )


def _arrivals(
    env: simpy.Environment, fleet: Fleet, trace: Trace, flights: list[Flight], progress: Progress
) -> Generator[simpy.Event, None, None]:
    scenario = fleet.scenario
    chance = random.Random(scenario.seed)  # noqa: S311 - a simulation, no secret
    for index, arrival in enumerate(trace.arrivals):
        if arrival.at_seconds > env.now:
            yield env.timeout(arrival.at_seconds - env.now)
        flights.append(fleet.arrive(arrival))
        if scenario.cancelled and chance.random() < scenario.cancelled:
            happenings.leave(env, fleet, flights[-1], chance, scenario.patience_seconds)
        if index % PROGRESS_EVERY == 0:
            progress(index)
    progress(len(trace.arrivals))


def simpy_module() -> ModuleType:
    """SimPy, which only simulations need.

    Raises:
        UnavailableError: it is not installed.
    """
    try:
        import simpy  # noqa: PLC0415 - optional, and imported only by whoever simulates
    except ImportError as error:
        raise UnavailableError("simulations need SimPy: pip install 'kvlink[plan]'") from error
    return simpy
