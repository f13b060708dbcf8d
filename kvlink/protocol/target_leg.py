"""One leg on the target: one attempt to read one source rank's share, as a table. `kvlink.protocol.target` owns it."""

from __future__ import annotations

from msgspec.structs import replace

from kvlink import errors, limits, wire
from kvlink.protocol.increments import Landing
from kvlink.protocol.table import Edge, Moment, inert, on, row, total
from kvlink.protocol.vocabulary import (
    CutOff,
    End,
    Failure,
    PeerDead,
    PeerLost,
    Repeat,
    Send,
    SendAsk,
    StartIncrement,
    StartRead,
    StopRenewing,
    Tick,
    Value,
    Word,
    error_info,
    fail,
    failure_of,
)


class LegPhase(Word):
    """Where one leg stands on the target."""

    ASKING = "asking"
    PARKED = "parked"
    RESTING = "resting"
    """A stream: leased, and all that was ready is here; its source computes."""
    MOVING = "moving"
    LANDED = "landed"
    """All bytes are here and verified; the siblings' are not. Nothing is promised yet, so no clock runs."""
    PREPARED = "prepared"
    COMMITTED = "committed"
    INSTALLED = "installed"
    CUTTING = "cutting"
    NOT_INSTALLED = "not_installed"
    CLOSED = "closed"


QUIET = (LegPhase.NOT_INSTALLED, LegPhase.CLOSED)
"""No byte of such a leg can land."""


class ReadEnded(Value, frozen=True):
    """The transport's READ completion: ``error`` is ``None`` if all bytes are here and, with integrity on, verified.

    ``root`` is the root digest of what landed, ``None`` with integrity off. ``number``: the increment's, of a stream.
    """

    attempt: int
    root: bytes | None = None
    error: wire.ErrorInfo | None = None
    number: int = 0


class CutOffDone(Value, frozen=True):
    """The transport's CUT_OFF completion: no byte of the attempt can land any more."""

    attempt: int


class Prepare(Value, frozen=True):
    """From the part: every leg has landed."""


class Switched(Value, frozen=True):
    """From the part: the blocks were handed to the engine."""


class Cut(Value, frozen=True):
    """From the part: it failed, elsewhere."""

    failure: Failure


class LegFailed(Value, frozen=True):
    """To the part: this leg cannot be installed, so none can."""

    failure: Failure


class TargetLeg(Value, frozen=True):
    """One attempt of one leg.

    Attributes:
        peer: the source rank's incarnation.
        attempt: id, never used before by this incarnation.
        phase: where it stands.
        repeat: when its unanswered message is sent again.
        until: when its phase runs out.
        prepared_at: when *prepared* was first sent: the commit's time to live counts from here.
        root: root digest of what landed.
        error: why it was not installed; told to the source.
        dead: its source is proven dead: nobody is left to tell.
        stream: what is here of a stream; ``None`` for a leg that is read at once.
        rests_until: until when a stream may rest, whatever its source says.
    """

    peer: str
    attempt: int
    phase: LegPhase = LegPhase.ASKING
    repeat: Repeat | None = None
    until: float | None = None
    prepared_at: float | None = None
    root: bytes | None = None
    error: wire.ErrorInfo | None = None
    dead: bool = False
    stream: Landing | None = None
    rests_until: float | None = None


Change = tuple[TargetLeg, tuple[object, ...]]


def ask(leg: TargetLeg, at: Moment) -> Change:
    """The leg's first step: send its ask."""
    return replace(leg, repeat=Repeat.start(at.now, at.timing)), (SendAsk(leg.peer, leg.attempt),)


# --- guards ---------------------------------------------------------------------------------------------------


def due(leg: TargetLeg, _event: object, at: Moment) -> bool:
    """A repeat is due."""
    return leg.repeat is not None and at.now >= leg.repeat.at


def over(leg: TargetLeg, _event: object, at: Moment) -> bool:
    """The phase has run out."""
    return leg.until is not None and at.now >= leg.until


def failed(_leg: TargetLeg, event: ReadEnded, _at: Moment) -> bool:
    """The read did not bring verified bytes."""
    return event.error is not None


def late(leg: TargetLeg, event: wire.Commit, at: Moment) -> bool:
    """The commit's time to live, counted from first sending *prepared*, is over."""
    return leg.prepared_at is None or at.now >= leg.prepared_at + event.ttl_seconds


def other_root(leg: TargetLeg, event: wire.Commit, _at: Moment) -> bool:
    """The source committed other bytes than those that landed."""
    return leg.root is not None and event.root is not None and leg.root != event.root


