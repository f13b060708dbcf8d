"""Room that KVLink gives out: blocks that an engine lent, to requests that admission lets in.

For a gateway, or an engine that leaves its target blocks to KVLink. An engine with an allocator of its own lends
nothing and passes its blocks to the verbs; those are never queued here (H4).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvlink import limits
from kvlink.cluster import Admission, Admitted, Busy, Demand, TooLarge, Verdict
from kvlink.errors import (
    BusyError,
    CancelledError,
    ClosedError,
    ConfigError,
    ConflictError,
    KVLinkError,
    LayoutError,
    TooLargeError,
)
from kvlink.layout import CacheSpec, Group, IndexedBy
from kvlink.link.part import Part, State

if TYPE_CHECKING:
    from kvlink.descriptor import BlockList, Facts
    from kvlink.observe import Counters


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomStats:
    """Capacity of what was lent, in blocks.

    Attributes:
        lent: all, one number a group; groups that share memory count each other's.
        free: what no request has, likewise.
        waiting: requests in the queue.
    """

    lent: tuple[int, ...]
    free: tuple[int, ...]
    waiting: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """Room for one request: pass ``blocks`` to `kvlink.Link.fetch` or `kvlink.Link.expect` under the same key.

    Attributes:
        key: the request's.
        blocks: this rank's block ids, one list a group, growth included.
        tokens: how many there is room for, growth included.
        room: capacity as it was left.
    """

    key: str
    blocks: tuple[BlockList, ...]
    tokens: int
    room: RoomStats


@dataclass(slots=True, eq=False)
class _Held:
    blocks: tuple[BlockList, ...]
    timer: asyncio.TimerHandle | None = None
    part: Part | None = None


class RoomKeeper:
    """Lent blocks and who has them. `kvlink.link.driver` only.

    Args:
        spec: this rank's cache.
        classes: for each group, the first that shares its memory: groups of one class take from one pool.
        counters: of the link.
    """

    def __init__(self, spec: CacheSpec, classes: Sequence[int], counters: Counters) -> None:
        self._spec = spec
        self._pools = sorted(set(classes))
        self._pool_of = [self._pools.index(first) for first in classes]
        self._counters = counters
        self._loop = asyncio.get_running_loop()
        self._admission = Admission([0] * len(self._pools))
        self._lent: list[set[int]] = [set() for _ in self._pools]
        self._free: list[list[int]] = [[] for _ in self._pools]
        self._held: dict[str, _Held] = {}
        self._waiting: dict[str, tuple[tuple[int, ...], asyncio.Future[tuple[BlockList, ...]]]] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def stats(self) -> RoomStats:
        """Capacity now."""
        room = self._admission.room
        return RoomStats(
            lent=tuple(room.total[pool] for pool in self._pool_of),
            free=tuple(room.free[pool] for pool in self._pool_of),
            waiting=room.waiting,
        )

    def lend(self, blocks: Sequence[Sequence[int]]) -> None:
        """Add blocks; see `kvlink.Link.lend`."""
        if len(blocks) != len(self._spec.groups):
            raise LayoutError(
                f"{len(blocks)} block lists are lent; give one for each of {len(self._spec.groups)} groups"
            )
        added: list[list[int]] = [[] for _ in self._pools]
        for group, ids, pool in zip(self._spec.groups, blocks, self._pool_of, strict=True):
            for block in map(int, ids):
                if not 0 <= block < group.num_blocks:
                    raise LayoutError(
                        f"block {block} of groups.{group.name} is lent; it has 0 to {group.num_blocks - 1}"
                    )
                added[pool].append(block)
        for new, lent in zip(added, self._lent, strict=True):
            if len({*new, *lent}) != len(new) + len(lent):
                raise LayoutError(
                    "a block is lent twice; lend each once, under one of the groups that share its memory"
                )
        for pool, new in enumerate(added):
            self._lent[pool].update(new)
            self._free[pool] += new
        self._take(self._admission.grow([len(new) for new in added]))

    async def reserve(  # noqa: PLR0913 - what a request can say of itself
        self,
        key: str,
        *,
        tokens: int,
        growth_tokens: int,
        facts: Facts,
        deadline_seconds: float,
        wait_seconds: float,
        ttl_seconds: float,
    ) -> Reservation:
        """Room for a request; see `kvlink.Link.reserve`."""
        if key in self._held or key in self._waiting:
            raise ConflictError("this key has room, or waits for it, already; release it first", request_id=key)
        counts = self._counts(tokens + growth_tokens)
        now = self._loop.time()
        admitted: asyncio.Future[tuple[BlockList, ...]] = self._loop.create_future()
        self._waiting[key] = (counts, admitted)
        demand = Demand(
            key=key,
            blocks=self._by_pool(counts),
            tenant=facts.tenant,
            priority=facts.priority,
            deadline=now + deadline_seconds,
            waits_until=now + wait_seconds,
        )
        self._take(self._admission.ask(demand, now))
        try:
            blocks = await admitted
        except asyncio.CancelledError:
            self._waiting.pop(key, None)
            self.give_back(key)
            raise
        held = self._held.get(key)
        if held is None:
            raise ClosedError("its room was given back before the caller got it", request_id=key)
        held.timer = self._loop.call_later(ttl_seconds, self._run_out, key)
        return Reservation(key=key, blocks=blocks, tokens=tokens + growth_tokens, room=self.stats)

    def check(self, key: str, into: Sequence[Sequence[int]]) -> None:
        """Refuse lent blocks that are not this key's.

        Raises:
            ConflictError: a block was lent, and is free or another request's.
        """
        if not any(self._lent):
            return
        held = self._held.get(key)
        own: list[set[int]] = [set() for _ in self._pools]
        for reserved, pool in zip(() if held is None else held.blocks, self._pool_of, strict=False):
            own[pool].update(reserved)
        for index, (ids, pool) in enumerate(zip(into, self._pool_of, strict=False)):
            foreign = self._lent[pool].intersection(ids) - own[pool]
            if foreign:
                raise ConflictError(
                    f"block {min(foreign)} of groups.{self._spec.groups[index].name} was lent to KVLink and is not "
                    "reserved for this request; pass the blocks of its own reservation",
                    request_id=key,
                )

    def used_by(self, part: Part) -> None:
        """A verb uses the reservation of its key: it lasts until that fails, or is released."""
        held = self._held.get(part.key)
        if held is None:
            return
        if held.timer is not None:
            held.timer.cancel()
        held.part = part
        part.when_ended(self._part_ended)

    def give_back(self, key: str) -> None:
        """A request's room comes back, or it gives up waiting. Idempotent; only after its cut-off."""
        if key in self._waiting:
            self._fail(key, CancelledError("released while it waited for room", request_id=key))
        held = self._held.pop(key, None)
        if held is not None:
            if held.timer is not None:
                held.timer.cancel()
            for ids, pool in zip(held.blocks, self._pool_of, strict=True):
                self._free[pool] += ids
        self._take(self._admission.give_back(key, self._loop.time()))

    def close(self, why: str) -> None:
        """Forget everything, lent blocks included; who waits is told. Only once no part is live."""
        self._admission = Admission([0] * len(self._pools))
        for key in list(self._waiting):
            self._fail(key, ClosedError(why, request_id=key))
        for held in self._held.values():
            if held.timer is not None:
                held.timer.cancel()
        self._held.clear()
        self._lent = [set() for _ in self._pools]
        self._free = [[] for _ in self._pools]
        self._tick_later()

    # --- inside -------------------------------------------------------------------------------------------------------

    def _counts(self, tokens: int) -> tuple[int, ...]:
        """Blocks that ``tokens`` take of each group."""
        if not 0 < tokens <= limits.MAX_TOKENS_PER_REQUEST:
            raise ConfigError(f"room for {tokens} tokens is asked for; ask for 1 to {limits.MAX_TOKENS_PER_REQUEST}")
        return tuple(_blocks_for(group, tokens) for group in self._spec.groups)

    def _by_pool(self, counts: Sequence[int]) -> tuple[int, ...]:
        wanted = [0] * len(self._pools)
        for count, pool in zip(counts, self._pool_of, strict=True):
            wanted[pool] += count
        return tuple(wanted)

    def _take(self, verdicts: Sequence[Verdict]) -> None:
        for verdict in verdicts:
            match verdict:
                case Admitted(key=key):
                    self._admit(key)
                case Busy(key=key, why=why, retry_after_seconds=hint):
                    self._counters.demands_busy += 1
                    busy = BusyError(f"{why}: {self._words()}", retry_after_seconds=hint, request_id=key)
                    busy.free_blocks = self.stats.free
                    self._fail(key, busy)
                case TooLarge(key=key, pool=pool):
                    self._counters.demands_too_large += 1
                    counts, _ = self._waiting[key]
                    name = self._spec.groups[self._pool_of.index(pool)].name
                    text = (
                        f"it needs {self._by_pool(counts)[pool]} blocks of groups.{name} at once, growth included, and "
                        f"{len(self._lent[pool])} are lent in all"
                    )
                    self._fail(key, TooLargeError(text, request_id=key))
                case _:
                    self._counters.demands_queued += 1
        self._tick_later()

    def _admit(self, key: str) -> None:
        counts, admitted = self._waiting.pop(key)
        blocks = []
        for count, pool in zip(counts, self._pool_of, strict=True):
            free = self._free[pool]
            blocks.append(tuple(free[len(free) - count :]))
            del free[len(free) - count :]
        self._counters.demands_admitted += 1
        self._held[key] = _Held(tuple(blocks))
        admitted.set_result(tuple(blocks))

    def _fail(self, key: str, error: KVLinkError) -> None:
        _, admitted = self._waiting.pop(key)
        if not admitted.done():
            admitted.set_exception(error)

    def _words(self) -> str:
        stats = self.stats
        groups = zip(self._spec.groups, stats.free, stats.lent, strict=True)
        free = ", ".join(f"{count} of {lent} blocks of groups.{group.name}" for group, count, lent in groups)
        return f"free are {free}; {stats.waiting} requests wait"

    def _part_ended(self, part: Part) -> None:
        held = self._held.get(part.key)
        if held is not None and held.part is part and part.state is not State.DONE:
            self.give_back(part.key)

    def _run_out(self, key: str) -> None:
        """Nobody used the reservation in its time."""
        self._counters.reservations_expired += 1
        self.give_back(key)

    def _tick_later(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        at = self._admission.next_timer()
        self._timer = None if at is None else self._loop.call_at(at, self._tick)

    def _tick(self) -> None:
        self._take(self._admission.expire(self._loop.time()))


def _blocks_for(group: Group, tokens: int) -> int:
    """A group that is not indexed by tokens holds one entry a request."""
    return 1 if group.indexed_by is IndexedBy.ENTRY else -(-tokens // group.block_size)
