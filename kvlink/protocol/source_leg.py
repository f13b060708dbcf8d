"""One leg on the source: what one target rank's latest attempt may do, as a table. `kvlink.protocol.source` owns it."""

from __future__ import annotations

from msgspec.structs import replace

from kvlink import errors, wire
from kvlink.layout import Frontier
from kvlink.protocol.increments import Offering
from kvlink.protocol.table import Edge, Moment, inert, on, row, total
from kvlink.protocol.vocabulary import (
    End,
    ExposeIncrement,
    Failure,
    PeerDead,
    PeerLost,
    Send,
    SendAdvance,
    Tick,
    Value,
    Withdraw,
    Word,
    fail,
    failure_of,
)


class LegPhase(Word):
    """Where one leg stands on the source."""

    LEASED = "leased"
    COMMITTED = "committed"
    INSTALLED = "installed"
    NOT_INSTALLED = "not_installed"
    """The target said so, is proven dead, or was refused its commit."""
    LAPSED = "lapsed"
    REVOKED = "revoked"
    INDETERMINATE = "indeterminate"
    """Committed, and never told how it went."""


BUSY = (LegPhase.LEASED, LegPhase.COMMITTED)
"""The leg keeps the hold alive."""
FREE = (LegPhase.NOT_INSTALLED, LegPhase.LAPSED, LegPhase.REVOKED)
"""Known not to be installed: another attempt may be leased, and committed."""
GONE = (errors.PeerLostError.code, errors.PeerRestartedError.code)
"""Errors that say that the target is gone."""


class PreparedArrived(Value, frozen=True):
    """`wire.Prepared`, with the transport's verdict taken just before the step.

    Attributes:
        peer: whose connection carried it.
        attempt: the attempt.
        root: root digest of what landed, ``None`` with integrity off.
        lease_held: `LeaseReport.held`: the lease never lapsed up to now. A stream's were judged as each landed.
        source_root: `LeaseReport.root`, as 8 bytes, or ``None``. A stream's is known here.
        increments: of a stream, as many as the target has.
        content: digest of the descriptor that the target has all of, of a stream.
    """

    peer: str
    attempt: int
    root: bytes | None
    lease_held: bool
    source_root: bytes | None
    increments: int = 0
    content: str | None = None


class LandedArrived(Value, frozen=True):
    """`wire.Landed`, once for each increment that it tells of, with the transport's last word on that.

    Attributes:
        peer: whose connection carried it.
        attempt: the attempt.
        number: the increment's; of one that was told before, what the target repeats.
        held: its lease never lapsed.
        root: the source's root digest of it, as 8 bytes, or ``None``.
    """

    peer: str
    attempt: int
    number: int
    held: bool = True
    root: bytes | None = None


class Ahead(Value, frozen=True):
    """From the part: the KV is ready so far; ``content`` names its descriptor once it is sealed."""

    ready: Frontier
    content: str | None = None


class LeaseLapsed(Value, frozen=True):
    """The transport's LEASE_LAPSED: the attempt went unrenewed for the lease's length."""

    peer: str
    attempt: int


class Revoke(Value, frozen=True):
    """From the part: end the attempt if it is not committed."""

    failure: Failure


class LegEnded(Value, frozen=True):
    """To the part: the attempt ended without being installed."""

    failure: Failure


class SourceLeg(Value, frozen=True, kw_only=True):
    """The latest attempt of one target rank.

    Attributes:
        peer: the target rank's incarnation.
        engine: the target engine's incarnation, which all its ranks share.
        attempt: the attempt.
        until: when the phase runs out.
        phase: where it stands.
        root: root digest committed.
        error: why it was not installed.
        attempts: attempts leased to this peer so far.
        stream: what it was told of a stream; ``None`` if it reads all at once.
        seconds: how long it may take from its lease; a stream, from each increment up to the seal.
    """

    peer: str
    engine: str
    attempt: int
    until: float | None
    phase: LegPhase = LegPhase.LEASED
    root: bytes | None = None
    error: wire.ErrorInfo | None = None
    attempts: int = 1
    stream: Offering | None = None
    seconds: float = 0.0


Change = tuple[SourceLeg, tuple[object, ...]]


# --- guards ---------------------------------------------------------------------------------------------------


def over(leg: SourceLeg, _event: object, at: Moment) -> bool:
    """The phase has run out."""
    return leg.until is not None and at.now >= leg.until


def lapsed(_leg: SourceLeg, event: PreparedArrived, _at: Moment) -> bool:
    """The lease did not hold to the end of the read: the blocks may have been reused under it."""
    return not event.lease_held


def other_root(leg: SourceLeg, event: PreparedArrived, _at: Moment) -> bool:
    """Other bytes landed than those that lie here."""
    return event.root is not None and (here := _root(leg, event)) is not None and event.root != here


