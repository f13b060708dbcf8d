"""One request on all ranks of a target engine, at the rank that coordinates them: visible on all of them or on none.

Nothing is visible before every part is installed, and no source hears *installed* before that. The decision is in this
state before anybody hears of it, so whoever asks again gets the same word. The coordinator only answers; the ranks
(`kvlink.protocol.membership`) repeat. Its own part is one of them, and comes last: *done* there means visible on all.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from msgspec.structs import replace

from kvlink import errors, limits, wire
from kvlink.protocol.table import Edge, Moment, fire, inert, on, row, settle, total
from kvlink.protocol.vocabulary import Action, PeerDead, PeerLost, Send, Tick, Timing, Value, Word, error_info
from kvlink.wire import Stage, Verdict


class GroupPhase(Word):
    """Where a request stands, over all ranks."""

    GATHERING = "gathering"
    """Parts begin and land."""
    PROCEEDING = "proceeding"
    """All have landed: they are being committed and installed."""
    REVEALING = "revealing"
    """All are installed: the others become visible."""
    SHOWING = "showing"
    """The others are visible: ours becomes so."""
    DOUBTFUL = "doubtful"
    """Some are visible, and of one it is not known. The engine has lost a rank."""
    ABANDONED = "abandoned"
    CLOSED = "closed"
    """Nothing is left to do: the driver forgets the group."""


class Stood(Value, frozen=True):
    """`wire.Stands`, from the rank whose connection carried it."""

    peer: str
    message: wire.Stands


class AllLanded(Value, frozen=True):
    """Every rank's part has landed."""


class AllInstalled(Value, frozen=True):
    """Every rank's part is installed."""


class OthersRevealed(Value, frozen=True):
    """Every rank's but ours is visible."""


class AllRevealed(Value, frozen=True):
    """Every rank's is."""


class AllOver(Value, frozen=True):
    """No part of this try lives any more."""


GroupEvent = Stood | PeerLost | PeerDead | Tick
_RISING = (Stage.JOINED, Stage.LANDED, Stage.INSTALLED, Stage.LEAVING, Stage.REVEALED)
_BEGUN = (Stage.JOINED, Stage.LANDED)


class Member(Value, frozen=True):
    """One rank, and its part: the number 0 before it has begun one. Parts up to ``past`` are of earlier gatherings.

    ``tokens``: one past the part's last position, once that is known.
    """

    peer: str
    part: int = 0
    stage: Stage | None = None
    past: int = 0
    tokens: int | None = None


class Group(Value, frozen=True, kw_only=True):
    """One try of a request on all ranks of an engine.

    Attributes:
        key: the request's key.
        number: of this gathering; never used before by this incarnation.
        own: the coordinator's own rank.
        members: every rank, in order.
        timing: its clocks.
        until: when the phase runs out.
        phase: where it stands.
        content: what the first part stated.
        error: why it was abandoned, or is in doubt.
    """

    key: str
    number: int
    own: str
    members: tuple[Member, ...]
    timing: Timing
    until: float
    phase: GroupPhase = GroupPhase.GATHERING
    content: str | None = None
    error: wire.ErrorInfo | None = None

    def member(self, peer: str) -> Member:
        """The rank of this name; it is one of the group's."""
        return next(member for member in self.members if member.peer == peer)


Change = tuple[Group, tuple[object, ...]]


def begin(  # noqa: PLR0913 - one group's own facts
    key: str, number: int, own: str, peers: Iterable[str], *, now: float, timing: Timing, after: Group | None = None
) -> Group:
    """A part of this key has begun on some rank.

    Args:
        key: the request's key.
        number: of the gathering, higher than any before it in this incarnation.
        own: the coordinator's own rank, one of ``peers``.
        peers: every rank of the engine, incarnations all.
        now: the driver's monotonic clock, seconds.
        timing: the protocol's clocks.
        after: the abandoned gathering whose place it takes: what its parts still have to say is not about this one.
    """
    past = {} if after is None else {member.peer: max(member.part, member.past) for member in after.members}
    members = tuple(Member(peer, past=past.get(peer, 0)) for peer in peers)
    return Group(key=key, number=number, own=own, members=members, timing=timing, until=now + timing.gather_seconds)


