"""One simulated engine: chunked prefill and continuous decode in steps, under a cost model.

Steps with prompt tokens in them are simulated one by one. A stretch in which the same requests only decode is one jump,
in closed form, up to the next step at which something happens (a first token, an end, room that runs out); work that
arrives meanwhile cuts it at the end of the step under way. So the result is that of single steps, at a fraction of
the events.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Protocol

from kvlink.cluster import PoolState, prefill_chunks
from kvlink.planning.cost import StepCost, steps_within
from kvlink.planning.simulation.flight import Flight
from kvlink.planning.simulation.space import KVSpace

if TYPE_CHECKING:
    import simpy


class Owner(Protocol):
    """Whoever hears what happens in a worker."""

    def prefilled(self, flight: Flight) -> None:
        """The prompt is computed."""

    def first_token(self, flight: Flight) -> None:
        """The first step of its decode is done."""

    def finished(self, flight: Flight) -> None:
        """Its last token is out; it has left the batch."""

    def overran(self, flight: Flight) -> bool:
        """It has filled the room it was promised; whether it may go on (else it has left the batch)."""


class Worker:
    """An engine of one or more devices.

    Args:
        env: the simulation.
        name: unique; its failure domain, too.
        role: its pool.
        owner: hears of events.
        cost: of its steps.
        space: its KV room.
        token_budget: tokens of a step.
        max_running: requests of a step.
    """

    def __init__(  # noqa: PLR0913 - an engine has these parts, all keyword-only but the simulation
        self,
        env: simpy.Environment,
        *,
        name: str,
        role: str,
        owner: Owner,
        cost: StepCost,
        space: KVSpace,
        token_budget: int,
        max_running: int,
    ) -> None:
        self.name = self.domain = name
        self.role = role
        self.adapters: frozenset[str] = frozenset()
        self.space = space
        self.cost = cost
        self.state = PoolState.ACTIVE
        self.healthy = True
        self.revision = 1
        self.flights: dict[Flight, None] = {}
        self.pending: dict[Flight, None] = {}
        self.pending_tokens = 0
        self.promised = 0
        self.tenants: Counter[str | None] = Counter()
        """Tokens of room that each has or was promised."""
        self.busy_seconds: defaultdict[str, float] = defaultdict(float)
        """By role."""
        self.link_free_at = 0.0
        self._env = env
        self._owner = owner
        self._token_budget = token_budget
        self._max_running = max_running
        self._running: dict[Flight, int] = {}  # and the step after which each joined
        self._joining: dict[Flight, None] = {}
        self._step = 0
        self._context = 0
        self._milestones: list[tuple[int, int, Flight]] = []
        self._order = 0
        self._life = 0
        self._rest: simpy.Event | None = None
        self._jump: simpy.Process | None = None
        self._stretch: tuple[float, int, int, int] | None = None
        env.process(self._live(0))

    # --- what the fleet asks of it --------------------------------------------------------------------------------

    def prefill(self, flight: Flight) -> None:
        """Queue a prompt."""
        self.pending[flight] = None
        self.pending_tokens += flight.prompt - flight.computed
        self._wake()

    def decode(self, flight: Flight) -> None:
        """Take a request into the batch from the next step on; its KV is here."""
        self._joining[flight] = None
        self._wake()

    def drop(self, flight: Flight) -> None:
        """Let a request go, wherever it stands; a step under way still takes its time."""
        if flight in self.pending:
            del self.pending[flight]
            self.pending_tokens -= flight.prompt - flight.computed
        elif flight in self._joining:
            del self._joining[flight]
        elif flight in self._running:
            self._leave(flight)
            self._wake()

    @property
    def unpromised(self) -> int:
        """Tokens of room that nobody has or was promised; fewer than none where requests outgrew what they had."""
        return self.space.free - self.promised

    @property
    def resident(self) -> int:
        """Tokens of KV that decode reads in a step."""
        return self._context

    def nudge(self) -> None:
        """Room has come back: a prompt that could not begin may now."""
        if self.pending:
            self._wake()

    def youngest(self) -> Flight | None:
        """Who would lose least if one had to give its room back."""
        return next(reversed(self._running), None)

    def die(self) -> list[Flight]:
        """Lose the memory and everything under way; returns who was here."""
        if self._stretch is not None:
            start, batch, context, steps = self._stretch
            done = steps_within(self.cost, batch, context, steps, self._env.now - start) - 1
            self._step += done
            self._context += done * len(self._running)
        for flight in list(self._running):
            self._leave(flight)
        lost = list(self.flights)
        self._life += 1
        self.flights.clear()
        self.pending.clear()
        self.pending_tokens = self.promised = 0
        self.tenants.clear()
        self._joining.clear()
        self._milestones.clear()
        self.space.clear()
        self.healthy = False
        self._rest = self._jump = self._stretch = None
        return lost

    def revive(self) -> None:
        """Come back, empty."""
        self.healthy = True
        self._env.process(self._live(self._life))

    # --- steps ----------------------------------------------------------------------------------------------------

    def _live(self, life: int) -> Generator[simpy.Event, None, None]:
        while life == self._life:
            self._take_in()
            chunks = self._chunks()
            if chunks:
                yield from self._mixed_step(chunks, life)
            elif self._running:
                yield from self._decode_stretch(life)
            else:
                self._rest = self._env.event()
                yield self._rest

    def _chunks(self) -> list[tuple[Flight, int]]:
        """What the next step prefills, and how much of each; prompts that begin learn what is in the cache."""
        ready: list[Flight] = []

        def remaining() -> Iterator[int]:
            for flight in self.pending:
                if not self._begun(flight):
                    return
                ready.append(flight)
                yield flight.prompt - flight.computed

        chunks = prefill_chunks(
            remaining(), decoding=len(self._running), token_budget=self._token_budget, max_running=self._max_running
        )
        return list(zip(ready, chunks, strict=False))

    def _begun(self, flight: Flight) -> bool:
        """Whether its prefill has begun, or can now: with room for it, from behind the prefix that is in the cache."""
        stay = flight.first
        assert stay is not None
        if flight.prefill_at is not None:
            return True
        stay.pin_prefix(flight.arrival.blocks)
        if not stay.take():
            self.space.unpin(stay.pinned)
            stay.pinned = ()
            return False
        hit = min(len(stay.pinned) * self.space.block_tokens, flight.prompt - 1)  # the last one gives the logits
        flight.prefill_at = self._env.now
        flight.computed = hit
        self.pending_tokens -= hit
        flight.prefill_queue_seconds += self._env.now - (flight.admitted_at or 0.0)
        if flight.tries:
            flight.recomputed_tokens += min(flight.lost_tokens, flight.prompt - hit)
        else:
            flight.prefix_tokens = hit
        return True

    def _mixed_step(self, chunks: list[tuple[Flight, int]], life: int) -> Generator[simpy.Event, None, None]:
        new, attended, context = len(self._running), float(self._context), self._context
        for flight, tokens in chunks:
            new += tokens
            attended += tokens * (flight.computed + (tokens + 1) / 2)  # token i attends to the i before it and itself
            context += flight.computed + tokens
        seconds = self.cost.step_seconds(new, attended, context)
        yield self._env.timeout(seconds)
        if life != self._life:
            return
        self.busy_seconds[self.role] += seconds
        self._advance(1)
        for flight, tokens in chunks:
            if flight in self.pending:  # not dropped meanwhile
                flight.computed += tokens
                self.pending_tokens -= tokens
                if flight.computed == flight.prompt:
                    del self.pending[flight]
                    self._owner.prefilled(flight)

    def _decode_stretch(self, life: int) -> Generator[simpy.Event, None, None]:
        import simpy  # noqa: PLC0415 - an optional package, loaded where a simulation runs

        batch, context, start = len(self._running), self._context, self._env.now
        steps = self._milestones[0][0] - self._step
        self._stretch = (start, batch, context, steps)
        self._jump = self._env.active_process
        try:
            yield self._env.timeout(self.cost.decode_seconds(batch, context, steps))
        except simpy.Interrupt:
            steps = steps_within(self.cost, batch, context, steps, self._env.now - start)
            rest = start + self.cost.decode_seconds(batch, context, steps) - self._env.now
            yield self._env.timeout(max(rest, 0.0))
        if life != self._life:
            return
        self._jump = self._stretch = None
        self.busy_seconds[self.role] += self._env.now - start
        self._advance(steps)

    def _wake(self) -> None:
        """Tell the engine that there is other work: it takes it up at the end of the step under way."""
        if self._rest is not None:
            rest, self._rest = self._rest, None
            rest.succeed()
        elif self._jump is not None:
            jump, self._jump = self._jump, None
            jump.interrupt()

    # --- the batch ------------------------------------------------------------------------------------------------

    def _take_in(self) -> None:
        for flight in self._joining:
            self._running[flight] = self._step
            self._context += flight.prompt
            self._plan(flight)
        self._joining.clear()
        while self._milestones and self._milestones[0][2] not in self._running:
            heapq.heappop(self._milestones)  # dropped: no reason to stop there

    def _advance(self, steps: int) -> None:
        """The batch has made ``steps``; tell of whoever has reached something."""
        self._step += steps
        self._context += steps * len(self._running)
        while self._milestones and self._milestones[0][0] <= self._step:
            _, _, flight = heapq.heappop(self._milestones)
            if flight in self._running:
                self._reached(flight)

    def _reached(self, flight: Flight) -> None:
        if flight.first_token_at is None:
            self._owner.first_token(flight)
        decoded = self._step - self._running[flight]
        if decoded >= flight.left:
            self._leave(flight)
            self._owner.finished(flight)
        elif flight.prompt + decoded < _room(flight) or self._owner.overran(flight):
            self._plan(flight)

    def _plan(self, flight: Flight) -> None:
        """Stop at the next step that matters to ``flight``."""
        joined = self._running[flight]
        step = joined + min(flight.left, max(_room(flight) - flight.prompt, self._step - joined + 1))
        if flight.first_token_at is None:
            step = joined + 1
        self._order += 1
        heapq.heappush(self._milestones, (step, self._order, flight))

    def _leave(self, flight: Flight) -> None:
        decoded = self._step - self._running.pop(flight)
        self._context -= flight.prompt + decoded
        flight.generated += decoded


def _room(flight: Flight) -> int:
    assert flight.second is not None
    return flight.second.tokens