def dead(leg: TargetLeg, _event: object, _at: Moment) -> bool:
    """Nobody is left to tell."""
    return leg.dead


def streams(leg: TargetLeg, _event: object, _at: Moment) -> bool:
    """Its source is still computing."""
    return leg.stream is not None


def following(leg: TargetLeg, event: wire.Advance, _at: Moment) -> bool:
    """The next increment; a late or repeated one changes nothing, and one too early will come again."""
    return leg.stream is not None and leg.stream.expects(event)


def landed_before(leg: TargetLeg, event: wire.Advance, _at: Moment) -> bool:
    """Our word of it was lost."""
    return leg.stream is not None and event.number <= leg.stream.landed


def completes(leg: TargetLeg, event: ReadEnded, _at: Moment) -> bool:
    """With it, all that the seal covers is here."""
    return leg.stream is None or leg.stream.land(event.number, event.root).whole


def leaves_none(leg: TargetLeg, event: ReadEnded, _at: Moment) -> bool:
    """With it, all that was told so far is here."""
    return leg.stream is not None and leg.stream.land(event.number, event.root).resting


# --- effects --------------------------------------------------------------------------------------------------


def ask_again(leg: TargetLeg, _event: Tick, at: Moment) -> Change:
    """Repeat the ask."""
    return _repeated(leg, at), (SendAsk(leg.peer, leg.attempt),)


def park(leg: TargetLeg, _event: wire.Parked, at: Moment) -> Change:
    """Wait for the source, by our own bound: its word for how long it keeps the ask is only a hint."""
    return replace(leg, until=at.now + at.timing.park_seconds), ()


def start_read(leg: TargetLeg, event: wire.Lease, _at: Moment) -> Change:
    """The lease is ours: read."""
    return replace(leg, repeat=None, until=None), (StartRead(leg.peer, leg.attempt, event),)


def rest(leg: TargetLeg, _event: wire.Lease, at: Moment) -> Change:
    """The lease is ours; increments will be told."""
    return _resting(replace(leg, rests_until=at.now + at.timing.stream_seconds), at), ()


def rest_on(leg: TargetLeg, _event: wire.Parked, at: Moment) -> Change:
    """The source lives, and computes: for as long as we let it, since nobody else bounds what it says of itself."""
    return replace(leg, until=_rests(leg, at)), ()


def take_increment(leg: TargetLeg, event: wire.Advance, _at: Moment) -> Change:
    """Read it. Its source exposes only so many at a time, so it has withdrawn what lies a window behind."""
    if leg.stream is None:
        return leg, ()
    behind = event.number - limits.STREAM_WINDOW
    stop = (StopRenewing(leg.peer, leg.attempt, behind),) if behind > 0 else ()
    leg = replace(leg, stream=leg.stream.take(event), repeat=None, until=None)
    return leg, (*stop, StartIncrement(leg.peer, leg.attempt, event))


def keep_root(leg: TargetLeg, event: ReadEnded, _at: Moment) -> Change:
    """All bytes are here. Of a stream, *prepared* will say so."""
    if leg.stream is None:
        return replace(leg, root=event.root), ()
    stream = leg.stream.land(event.number, event.root)
    return replace(leg, stream=stream, root=stream.root), ()


def land(leg: TargetLeg, event: ReadEnded, _at: Moment) -> Change:
    """One more is here. The source makes room for others when it hears so."""
    if leg.stream is None:
        return leg, ()
    stream = leg.stream.land(event.number, event.root)
    told = (_landed(leg, stream),) if stream.landed > leg.stream.landed else ()
    return replace(leg, stream=stream), told


def land_and_rest(leg: TargetLeg, event: ReadEnded, at: Moment) -> Change:
    """All that was told is here; say so until more is told."""
    leg, told = land(leg, event, at)
    return _resting(leg, at), told


def landed_again(leg: TargetLeg, event: Tick | wire.Advance, at: Moment) -> Change:
    """Say again what is here; whoever is asked for it in vain lets the clock run on."""
    if leg.stream is None:
        return leg, ()
    told = _landed(leg, leg.stream)
    return (_repeated(leg, at) if isinstance(event, Tick) else leg), (told,)


def cut_resting(leg: TargetLeg, _event: Tick, at: Moment) -> Change:
    """The source lives, and says nothing of this stream."""
    text = f"{leg.peer} said nothing of its stream for {at.timing.rest_seconds:g} s, and has not sealed it"
    if leg.rests_until is not None and at.now >= leg.rests_until:
        text = f"{leg.peer} has not sealed its stream within {at.timing.stream_seconds:g} s of its lease"
    return _failing(leg, fail(End.EXPIRED, errors.DeadlineError, text), at)


