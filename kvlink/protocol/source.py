"""One request on one source rank: the hold on its blocks, and one leg per target rank that reads it.

``begin`` and ``step`` return the new state and the actions that the driver must carry out, in order; ``next_timer``
says when to send a `Tick`. The machine waits for nothing, reads no clock and remembers nothing outside its state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from msgspec.structs import replace

from kvlink import errors, wire
from kvlink.layout import NOTHING
from kvlink.protocol.source_asks import (
    lease,
    lease_again,
    not_admitted,
    other_content,
    other_readers,
    over_already,
    park,
    refuse_conflict,
    refuse_ended,
    refuse_over,
    refuse_readers,
    refuse_taken,
    refuse_verdict,
    refuse_worn,
    repeated,
    stale,
    taken,
    worn_out,
)
from kvlink.protocol.source_leg import (
    FREE,
    SOURCE_LEG,
    Ahead,
    LandedArrived,
    LeaseLapsed,
    LegEnded,
    LegPhase,
    PreparedArrived,
    Revoke,
    SourceLeg,
)
from kvlink.protocol.source_part import (
    Advanced,
    AllIdle,
    AllInstalled,
    AllKnown,
    AskArrived,
    Change,
    DeclineArrived,
    RenewHold,
    Seal,
    SourceEvent,
    SourcePart,
    SourcePhase,
    Ticket,
    TicketArrived,
    Unknowable,
    ended_error,
)
from kvlink.protocol.table import Edge, Moment, fire, fire_each, inert, on, row, settle, total
from kvlink.protocol.vocabulary import (
    Action,
    Cancel,
    End,
    EndHold,
    Failure,
    Learned,
    PeerDead,
    PeerLost,
    Received,
    Repeat,
    Report,
    Send,
    SendAnnounce,
    Tick,
    Timing,
    Unpark,
    error_info,
    fail,
    failure_of,
)

_Concerned = Callable[[SourceLeg], bool]


def begin(
    key: str, *, digest: str | None, ttl_seconds: float, deadline_seconds: float, now: float, timing: Timing
) -> SourcePart:
    """Hold blocks for a request; sealed at once if ``digest`` is given, else by `Seal`.

    The driver then replays what came too early: parked asks (`ParkingLot.take`) and tickets.
    """
    return SourcePart(
        key=key,
        timing=timing,
        ttl_seconds=ttl_seconds,
        deadline_seconds=deadline_seconds,
        hold_until=now + ttl_seconds,
        digest=digest,
        phase=SourcePhase.OPEN if digest is None else SourcePhase.HELD,
    )


def step(part: SourcePart, event: SourceEvent, now: float) -> tuple[SourcePart, tuple[Action, ...]]:
    """Take one event. Late, repeated and foreign events are inert; every event is accepted in every state."""
    at = Moment(now, part.timing)
    part, actions = _tell_legs(part, event, at)
    if type(event) in SOURCE_PART_EVENTS:
        part, more = fire(SOURCE_PART, part, event, at)
        actions += more
    part, done = settle(SOURCE_PART, SOURCE_PART_EVENTS, part, actions, _signal, at)
    return part, cast("tuple[Action, ...]", done)


def next_timer(part: SourcePart) -> float | None:
    """When the next `Tick` is due, or ``None``."""
    times = [leg.until for leg in part.legs if leg.until is not None]
    if part.phase in (SourcePhase.OPEN, SourcePhase.STREAMING, SourcePhase.HELD):
        times += [ticket.repeat.at for ticket in part.tickets if ticket.repeat is not None]
        times += [part.hold_until] if part.idle else []
    if part.phase is SourcePhase.STREAMING and part.stalls_at is not None:
        times.append(part.stalls_at)
    if part.phase is SourcePhase.ENDED and part.retire_at is not None:
        times.append(part.retire_at)
    return min(times, default=None)


def answer_unknown(peer: str, message: object) -> tuple[Send, ...]:
    """What to say about an attempt that no part knows (any more). Everything else about it is dropped (C3)."""
    match message:
        case wire.Prepared() | PreparedArrived() | wire.Landed() | LandedArrived():
            text = "no such lease here: it ended long ago, or another attempt took its place"
            error = error_info(errors.UnknownRequestError, text)
            return (Send(peer, wire.Refused(attempt=message.attempt, error=error)),)
        case wire.Installed() | wire.NotInstalled():
            return (Send(peer, wire.Ack(attempt=message.attempt)),)
        case _:
            return ()


def _tell_legs(part: SourcePart, event: SourceEvent, at: Moment) -> Change:
    """Put an event to the legs it is about."""
    match event:
        case Received(peer=peer, message=wire.Installed() | wire.NotInstalled() as message):
            return _one(part, peer, message, at)
        case LandedArrived(peer=peer) | PreparedArrived(peer=peer) | LeaseLapsed(peer=peer):
            return _one(part, peer, event, at)
        case PeerLost() | PeerDead():
            return _each(part, event, at, lambda leg: leg.peer == event.peer)
        case Tick():
            return _each(part, event, at)
        case _:
            return part, ()


def _one(
    part: SourcePart,
    peer: str,
    event: LandedArrived | PreparedArrived | LeaseLapsed | wire.Installed | wire.NotInstalled,
    at: Moment,
) -> Change:
    """The leg's latest attempt, or an answer that fits every attempt before it (G2)."""
    leg = part.leg(peer)
    if part.phase is SourcePhase.CLOSED or leg is None or leg.attempt != event.attempt:
        return part, answer_unknown(peer, event)
    return _each(part, event, at, lambda other: other is leg)