def begins(group: Group | None, peer: str, message: wire.Stands) -> bool:
    """Whether this word is of a new try: the driver then begins a group, and puts the word to it."""
    if message.stage not in _BEGUN or message.group:
        return False
    if group is None:
        return True
    known = group.member(peer)
    return group.phase is GroupPhase.ABANDONED and message.part > max(known.part, known.past)


def step(group: Group, event: GroupEvent, now: float) -> tuple[Group, tuple[Action, ...]]:
    """Take one event. Late and repeated events are answered as they were; every event is accepted in every state."""
    at = Moment(now, group.timing)
    group, actions = fire(GROUP, group, event, at)
    group, done = settle(GROUP, GROUP_EVENTS, group, actions, _signal, at)
    return group, cast("tuple[Action, ...]", done)


def next_timer(group: Group) -> float | None:
    """When the next `Tick` is due, or ``None``."""
    return None if group.phase is GroupPhase.CLOSED else group.until


def answer_unknown(peer: str, message: wire.Stands) -> Send:
    """What to say of a part whose group is forgotten: what is over is noted, what waits need not.

    What is installed may have been decided on before it was forgotten (a pause): nobody knows any more.
    """
    if message.stage in (Stage.INSTALLED, Stage.LEAVING):
        error = error_info(errors.IndeterminateError, f"what was decided on request {message.key} is forgotten")
        return _decided(message, peer, 1, Verdict.ABANDON, error)
    return _answer_over(peer, message)


def _signal(group: Group) -> object | None:
    """What the parts together say."""
    match group.phase:
        case GroupPhase.GATHERING if _all(group, Stage.LANDED):
            return AllLanded()
        case GroupPhase.PROCEEDING if _all(group, Stage.INSTALLED):
            return AllInstalled()
        case GroupPhase.REVEALING if _all(group, Stage.REVEALED, but=group.own):
            return OthersRevealed()
        case GroupPhase.SHOWING if _all(group, Stage.REVEALED):
            return AllRevealed()
        case GroupPhase.ABANDONED if all(member.stage in (None, Stage.FAILED) for member in group.members):
            return AllOver()
        case _:
            return None


def _all(group: Group, stage: Stage, *, but: str = "") -> bool:
    """Every part has come to ``stage``, or further."""
    reached = _RISING[_RISING.index(stage) :]
    return all(member.stage in reached for member in group.members if member.peer != but)


# --- guards -------------------------------------------------------------------------------------------------------


def over(group: Group, _event: Tick, at: Moment) -> bool:
    """The phase has run out."""
    return at.now >= group.until


def stale(group: Group, event: Stood, _at: Moment) -> bool:
    """A late word of an earlier part or gathering."""
    message, known = event.message, group.member(event.peer)
    earlier = message.part < known.part or message.part <= known.past
    return earlier or message.group not in (0, group.number)


def younger(group: Group, event: Stood, _at: Moment) -> bool:
    """Another part of the same rank: the one that we counted on is over."""
    return event.message.part > group.member(event.peer).part


def failing(_group: Group, event: Stood, _at: Moment) -> bool:
    """It cannot be installed, or is asked out."""
    return event.message.stage in (Stage.FAILED, Stage.LEAVING)


def failed(group: Group, event: Stood, _at: Moment) -> bool:
    """It is over, and not visible; what has said that it is visible has no way back."""
    return event.message.stage is Stage.FAILED and group.member(event.peer).stage is not Stage.REVEALED


def revealed(_group: Group, event: Stood, _at: Moment) -> bool:
    """It is visible."""
    return event.message.stage is Stage.REVEALED


def other_content(group: Group, event: Stood, _at: Moment) -> bool:
    """Ranks that fetch different things under one key."""
    return group.content is not None and event.message.content != group.content


def torn(group: Group, _event: AllLanded, _at: Moment) -> bool:
    """Their sources sealed them at different positions."""
    return len({member.tokens for member in group.members}) > 1