def send_prepared(leg: TargetLeg, _event: Prepare, at: Moment) -> Change:
    """Start the clock of the commit, then ask for it."""
    leg = replace(
        leg,
        prepared_at=at.now,
        until=at.now + at.timing.commit_ttl_seconds,
        repeat=Repeat.start(at.now, at.timing),
    )
    return leg, (_prepared(leg),)


def prepared_again(leg: TargetLeg, _event: Tick, at: Moment) -> Change:
    """Repeat *prepared*; the clock of its first sending runs on."""
    return _repeated(leg, at), (_prepared(leg),)


def take_commit(leg: TargetLeg, event: wire.Commit, _at: Moment) -> Change:
    """Hold the right to install until the time to live is over."""
    started = leg.prepared_at or 0.0
    increments = 0 if leg.stream is None else leg.stream.landed
    stop = StopRenewing(leg.peer, leg.attempt, increments)
    return replace(leg, repeat=None, until=started + event.ttl_seconds), (stop,)


def send_installed(leg: TargetLeg, _event: Switched, at: Moment) -> Change:
    """Tell the source, until it acknowledges or the bound of telling."""
    return _telling(leg, at), (Send(leg.peer, wire.Installed(attempt=leg.attempt)),)


def installed_again(leg: TargetLeg, _event: Tick, at: Moment) -> Change:
    """Repeat *installed*."""
    return _repeated(leg, at), (Send(leg.peer, wire.Installed(attempt=leg.attempt)),)


def send_not_installed(leg: TargetLeg, _event: object, at: Moment) -> Change:
    """Tell the source that this attempt never will be installed."""
    return _telling(leg, at), (_not_installed(leg),)


def not_installed_again(leg: TargetLeg, _event: Tick, at: Moment) -> Change:
    """Repeat *not installed*."""
    return _repeated(leg, at), (_not_installed(leg),)


def mark_dead(leg: TargetLeg, _event: PeerDead, _at: Moment) -> Change:
    """Remember that nobody is left to tell."""
    return replace(leg, dead=True), ()


def cut_with_siblings(leg: TargetLeg, event: Cut, at: Moment) -> Change:
    """The part failed elsewhere: cut this leg's read off."""
    return _cut(leg, event.failure, at)


def tell_with_siblings(leg: TargetLeg, event: Cut, at: Moment) -> Change:
    """The part failed elsewhere before this leg read a byte."""
    return send_not_installed(replace(leg, error=event.failure.error), event, at)


def refused(leg: TargetLeg, event: wire.Refused | wire.Revoked, _at: Moment) -> Change:
    """No lease: nothing was read, and the source knows."""
    failure = failure_of(event.error)
    return replace(leg, error=event.error, repeat=None, until=None), (LegFailed(failure),)


def cut_refused(leg: TargetLeg, event: wire.Refused | wire.Revoked, at: Moment) -> Change:
    """The source ended the attempt while, or after, we read."""
    return _failing(leg, failure_of(event.error), at)


def cut_failed_read(leg: TargetLeg, event: ReadEnded, at: Moment) -> Change:
    """The read failed. It is cut off all the same: only that completion says that nothing can land."""
    error = event.error or error_info(errors.TransportError, "the read ended without a word")
    return _failing(leg, failure_of(error), at)


def cut_late(leg: TargetLeg, _event: object, at: Moment) -> Change:
    """The right to install is over, or never came."""
    text = "no commit, or not those of all legs, within the time to live counted from first sending prepared"
    return _failing(leg, fail(End.EXPIRED, errors.ExpiredError, text), at)


def cut_other_root(leg: TargetLeg, event: wire.Commit, at: Moment) -> Change:
    """Name both roots."""
    ours, theirs = (leg.root or b"").hex(), (event.root or b"").hex()
    text = f"root digest differs: {ours} landed here, {leg.peer} committed {theirs}"
    return _failing(leg, fail(End.FAILED, errors.IntegrityError, text), at)


def cut_lost(leg: TargetLeg, _event: PeerLost, at: Moment) -> Change:
    """The source fell silent before it committed."""
    return _failing(leg, _lost(leg), at)


def cut_dead(leg: TargetLeg, _event: PeerDead, at: Moment) -> Change:
    """The source died before it committed."""
    return _failing(replace(leg, dead=True), _died(leg), at)


