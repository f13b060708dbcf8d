"""How a source answers an ask: the guards and effects of `kvlink.protocol.source`'s richest cell.

What keeps a request from being installed twice is here: a leg is leased to another attempt only after the first is
known not to be installed, and a part serves one target engine at a time.
"""

from __future__ import annotations

from msgspec.structs import replace

from kvlink import errors, limits, wire
from kvlink.protocol.increments import Offering
from kvlink.protocol.source_leg import (
    BUSY,
    FREE,
    SOURCE_LEG,
    LegEnded,
    LegPhase,
    Revoke,
    SourceLeg,
    advance,
    advance_again,
)
from kvlink.protocol.source_part import AskArrived, Change, SourcePart, ended_error
from kvlink.protocol.table import Moment, fire
from kvlink.protocol.vocabulary import End, Expose, ParkAsk, Send, SendLease, error_info, fail

# --- guards ---------------------------------------------------------------------------------------------------


def repeated(part: SourcePart, event: AskArrived, _at: Moment) -> bool:
    """This attempt is leased: only the answer was lost."""
    leg = part.leg(event.peer)
    return leg is not None and leg.attempt == event.attempt and leg.phase is LegPhase.LEASED


def stale(part: SourcePart, event: AskArrived, _at: Moment) -> bool:
    """A late copy of an ask: its attempt has gone on, or a younger one has taken its place."""
    leg = part.latest(event.peer)
    return leg is not None and (event.attempt < leg.attempt or (event.attempt == leg.attempt and leg.phase not in FREE))


def over_already(part: SourcePart, event: AskArrived, _at: Moment) -> bool:
    """This attempt has ended here, and its target may not have heard."""
    leg = part.latest(event.peer)
    return leg is not None and event.attempt == leg.attempt and leg.phase in FREE


def other_content(part: SourcePart, event: AskArrived, _at: Moment) -> bool:
    """Same key, other content."""
    return event.digest not in (part.digest, part.opening)


def not_admitted(_part: SourcePart, event: AskArrived, _at: Moment) -> bool:
    """Admission or the descriptor's check said no."""
    return event.refusal is not None


def taken(part: SourcePart, event: AskArrived, _at: Moment) -> bool:
    """Another attempt stands in the way: of this rank, past its lease; or of another engine, not known to be over."""
    return _in_the_way(part, event) is not None


def other_readers(part: SourcePart, event: AskArrived, _at: Moment) -> bool:
    """Two ranks of one engine count the readers differently."""
    return _same_engine(part, event) and part.readers is not None and part.readers != event.readers


def worn_out(part: SourcePart, event: AskArrived, _at: Moment) -> bool:
    """Retries are bounded in number, too."""
    return _attempts(part, event) >= limits.MAX_ATTEMPTS_PER_LEG


def _same_engine(part: SourcePart, event: AskArrived) -> bool:
    return all(leg.engine == event.engine for leg in part.legs)


def _attempts(part: SourcePart, event: AskArrived) -> int:
    """Attempts before this one: of its rank, or of engines whose place it takes, however often they took turns."""
    known = (*part.legs, *part.passed)
    before = (leg for leg in known if leg.peer == event.peer or leg.engine != event.engine)
    return max((leg.attempts for leg in before), default=0)


def _in_the_way(part: SourcePart, event: AskArrived) -> SourceLeg | None:
    if _same_engine(part, event):
        leg = part.leg(event.peer)
        return leg if leg is not None and leg.phase not in (*FREE, LegPhase.LEASED) else None
    busy = [leg for leg in part.legs if leg.phase not in FREE]
    return next((leg for leg in busy if leg.phase is LegPhase.INDETERMINATE), busy[0] if busy else None)


# --- effects --------------------------------------------------------------------------------------------------


def lease_again(part: SourcePart, event: AskArrived, _at: Moment) -> Change:
    """The same lease, and of a stream the same increments."""
    leg = part.leg(event.peer)
    return part, (SendLease(event.peer, event.attempt), *(() if leg is None else advance_again(leg)))


