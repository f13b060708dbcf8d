"""Block accounting of one rank: what is out, to whom, and that it comes back exactly once.

Pure bookkeeping over block ids, by request key; it touches no memory and waits for nothing. `kvlink.link` writes here
*before* the first byte moves, so that whatever fails afterwards, it is known what to give back.

Source side: a **hold** keeps blocks alive for whoever may ask; a **lease** keeps them alive for one attempt. The blocks
come back when the hold has ended and no lease is left.

Target side, see ``_NEXT``::

    reserved ──land──> landed ──install──> installed ──release──> back
        └──────drain──────┴──> draining ──drained──> back

*Draining* blocks await their cut-off: nothing but `BlockLedger.drained` frees them, and no time does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from kvlink.errors import ConflictError, KVLinkError, LayoutError, UnknownRequestError

Blocks = tuple[tuple[int, ...], ...]
"""Block ids, one list a group."""


class LedgerError(KVLinkError, RuntimeError):
    """KVLink's own accounting was about to go wrong (blocks returned twice, a step left out): a bug, please report."""

    code = "ledger"


class ReservationState(StrEnum):
    """Of a request's target blocks."""

    RESERVED = "reserved"
    LANDED = "landed"
    INSTALLED = "installed"
    DRAINING = "draining"


_NEXT: Final[dict[tuple[ReservationState, str], ReservationState | None]] = {
    (ReservationState.RESERVED, "land"): ReservationState.LANDED,
    (ReservationState.RESERVED, "drain"): ReservationState.DRAINING,
    (ReservationState.LANDED, "install"): ReservationState.INSTALLED,
    (ReservationState.LANDED, "drain"): ReservationState.DRAINING,
    (ReservationState.INSTALLED, "release"): None,
    (ReservationState.DRAINING, "drained"): None,
}
"""``None``: the blocks are back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryStats:
    """Blocks out now. A source block that several requests share counts for each of them.

    Attributes:
        held: source blocks under a hold that nobody reads.
        leased: source blocks that at least one attempt may read.
        reserved: target blocks that bytes may be landing in.
        landed: target blocks filled and verified, invisible.
        installed: target blocks handed to the engine and not yet released.
        draining: target blocks that await their cut-off.
    """

    held: int
    leased: int
    reserved: int
    landed: int
    draining: int
    installed: int


@dataclass(slots=True)
class _Hold:
    blocks: Blocks
    leases: int = 0
    ended: bool = False


@dataclass(slots=True)
class _Reservation:
    blocks: Blocks
    state: ReservationState = field(default=ReservationState.RESERVED)


class BlockLedger:
    """Blocks of one rank's caches that KVLink may touch. Not thread-safe: one loop owns it.

    A call that raises has changed nothing.

    Args:
        classes: for each group, the first group whose blocks are the same memory (`kvlink.layout.alias_classes`);
            groups that are not listed share with none.
    """

    def __init__(self, classes: Sequence[int] = ()) -> None:
        self._classes = tuple(classes)
        self._holds: dict[str, _Hold] = {}
        self._leases: dict[Hashable, str] = {}
        self._reservations: dict[str, _Reservation] = {}
        self._owners: dict[tuple[int, int], str] = {}
        self._leased_blocks = 0

    # --- source -------------------------------------------------------------------------------------------------------

    def hold(self, key: str, blocks: Sequence[Sequence[int]]) -> None:
        """Keep source blocks for a request. Other requests may hold the same blocks (a shared prefix).

        Raises:
            ConflictError: the key is held, or still leased, already.
        """
        if key in self._holds:
            raise ConflictError("this key is held already; end it first, or give the request a new key", request_id=key)
        self._holds[key] = _Hold(_frozen(blocks))

    def change_hold(self, key: str, blocks: Sequence[Sequence[int]]) -> None:
        """Hold these blocks for a request from now on: its KV is still being computed, and more blocks came with it.

        Leases that were given go over to them.

        Raises:
            UnknownRequestError: nothing is held under this key, or its hold has ended.
        """
        hold = self._holds.get(key)
        if hold is None or hold.ended:
            raise UnknownRequestError("no blocks are held under this key (any more)", request_id=key)
        before, hold.blocks = _size(hold.blocks), _frozen(blocks)
        if hold.leases:
            self._leased_blocks += _size(hold.blocks) - before

    def lease(self, attempt: Hashable, key: str) -> Blocks:
        """Let an attempt read a hold's blocks.

        Args:
            attempt: names the attempt among all peers, such as ``(peer, attempt)``.
            key: whose hold.

        Returns:
            The blocks.

        Raises:
            UnknownRequestError: nothing is held under this key, or its hold has ended.
            LedgerError: the attempt has a lease.
        """
        hold = self._holds.get(key)
        if hold is None or hold.ended:
            raise UnknownRequestError("no blocks are held under this key (any more)", request_id=key)
        if attempt in self._leases:
            raise LedgerError(f"attempt {attempt} has a lease already", request_id=key)
        self._leases[attempt] = key
        hold.leases += 1
        if hold.leases == 1:
            self._leased_blocks += _size(hold.blocks)
        return hold.blocks

    def end_lease(self, attempt: Hashable) -> Blocks | None:
        """End an attempt's lease, whatever became of it.

        Returns:
            The blocks, if this brought them back to the engine; ``None`` if something still keeps them.

        Raises:
            LedgerError: the attempt has no lease (any more).
        """
        key = self._leases.pop(attempt, None)
        if key is None:
            raise LedgerError(f"attempt {attempt} has no lease to end")
        hold = self._holds[key]
        hold.leases -= 1
        if hold.leases == 0:
            self._leased_blocks -= _size(hold.blocks)
        return self._give_back(key)

    def end_hold(self, key: str) -> Blocks | None:
        """End a hold: no new lease is given, those given run on.

        Returns:
            The blocks, if this brought them back to the engine; ``None`` if leases still keep them.

        Raises:
            LedgerError: nothing is held under this key (any more).
        """
        hold = self._holds.get(key)
        if hold is None or hold.ended:
            raise LedgerError("there is no hold to end", request_id=key)
        hold.ended = True
        return self._give_back(key)

    def _give_back(self, key: str) -> Blocks | None:
        hold = self._holds[key]
        if hold.leases or not hold.ended:
            return None
        del self._holds[key]
        return hold.blocks

    @property
    def leased_blocks(self) -> int:
        """Source blocks that at least one attempt may read, as `stats` counts them; asked at every request."""
        return self._leased_blocks

    # --- target -------------------------------------------------------------------------------------------------------

    def reserve(self, key: str, blocks: Sequence[Sequence[int]]) -> None:
        """Record that a request owns these target blocks, before its first byte moves.

        Args:
            key: the request.
            blocks: the blocks that will be *written* (`kvlink.layout.touched_blocks`), one list a group; null blocks
                and a prefix that is there already are not among them.

        Raises:
            ConflictError: the key has a reservation, or a block belongs to another live request.
            LayoutError: a block is listed twice, be it by two groups that share memory.
        """
        if key in self._reservations:
            state = self._reservations[key].state
            raise ConflictError(f"this key has blocks already ({state}); release them first", request_id=key)
        frozen = _frozen(blocks)
        wanted = self._slots_of(frozen)
        for group, block in wanted:
            owner = self._owners.get((group, block))
            if owner is not None:
                raise ConflictError(
                    f"block {block} of group {group} belongs to request {owner} "
                    f"({self._reservations[owner].state}); release that before reusing its blocks",
                    request_id=key,
                )
        if len(set(wanted)) != len(wanted):
            group, block = next(item for item, count in Counter(wanted).items() if count > 1)
            raise LayoutError(
                f"block {block} of group {group} is listed twice for request {key}, by it or by a group that shares "
                "its memory; pass each block once"
            )
        self._reservations[key] = _Reservation(frozen)
        self._owners.update(dict.fromkeys(wanted, key))

    def land(self, key: str) -> None:
        """All bytes are in the request's blocks and verified. Raises LedgerError unless they are *reserved*."""
        self._step(key, "land")

    def install(self, key: str) -> None:
        """The blocks were handed to the engine. Raises LedgerError unless they are *landed*."""
        self._step(key, "install")

    def release(self, key: str) -> Blocks:
        """The engine is done with installed blocks; returns them. Raises LedgerError unless they are *installed*."""
        return self._step(key, "release")

    def drain(self, key: str) -> None:
        """The request failed: its blocks wait for the cut-off. Raises LedgerError unless *reserved* or *landed*."""
        self._step(key, "drain")

    def drained(self, key: str) -> Blocks:
        """The cut-off of every leg is complete; returns the blocks. Raises LedgerError unless they are *draining*."""
        return self._step(key, "drained")

    def blocks_of(self, key: str) -> Blocks | None:
        """A request's target blocks; ``None`` if it has none (any more)."""
        reservation = self._reservations.get(key)
        return None if reservation is None else reservation.blocks

    def state_of(self, key: str) -> ReservationState | None:
        """Of a request's target blocks; ``None`` if it has none (any more)."""
        reservation = self._reservations.get(key)
        return None if reservation is None else reservation.state

    def installed(self) -> tuple[str, ...]:
        """Keys of the requests whose target blocks are *installed*."""
        return tuple(
            key for key, held in self._reservations.items() if held.state is ReservationState.INSTALLED
        )  # fmt: skip

    def _step(self, key: str, event: str) -> Blocks:
        reservation = self._reservations.get(key)
        if reservation is None:
            raise LedgerError(f"{event}: no target blocks are out under this key (any more)", request_id=key)
        if (reservation.state, event) not in _NEXT:
            raise LedgerError(f"{event}: the blocks are {reservation.state}", request_id=key)
        following = _NEXT[reservation.state, event]
        if following is not None:
            reservation.state = following
            return reservation.blocks
        del self._reservations[key]
        for owned in self._slots_of(reservation.blocks):
            del self._owners[owned]
        return reservation.blocks

    def _slots_of(self, blocks: Blocks) -> list[tuple[int, int]]:
        """What the blocks are owned under: the first group of those that share their memory, and the id."""
        classes = (*self._classes, *range(len(self._classes), len(blocks)))
        return [(classes[group], block) for group, ids in enumerate(blocks) for block in ids]

    # --- both ---------------------------------------------------------------------------------------------------------

    def restart(self, classes: Sequence[int]) -> None:
        """Go on with another cache. Raises LedgerError while any block is out."""
        if self._holds or self._leases or self._reservations:
            raise LedgerError("blocks are out; a cache is only changed once all are back")
        self._classes = tuple(classes)

    def stats(self) -> MemoryStats:
        """What is out now, in blocks. All zero once every request has ended and been released."""
        counts: Counter[str] = Counter()
        for hold in self._holds.values():
            counts["leased" if hold.leases else "held"] += _size(hold.blocks)
        for reservation in self._reservations.values():
            counts[reservation.state.value] += _size(reservation.blocks)
        return MemoryStats(
            held=counts["held"],
            leased=counts["leased"],
            reserved=counts["reserved"],
            landed=counts["landed"],
            draining=counts["draining"],
            installed=counts["installed"],
        )


def _frozen(blocks: Sequence[Sequence[int]]) -> Blocks:
    return tuple(tuple(int(block) for block in ids) for ids in blocks)


def _size(blocks: Blocks) -> int:
    return sum(map(len, blocks))
