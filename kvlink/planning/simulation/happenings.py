"""What happens to a fleet while it serves: failures, a new revision, pools that change, users who leave."""

from __future__ import annotations

import random
from collections.abc import Generator
from typing import TYPE_CHECKING, Final

from kvlink.cluster import PoolLoad, PoolState, rollout_waves, worker_to_move
from kvlink.planning.simulation.fleet import DECODE, PREFILL, SHARED, Fleet
from kvlink.planning.simulation.flight import Flight
from kvlink.planning.simulation.scenario import Elastic, Failure, Switch
from kvlink.planning.simulation.worker import Worker

if TYPE_CHECKING:
    import simpy

    Steps = Generator[simpy.Event, object, None]

LOOK_AGAIN_SECONDS: Final = 1.0
"""Until a worker that is changing pools may be looked at again by a switch."""

PRESSED_ROOM: Final = 0.8
"""Part of decode's room that KV fills while others wait in line: then it is decode that they wait for."""


def fail(env: simpy.Environment, fleet: Fleet, failure: Failure) -> Steps:
    """A worker dies, and comes back empty after a while."""
    worker = fleet.workers[failure.worker]
    yield env.timeout(failure.at_seconds)
    if worker.healthy:
        fleet.lose(worker)
        yield env.timeout(failure.down_seconds)
        worker.revive()
        fleet.admit()


def switch(env: simpy.Environment, fleet: Fleet, plan: Switch) -> Steps:
    """Drain, restart on the new revision, wave after wave."""
    yield env.timeout(plan.at_seconds)
    by_name = {worker.name: worker for worker in fleet.workers}
    pools = [[worker.name for worker in fleet.pool(role)] for role in (SHARED, PREFILL, DECODE)]
    for wave in rollout_waves(pools):
        restarts = [env.process(_restart(env, fleet, by_name[name], plan.restart_seconds)) for name in wave]
        yield env.all_of(restarts)


def _restart(env: simpy.Environment, fleet: Fleet, worker: Worker, seconds: float) -> Steps:
    while worker.state is not PoolState.ACTIVE:
        yield env.timeout(LOOK_AGAIN_SECONDS)
    yield fleet.drained(worker)
    yield env.timeout(seconds)
    worker.revision += 1
    worker.space.clear()
    worker.adapters = frozenset()
    fleet.activate(worker)


def resize(env: simpy.Environment, fleet: Fleet, plan: Elastic) -> Steps:
    """Look at both pools now and then, and move a worker where it is needed more; never ends by itself."""
    while True:
        yield env.timeout(plan.period_seconds)
        name = worker_to_move(_load(fleet, PREFILL, plan), _load(fleet, DECODE, plan))
        if name is not None:
            worker = next(worker for worker in fleet.workers if worker.name == name)
            yield fleet.drained(worker)
            yield env.timeout(plan.switch_seconds)
            fleet.change_role(worker, DECODE if worker.role == PREFILL else PREFILL)
            fleet.activate(worker)


def _load(fleet: Fleet, role: str, plan: Elastic) -> PoolLoad:
    """Prefill is pressed by queued prompts that take longer than a period, decode by KV that fills its room.

    Room that is only promised does not count for decode: it is prefill that those requests wait for.
    """
    active = [w for w in fleet.pool(role) if w.state is PoolState.ACTIVE and w.healthy]
    count = max(len(active), 1)
    if role == PREFILL:
        pressure = sum(map(fleet.queue_seconds, active)) / count / plan.period_seconds
        active.sort(key=lambda worker: (worker.pending_tokens, worker.name))
    else:
        pressure = sum(worker.resident / worker.space.total for worker in active) / count
        pressure += 1.0 if fleet.waiting and pressure > PRESSED_ROOM else 0.0
        active.sort(key=lambda worker: (worker.space.held, worker.name))
    return PoolLoad(pressure=pressure, active=tuple(worker.name for worker in active))


def leave(env: simpy.Environment, fleet: Fleet, flight: Flight, chance: random.Random, patience: float) -> None:
    """A user who leaves at a random moment."""
    callbacks = env.timeout(chance.random() * patience).callbacks
    assert callbacks is not None
    callbacks.append(lambda _: fleet.cancel(flight))