def unread_lost(leg: TargetLeg, event: PeerLost, at: Moment) -> Change:
    """The source fell silent before we read a byte; it may hold a lease for us, so it is told if it comes back."""
    leg = replace(leg, error=_lost(leg).error)
    leg, actions = send_not_installed(leg, event, at)
    return leg, (*actions, LegFailed(_lost(leg)))


def unread_dead(leg: TargetLeg, _event: PeerDead, _at: Moment) -> Change:
    """The source died before we read a byte."""
    failure = _died(leg)
    return replace(leg, error=failure.error, dead=True, repeat=None, until=None), (LegFailed(failure),)


def unpark_late(leg: TargetLeg, event: Tick, at: Moment) -> Change:
    """The source never came to know the key, or never sealed it."""
    why = "does not know the key, or its prefill has not sealed it"
    text = f"parked for {at.timing.park_seconds:g} s: {leg.peer} {why}"
    failure = fail(End.EXPIRED, errors.DeadlineError, text)
    leg, actions = send_not_installed(replace(leg, error=failure.error), event, at)
    return leg, (*actions, LegFailed(failure))


def close(leg: TargetLeg, _event: object, _at: Moment) -> Change:
    """Told, or nobody to tell."""
    return replace(leg, repeat=None, until=None), ()


def _repeated(leg: TargetLeg, at: Moment) -> TargetLeg:
    return replace(leg, repeat=leg.repeat and leg.repeat.again(at.now, at.timing))


def _telling(leg: TargetLeg, at: Moment) -> TargetLeg:
    return replace(leg, repeat=Repeat.start(at.now, at.timing), until=at.now + at.timing.tell_seconds)


def _resting(leg: TargetLeg, at: Moment) -> TargetLeg:
    return replace(leg, repeat=Repeat.start(at.now, at.timing), until=_rests(leg, at))


def _rests(leg: TargetLeg, at: Moment) -> float:
    bound = at.now + at.timing.rest_seconds
    return bound if leg.rests_until is None else min(bound, leg.rests_until)


def _landed(leg: TargetLeg, stream: Landing) -> Send:
    return Send(leg.peer, wire.Landed(attempt=leg.attempt, increments=stream.landed))


def _prepared(leg: TargetLeg) -> Send:
    if leg.stream is None:
        return Send(leg.peer, wire.Prepared(attempt=leg.attempt, root=leg.root))
    increments, content = leg.stream.landed, leg.stream.content
    prepared = wire.Prepared(attempt=leg.attempt, root=leg.root, increments=increments, content=content)
    return Send(leg.peer, prepared)


def _not_installed(leg: TargetLeg) -> Send:
    error = leg.error or error_info(errors.TransferError, "not installed")
    return Send(leg.peer, wire.NotInstalled(attempt=leg.attempt, error=error))


def _cut(leg: TargetLeg, failure: Failure, _at: Moment) -> Change:
    return replace(leg, error=failure.error, repeat=None, until=None), (CutOff(leg.peer, leg.attempt),)


def _failing(leg: TargetLeg, failure: Failure, at: Moment) -> Change:
    leg, actions = _cut(leg, failure, at)
    return leg, (*actions, LegFailed(failure))


def _lost(leg: TargetLeg) -> Failure:
    text = f"{leg.peer} fell silent while attempt {leg.attempt} was {leg.phase.value}"
    return fail(End.FAILED, errors.PeerLostError, text)


def _died(leg: TargetLeg) -> Failure:
    text = f"{leg.peer} is gone; attempt {leg.attempt} was {leg.phase.value}"
    return fail(End.FAILED, errors.PeerRestartedError, text)


# --- the table ------------------------------------------------------------------------------------------------

P = LegPhase
TARGET_LEG_EVENTS = (
    wire.Lease, wire.Parked, wire.Refused, wire.Revoked, wire.Advance, wire.Commit, wire.Ack, ReadEnded, CutOffDone,
    PeerLost, PeerDead, Prepare, Switched, Cut, Tick,
)  # fmt: skip