def untold(_group: Group, event: Stood, _at: Moment) -> bool:
    """It waits to be told to proceed."""
    return event.message.stage is Stage.LANDED


def ours(group: Group, event: Stood, _at: Moment) -> bool:
    """The coordinator's own part."""
    return event.peer == group.own


def theirs(group: Group, event: PeerLost | PeerDead, _at: Moment) -> bool:
    """A rank of this engine."""
    return any(member.peer == event.peer for member in group.members)


def undecided(group: Group, event: PeerLost | PeerDead, _at: Moment) -> bool:
    """A rank that has not said that it is visible."""
    return any(member.peer == event.peer and member.stage is not Stage.REVEALED for member in group.members)


# --- effects ------------------------------------------------------------------------------------------------------


def record(group: Group, event: Stood, at: Moment) -> Change:
    """The furthest that a part is known to have come."""
    message, known = event.message, group.member(event.peer)
    further = known.part != message.part or known.stage is None or _later(known.stage, message.stage)
    after = replace(known, part=message.part, stage=message.stage, tokens=message.tokens) if further else known
    members = tuple(after if member is known else member for member in group.members)
    until = group.until
    if group.phase is GroupPhase.GATHERING and all(member.part for member in members):
        until = at.now + at.timing.group_seconds  # all have begun: from now on their own deadlines bound the wait
    return replace(group, members=members, until=until, content=group.content or message.content), ()


def proceed(group: Group, _event: AllLanded, at: Moment) -> Change:
    """Have all of them committed: only now does any commit's clock start."""
    timing = at.timing
    until = at.now + timing.commit_ttl_seconds + timing.drift_margin_seconds + timing.gather_seconds
    return replace(group, until=until), _to_all(group, Verdict.PROCEED)


def proceed_again(group: Group, event: Stood, _at: Moment) -> Change:
    """The word was lost."""
    return group, (_decided(event.message, event.peer, group.number, Verdict.PROCEED),)


def reveal_others(group: Group, _event: AllInstalled, at: Moment) -> Change:
    """The decision: from here on there is no way back."""
    return replace(group, until=at.now + at.timing.tell_seconds), _to_all(group, Verdict.REVEAL, but=group.own)


def reveal_own(group: Group, _event: OthersRevealed, _at: Moment) -> Change:
    """The last."""
    return group, (_word(group, group.member(group.own), Verdict.REVEAL),)


def reveal_again(group: Group, event: Stood, _at: Moment) -> Change:
    """The word was lost."""
    return group, (_decided(event.message, event.peer, group.number, Verdict.REVEAL),)


def note(group: Group, event: Stood, at: Moment) -> Change:
    """Record, then acknowledge."""
    group, _ = record(group, event, at)
    return group, (_decided(event.message, event.peer, group.number, Verdict.NOTED),)


def answer_stale(group: Group, event: Stood, _at: Moment) -> Change:
    """Its try was abandoned: only then does another begin."""
    return group, (_answer_over(event.peer, event.message),)


def abandon_failed(group: Group, event: Stood, at: Moment) -> Change:
    """Failed as one, cancelled as one: for the reason of whoever failed first."""
    reason = event.message.error or error_info(errors.TransferError, "failed without a word")
    text = f"{event.peer}: {reason.message}"
    error = replace(reason, message=text[: limits.MAX_TEXT_BYTES])
    group, _ = record(group, event, at)
    group, told = _abandon(group, error, at)
    noted = (_decided(event.message, event.peer, group.number, Verdict.NOTED),) if failed(group, event, at) else ()
    return group, (*noted, *told)


def abandon_other_content(group: Group, event: Stood, at: Moment) -> Change:
    """Name both."""
    text = f"{event.peer} fetches {event.message.content} under key {group.key}, its siblings {group.content}"
    group, _ = record(group, event, at)
    return _abandon(group, error_info(errors.ConflictError, text), at)


def abandon_torn(group: Group, _event: AllLanded, at: Moment) -> Change:
    """One rank's share of a shorter prompt beside another's of a longer one is no request's KV."""
    ends = ", ".join(f"{member.peer} {member.tokens}" for member in group.members)
    return _abandon(
        group, error_info(errors.ConflictError, f"the ranks' shares end at different positions: {ends}"), at
    )


