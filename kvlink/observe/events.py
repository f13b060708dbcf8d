"""What happened, as a bounded stream of typed events: every part's end with its cause, and peers that come and go."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal

from kvlink import errors, limits
from kvlink.errors import KVLinkError

_log: Final = logging.getLogger("kvlink.observe")

Side = Literal["source", "target"]


class Cause(StrEnum):
    """Why a part ended, for counting and alarms: one of few, whatever the error's class."""

    DONE = "done"
    REFUSED = "refused"
    """A side would not begin: no room, a conflict, a mismatch, a key that nobody knows, a bad argument or claim."""
    DECLINED = "declined"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    """Time ran out: a claim's, a commit's, the transfer's own, or a lease's."""
    PEER = "peer"
    """The other process was lost, restarted, unreachable, or cannot work with us."""
    TRANSPORT = "transport"
    INTEGRITY = "integrity"
    INDETERMINATE = "indeterminate"
    INTERNAL = "internal"
    """None of these: closed under it, lacking something, or our own fault."""


_CAUSES: Final[dict[type[KVLinkError], Cause]] = {
    errors.KVLinkError: Cause.INTERNAL,
    errors.ConfigError: Cause.REFUSED,
    errors.LayoutError: Cause.REFUSED,
    errors.MismatchError: Cause.REFUSED,
    errors.UnsupportedError: Cause.REFUSED,
    errors.WireError: Cause.REFUSED,
    errors.AuthenticationError: Cause.REFUSED,
    errors.PeerError: Cause.PEER,
    errors.BusyError: Cause.REFUSED,
    errors.TooLargeError: Cause.REFUSED,
    errors.ConflictError: Cause.REFUSED,
    errors.UnknownRequestError: Cause.REFUSED,
    errors.DeclinedError: Cause.DECLINED,
    errors.CancelledError: Cause.CANCELLED,
    errors.DeadlineError: Cause.EXPIRED,
    errors.LeaseLapsedError: Cause.EXPIRED,
    errors.ExpiredError: Cause.EXPIRED,
    errors.IntegrityError: Cause.INTEGRITY,
    errors.IndeterminateError: Cause.INDETERMINATE,
    errors.TransportError: Cause.TRANSPORT,
}
"""A class that is not listed is its nearest ancestor's."""


def cause_of(error: KVLinkError | None) -> Cause:
    """The cause that an end with ``error`` counts under; ``None`` is an end that is done."""
    return Cause.DONE if error is None else next(_CAUSES[cls] for cls in type(error).__mro__ if cls in _CAUSES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Base of all events. ``at_seconds``: on the loop's clock, which only differences mean anything of."""

    at_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PartEnded(Event):
    """A part came to its end, after its cut-off; once a part.

    Attributes:
        key: the request's.
        side: what this rank is in it.
        end: the name of its `kvlink.State`, in lower case.
        cause: why.
        code: of the error's class, or ``None`` if it is done.
        why: the error in words, or "".
        bytes: payload of this rank's share, if it is done.
        seconds: from its verb to its end.
        transport: what carried it, or "" if nothing was chosen.
    """

    key: str
    side: Side
    end: str
    cause: Cause
    code: str | None
    why: str
    bytes: int
    seconds: float
    transport: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerConnected(Event):
    """A session is up. ``side``: what this rank is to ``peer``."""

    peer: str
    side: Side
    transport: str
    handshake_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerDisconnected(Event):
    """A session ended, by ``code`` and in words: a reset, silence, a goodbye, a violation, or our own closing."""

    peer: str
    side: Side
    code: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledLost(Event):
    """Source: the target of a request fell silent or died after it had installed it. `kvlink.Link.recovery_point` asks.

    Attributes:
        key: the request's, or its replica's.
        target: ``"engine@incarnation"``.
        proven: another incarnation has authenticated in its place, so the KV is gone. Else its process may live: the
            request is told once more if that is proven, and anew if the incarnation comes back and is lost again.
        tokens: positions that were installed.
        bytes: of KV that prefilling them all writes on this rank.
        prefill_again: no other copy stands, is on its way, or can be fetched.
    """

    key: str
    target: str
    proven: bool
    tokens: int
    bytes: int
    prefill_again: bool


class Events:
    """A link's events, for whoever takes them (`take`, from any thread) or is called with them (`subscribe`).

    Events that nobody takes are dropped, oldest first; `dropped` says how many.
    """

    def __init__(self, capacity: int = limits.MAX_QUEUED_EVENTS) -> None:
        self.dropped = 0
        self._queue: deque[Event] = deque(maxlen=capacity)
        self._subscribers: list[Callable[[Event], None]] = []
        self._causes: Counter[tuple[Side, Cause]] = Counter()

    @property
    def causes(self) -> Mapping[str, int]:
        """Parts that ended, by ``"<side>_<cause>"``; all that there are, also those that never happened."""
        sides: tuple[Side, Side] = ("source", "target")
        return {f"{side}_{cause}": self._causes[side, cause] for side in sides for cause in Cause}

    def take(self, limit: int = 256) -> list[Event]:
        """Up to ``limit`` events, oldest first, each once. Never blocks."""
        taken: list[Event] = []
        while len(taken) < limit:
            try:
                taken.append(self._queue.popleft())
            except IndexError:
                break
        return taken

    def subscribe(self, callback: Callable[[Event], None]) -> Callable[[], None]:
        """Call ``callback(event)`` with every event from now on, on the loop's thread; it must not block.

        What it raises is logged, and changes nothing. Events go into the queue all the same.

        Returns:
            What ends the subscription; idempotent.
        """
        self._subscribers.append(callback)

        def end() -> None:
            if callback in self._subscribers:
                self._subscribers.remove(callback)

        return end

    def emit(self, event: Event) -> None:
        """The link's call: something happened."""
        if isinstance(event, PartEnded):
            self._causes[event.side, event.cause] += 1
        self.dropped += len(self._queue) == self._queue.maxlen
        self._queue.append(event)
        for callback in tuple(self._subscribers):
            try:
                callback(event)
            except Exception:  # noqa: BLE001 - an embedder's fault must not end a transfer
                _log.exception("a subscriber failed with %s", type(event).__name__)