_unread = row(
    on(wire.Lease, Edge(P.RESTING, rest, streams), Edge(P.MOVING, start_read)),
    on(wire.Refused, Edge(P.CLOSED, refused)),
    on(wire.Revoked, Edge(P.CLOSED, refused)),
    on(PeerLost, Edge(P.NOT_INSTALLED, unread_lost)),
    on(PeerDead, Edge(P.CLOSED, unread_dead)),
    on(Cut, Edge(P.NOT_INSTALLED, tell_with_siblings)),
    inert(wire.Advance, wire.Commit, wire.Ack, ReadEnded, CutOffDone, Prepare, Switched),
)
_uncommitted = row(
    on(wire.Refused, Edge(P.CUTTING, cut_refused)),
    on(wire.Revoked, Edge(P.CUTTING, cut_refused)),
    on(PeerLost, Edge(P.CUTTING, cut_lost)),
    on(PeerDead, Edge(P.CUTTING, cut_dead)),
    on(Cut, Edge(P.CUTTING, cut_with_siblings)),
    inert(wire.Lease, wire.Ack, CutOffDone, Switched),
)
# Once nothing of the leg can change any more, all that is left is to tell, and to stop telling.
_told = row(
    on(wire.Ack, Edge(P.CLOSED, close)),
    on(PeerDead, Edge(P.CLOSED, close)),
    inert(wire.Lease, wire.Parked, wire.Refused, wire.Revoked, wire.Advance, wire.Commit, ReadEnded, CutOffDone),
    inert(PeerLost, Prepare, Switched, Cut),
)

TARGET_LEG = total(
    P,
    TARGET_LEG_EVENTS,
    {
        P.ASKING: row(_unread, on(wire.Parked, Edge(P.PARKED, park)), on(Tick, Edge(None, ask_again, due))),
        P.PARKED: row(
            _unread,
            inert(wire.Parked),
            on(Tick, Edge(P.NOT_INSTALLED, unpark_late, over), Edge(None, ask_again, due)),
        ),
        P.RESTING: row(
            _uncommitted,
            on(wire.Parked, Edge(None, rest_on)),
            on(wire.Advance, Edge(P.MOVING, take_increment, following), Edge(None, landed_again, landed_before)),
            on(Tick, Edge(P.CUTTING, cut_resting, over), Edge(None, landed_again, due)),
            inert(wire.Commit, ReadEnded, Prepare),
        ),
        P.MOVING: row(
            _uncommitted,
            on(wire.Advance, Edge(None, take_increment, following)),
            on(
                ReadEnded,
                Edge(P.CUTTING, cut_failed_read, failed),
                Edge(P.LANDED, keep_root, completes),
                Edge(P.RESTING, land_and_rest, leaves_none),
                Edge(None, land),
            ),
            inert(wire.Parked, wire.Commit, Prepare, Tick),
        ),
        P.LANDED: row(
            _uncommitted,
            on(Prepare, Edge(P.PREPARED, send_prepared)),
            inert(wire.Parked, wire.Advance, wire.Commit, ReadEnded, Tick),
        ),
        P.PREPARED: row(
            _uncommitted,
            on(
                wire.Commit,
                Edge(P.CUTTING, cut_late, late),
                Edge(P.CUTTING, cut_other_root, other_root),
                Edge(P.COMMITTED, take_commit),
            ),
            on(Tick, Edge(P.CUTTING, cut_late, over), Edge(None, prepared_again, due)),
            inert(wire.Parked, wire.Advance, ReadEnded, Prepare),
        ),
        # The source has promised and cannot take it back: its silence, death or second thoughts change nothing.
        P.COMMITTED: row(
            on(Switched, Edge(P.INSTALLED, send_installed)),
            on(Cut, Edge(P.CUTTING, cut_with_siblings)),
            on(PeerDead, Edge(None, mark_dead)),
            on(Tick, Edge(P.CUTTING, cut_late, over)),
            inert(wire.Lease, wire.Parked, wire.Refused, wire.Revoked, wire.Advance, wire.Commit, wire.Ack),
            inert(ReadEnded, CutOffDone, PeerLost, Prepare),
        ),
        P.INSTALLED: row(_told, on(Tick, Edge(P.CLOSED, close, over), Edge(None, installed_again, due))),
        P.CUTTING: row(
            on(CutOffDone, Edge(P.CLOSED, close, dead), Edge(P.NOT_INSTALLED, send_not_installed)),
            on(PeerDead, Edge(None, mark_dead)),
            inert(wire.Lease, wire.Parked, wire.Refused, wire.Revoked, wire.Advance, wire.Commit, wire.Ack),
            inert(ReadEnded, PeerLost, Prepare, Switched, Cut, Tick),
        ),
        P.NOT_INSTALLED: row(_told, on(Tick, Edge(P.CLOSED, close, over), Edge(None, not_installed_again, due))),
        P.CLOSED: row(inert(*TARGET_LEG_EVENTS)),
    },
)
