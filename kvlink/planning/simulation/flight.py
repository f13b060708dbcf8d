"""One request on its way through the simulated fleet."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from kvlink.cluster import PoolState
from kvlink.planning.simulation.space import KVSpace
from kvlink.planning.trace import Arrival


class End(StrEnum):
    """How a request ended; every one has exactly one end."""

    DONE = "done"
    CANCELLED = "cancelled"
    TOO_LARGE = "too_large"


class Engine(Protocol):
    """What a request sees of the worker it is at."""

    name: str
    state: PoolState
    adapters: frozenset[str]
    space: KVSpace
    promised: int
    tenants: Counter[str | None]
    link_free_at: float
    flights: dict[Flight, None]

    def prefill(self, flight: Flight) -> None:
        """Queue its prompt."""

    def decode(self, flight: Flight) -> None:
        """Take it into the batch."""

    def drop(self, flight: Flight) -> None:
        """Let it go, wherever it stands."""

    def nudge(self) -> None:
        """Room has come back."""

    def youngest(self) -> Flight | None:
        """The last that came into the batch."""


@dataclass(slots=True)
class Stay:
    """What a request has at one worker: room in tokens, promised and then taken, and prefix blocks it keeps there.

    Promised room still serves as cache, as the room of a prompt that waits in an engine's queue does.
    """

    worker: Engine
    promised: int
    tokens: int = 0
    pinned: tuple[int, ...] = ()

    def pin_prefix(self, blocks: tuple[int, ...]) -> None:
        """Keep what is here of a prefix, before room is taken that its blocks might give way to."""
        self.pinned = blocks[: self.worker.space.match(blocks)]
        self.worker.space.pin(self.pinned)

    def take(self) -> bool:
        """Take the promised room; whether it was there (others may have grown into it)."""
        if not self.worker.space.hold(self.promised):
            return False
        self.worker.promised -= self.promised
        self.tokens += self.promised
        self.promised = 0
        return True


@dataclass(slots=True, eq=False)
class Flight:
    """State and measures of one request. Times are seconds on the simulation's clock; ``None``: not yet.

    Attributes:
        prompt: tokens to prefill in this try: the prompt, and what was generated before a restart.
        computed: of them, so far.
        generated: tokens given to the user.
        first, second: where prefill and decode happen: the same where they share a worker.
        tries: restarts so far; what is scheduled for an earlier try is void.
        excluded: failure domains to stay out of: where it was lost.
        waited_seconds: in line, over all tries; ``prefill_queue_seconds``: admitted, until its prefill began.
        link_wait_seconds: for a link that others used; ``transfer_seconds``: the transfer itself.
        prefix_tokens: of the prompt that its first try found in a cache.
        lost_tokens: whose KV the last restart lost; ``recomputed_tokens``: of those, computed again.
    """

    arrival: Arrival
    prompt: int
    computed: int = 0
    generated: int = 0
    first: Stay | None = None
    second: Stay | None = None
    tries: int = 0
    excluded: frozenset[str] = frozenset()
    end: End | None = None
    admitted_at: float | None = None
    prefill_at: float | None = None
    installed_at: float | None = None
    first_token_at: float | None = None
    ended_at: float | None = None
    waited_seconds: float = 0.0
    prefill_queue_seconds: float = 0.0
    transfer_seconds: float = 0.0
    link_wait_seconds: float = 0.0
    moved_bytes: int = 0
    prefix_tokens: int = 0
    lost_tokens: int = 0
    recomputed_tokens: int = 0
    stood_in_line_at: float = 0.0

    @property
    def left(self) -> int:
        """Tokens still to be generated."""
        return self.arrival.decode_tokens - self.generated