def _each(part: SourcePart, event: object, at: Moment, concerned: _Concerned = lambda _leg: True) -> Change:
    legs, actions = fire_each(SOURCE_LEG, part.legs, event, at, concerned)
    return (part if legs is part.legs else replace(part, legs=legs)), actions


def _signal(part: SourcePart) -> object | None:
    """What the legs together say to the part."""
    if part.phase is SourcePhase.HELD or part.phase is SourcePhase.ENDING:
        phases = [leg.phase for leg in part.legs]
        if part.readers == phases.count(LegPhase.INSTALLED):
            return AllInstalled()
        if not part.idle:
            return None
        if part.phase is SourcePhase.ENDING:
            return AllIdle()
        return Unknowable() if LegPhase.INDETERMINATE in phases else None
    if part.phase is SourcePhase.ENDED and part.end is End.INDETERMINATE:
        return None if any(leg.phase is LegPhase.INDETERMINATE for leg in part.legs) else AllKnown()
    return None


# --- guards ---------------------------------------------------------------------------------------------------


def expired(part: SourcePart, _event: Tick, at: Moment) -> bool:
    """The hold's time to live is over and nobody reads."""
    return part.idle and at.now >= part.hold_until


def stalled(part: SourcePart, _event: Tick, at: Moment) -> bool:
    """Its engine has neither computed more nor sealed it, for as long as a hold lasts."""
    return part.stalls_at is not None and at.now >= part.stalls_at


def retired(part: SourcePart, _event: Tick, at: Moment) -> bool:
    """Late messages have had their time."""
    return part.retire_at is not None and at.now >= part.retire_at


def may_return(_part: SourcePart, event: LegEnded, _at: Moment) -> bool:
    """A fresh attempt may succeed, or the leg may yet say how it ended."""
    return event.failure.error.retryable or event.failure.end is End.INDETERMINATE


def gone(_part: SourcePart, event: LegEnded, _at: Moment) -> bool:
    """Its target fell silent or died."""
    return event.failure.error.code in (errors.PeerLostError.code, errors.PeerRestartedError.code)


def awaited(part: SourcePart, event: PeerLost | PeerDead, _at: Moment) -> bool:
    """Its ticket is here, and nobody else has asked."""
    return not part.legs and any(ticket.peer == event.peer for ticket in part.tickets)


def unread_by_all(part: SourcePart, event: DeclineArrived, _at: Moment) -> bool:
    """The target engine reads our replicas elsewhere."""
    return event.unread and not part.legs


def declined_by_reader(part: SourcePart, event: DeclineArrived, _at: Moment) -> bool:
    """Whoever declines is reading, or nobody is."""
    return not event.unread and (not part.legs or part.leg(event.peer) is not None)


def served(part: SourcePart, event: TicketArrived, _at: Moment) -> bool:
    """The ticket's rank has asked already. Whoever has its commit does not ask under it again: this is its next try."""
    leg = part.leg(event.peer)
    return leg is not None and leg.phase not in (*FREE, LegPhase.COMMITTED)


