"""Admission: who gets room in a target's cache now, who waits for it, and who is refused.

Room is counted in blocks of one or more pools. A demand gets all that it asks for, the growth that decode is expected
to need included, or nothing (H1). What can never fit is refused at once (H2); what does not fit now waits in a bounded
queue, or hears *busy* with a hint. Every verdict carries the room as it is then.

The queue's head is the first by: tenants below their fair share before those at or above it (H3), then priority, then
deadline, then arrival. A tenant's share is the largest part of a pool that it holds; a fair one is an equal part for
each tenant that holds or waits. Nobody overtakes a head that does not fit yet, so a large demand is not starved by
small ones; what a tenant takes beyond its share is only what nobody else waits for.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from kvlink import limits
from kvlink.cluster.order import precedence

Counts = tuple[int, ...]
"""Blocks, one number a pool."""

_REMEMBERED_RETURNS: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Capacity at one moment, in blocks, one number a pool.

    Attributes:
        total: all that there is.
        free: what nobody has.
        waiting: demands in the queue.
    """

    total: Counts
    free: Counts
    waiting: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """One request for room.

    Attributes:
        key: names it; no two live ones are alike.
        blocks: what it needs of each pool, growth included.
        tenant: whose it is; ``None`` is a tenant, too.
        priority: higher goes first.
        deadline: when it is of no use any more, on the caller's clock.
        waits_until: how long it stays in the queue, on the same clock; now or before: not at all.
    """

    key: str
    blocks: Counts
    tenant: str | None = None
    priority: int = 0
    deadline: float = float("inf")
    waits_until: float = 0.0


@dataclass(frozen=True, slots=True)
class Admitted:
    """The demand has its blocks."""

    key: str
    room: Room


@dataclass(frozen=True, slots=True)
class Waiting:
    """The demand is in the queue; another verdict follows."""

    key: str
    room: Room


@dataclass(frozen=True, slots=True)
class Busy:
    """No room now, and the demand is gone. ``retry_after_seconds`` is a guess from how blocks came back so far."""

    key: str
    room: Room
    why: str
    retry_after_seconds: float


@dataclass(frozen=True, slots=True)
class TooLarge:
    """The demand can never fit: it needs more of ``pool`` than there is."""

    key: str
    room: Room
    pool: int


Verdict = Admitted | Waiting | Busy | TooLarge


@dataclass(slots=True)
class _Queued:
    demand: Demand
    arrival: int


@dataclass(slots=True)
class _Tenant:
    held: list[int]
    demands: int = field(default=0)
    """That hold or wait."""


