"""The simulated fleet: a line, a router, workers in pools, links between them. Decisions are `kvlink.cluster`'s.

A request stands in line until a worker (or a prefill and a decode worker of one revision) has room for all of it, its
expected growth included; that room is promised before anything is computed, at a decode worker even taken. Split, its
KV is moved once its prompt is computed, and its first token comes from the decode worker.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from kvlink import limits
from kvlink.cluster import Line, PoolState
from kvlink.planning.cost import StepCost
from kvlink.planning.simulation.flight import End, Engine, Flight, Stay
from kvlink.planning.simulation.router import Router
from kvlink.planning.simulation.scenario import Scenario
from kvlink.planning.simulation.space import KVSpace
from kvlink.planning.simulation.worker import Worker
from kvlink.planning.trace import Arrival

if TYPE_CHECKING:
    import simpy

SHARED: Final = "shared"
PREFILL: Final = "prefill"
DECODE: Final = "decode"


class Fleet:
    """All workers of a scenario, and the requests among them.

    Args:
        env: the simulation.
        scenario: the fleet's rules.
        cost: of a worker's steps.
        room_tokens: KV room of a worker.
        block_tokens: of a prefix block.
    """

    def __init__(
        self, env: simpy.Environment, scenario: Scenario, cost: StepCost, room_tokens: int, block_tokens: int
    ) -> None:
        self._env = env
        self.scenario = scenario
        self._room = room_tokens
        self._router = Router(env, scenario, cost)
        self.workers = [
            Worker(
                env,
                name=f"w{index}",
                role=(PREFILL if index < scenario.prefill_workers else DECODE) if scenario.prefill_workers else SHARED,
                owner=self,
                cost=cost,
                space=KVSpace(room_tokens, block_tokens),
                token_budget=scenario.token_budget,
                max_running=scenario.max_running,
            )
            for index in range(scenario.workers)
        ]
        self._line = Line()
        self._standing: dict[str, Flight] = {}
        self._emptied: dict[Engine, simpy.Event] = {}
        pools = {role: len(self.pool(role)) for role in (SHARED, PREFILL, DECODE)}
        self.initial_pools = {role: count for role, count in pools.items() if count}
        self.peak_room: dict[str, float] = dict.fromkeys(self.initial_pools, 0.0)
        self.unfinished = 0
        self._role_since = dict.fromkeys(self.workers, 0.0)
        self._role_seconds: defaultdict[str, float] = defaultdict(float)

    def pool(self, role: str) -> list[Worker]:
        """Workers of a role."""
        return [worker for worker in self.workers if worker.role == role]

    @property
    def waiting(self) -> int:
        """Requests in line."""
        return len(self._line)

    def queue_seconds(self, worker: Worker) -> float:
        """See `Router.queue_seconds`."""
        return self._router.queue_seconds(worker)

    @property
    def explanations(self) -> list[str]:
        """Some routing choices, in words."""
        return self._router.explanations

    def change_role(self, worker: Worker, role: str) -> None:
        """Let a drained worker serve in another pool."""
        self._role_seconds[worker.role] += self._env.now - self._role_since[worker]
        self._role_since[worker] = self._env.now
        worker.role = role

    def role_seconds(self, role: str) -> float:
        """Worker-seconds that a pool has had so far."""
        now = self._env.now
        return self._role_seconds[role] + sum(now - self._role_since[worker] for worker in self.pool(role))

    # --- what happens to requests ---------------------------------------------------------------------------------

    def arrive(self, arrival: Arrival) -> Flight:
        """A request comes."""
        flight = Flight(arrival, prompt=arrival.prompt_tokens)
        self.unfinished += 1
        self._stand(flight)
        self.admit()
        return flight

    def cancel(self, flight: Flight) -> None:
        """Its user has left; whatever it holds comes back."""
        if flight.end is None:
            self._let_go(flight)
            self._finish(flight, End.CANCELLED)
            self.admit()

    def lose(self, worker: Worker) -> None:
        """A worker dies; whoever was there begins anew elsewhere, with what was generated as part of its prompt."""
        for flight in worker.die():
            flight.excluded = frozenset({worker.domain})
            self._restart(flight)
        self._note_empty(worker)
        self.admit()

    def drained(self, worker: Worker) -> simpy.Event:
        """Take a worker out of service; the event comes when its last request has left."""
        worker.state = PoolState.DRAINING
        event = self._emptied[worker] = self._env.event()
        self._note_empty(worker)
        return event

    def activate(self, worker: Worker) -> None:
        """Put a drained worker back."""
        worker.state = PoolState.ACTIVE
        self.admit()

    def _stand(self, flight: Flight) -> None:
        arrival = flight.arrival
        flight.stood_in_line_at = self._env.now
        self._standing[arrival.name] = flight
        self._line.join(arrival.name, tenant=arrival.tenant, priority=arrival.priority)

    def _restart(self, flight: Flight) -> None:
        before = flight.prompt - flight.arrival.prompt_tokens
        self._let_go(flight)
        written = max(flight.generated - before - 1, 0)  # the KV of the last token was not needed yet
        flight.lost_tokens = flight.computed + written
        flight.tries += 1
        flight.prompt = flight.arrival.prompt_tokens + flight.generated
        flight.computed = 0
        flight.prefill_at = None
        self._stand(flight)

    def _let_go(self, flight: Flight) -> None:
        """Give back whatever it holds anywhere."""
        if self._line.leave(flight.arrival.name):
            del self._standing[flight.arrival.name]
        stays = {id(stay): stay for stay in (flight.first, flight.second) if stay is not None}
        for stay in stays.values():
            self._release(flight, stay)
        flight.first = flight.second = None

    def _release(self, flight: Flight, stay: Stay) -> None:
        worker = stay.worker
        worker.drop(flight)
        if flight in worker.flights:  # else the worker died, and its memory with it
            del worker.flights[flight]
            worker.space.unpin(stay.pinned)
            worker.space.hold(-stay.tokens)
            worker.promised -= stay.promised
            worker.tenants[flight.arrival.tenant] -= stay.tokens + stay.promised
            worker.nudge()
        self._note_empty(worker)

    def _note_empty(self, worker: Engine) -> None:
        if worker.state is PoolState.DRAINING and not worker.flights:
            worker.state = PoolState.DRAINED
            self._emptied.pop(worker).succeed()

    def _finish(self, flight: Flight, end: End) -> None:
        self.unfinished -= 1
        flight.end = end
        flight.ended_at = self._env.now

    # --- admission and routing ------------------------------------------------------------------------------------

    def admit(self) -> None:
        """Place whoever stands first, for as long as there is room."""
        while (key := self._line.head(self._share)) is not None:
            flight = self._standing[key]
            if self._router.need(flight) > self._room:
                self._let_go(flight)
                self._finish(flight, End.TOO_LARGE)
            elif not self._place(flight):
                return

    def _share(self, tenant: str | None) -> float:
        return sum(worker.tenants[tenant] for worker in self.workers) / (self._room * len(self.workers))

    def _place(self, flight: Flight) -> bool:
        """Choose and promise room for the request, both halves of it or neither."""
        if not self.scenario.prefill_workers:
            worker = self._router.shared(flight, self.workers)
            if worker is None:
                return False
            flight.first = flight.second = self._promise(flight, worker, self._router.need(flight))
        elif not self._place_pair(flight):
            return False
        self._line.leave(flight.arrival.name)
        del self._standing[flight.arrival.name]
        now = self._env.now
        flight.waited_seconds += now - flight.stood_in_line_at
        flight.admitted_at = now
        self._start(flight)
        return True

    def _place_pair(self, flight: Flight) -> bool:
        """A prefill and a decode worker of one revision, the newest that has both."""
        prefill, decode = self.pool(PREFILL), self.pool(DECODE)
        for revision in sorted({worker.revision for worker in self.workers}, reverse=True):
            first = self._router.prefill(flight, prefill, revision)
            second = None if first is None else self._router.decode(flight, decode, revision)
            if first is not None and second is not None:
                flight.first = self._promise(flight, first, flight.prompt)
                flight.second = self._promise(flight, second, self._router.need(flight))
                flight.second.pin_prefix(flight.arrival.blocks)
                flight.second.take()  # at once: it is where the KV will land
                return True
        return False

    def _start(self, flight: Flight) -> None:
        """Queue the prompt, once the adapter that it needs is loaded wherever it is not."""
        adapter = flight.arrival.adapter
        stays = [stay for stay in (flight.first, flight.second) if stay is not None]
        missing = [stay.worker for stay in stays if adapter is not None and adapter not in stay.worker.adapters]
        if not missing or adapter is None:
            stays[0].worker.prefill(flight)
            return
        for worker in missing:
            worker.adapters |= {adapter}
        tries = flight.tries

        def loaded(_: object) -> None:
            if flight.end is None and flight.tries == tries:
                stays[0].worker.prefill(flight)

        self._later(limits.ADAPTER_LOAD_SECONDS, loaded)

    def _promise(self, flight: Flight, worker: Worker, tokens: int) -> Stay:
        worker.flights[flight] = None
        worker.promised += tokens
        worker.tenants[flight.arrival.tenant] += tokens
        used = 1 - worker.unpromised / self._room
        self.peak_room[worker.role] = max(self.peak_room[worker.role], used)
        return Stay(worker, promised=tokens)

    # --- what workers tell ------------------------------------------------------------------------------------------

    def prefilled(self, flight: Flight) -> None:
        """The prompt is computed: decode goes on in place, or the KV moves."""
        assert flight.first is not None
        self._keep_blocks(flight, flight.first)
        if flight.second is flight.first:
            flight.generated += 1  # the last prompt token's step gives the next one
            self._note_first_token(flight)
            if flight.left:
                flight.first.worker.decode(flight)
            else:
                self.finished(flight)
        else:
            self._move(flight)

    def first_token(self, flight: Flight) -> None:
        """The decode worker has given its first one."""
        self._note_first_token(flight)

    def _note_first_token(self, flight: Flight) -> None:
        if flight.first_token_at is None:
            flight.first_token_at = self._env.now

    def finished(self, flight: Flight) -> None:
        """It has all its tokens."""
        self._let_go(flight)
        self._finish(flight, End.DONE)
        self.admit()

    def overran(self, flight: Flight) -> bool:
        """Give it more room; where there is none, the youngest of the batch gives its own back and begins anew."""
        stay = flight.second
        assert stay is not None
        more = min(self.scenario.growth_step, flight.left)
        while not stay.worker.space.hold(more):
            youngest = stay.worker.youngest()
            assert youngest is not None
            self._restart(youngest)
            if youngest is flight:
                self.admit()
                return False
        stay.tokens += more
        stay.worker.tenants[flight.arrival.tenant] += more
        return True

    def _keep_blocks(self, flight: Flight, stay: Stay) -> None:
        """The prefix blocks of the request are here now, for others to find."""
        blocks = flight.arrival.blocks
        stay.worker.space.pin(blocks[len(stay.pinned) :])
        stay.pinned = blocks

    def _move(self, flight: Flight) -> None:
        """Move the KV: one transfer at a time over each worker's link, in the order in which they are ready."""
        first, second = flight.first, flight.second
        assert first is not None
        assert second is not None
        now, transfer = self._env.now, self.scenario.transfer
        there = min(len(second.pinned) * second.worker.space.block_tokens, flight.prompt)
        size = (flight.prompt - there) * self._router.token_bytes
        start = max(now, first.worker.link_free_at, second.worker.link_free_at)
        seconds = transfer.seconds(size)
        first.worker.link_free_at = second.worker.link_free_at = start + size / transfer.bytes_per_second
        flight.link_wait_seconds += start - now
        flight.transfer_seconds += seconds
        flight.moved_bytes += size
        tries = flight.tries
        self._later(start + seconds - now, lambda _: self._installed(flight, tries))

    def _later(self, seconds: float, act: Callable[[object], None]) -> None:
        callbacks = self._env.timeout(seconds).callbacks
        assert callbacks is not None
        callbacks.append(act)

    def _installed(self, flight: Flight, tries: int) -> None:
        if flight.end is not None or flight.tries != tries:
            return  # cancelled or begun anew meanwhile
        first, second = flight.first, flight.second
        assert first is not None
        assert second is not None
        self._keep_blocks(flight, second)
        flight.first = None
        self._release(flight, first)
        flight.installed_at = self._env.now
        second.worker.decode(flight)
        self.admit()