def abandon_younger(group: Group, event: Stood, at: Moment) -> Change:
    """The part that the others wait for is over; they must begin anew, too."""
    group, _ = record(group, event, at)
    return _abandon(group, error_info(errors.TransferError, f"{event.peer} has begun anew", retryable=True), at)


def abandon_lost(group: Group, event: PeerLost | PeerDead, at: Moment) -> Change:
    """A TP group is one incarnation."""
    gone = group.member(event.peer)  # told all the same, should it be listening; not waited for
    members = tuple(replace(gone, stage=None) if member is gone else member for member in group.members)
    text = f"{event.peer}, a rank of this engine, is gone or silent"
    return _abandon(replace(group, members=members), error_info(errors.PeerLostError, text), at)


def abandon_incomplete(group: Group, _event: Tick, at: Moment) -> Change:
    """Some rank never began, never landed or never answered."""
    stages = (
        (member.peer, "has not begun" if member.stage is None else member.stage.value) for member in group.members
    )
    waits = ", ".join(f"{peer} {stage}" for peer, stage in stages)
    text = f"the ranks of this engine did not come together in time: {waits}"
    return _abandon(group, error_info(errors.DeadlineError, text), at)


def abandon_again(group: Group, event: Stood, at: Moment) -> Change:
    """The word was lost."""
    group, _ = record(group, event, at)
    return group, (_decided(event.message, event.peer, group.number, Verdict.ABANDON, group.error),)


def doubt(group: Group, event: Stood | PeerLost | PeerDead | Tick, at: Moment) -> Change:
    """Some may be visible, one is not known to be: ours is not shown, and says so."""
    who = "a rank" if isinstance(event, Tick) else event.peer
    text = f"all parts were installed, and {who} did not say that its own is visible: the engine has lost it"
    error = error_info(errors.IndeterminateError, text)
    group = replace(group, error=error, until=at.now + at.timing.retire_seconds)
    return group, (_word(group, group.member(group.own), Verdict.ABANDON, error),)


def doubt_noted(group: Group, event: Stood, at: Moment) -> Change:
    """It gave up waiting for our word."""
    group, noted = note(group, event, at)
    group, told = doubt(group, event, at)
    return group, (*noted, *told)


def _answer_over(peer: str, message: wire.Stands) -> Send:
    """To a part that became visible nowhere, and never will; or that has said how it ended."""
    if message.stage in (Stage.REVEALED, Stage.FAILED):
        return _decided(message, peer, 1, Verdict.NOTED)
    error = error_info(errors.UnknownRequestError, f"no rank waits for request {message.key} any more")
    return _decided(message, peer, 1, Verdict.ABANDON, error)


def _abandon(group: Group, error: wire.ErrorInfo, at: Moment) -> Change:
    group = replace(group, error=error, until=at.now + at.timing.tell_seconds)
    living = (member for member in group.members if member.part and member.stage is not Stage.FAILED)
    return group, tuple(_word(group, member, Verdict.ABANDON, error) for member in living)


def _to_all(group: Group, verdict: Verdict, *, but: str = "") -> tuple[Send, ...]:
    return tuple(_word(group, member, verdict) for member in group.members if member.peer != but)


def _word(group: Group, member: Member, verdict: Verdict, error: wire.ErrorInfo | None = None) -> Send:
    message = wire.Decided(key=group.key, part=member.part, group=group.number, verdict=verdict, error=error)
    return Send(member.peer, message)


def _decided(asked: wire.Stands, peer: str, number: int, verdict: Verdict, error: wire.ErrorInfo | None = None) -> Send:
    return Send(peer, wire.Decided(key=asked.key, part=asked.part, group=number, verdict=verdict, error=error))


def _later(known: Stage, told: Stage) -> bool:
    return known not in (Stage.FAILED, Stage.REVEALED) and (
        told is Stage.FAILED or _RISING.index(told) > _RISING.index(known)
    )