class Admission:
    """Room of one target, and who has it. Not thread-safe: one loop owns it.

    Args:
        total: blocks of each pool.
        max_waiting: demands in the queue at most.
    """

    def __init__(self, total: Sequence[int], max_waiting: int = limits.MAX_WAITING_DEMANDS) -> None:
        self._total = list(total)
        self._free = list(total)
        self._max_waiting = max_waiting
        self._held: dict[str, Demand] = {}
        self._queue: dict[str, _Queued] = {}
        self._tenants: dict[str | None, _Tenant] = {}
        self._arrivals = 0
        self._returns: deque[tuple[float, Counts]] = deque(maxlen=_REMEMBERED_RETURNS)

    def __contains__(self, key: str) -> bool:
        return key in self._held or key in self._queue

    @property
    def room(self) -> Room:
        """Capacity now."""
        return Room(total=tuple(self._total), free=tuple(self._free), waiting=len(self._queue))

    def held_by(self, tenant: str | None) -> Counts:
        """Blocks that a tenant holds."""
        known = self._tenants.get(tenant)
        return (0,) * len(self._total) if known is None else tuple(known.held)

    # --- events -------------------------------------------------------------------------------------------------------

    def ask(self, demand: Demand, now: float) -> tuple[Verdict, ...]:
        """Ask for room.

        Returns:
            The demand's own verdict, and those of others that it changes: whoever leaves a full queue for it.
        """
        assert demand.key not in self, "the caller refuses a second demand under one key"
        assert len(demand.blocks) == len(self._total)
        for pool, (wanted, total) in enumerate(zip(demand.blocks, self._total, strict=True)):
            if wanted > total:
                return (TooLarge(demand.key, self.room, pool),)
        self._arrivals += 1
        self._queue[demand.key] = _Queued(demand, self._arrivals)
        self._tenants.setdefault(demand.tenant, _Tenant([0] * len(self._total))).demands += 1
        verdicts: list[Verdict] = [*self._admit()]
        if demand.key in self._queue and demand.waits_until <= now:
            verdicts.append(self._turn_away(demand.key, "no room now", now))
        if len(self._queue) > self._max_waiting:
            why = f"the queue is full: {self._max_waiting} demands wait"
            verdicts += [self._turn_away(self._victim(demand), why, now), *self._admit()]
        if demand.key in self._queue:
            verdicts.append(Waiting(demand.key, self.room))
        return tuple(verdicts)

    def give_back(self, key: str, now: float) -> tuple[Verdict, ...]:
        """A holder is done with its blocks, or one that waits gives up. Unknown keys change nothing.

        Returns:
            Whoever is admitted now.
        """
        demand = self._held.pop(key, None)
        if demand is not None:
            self._returns.append((now, demand.blocks))
            self._move(demand, -1)
        elif (queued := self._queue.pop(key, None)) is not None:
            demand = queued.demand
        else:
            return ()
        self._leave(demand)
        return tuple(self._admit())

    def grow(self, blocks: Sequence[int]) -> tuple[Verdict, ...]:
        """There is more room, or (negative) less of what is free; returns whoever is admitted now."""
        for pool, more in enumerate(blocks):
            assert self._free[pool] + more >= 0, "only free blocks are taken out"
            self._total[pool] += more
            self._free[pool] += more
        return tuple(self._admit())

    def expire(self, now: float) -> tuple[Verdict, ...]:
        """Turn away whoever has waited long enough, and let in whom that lets in. On its own tick (B6)."""
        late = [key for key, queued in self._queue.items() if _ends_at(queued.demand) <= now]
        turned_away = [self._turn_away(key, "no room in the time it waited", now) for key in late]
        return (*turned_away, *self._admit())

    def next_timer(self) -> float | None:
        """When `expire` is due."""
        return min((_ends_at(queued.demand) for queued in self._queue.values()), default=None)

    # --- decisions -------------------------------------------------------------------------------------------------

    def _admit(self) -> list[Admitted]:
        """Give the head its room for as long as it fits. Shares move with each, so the head is found anew."""
        admitted = []
        while self._queue:
            head = min(self._queue.values(), key=self._order).demand
            if any(wanted > free for wanted, free in zip(head.blocks, self._free, strict=True)):
                break
            del self._queue[head.key]
            self._held[head.key] = head
            self._move(head, 1)
            admitted.append(Admitted(head.key, self.room))
        return admitted

    def _order(self, queued: _Queued) -> tuple[bool, int, float, int]:
        demand = queued.demand
        held = self._tenants[demand.tenant].held
        share = max((part / total for part, total in zip(held, self._total, strict=True) if total), default=0.0)
        return precedence(
            share=share, tenants=len(self._tenants), priority=demand.priority, deadline=demand.deadline,
            arrival=queued.arrival,
        )  # fmt: skip

    def _victim(self, newcomer: Demand) -> str:
        """Who leaves a queue too long: the last of the tenant that fills it, else of the newcomer's own (H3)."""
        waiting = Counter(queued.demand.tenant for queued in self._queue.values())
        tenant, most = waiting.most_common(1)[0]
        if waiting[newcomer.tenant] >= most:  # the newcomer is counted: taking from others would only turn the tables
            tenant = newcomer.tenant
        return max((q for q in self._queue.values() if q.demand.tenant == tenant), key=self._order).demand.key

    def _turn_away(self, key: str, why: str, now: float) -> Busy:
        demand = self._queue.pop(key).demand
        self._leave(demand)
        return Busy(key, self.room, why, self._hint(demand, now))

    def _hint(self, demand: Demand, now: float) -> float:
        """When as much may have come back as is missing for this demand and all that wait, at the rate seen so far."""
        if not self._returns:
            return limits.ROOM_HINT_SECONDS
        seconds = max(now - self._returns[0][0], limits.BUSY_HINT_SECONDS)
        hint = limits.BUSY_HINT_SECONDS
        for pool, free in enumerate(self._free):
            wanted = demand.blocks[pool] + sum(queued.demand.blocks[pool] for queued in self._queue.values())
            if wanted > free:
                came_back = sum(blocks[pool] for _, blocks in self._returns)
                hint = max(hint, (wanted - free) * seconds / came_back if came_back else limits.MAX_ROOM_HINT_SECONDS)
        return min(hint, limits.MAX_ROOM_HINT_SECONDS)

    def _move(self, demand: Demand, sign: int) -> None:
        held = self._tenants[demand.tenant].held
        for pool, blocks in enumerate(demand.blocks):
            self._free[pool] -= sign * blocks
            held[pool] += sign * blocks

    def _leave(self, demand: Demand) -> None:
        tenant = self._tenants[demand.tenant]
        tenant.demands -= 1
        if not tenant.demands:
            del self._tenants[demand.tenant]


def _ends_at(demand: Demand) -> float:
    return min(demand.waits_until, demand.deadline)