def unfinished(leg: SourceLeg, event: PreparedArrived, _at: Moment) -> bool:
    """The target has not all that the seal covers, or something else beside it."""
    if leg.stream is None:
        return event.increments > 0 or event.content is not None
    return not leg.stream.closes(event.increments, event.content)


def streams(leg: SourceLeg, _event: object, _at: Moment) -> bool:
    """It is told increment by increment."""
    return leg.stream is not None


def lands(leg: SourceLeg, event: LandedArrived, _at: Moment) -> bool:
    """The next increment that was told."""
    return leg.stream is not None and leg.stream.landed < leg.stream.exposed and event.number == leg.stream.landed + 1


def lapsed_increment(leg: SourceLeg, event: LandedArrived, at: Moment) -> bool:
    """Its lease did not hold to the end of its read."""
    return lands(leg, event, at) and not event.held


def told_before(leg: SourceLeg, event: LandedArrived, _at: Moment) -> bool:
    """The target waits for what follows; what followed was lost, or is not computed yet."""
    return leg.stream is not None and event.number <= leg.stream.landed


def final(leg: SourceLeg, event: wire.NotInstalled, _at: Moment) -> bool:
    """Nobody will ask afresh, and the part has not heard so from this leg."""
    return not event.error.retryable and (leg.error is None or leg.error.retryable)


def unmourned(leg: SourceLeg, _event: PeerLost | PeerDead, _at: Moment) -> bool:
    """The part has not heard from this leg that its target is gone; once is enough, however often it comes and goes."""
    return leg.error is None or leg.error.code not in GONE


# --- effects --------------------------------------------------------------------------------------------------


def commit(leg: SourceLeg, event: PreparedArrived, at: Moment) -> Change:
    """Promise, and only then put away what was read: a request waits for the one, nobody for the other.

    The target's clock started before ours and has no margin, so ours always ends last.
    """
    ends = at.now + at.timing.commit_ttl_seconds + at.timing.drift_margin_seconds
    leg = replace(leg, root=_root(leg, event), until=ends)
    return leg, (_commit(leg, at), Withdraw(leg.peer, leg.attempt))


def commit_again(leg: SourceLeg, _event: PreparedArrived, at: Moment) -> Change:
    """The same answer; the clock of the first runs on."""
    return leg, (_commit(leg, at),)


def refuse_lapsed(leg: SourceLeg, _event: PreparedArrived | LandedArrived, _at: Moment) -> Change:
    """No commit, for good (A6)."""
    return _refusing(leg, _lapse(leg))


def refuse_root(leg: SourceLeg, event: PreparedArrived, _at: Moment) -> Change:
    """No commit: name both roots."""
    ours, theirs = (_root(leg, event) or b"").hex(), (event.root or b"").hex()
    text = f"root digest differs: {ours} lies here, {theirs} landed at {leg.peer}"
    return _refusing(leg, fail(End.FAILED, errors.IntegrityError, text))


def refuse_unfinished(leg: SourceLeg, event: PreparedArrived, _at: Moment) -> Change:
    """No commit: only what the seal covers is ever installed, and all of it."""
    here = "nothing streamed" if leg.stream is None else f"{leg.stream.exposed} increments of {leg.stream.content}"
    text = f"{leg.peer} has {event.increments} increments of {event.content}; here are {here}"
    return _refusing(leg, fail(End.FAILED, errors.ConflictError, text))


def advance(leg: SourceLeg, at: Moment) -> Change:
    """Tell the target of what has become ready, if it has room; else it will be told when it has."""
    if leg.stream is None or not leg.stream.may_expose:
        return leg, ()
    stream = leg.stream.expose()
    leg = replace(leg, stream=stream, until=at.now + leg.seconds)
    exposed = ExposeIncrement(leg.peer, leg.attempt, stream.exposed, stream.told, stream.sealed)
    return leg, (exposed, SendAdvance(leg.peer, leg.attempt, stream.exposed))


def advance_again(leg: SourceLeg, since: int = 0) -> tuple[SendAdvance, ...]:
    """Say again what may be read, and has not landed; but for the first ``since``."""
    if leg.stream is None:
        return ()
    told = range(max(since, leg.stream.landed) + 1, leg.stream.exposed + 1)
    return tuple(SendAdvance(leg.peer, leg.attempt, number) for number in told)


def hear_ahead(leg: SourceLeg, event: Ahead, at: Moment) -> Change:
    """More is ready, or all is."""
    if leg.stream is None:
        return leg, ()
    return advance(replace(leg, stream=replace(leg.stream, ready=event.ready, content=event.content)), at)


def record_landed(leg: SourceLeg, event: LandedArrived, at: Moment) -> Change:
    """It was read under its lease; there is room for the next."""
    if leg.stream is None:
        return leg, ()
    return advance(replace(leg, stream=leg.stream.land(event.root)), at)


