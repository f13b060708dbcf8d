"""What a source part is: its phases, its state, the events it takes. `kvlink.protocol.source` moves it."""

from __future__ import annotations

from kvlink import errors, wire
from kvlink.layout import Frontier
from kvlink.protocol.source_leg import BUSY, LandedArrived, LeaseLapsed, PreparedArrived, SourceLeg
from kvlink.protocol.vocabulary import (
    Cancel,
    End,
    Failure,
    PeerDead,
    PeerLost,
    Received,
    Repeat,
    Tick,
    Timing,
    Value,
    Word,
    error_info,
)


class SourcePhase(Word):
    """Where a source part stands."""

    OPEN = "open"
    """Known, and nothing of it ready: asks are parked."""
    STREAMING = "streaming"
    """Some of it is ready, not sealed: asks for the stream are answered."""
    HELD = "held"
    """Sealed: asks are answered."""
    ENDING = "ending"
    """No new leg; committed legs are awaited."""
    ENDED = "ended"
    """Reported; kept a while to answer, and to learn, from late messages."""
    CLOSED = "closed"
    """Nothing is left to do: the driver forgets the part and keeps its ledger entry."""


class AskArrived(Value, frozen=True, kw_only=True):
    """`wire.Ask`, with the verdicts that need more than this part.

    Attributes:
        peer: whose connection carried it: the target rank's incarnation.
        engine: the target engine's incarnation, which all its ranks share.
        attempt: ids of one incarnation only rise.
        digest: `descriptor_digest` of its descriptor.
        readers: how many target ranks will read this source rank.
        refusal: why admission or the descriptor's check refuses it, or ``None``. Ignored for a repeated ask.
    """

    peer: str
    engine: str
    attempt: int
    digest: str
    readers: int
    refusal: wire.ErrorInfo | None = None


class Advanced(Value, frozen=True):
    """More of the KV is ready. ``opening`` is `descriptor_digest` of the stream's beginning, the same each time."""

    frontier: Frontier
    opening: str


class Seal(Value, frozen=True):
    """The KV is complete. ``digest`` is `descriptor_digest` of the descriptor; the rest is as in `Advanced`."""

    digest: str
    frontier: Frontier | None = None
    opening: str | None = None


class RenewHold(Value, frozen=True):
    """`wire.Renew` named this key: it is queued over there."""


class TicketArrived(Value, frozen=True):
    """Push: this target rank has room and wants to be told."""

    peer: str


class DeclineArrived(Value, frozen=True):
    """`wire.Decline`: the target rank will not ask (``unread``: no rank reads this source rank)."""

    peer: str
    why: str
    unread: bool


class AllInstalled(Value, frozen=True):
    """As many target ranks as will read have installed."""


class AllIdle(Value, frozen=True):
    """No leg is leased or committed."""


class Unknowable(Value, frozen=True):
    """No leg is leased or committed, and of one it is not known whether it was installed."""


class AllKnown(Value, frozen=True):
    """A part that ended *indeterminate* has since heard from every leg."""


SourceEvent = (
    AskArrived | Advanced | Seal | RenewHold | TicketArrived | DeclineArrived | LandedArrived | PreparedArrived
    | LeaseLapsed | Received | PeerLost | PeerDead | Cancel | Tick
)  # fmt: skip


class Ticket(Value, frozen=True):
    """A target rank that waits to be told; ``repeat`` is ``None`` until it has been."""

    peer: str
    repeat: Repeat | None = None


class SourcePart(Value, frozen=True, kw_only=True):
    """One request on one source rank.

    Attributes:
        key: the request's key.
        timing: its clocks.
        ttl_seconds: how long an unasked hold lasts; `Advanced`, `Seal` and `RenewHold` start it anew. As long may pass
            between two words of an engine that computes.
        deadline_seconds: how long one attempt may take on the target.
        hold_until: when the hold ends if no leg is leased or committed by then.
        digest: `descriptor_digest` of its descriptor, once sealed.
        opening: that of its stream's beginning, if it has one.
        frontier: how far it has been computed, if it streams.
        stalls_at: when a stream's engine has said nothing for too long.
        phase: where it stands.
        readers: target ranks that will read it, as the first of them said.
        legs: the latest attempt per target rank, all of one engine.
        passed: legs of engines that another has taken the place of: late copies of their asks must not revive them.
        tickets: who waits to be told (push).
        failure: the first cause, once it failed.
        end: the end, once reported; *indeterminate* may still turn into knowledge.
        retire_at: when an ended part is forgotten.
    """

    key: str
    timing: Timing
    ttl_seconds: float
    deadline_seconds: float
    hold_until: float
    digest: str | None = None
    opening: str | None = None
    frontier: Frontier | None = None
    stalls_at: float | None = None
    phase: SourcePhase = SourcePhase.OPEN
    readers: int | None = None
    legs: tuple[SourceLeg, ...] = ()
    passed: tuple[SourceLeg, ...] = ()
    tickets: tuple[Ticket, ...] = ()
    failure: Failure | None = None
    end: End | None = None
    retire_at: float | None = None

    def leg(self, peer: str) -> SourceLeg | None:
        """The latest leg of this target rank."""
        for leg in self.legs:
            if leg.peer == peer:
                return leg
        return None

    def latest(self, peer: str) -> SourceLeg | None:
        """The latest leg of this target rank, also of one whose engine was passed over."""
        return self.leg(peer) or next((leg for leg in self.passed if leg.peer == peer), None)

    @property
    def idle(self) -> bool:
        """No leg is leased or committed."""
        for leg in self.legs:  # noqa: SIM110 - asked at every step; half of it would be making a generator
            if leg.phase in BUSY:
                return False
        return True


Change = tuple[SourcePart, tuple[object, ...]]


def ended_error(key: str, end: End, failure: Failure | None) -> wire.ErrorInfo:
    """How to refuse an ask for a part that ended like this; for the driver, from its ledger, once the part is gone."""
    if end is End.DONE:
        return error_info(errors.ConflictError, f"request {key} is installed already, or is read elsewhere")
    if failure is not None:
        return failure.error
    return error_info(errors.UnknownRequestError, f"request {key} has ended here ({end.value})")