def lease(part: SourcePart, event: AskArrived, at: Moment) -> Change:
    """Lease to this attempt. What the same rank had leased before it has given up itself: that is revoked first."""
    actions: tuple[object, ...] = ()
    old = part.leg(event.peer) if _same_engine(part, event) else None
    if old is not None:
        text = f"attempt {event.attempt} of the same rank takes the place of attempt {old.attempt}"
        superseded = Revoke(fail(End.FAILED, errors.TransferError, text, retryable=True))
        _, revoked = fire(SOURCE_LEG, old, superseded, at)
        actions = tuple(action for action in revoked if not isinstance(action, LegEnded))
    # The target's own deadline ends first: ours adds what its siblings may have been parked, and a margin.
    bound = part.deadline_seconds + at.timing.park_seconds + at.timing.drift_margin_seconds
    leg = SourceLeg(
        peer=event.peer,
        engine=event.engine,
        attempt=event.attempt,
        until=at.now + bound,
        attempts=_attempts(part, event) + 1,
        stream=_offering(part, event),
        seconds=bound,
    )
    exposed = Expose(event.peer, event.attempt, leg.stream is not None)
    leg, advanced = advance(leg, at)
    kept = tuple(other for other in part.legs if other.engine == event.engine and other.peer != event.peer)
    passed = tuple(other for other in (*part.passed, *part.legs) if event.peer != other.peer and other not in kept)
    tickets = tuple(ticket for ticket in part.tickets if ticket.peer != event.peer)
    hold_until = max(part.hold_until, at.now + at.timing.retry_hold_seconds)
    part = replace(
        part, legs=(*kept, leg), passed=passed, tickets=tickets, readers=event.readers, hold_until=hold_until
    )
    return part, (*actions, exposed, SendLease(event.peer, event.attempt), *advanced)


def _offering(part: SourcePart, event: AskArrived) -> Offering | None:
    """Whoever asks by a stream's beginning reads a stream, from its first position on, sealed or not."""
    if part.frontier is None or event.digest != part.opening:
        return None
    return Offering(ready=part.frontier, content=part.digest)


def park(part: SourcePart, event: AskArrived, _at: Moment) -> Change:
    """Known, and not ready for this ask."""
    return part, (ParkAsk(event.peer, event.attempt),)


def refuse_over(part: SourcePart, event: AskArrived, _at: Moment) -> Change:
    """Say again why this attempt ended."""
    leg = part.latest(event.peer)
    error = leg.error if leg is not None else None
    return _refuse(part, event, error or error_info(errors.TransferError, "this attempt has ended"))


def refuse_conflict(part: SourcePart, event: AskArrived, _at: Moment) -> Change:
    """Name both digests (G4)."""
    text = f"request {part.key} is here with content {part.digest}, and was asked for with {event.digest}"
    return _refuse(part, event, error_info(errors.ConflictError, text))


def refuse_verdict(part: SourcePart, event: AskArrived, _at: Moment) -> Change:
    """Pass the verdict on."""
    return _refuse(part, event, event.refusal or error_info(errors.BusyError, "no room now"))


def refuse_taken(part: SourcePart, event: AskArrived, _at: Moment) -> Change:
    """Another attempt may be installed: never a second one (G3)."""
    other = _in_the_way(part, event)
    if other is None:
        return part, ()
    what = f"attempt {other.attempt} of {other.peer} is {other.phase.value}"
    if other.phase is LegPhase.INDETERMINATE:
        text = f"{what}: it may be installed there; nobody else gets it until {other.peer} says that it is not"
        return _refuse(part, event, error_info(errors.IndeterminateError, text))
    text = f"{what}; another is served only once that one is known not to be installed"
    return _refuse(part, event, error_info(errors.ConflictError, text, retryable=other.phase in BUSY))


def refuse_readers(part: SourcePart, event: AskArrived, _at: Moment) -> Change:
    """Name both counts."""
    text = f"readers differ: {event.peer} says {event.readers}, another rank of its engine said {part.readers}"
    return _refuse(part, event, error_info(errors.ConflictError, text))


def refuse_worn(part: SourcePart, event: AskArrived, _at: Moment) -> Change:
    """Enough."""
    text = f"{limits.MAX_ATTEMPTS_PER_LEG} attempts of {event.peer} have failed; the request needs a new key"
    return _refuse(part, event, error_info(errors.TransferError, text))


def refuse_ended(part: SourcePart, event: AskArrived, _at: Moment) -> Change:
    """The part is over, or all but."""
    return _refuse(part, event, ended_error(part.key, part.end or End.FAILED, part.failure))


def _refuse(part: SourcePart, event: AskArrived, error: wire.ErrorInfo) -> Change:
    return part, (Send(event.peer, wire.Refused(attempt=event.attempt, error=error)),)