# --- effects --------------------------------------------------------------------------------------------------


def advance(part: SourcePart, event: Advanced, at: Moment) -> Change:
    """More is ready: tell those who read. While nobody does any more, no word of the engine keeps the hold."""
    forsaken = bool(part.legs) and part.idle
    part = replace(
        part,
        frontier=event.frontier,
        opening=event.opening,
        hold_until=part.hold_until if forsaken else max(part.hold_until, at.now + part.ttl_seconds),
        stalls_at=at.now + part.ttl_seconds,
    )
    return _each(part, Ahead(event.frontier), at)


def open_stream(part: SourcePart, event: Advanced, at: Moment) -> Change:
    """The first of it is ready: whoever has asked may read, whoever has room is told."""
    part, _ = advance(part, event, at)
    tickets = tuple(Ticket(ticket.peer, Repeat.start(at.now, at.timing)) for ticket in part.tickets)
    return replace(part, tickets=tickets), (Unpark(), *(SendAnnounce(ticket.peer) for ticket in tickets))


def seal_stream(part: SourcePart, event: Seal, at: Moment) -> Change:
    """All of it is ready: those who read are told, and those who asked for the whole are answered."""
    frontier = event.frontier or part.frontier or NOTHING
    forsaken = bool(part.legs) and part.idle
    hold_until = part.hold_until if forsaken else max(part.hold_until, at.now + part.ttl_seconds)
    part = replace(part, digest=event.digest, frontier=frontier, hold_until=hold_until, stalls_at=None)
    part, told = _each(part, Ahead(frontier, event.digest), at)
    return part, (*told, Unpark())


def seal(part: SourcePart, event: Seal, at: Moment) -> Change:
    """The KV is complete: answer those who asked, tell those who wait."""
    part = replace(part, digest=event.digest, opening=event.opening, frontier=event.frontier)
    part = replace(part, hold_until=at.now + part.ttl_seconds)
    tickets = tuple(Ticket(ticket.peer, Repeat.start(at.now, at.timing)) for ticket in part.tickets)
    return replace(part, tickets=tickets), (Unpark(), *(SendAnnounce(ticket.peer) for ticket in tickets))


def renew(part: SourcePart, _event: RenewHold, at: Moment) -> Change:
    """Queued over there: keep it."""
    return replace(part, hold_until=max(part.hold_until, at.now + part.ttl_seconds)), ()


def keep_ticket(part: SourcePart, event: TicketArrived, at: Moment) -> Change:
    """To be told when sealed."""
    part = _with_ticket(part, Ticket(event.peer), at)
    return part, ()


def announce(part: SourcePart, event: TicketArrived, at: Moment) -> Change:
    """Tell, until asked."""
    part = _with_ticket(part, Ticket(event.peer, Repeat.start(at.now, at.timing)), at)
    return part, (SendAnnounce(event.peer),)


def announce_again(part: SourcePart, _event: Tick, at: Moment) -> Change:
    """Repeat what is due."""
    tickets: list[Ticket] = []
    actions: list[object] = []
    for ticket in part.tickets:
        if ticket.repeat is not None and at.now >= ticket.repeat.at:
            actions.append(SendAnnounce(ticket.peer))
            tickets.append(Ticket(ticket.peer, ticket.repeat.again(at.now, at.timing)))
        else:
            tickets.append(ticket)
    return replace(part, tickets=tuple(tickets)), tuple(actions)


def withdraw_ticket(part: SourcePart, event: TicketArrived, _at: Moment) -> Change:
    """Too late."""
    error = ended_error(part.key, part.end or End.FAILED, part.failure)
    return part, (Send(event.peer, wire.Withdrawn(key=part.key, error=error)),)


def keep_for_retry(part: SourcePart, _event: LegEnded, at: Moment) -> Change:
    """A fresh attempt has this long to ask."""
    return replace(part, hold_until=max(part.hold_until, at.now + at.timing.retry_hold_seconds)), ()


def keep_briefly(part: SourcePart, _event: LegEnded, at: Moment) -> Change:
    """It may come back, or its gateway turn elsewhere; a dead target must not hold our blocks for the whole ttl."""
    return replace(part, hold_until=at.now + at.timing.lost_hold_seconds), ()