def landed_again(leg: SourceLeg, event: LandedArrived, at: Moment) -> Change:
    """Say again what follows, or that nothing does yet."""
    follows = advance_again(leg, event.number)
    parked = wire.Parked(attempt=leg.attempt, park_seconds=at.timing.rest_seconds)
    return leg, follows or (Send(leg.peer, parked),)


def refuse_again(leg: SourceLeg, _event: PreparedArrived | LandedArrived, _at: Moment) -> Change:
    """The attempt is over: say why, again."""
    return leg, (() if leg.error is None else (Send(leg.peer, wire.Refused(attempt=leg.attempt, error=leg.error)),))


def record_installed(leg: SourceLeg, _event: wire.Installed, _at: Moment) -> Change:
    """Record, then acknowledge."""
    return replace(leg, until=None, error=None), (_ack(leg),)


def record_not_installed(leg: SourceLeg, event: wire.NotInstalled, _at: Moment) -> Change:
    """Record, then acknowledge. The target's own cut-off is behind it."""
    leg = replace(leg, until=None, error=event.error)
    return leg, (Withdraw(leg.peer, leg.attempt), _ack(leg), LegEnded(failure_of(event.error)))


def record_final(leg: SourceLeg, event: wire.NotInstalled, _at: Moment) -> Change:
    """It was over before, and might have been asked for afresh: now it never will be."""
    return replace(leg, error=event.error), (_ack(leg), LegEnded(failure_of(event.error)))


def acknowledge(leg: SourceLeg, _event: wire.Installed | wire.NotInstalled, _at: Moment) -> Change:
    """Recorded before: only the acknowledgement was lost."""
    return leg, (_ack(leg),)


def revoke_lapsed(leg: SourceLeg, _event: LeaseLapsed, _at: Moment) -> Change:
    """The target fell silent for the lease's length; tell it, should it be listening (B5)."""
    return _revoking(leg, _lapse(leg))


def revoke(leg: SourceLeg, event: Revoke, _at: Moment) -> Change:
    """The part ends, or another attempt takes over."""
    return _revoking(leg, event.failure)


def revoke_overdue(leg: SourceLeg, _event: Tick, _at: Moment) -> Change:
    """A target that renews for ever and never ends holds our blocks for ever: not so."""
    text = f"attempt {leg.attempt} of {leg.peer} did not end within its own deadline and a margin"
    return _revoking(leg, fail(End.EXPIRED, errors.DeadlineError, text))


def revoke_lost(leg: SourceLeg, _event: PeerLost, _at: Moment) -> Change:
    """Nobody reads any more, and what cannot renew cannot commit."""
    return _revoking(leg, fail(End.FAILED, errors.PeerLostError, f"{leg.peer} fell silent while it read"))


def record_gone(leg: SourceLeg, event: PeerLost | PeerDead, _at: Moment) -> Change:
    """The attempt was over before (its lease lapsed, say), and now whoever might have asked afresh is gone."""
    kind = errors.PeerLostError if isinstance(event, PeerLost) else errors.PeerRestartedError
    failure = fail(End.FAILED, kind, f"{leg.peer} is gone; its attempt {leg.attempt} had ended uninstalled")
    return replace(leg, error=failure.error), (LegEnded(failure),)


def record_dead(leg: SourceLeg, _event: PeerDead, _at: Moment) -> Change:
    """Whatever it installed died with it."""
    failure = fail(End.FAILED, errors.PeerRestartedError, f"{leg.peer} is gone; attempt {leg.attempt} died with it")
    leg = replace(leg, until=None, error=failure.error)
    return leg, (Withdraw(leg.peer, leg.attempt), LegEnded(failure))


def give_up(leg: SourceLeg, _event: Tick, at: Moment) -> Change:
    """Never told: it may be installed or not, and nobody may act as if he knew."""
    waited = at.timing.commit_ttl_seconds + at.timing.drift_margin_seconds
    text = f"{leg.peer} did not say within {waited:g} s of its commit whether it installed attempt {leg.attempt}"
    failure = fail(End.INDETERMINATE, errors.IndeterminateError, text)
    return replace(leg, until=None, error=failure.error), (LegEnded(failure),)


def _root(leg: SourceLeg, event: PreparedArrived) -> bytes | None:
    return event.source_root if leg.stream is None else leg.stream.root


def _commit(leg: SourceLeg, at: Moment) -> Send:
    ttl = at.timing.commit_ttl_seconds
    return Send(leg.peer, wire.Commit(attempt=leg.attempt, ttl_seconds=ttl, root=leg.root))


def _ack(leg: SourceLeg) -> Send:
    return Send(leg.peer, wire.Ack(attempt=leg.attempt))


