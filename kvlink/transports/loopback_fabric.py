"""What the ends of a loopback share; see `kvlink.transports.loopback`."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from kvlink.limits import CUT_OFF_GRACE_SECONDS, PEER_LOST_SECONDS
from kvlink.transports.faults import Fault, FaultScript
from kvlink.transports.loopback_state import Regions, SourceLease


class End(Protocol):
    """What one end lets the fabric and the other ends do to it. Not for drivers."""

    @property
    def name(self) -> str:
        """What faults call the end by."""

    @property
    def stopped_at(self) -> float | None:
        """When it stopped or died, or ``None`` while it runs."""

    def address(self) -> bytes:
        """Its name in the fabric."""

    def regions(self) -> Regions:
        """What it has registered, for an end that reads it."""

    def lease_for(self, reader: End, attempt: int) -> SourceLease | None:
        """What ``reader`` may read of it, or ``None``."""

    def renews_until(self, source: End, attempt: int) -> float:
        """Until when it renews its lease of ``attempt`` at ``source``, as things are: -inf never, inf on and on."""

    def settle_leases(self) -> None:
        """Judge every lease up to now; called before anything that starts or stops renewals changes."""

    def wake(self) -> None:
        """Make its driver poll."""

    def lose_end(self, end: End, detail: str) -> None:
        """Lose the peer, if any, that ``end`` is to it."""

    def freeze(self) -> None:
        """See `LoopbackFabric.stop`."""

    def thaw(self) -> None:
        """See `LoopbackFabric.resume`."""

    def die(self, detail: str) -> None:
        """Leave the fabric for good; every peer loses it now."""


class LoopbackFabric:
    """What the ends of one process share: order, clock, faults, and who is stopped or dead.

    Args:
        seed: draws the order in which reads advance and chunks land. Same seed, same calls: same history.
        faults: what goes wrong, in any order; see `kvlink.transports.faults`.
        clock: seconds, never going back. Leases, silence and the cut-off's grace are judged by it.
        chunks_per_poll: chunks that land in one `poll` at most, and chunks in flight per read.
        peer_lost_seconds: silence of a stopped end after which the others lose it.
        cut_off_grace_seconds: wait for chunks in flight before a cut-off drops them, and every read of that peer.
    """

    def __init__(
        self,
        seed: int,
        faults: Iterable[Fault] = (),
        *,
        clock: Callable[[], float] = time.monotonic,
        chunks_per_poll: int = 8,
        peer_lost_seconds: float = PEER_LOST_SECONDS,
        cut_off_grace_seconds: float = CUT_OFF_GRACE_SECONDS,
    ) -> None:
        self.clock = clock
        self.script = FaultScript(faults)
        self.random = random.Random(seed)  # noqa: S311 - an order of events to repeat, not a secret
        self.chunks_per_poll = chunks_per_poll
        self.peer_lost_seconds = peer_lost_seconds
        self.cut_off_grace_seconds = cut_off_grace_seconds
        self.step = 0
        self._ends: dict[bytes, End] = {}
        self._serial = 0

    def inject(self, *faults: Fault) -> None:
        """Add faults while things run."""
        for end in self._ends.values():
            end.settle_leases()
        for fault in faults:
            self.script.inject(fault)

    def stop(self, name: str) -> None:
        """Freeze the end called ``name``, as SIGSTOP would: it answers nothing, renews nothing, and is read no more."""
        self._end_named(name).freeze()

    def resume(self, name: str) -> None:
        """Let a stopped end go on, as SIGCONT would. Peers that lost it meanwhile stay lost."""
        self._end_named(name).thaw()

    def kill(self, name: str) -> None:
        """End the process called ``name``, as ``kill -9`` would: its peers lose it at once.

        A successor may take the name.
        """
        self._end_named(name).die("connection reset")

    def join(self, end: End) -> bytes:
        """Give a new end its address, which no other ever has."""
        self._serial += 1
        address = f"loopback:{self._serial}:{end.name}".encode()
        self._ends[address] = end
        return address

    def leave(self, address: bytes) -> None:
        """Forget an end that closed or died."""
        self._ends.pop(address, None)

    def find(self, address: bytes) -> End | None:
        """The live end at an address."""
        return self._ends.get(address)

    def _end_named(self, name: str) -> End:
        for end in self._ends.values():
            if end.name == name:
                return end
        raise LookupError(
            f"no live end of this fabric is called {name!r}; it has {[e.name for e in self._ends.values()]}"
        )