# --- the table ----------------------------------------------------------------------------------------------------

P = GroupPhase
GROUP_EVENTS = (
    Stood, PeerLost, PeerDead, Tick, AllLanded, AllInstalled, OthersRevealed, AllRevealed, AllOver,
)  # fmt: skip

GROUP = total(
    P,
    GROUP_EVENTS,
    {
        P.GATHERING: row(
            on(
                Stood,
                Edge(None, answer_stale, stale),
                Edge(P.ABANDONED, abandon_failed, failing),
                Edge(P.ABANDONED, abandon_other_content, other_content),
                Edge(None, record),
            ),
            on(PeerLost, Edge(P.ABANDONED, abandon_lost, theirs)),
            on(PeerDead, Edge(P.ABANDONED, abandon_lost, theirs)),
            on(Tick, Edge(P.ABANDONED, abandon_incomplete, over)),
            on(AllLanded, Edge(P.ABANDONED, abandon_torn, torn), Edge(P.PROCEEDING, proceed)),
            inert(AllInstalled, OthersRevealed, AllRevealed, AllOver),
        ),
        P.PROCEEDING: row(
            on(
                Stood,
                Edge(None, answer_stale, stale),
                Edge(P.ABANDONED, abandon_failed, failing),
                Edge(P.ABANDONED, abandon_younger, younger),
                Edge(None, proceed_again, untold),
                Edge(None, record),
            ),
            on(PeerLost, Edge(P.ABANDONED, abandon_lost, theirs)),
            on(PeerDead, Edge(P.ABANDONED, abandon_lost, theirs)),
            on(Tick, Edge(P.ABANDONED, abandon_incomplete, over)),
            on(AllInstalled, Edge(P.REVEALING, reveal_others)),
            inert(AllLanded, OthersRevealed, AllRevealed, AllOver),
        ),
        # Decided: whoever is installed is told so, whatever it would rather; whoever is lost leaves a doubt.
        P.REVEALING: row(
            on(
                Stood,
                Edge(None, answer_stale, stale),
                Edge(P.DOUBTFUL, doubt_noted, failed),
                Edge(None, note, revealed),
                Edge(None, None, younger),
                Edge(None, None, ours),
                Edge(None, reveal_again),
            ),
            on(PeerLost, Edge(P.DOUBTFUL, doubt, undecided)),
            on(PeerDead, Edge(P.DOUBTFUL, doubt, undecided)),
            on(Tick, Edge(P.DOUBTFUL, doubt, over)),
            on(OthersRevealed, Edge(P.SHOWING, reveal_own)),
            inert(AllLanded, AllInstalled, AllRevealed, AllOver),
        ),
        P.SHOWING: row(
            on(
                Stood,
                Edge(None, answer_stale, stale),
                Edge(None, note, revealed),
                Edge(None, None, younger),
                Edge(None, reveal_again),
            ),
            on(AllRevealed, Edge(P.CLOSED)),
            on(Tick, Edge(P.CLOSED, None, over)),
            inert(PeerLost, PeerDead, AllLanded, AllInstalled, OthersRevealed, AllOver),
        ),
        P.DOUBTFUL: row(
            on(
                Stood,
                Edge(None, answer_stale, stale),
                Edge(None, note, failed),
                Edge(None, note, revealed),
                Edge(None, None, younger),
                Edge(None, abandon_again, ours),
                Edge(None, reveal_again),
            ),
            on(Tick, Edge(P.CLOSED, None, over)),
            inert(PeerLost, PeerDead, AllLanded, AllInstalled, OthersRevealed, AllRevealed, AllOver),
        ),
        P.ABANDONED: row(
            on(
                Stood,
                Edge(None, answer_stale, stale),
                Edge(None, note, failed),
                Edge(None, abandon_again),
            ),
            on(AllOver, Edge(P.CLOSED)),
            on(Tick, Edge(P.CLOSED, None, over)),
            inert(PeerLost, PeerDead, AllLanded, AllInstalled, OthersRevealed, AllRevealed),
        ),
        P.CLOSED: row(inert(*GROUP_EVENTS)),
    },
)
