"""The words the protocol's machines share: ends, timing, and what goes into a step and comes out of it.

Every value is frozen and hashable: a machine's state is data that a test can compare and an explorer can store.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from kvlink import errors, limits, wire
from kvlink.layout import Frontier


class Value(msgspec.Struct, frozen=True, gc=False):
    """Base of all states, events and actions. Frozen, so none can come to hold itself: the collector need not look."""


class Word(Enum):
    """An enum that is looked up by what it is. Python's own hashes a member's name, in Python, at every look."""

    __hash__ = object.__hash__


class End(Word):
    """How a part ended. A target part is never ``INDETERMINATE``: it alone decides whether it installs."""

    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    INDETERMINATE = "indeterminate"


class Failure(Value, frozen=True):
    """Why a part did not end ``DONE``: the end, and the error as it travels and as the embedder gets it."""

    end: End
    error: wire.ErrorInfo


def fail(end: End, error: type[errors.KVLinkError], message: str, *, retryable: bool | None = None) -> Failure:
    """A `Failure` from an error class; ``retryable`` defaults to the class's own word."""
    return Failure(end, error_info(error, message, retryable=retryable))


def error_info(error: type[errors.KVLinkError], message: str, *, retryable: bool | None = None) -> wire.ErrorInfo:
    """An `wire.ErrorInfo` from an error class."""
    return wire.ErrorInfo(
        code=error.code,
        message=message[: limits.MAX_TEXT_BYTES],
        retryable=error.default_retryable if retryable is None else retryable,
    )


_END_OF_CODE = {
    errors.CancelledError.code: End.CANCELLED,
    errors.DeadlineError.code: End.EXPIRED,
    errors.ExpiredError.code: End.EXPIRED,
    errors.LeaseLapsedError.code: End.EXPIRED,
}


def failure_of(error: wire.ErrorInfo) -> Failure:
    """The `Failure` that an error told by the other side (or by the transport) makes of a part."""
    return Failure(_END_OF_CODE.get(error.code, End.FAILED), error)


class Timing(Value, frozen=True, kw_only=True):
    """The protocol's clocks, in seconds. Both machines hold one; only the commit's time to live is told to the peer.

    Attributes:
        commit_ttl_seconds: source: what a commit grants. Target: how long it waits for a commit.
        drift_margin_seconds: how much longer than the grant the source waits.
        repeat_seconds: first interval between repeats of an unanswered message.
        max_repeat_seconds: what that interval doubles up to.
        park_seconds: how long a parked ask waits for its source.
        tell_seconds: how long *installed* or *not installed* is repeated to a source that does not acknowledge.
        rest_seconds: how long a target waits for more of a stream without a word from its source.
        stream_seconds: how long it waits for a stream in all, from its lease, whatever its source says.
        retry_hold_seconds: how long a hold outlives a retryable failure, for a fresh attempt to ask.
        lost_hold_seconds: how long a hold outlives the target that was to read it.
        retire_seconds: how long a source keeps an ended part to answer late messages.
        gather_seconds: how long a coordinator waits for the last rank to begin its part.
        group_seconds: how long a coordinator keeps a request of which it hears nothing.
    """

    commit_ttl_seconds: float = limits.COMMIT_TTL_SECONDS
    drift_margin_seconds: float = limits.DRIFT_MARGIN_SECONDS
    repeat_seconds: float = limits.REPEAT_SECONDS
    max_repeat_seconds: float = limits.MAX_REPEAT_SECONDS
    park_seconds: float = limits.PARK_SECONDS
    tell_seconds: float = limits.TELL_SECONDS
    rest_seconds: float = limits.REST_SECONDS
    stream_seconds: float = limits.MAX_STREAM_SECONDS
    retry_hold_seconds: float = limits.RETRY_HOLD_SECONDS
    lost_hold_seconds: float = limits.LOST_HOLD_SECONDS
    retire_seconds: float = limits.RETIRE_SECONDS
    gather_seconds: float = limits.GATHER_SECONDS
    group_seconds: float = limits.MAX_ATTEMPT_SECONDS


class Repeat(Value, frozen=True):
    """When an unanswered message is sent again, and the interval after that."""

    at: float
    interval: float

    @classmethod
    def start(cls, now: float, timing: Timing) -> Repeat:
        """The message was sent for the first time now."""
        return cls(now + timing.repeat_seconds, timing.repeat_seconds)

    def again(self, now: float, timing: Timing) -> Repeat:
        """The message was sent again now: the interval doubles, up to its bound."""
        interval = min(self.interval * 2, timing.max_repeat_seconds)
        return Repeat(now + interval, interval)


# --- events ---------------------------------------------------------------------------------------------------