def _lapse(leg: SourceLeg) -> Failure:
    text = f"the lease of attempt {leg.attempt} lapsed before {leg.peer} had read it; ask again in a fresh attempt"
    return fail(End.EXPIRED, errors.LeaseLapsedError, text)


def _refusing(leg: SourceLeg, failure: Failure) -> Change:
    leg = replace(leg, until=None, error=failure.error)
    refusal = Send(leg.peer, wire.Refused(attempt=leg.attempt, error=failure.error))
    return leg, (Withdraw(leg.peer, leg.attempt), refusal, LegEnded(failure))


def _revoking(leg: SourceLeg, failure: Failure) -> Change:
    leg = replace(leg, until=None, error=failure.error)
    revoked = Send(leg.peer, wire.Revoked(attempt=leg.attempt, error=failure.error))
    return leg, (Withdraw(leg.peer, leg.attempt), revoked, LegEnded(failure))


# --- the table ------------------------------------------------------------------------------------------------

P = LegPhase
SOURCE_LEG_EVENTS = (
    Ahead, LandedArrived, PreparedArrived, wire.Installed, wire.NotInstalled, LeaseLapsed, PeerLost, PeerDead, Revoke,
    Tick,
)  # fmt: skip

_over_and_told = row(
    on(LandedArrived, Edge(None, refuse_again)),
    on(PreparedArrived, Edge(None, refuse_again)),
    on(wire.Installed, Edge(None, acknowledge)),
    on(wire.NotInstalled, Edge(None, record_final, final), Edge(None, acknowledge)),
    on(PeerLost, Edge(None, record_gone, unmourned)),
    on(PeerDead, Edge(None, record_gone, unmourned)),
    inert(Ahead, LeaseLapsed, Revoke, Tick),
)

SOURCE_LEG = total(
    P,
    SOURCE_LEG_EVENTS,
    {
        P.LEASED: row(
            on(Ahead, Edge(None, hear_ahead, streams)),
            on(
                LandedArrived,
                Edge(P.LAPSED, refuse_lapsed, lapsed_increment),
                Edge(None, record_landed, lands),
                Edge(None, landed_again, told_before),
            ),
            on(
                PreparedArrived,
                Edge(P.LAPSED, refuse_lapsed, lapsed),
                Edge(P.NOT_INSTALLED, refuse_unfinished, unfinished),
                Edge(P.NOT_INSTALLED, refuse_root, other_root),
                Edge(P.COMMITTED, commit),
            ),
            on(wire.NotInstalled, Edge(P.NOT_INSTALLED, record_not_installed)),
            on(LeaseLapsed, Edge(P.LAPSED, revoke_lapsed)),
            on(PeerLost, Edge(P.REVOKED, revoke_lost)),
            on(PeerDead, Edge(P.NOT_INSTALLED, record_dead)),
            on(Revoke, Edge(P.REVOKED, revoke)),
            on(Tick, Edge(P.REVOKED, revoke_overdue, over)),
            inert(wire.Installed),  # never committed: a lie, and it earns no acknowledgement
        ),
        # Promised: neither the lease's end nor our own change of mind takes it back.
        P.COMMITTED: row(
            on(PreparedArrived, Edge(None, commit_again)),
            on(wire.Installed, Edge(P.INSTALLED, record_installed)),
            on(wire.NotInstalled, Edge(P.NOT_INSTALLED, record_not_installed)),
            on(PeerDead, Edge(P.NOT_INSTALLED, record_dead)),
            on(Tick, Edge(P.INDETERMINATE, give_up, over)),
            inert(Ahead, LandedArrived, LeaseLapsed, PeerLost, Revoke),
        ),
        P.INSTALLED: row(
            on(wire.Installed, Edge(None, acknowledge)),
            on(wire.NotInstalled, Edge(None, acknowledge)),
            on(PeerDead, Edge(P.NOT_INSTALLED, record_dead)),
            inert(Ahead, LandedArrived, PreparedArrived, LeaseLapsed, PeerLost, Revoke, Tick),
        ),
        P.NOT_INSTALLED: _over_and_told,
        P.LAPSED: _over_and_told,
        P.REVOKED: _over_and_told,
        # Too late for the report, never too late to know.
        P.INDETERMINATE: row(
            on(LandedArrived, Edge(None, refuse_again)),
            on(PreparedArrived, Edge(None, refuse_again)),
            on(wire.Installed, Edge(P.INSTALLED, record_installed)),
            on(wire.NotInstalled, Edge(P.NOT_INSTALLED, record_not_installed)),
            on(PeerDead, Edge(P.NOT_INSTALLED, record_dead)),
            inert(Ahead, LeaseLapsed, PeerLost, Revoke, Tick),
        ),
    },
)