def drop_ticket(part: SourcePart, event: PeerLost | PeerDead, at: Moment) -> Change:
    """The room it spoke of is gone, or will be asked for by another ticket."""
    tickets = tuple(ticket for ticket in part.tickets if ticket.peer != event.peer)
    hold_until = min(part.hold_until, at.now + at.timing.lost_hold_seconds)
    error = error_info(errors.PeerLostError, f"{event.peer} is gone, and with it the room that its ticket promised")
    return replace(part, tickets=tickets, hold_until=hold_until, failure=failure_of(error)), ()


def end_all(part: SourcePart, event: Cancel | LegEnded, at: Moment) -> Change:
    """End what is not promised; tell everybody who waits."""
    return _end_all(part, event.failure, at)


def end_declined(part: SourcePart, event: DeclineArrived, at: Moment) -> Change:
    """The blocks return at once, not at the hold's end (B2)."""
    text = f"{event.peer} declined: {event.why}"
    return _end_all(part, fail(End.FAILED, errors.DeclinedError, text), at)


def end_expired(part: SourcePart, _event: Tick, at: Moment) -> Change:
    """Nobody asked in time, or nobody asked again: then the last failure is the cause."""
    failed = [leg.error for leg in part.legs if leg.error is not None]
    if failed:
        return _end_all(part, failure_of(failed[-1]), at)
    text = f"request {part.key}: not asked for by all its readers within the hold's time to live"
    return _end_all(part, part.failure or fail(End.EXPIRED, errors.ExpiredError, text), at)


def end_stalled(part: SourcePart, _event: Tick, at: Moment) -> Change:
    """Nobody waits for ever for an engine that has forgotten what it computed."""
    text = f"request {part.key}: nothing more became ready for {part.ttl_seconds:g} s, and it is not sealed"
    return _end_all(part, fail(End.EXPIRED, errors.ExpiredError, text), at)


def end_unknown(part: SourcePart, _event: Unknowable, at: Moment) -> Change:
    """The end says so."""
    error = next((leg.error for leg in part.legs if leg.phase is LegPhase.INDETERMINATE), None)
    error = error or error_info(errors.IndeterminateError, "a committed leg did not say how it ended")
    return _end_all(part, Failure(End.INDETERMINATE, error), at)


def report_done(part: SourcePart, _event: object, _at: Moment) -> Change:
    """Installed by all its readers, or read by none."""
    return replace(part, end=End.DONE, tickets=()), (EndHold(), Report(End.DONE, None))


def report_failed(part: SourcePart, _event: AllIdle, at: Moment) -> Change:
    """The last leg has ended: the blocks go back, then the end is told, once."""
    failure = part.failure or fail(End.FAILED, errors.TransferError, "failed without a word")
    unknown = next((leg for leg in part.legs if leg.phase is LegPhase.INDETERMINATE), None)
    if unknown is not None and unknown.error is not None:
        failure = Failure(End.INDETERMINATE, unknown.error)
    part = replace(part, failure=failure, end=failure.end, retire_at=at.now + at.timing.retire_seconds)
    return part, (EndHold(), Report(failure.end, failure.error))


def learn(part: SourcePart, _event: AllKnown, _at: Moment) -> Change:
    """It was reported as unknown, and is known now."""
    installed = part.readers == sum(leg.phase is LegPhase.INSTALLED for leg in part.legs)
    end = End.DONE if installed else End.FAILED
    return replace(part, end=end), (Learned(end),)


def _with_ticket(part: SourcePart, ticket: Ticket, at: Moment) -> SourcePart:
    others = tuple(other for other in part.tickets if other.peer != ticket.peer)
    hold_until = max(part.hold_until, at.now + part.ttl_seconds)
    return replace(part, tickets=(*others, ticket), hold_until=hold_until, failure=None)


def _end_all(part: SourcePart, failure: Failure, at: Moment) -> Change:
    withdrawn = wire.Withdrawn(key=part.key, error=failure.error)
    told: tuple[object, ...] = tuple(Send(ticket.peer, withdrawn) for ticket in part.tickets)
    waiting = part.phase in (SourcePhase.OPEN, SourcePhase.STREAMING)
    unparked: tuple[object, ...] = (Unpark(),) if waiting else ()
    part, revoked = _each(replace(part, failure=failure, tickets=()), Revoke(failure), at)
    return part, (*revoked, *told, *unparked)