class Received(Value, frozen=True):
    """A control message that needs no verdict, from the peer whose connection carried it.

    A message about a leg of another peer, about no leg, or of a kind that is not for this machine is inert: an
    authenticated peer can end only its own.
    """

    peer: str
    message: wire.AnyMessage


class PeerLost(Value, frozen=True):
    """No word from this incarnation: a reset that redialling did not mend, or silence."""

    peer: str


class PeerDead(Value, frozen=True):
    """This incarnation is proven dead: its successor has authenticated, or its own host says that it is gone."""

    peer: str


class Cancel(Value, frozen=True):
    """This side ends the part: the embedder cancelled, the link closes, a prefill failed."""

    failure: Failure


class Tick(Value, frozen=True):
    """Time has come to what ``next_timer`` announced. Harmless at any other time."""


# --- actions --------------------------------------------------------------------------------------------------


class Send(Value, frozen=True):
    """Send this message; if there is no connection, drop it (what must arrive is repeated)."""

    peer: str
    message: wire.AnyMessage


class SendAsk(Value, frozen=True):
    """Target: compose and send `wire.Ask` for this leg, redialling if need be. The same words on every repeat."""

    peer: str
    attempt: int


class StartRead(Value, frozen=True):
    """Target: start reading this leg into the reserved blocks. Answer with ``ReadEnded``, also if it cannot start."""

    peer: str
    attempt: int
    lease: wire.Lease


class StartIncrement(Value, frozen=True):
    """Target: start reading one increment of a stream, as `StartRead` a leg. Answer with its ``ReadEnded``."""

    peer: str
    attempt: int
    advance: wire.Advance


class StopRenewing(Value, frozen=True):
    """Target: the leg is committed, its lease is no longer needed; the transport may forget the attempt.

    Of a stream, its increments up to ``increments``: their source has withdrawn them.
    """

    peer: str
    attempt: int
    increments: int = 0


class CutOff(Value, frozen=True):
    """Target: end the read for good. Answer with ``CutOffDone`` when no byte of the attempt can land any more."""

    peer: str
    attempt: int


class Install(Value, frozen=True):
    """Target: hand the blocks to the engine *now*. Answer with ``InstallDone`` or ``InstallFailed``, always.

    With siblings to wait for, make them ready to hand over, and show them to nobody before `Show`.
    """


class Show(Value, frozen=True):
    """Target: all siblings are installed: the engine may see the blocks."""


class ReleaseBlocks(Value, frozen=True):
    """Target: nothing was installed and nothing can land: the reservation goes back."""


class SendLease(Value, frozen=True):
    """Source: compose and send `wire.Lease`. The attempt is exposed; the answer is the same on every repeat."""

    peer: str
    attempt: int


class Expose(Value, frozen=True):
    """Source: let this attempt read; its lease starts now. A ``stream`` is exposed increment by increment."""

    peer: str
    attempt: int
    stream: bool = False


class ExposeIncrement(Value, frozen=True):
    """Source: let this attempt read what lies between the last increment's frontier and this one's."""

    peer: str
    attempt: int
    number: int
    frontier: Frontier
    sealed: bool


class SendAdvance(Value, frozen=True):
    """Source: compose and send `wire.Advance`; the same words on every repeat."""

    peer: str
    attempt: int
    number: int


class Withdraw(Value, frozen=True):
    """Source: end the exposure of this attempt, with all its increments."""

    peer: str
    attempt: int


class SendAnnounce(Value, frozen=True):
    """Source, push: compose and send `wire.Announce` to this holder of a ticket."""

    peer: str


class ParkAsk(Value, frozen=True):
    """Source: keep this ask in the `ParkingLot` until `Unpark`; answer `wire.Parked`, or busy if the lot is full."""

    peer: str
    attempt: int


class Unpark(Value, frozen=True):
    """Source: take this part's asks from the lot and put them to the machine again, with fresh verdicts."""


class EndHold(Value, frozen=True):
    """Source: the blocks go back to the engine. Once a part."""


class Learned(Value, frozen=True):
    """Source: a part reported *indeterminate* turned out like this. For the ledger; nothing is reported again."""

    end: End


class Report(Value, frozen=True):
    """The part's end on this side. Once a part, after `ReleaseBlocks` or `EndHold` where blocks go back."""

    end: End
    error: wire.ErrorInfo | None


Action = (
    Send | SendAsk | StartRead | StartIncrement | StopRenewing | CutOff | Install | Show | ReleaseBlocks | SendLease
    | Expose | ExposeIncrement | SendAdvance | Withdraw | SendAnnounce | ParkAsk | Unpark | EndHold | Learned | Report
)  # fmt: skip