# --- the table ------------------------------------------------------------------------------------------------

P = SourcePhase
SOURCE_PART_EVENTS = (
    AskArrived, Advanced, Seal, RenewHold, TicketArrived, DeclineArrived, PeerLost, PeerDead, Cancel, LegEnded,
    AllInstalled, AllIdle, Unknowable, AllKnown, Tick,
)  # fmt: skip

_unasked = row(
    on(RenewHold, Edge(None, renew)),
    on(Cancel, Edge(P.ENDING, end_all)),
    on(PeerLost, Edge(None, drop_ticket, awaited)),
    on(PeerDead, Edge(None, drop_ticket, awaited)),
    on(
        DeclineArrived,
        Edge(P.CLOSED, report_done, unread_by_all),
        Edge(P.ENDING, end_declined, declined_by_reader),
    ),
)
_asked = row(
    on(TicketArrived, Edge(None, None, served), Edge(None, announce)),
    on(
        LegEnded,
        Edge(None, keep_briefly, gone),
        Edge(None, keep_for_retry, may_return),
        Edge(P.ENDING, end_all),
    ),
)
_answers: tuple[Edge[SourcePart, AskArrived], ...] = (
    Edge(None, refuse_verdict, not_admitted),
    Edge(None, refuse_taken, taken),
    Edge(None, refuse_readers, other_readers),
    Edge(None, refuse_worn, worn_out),
    Edge(None, lease),
)
_too_late = row(
    on(AskArrived, Edge(None, None, stale), Edge(None, refuse_ended)),
    on(TicketArrived, Edge(None, withdraw_ticket)),
    inert(Advanced, Seal, RenewHold, DeclineArrived, PeerLost, PeerDead, Cancel, LegEnded, Unknowable),
)

SOURCE_PART = total(
    P,
    SOURCE_PART_EVENTS,
    {
        P.OPEN: row(
            _unasked,
            on(AskArrived, Edge(None, park)),
            on(Advanced, Edge(P.STREAMING, open_stream)),
            on(Seal, Edge(P.HELD, seal)),
            on(TicketArrived, Edge(None, keep_ticket)),
            on(Tick, Edge(P.ENDING, end_expired, expired)),
            inert(LegEnded, AllInstalled, AllIdle, Unknowable, AllKnown),
        ),
        P.STREAMING: row(
            _unasked,
            _asked,
            on(
                AskArrived,
                Edge(None, lease_again, repeated),
                Edge(None, None, stale),
                Edge(None, refuse_over, over_already),
                Edge(None, park, other_content),
                *_answers,
            ),
            on(Advanced, Edge(None, advance)),
            on(Seal, Edge(P.HELD, seal_stream)),
            on(
                Tick,
                Edge(P.ENDING, end_stalled, stalled),
                Edge(P.ENDING, end_expired, expired),
                Edge(None, announce_again),
            ),
            inert(AllInstalled, AllIdle, Unknowable, AllKnown),
        ),
        P.HELD: row(
            _unasked,
            _asked,
            on(
                AskArrived,
                Edge(None, lease_again, repeated),
                Edge(None, None, stale),
                Edge(None, refuse_over, over_already),
                Edge(None, refuse_conflict, other_content),
                *_answers,
            ),
            on(AllInstalled, Edge(P.CLOSED, report_done)),
            on(Unknowable, Edge(P.ENDING, end_unknown)),
            on(Tick, Edge(P.ENDING, end_expired, expired), Edge(None, announce_again)),
            inert(Advanced, Seal, AllIdle, AllKnown),
        ),
        P.ENDING: row(
            _too_late,
            on(AllInstalled, Edge(P.CLOSED, report_done)),
            on(AllIdle, Edge(P.ENDED, report_failed)),
            inert(AllKnown, Tick),
        ),
        P.ENDED: row(
            _too_late,
            on(AllKnown, Edge(None, learn)),
            on(Tick, Edge(P.CLOSED, None, retired)),
            inert(AllInstalled, AllIdle),
        ),
        P.CLOSED: row(inert(*SOURCE_PART_EVENTS)),
    },
)
