"""One request on one target rank: its legs, and the one switch that installs all of them or none.

``begin`` and ``step`` return the new state and the actions that the driver must carry out, in order; ``next_timer``
says when to send a `Tick`. The machine waits for nothing, reads no clock and remembers nothing outside its state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, cast

from msgspec.structs import replace

from kvlink import errors, wire
from kvlink.protocol import membership
from kvlink.protocol.increments import Landing
from kvlink.protocol.membership import Abandon, Membership, Noted, Proceed, Reveal
from kvlink.protocol.table import Edge, Moment, fire, fire_each, inert, on, row, settle, total
from kvlink.protocol.target_leg import (
    QUIET,
    TARGET_LEG,
    Cut,
    CutOffDone,
    LegFailed,
    LegPhase,
    Prepare,
    ReadEnded,
    Switched,
    TargetLeg,
    ask,
)
from kvlink.protocol.target_part import (
    AllCommitted,
    AllLanded,
    AllQuiet,
    AllTold,
    Change,
    InstallDone,
    InstallFailed,
    TargetEvent,
    TargetPart,
    TargetPhase,
)
from kvlink.protocol.vocabulary import (
    Action,
    Cancel,
    End,
    Failure,
    Install,
    PeerDead,
    PeerLost,
    Received,
    ReleaseBlocks,
    Report,
    Show,
    Tick,
    Timing,
    fail,
    failure_of,
)

_Concerned = Callable[[TargetLeg], bool]
_LEG_MESSAGES: Final = (
    wire.Lease, wire.Commit, wire.Ack, wire.Parked, wire.Refused, wire.Revoked, wire.Advance,
)  # fmt: skip
_SAID_TOGETHER: Final = {LegPhase.LANDED: AllLanded(), LegPhase.COMMITTED: AllCommitted()}
_STANDING_STILL: Final = (LegPhase.PARKED, LegPhase.RESTING)


def begin(  # noqa: PLR0913 - what a request is, and by which clocks
    key: str,
    legs: Iterable[tuple[str, int]],
    *,
    deadline_seconds: float,
    now: float,
    timing: Timing,
    siblings: Membership | None = None,
    stream: bool = False,
) -> tuple[TargetPart, tuple[Action, ...]]:
    """Ask every source rank.

    Args:
        key: the request's key.
        legs: ``(peer, attempt)`` per source rank: its incarnation, and an id this incarnation never used before.
        deadline_seconds: how long the transfer may take from now, time spent parked apart.
        now: the driver's monotonic clock, seconds.
        timing: the protocol's clocks.
        siblings: its place among the parts with which it becomes visible, or ``None`` if it does alone.
        stream: the sources are still computing: legs are read increment by increment.

    Raises:
        ValueError: no leg, or two with one attempt or one peer.
    """
    pairs = tuple(legs)
    if not pairs or any(len(set(ids)) < len(pairs) for ids in zip(*pairs, strict=True)):
        raise ValueError(f"a part needs legs with distinct peers and attempts, not {pairs}")
    at = Moment(now, timing)
    landing = Landing() if stream else None
    asked = [ask(TargetLeg(peer, attempt, stream=landing), at) for peer, attempt in pairs]
    actions = tuple(action for _, some in asked for action in some)
    if siblings is not None:
        siblings, told = membership.tell(siblings, wire.Stage.JOINED, at)
        actions = (*actions, *told)
    part = TargetPart(
        key=key,
        legs=tuple(leg for leg, _ in asked),
        timing=timing,
        deadline_seconds=deadline_seconds,
        deadline_at=now + deadline_seconds,
        siblings=siblings,
    )
    return part, cast("tuple[Action, ...]", actions)


def step(part: TargetPart, event: TargetEvent, now: float) -> tuple[TargetPart, tuple[Action, ...]]:
    """Take one event. Late, repeated and foreign events are inert; every event is accepted in every state."""
    at = Moment(now, part.timing)
    before = part
    part, actions = _tell_legs(part, event, at)
    told = _told_part(part, event)
    if told is not None:
        part, more = fire(TARGET_PART, part, told, at)
        actions += more
    part, done = settle(TARGET_PART, TARGET_PART_EVENTS, part, actions, _signal, at)
    return _stop_clock(before, part, now), cast("tuple[Action, ...]", done)


def next_timer(part: TargetPart) -> float | None:
    """When the next `Tick` is due, or ``None``."""
    if part.phase is TargetPhase.INSTALLING:
        return None
    times: list[float] = []
    if part.phase is not TargetPhase.HIDDEN:
        times += [leg.until for leg in part.legs if leg.until is not None]
        times += [leg.repeat.at for leg in part.legs if leg.repeat is not None]
    if part.siblings is not None and part.siblings.repeat is not None:
        times.append(part.siblings.repeat.at)
        times += [] if part.siblings.until is None else [part.siblings.until]
    if part.phase in (TargetPhase.LIVE, TargetPhase.GATHERED) and part.parked_since is None:
        times.append(part.deadline_at)
    return min(times, default=None)


def _told_part(part: TargetPart, event: TargetEvent) -> object | None:
    """What an event is to the part itself."""
    if not isinstance(event, Received):
        return event if type(event) in TARGET_PART_EVENTS else None
    if part.siblings is None or not isinstance(event.message, wire.Decided):
        return None
    return membership.word_of(part.siblings, event.peer, event.message)


def _tell_legs(part: TargetPart, event: TargetEvent, at: Moment) -> Change:
    """Put an event to the legs it is about."""
    match event:
        case Received(peer=peer, message=message):
            if not isinstance(message, _LEG_MESSAGES):
                return part, ()
            attempt = message.attempt
            return _each(part, message, at, lambda leg: leg.attempt == attempt and leg.peer == peer)
        case ReadEnded() | CutOffDone():
            return _each(part, event, at, lambda leg: leg.attempt == event.attempt)
        case PeerLost() | PeerDead():
            return _each(part, event, at, lambda leg: leg.peer == event.peer)
        case Tick() if part.phase not in (TargetPhase.INSTALLING, TargetPhase.HIDDEN):
            return _each(part, event, at)
        case _:
            return part, ()


def _each(part: TargetPart, event: object, at: Moment, concerned: _Concerned = lambda _leg: True) -> Change:
    legs, actions = fire_each(TARGET_LEG, part.legs, event, at, concerned)
    return (part if legs is part.legs else replace(part, legs=legs)), actions


def _signal(part: TargetPart) -> object | None:
    """What the legs together say to the part."""
    if part.phase is TargetPhase.LIVE:
        first = part.legs[0].phase
        said = _SAID_TOGETHER.get(first)
        return said if said is not None and all(leg.phase is first for leg in part.legs) else None
    if part.phase is TargetPhase.ENDING:
        return AllQuiet() if all(leg.phase in QUIET for leg in part.legs) else None
    if part.phase is TargetPhase.ENDED:
        untold = part.siblings is not None and part.siblings.repeat is not None
        return AllTold() if not untold and all(leg.phase is LegPhase.CLOSED for leg in part.legs) else None
    return None


def _stop_clock(before: TargetPart, part: TargetPart, now: float) -> TargetPart:
    """The transfer's clock stands still while a leg is parked or rests: a prefill has a bound of its own (B7)."""
    if part.legs is before.legs and part.parked_since is before.parked_since:
        return part
    parked = any(leg.phase in _STANDING_STILL for leg in part.legs)
    if parked and before.parked_since is None:
        return replace(part, parked_since=now)
    if not parked and before.parked_since is not None:
        return replace(part, parked_since=None, deadline_at=part.deadline_at + now - before.parked_since)
    return part


# --- guards -------------------------------------------------------------------------------------------------------


def overdue(part: TargetPart, _event: Tick, at: Moment) -> bool:
    """The transfer's own clock has run out."""
    return part.parked_since is None and at.now >= part.deadline_at


def torn(part: TargetPart, _event: AllLanded, _at: Moment) -> bool:
    """The sources' seals cover different things."""
    return len({leg.stream.content for leg in part.legs if leg.stream is not None}) > 1


def out_of_time(part: TargetPart, _event: AllCommitted, at: Moment) -> bool:
    """The first commit's time to live ended before the last commit came."""
    return any(leg.until is None or at.now >= leg.until for leg in part.legs)


def together(part: TargetPart, _event: object, _at: Moment) -> bool:
    """It becomes visible with its siblings."""
    return part.siblings is not None


def doomed(part: TargetPart, _event: InstallDone, _at: Moment) -> bool:
    """Its end came while the engine was taking the blocks, and none but its siblings can be shown them."""
    return part.failure is not None


def leaderless(part: TargetPart, event: PeerLost | PeerDead, _at: Moment) -> bool:
    """It was the coordinator that went."""
    return part.siblings is not None and part.siblings.coordinator == event.peer


def doubtful(_part: TargetPart, event: Abandon, _at: Moment) -> bool:
    """The coordinator itself does not know."""
    return event.failure.end is End.INDETERMINATE


def unheard(part: TargetPart, _event: Tick, at: Moment) -> bool:
    """The coordinator has not said what it must, and another word to it is due."""
    return part.siblings is not None and part.siblings.repeat is not None and at.now >= part.siblings.repeat.at


def forsaken(part: TargetPart, _event: Tick, at: Moment) -> bool:
    """The coordinator has not said what it must in all the time there is."""
    waits = part.siblings if part.siblings is not None and part.siblings.repeat is not None else None
    return waits is not None and waits.until is not None and at.now >= waits.until


# --- effects ------------------------------------------------------------------------------------------------------


def prepare(part: TargetPart, _event: AllLanded, at: Moment) -> Change:
    """Only now start the commits' clocks: a slow leg must not let a fast one's run out."""
    return _each(part, Prepare(), at)


def cut_torn(part: TargetPart, _event: AllLanded, at: Moment) -> Change:
    """One rank's share of a shorter prompt beside another's of a longer one is no request's KV."""
    seals = ", ".join(f"{leg.peer} sealed {leg.stream.content}" for leg in part.legs if leg.stream is not None)
    return _cut_all(part, fail(End.FAILED, errors.ConflictError, f"the sources' shares differ: {seals}"), at)


def say_landed(part: TargetPart, _event: AllLanded, at: Moment) -> Change:
    """Nor may a slow sibling; and what it has must end where ours does."""
    streams = [leg.stream for leg in part.legs if leg.stream is not None]
    if part.siblings is not None and streams:
        part = replace(part, siblings=replace(part.siblings, tokens=streams[0].tokens))
    return _say(part, wire.Stage.LANDED, at)


def proceed(part: TargetPart, event: Proceed, at: Moment) -> Change:
    """All siblings have landed."""
    if part.siblings is not None:
        part = replace(part, siblings=replace(membership.heard(part.siblings), group=event.group))
    return _each(part, Prepare(), at)


def install(part: TargetPart, _event: AllCommitted, _at: Moment) -> Change:
    """The one switch."""
    return part, (Install(),)


def report_done(part: TargetPart, _event: InstallDone, at: Moment) -> Change:
    """Installed, whatever the sources come to hear of it."""
    part, actions = _each(part, Switched(), at)
    return part, (*actions, Report(End.DONE, None))


def hide(part: TargetPart, _event: InstallDone, at: Moment) -> Change:
    """In time; and no source hears of it, so none lets go, before all siblings are."""
    return _say(part, wire.Stage.INSTALLED, at)


def show(part: TargetPart, _event: Reveal, at: Moment) -> Change:
    """All siblings are installed."""
    part, told = _say(replace(part, failure=None), wire.Stage.REVEALED, at)
    part, actions = _each(part, Switched(), at)
    return part, (Show(), *told, *actions, Report(End.DONE, None))


def ask_out(part: TargetPart, event: Cancel, at: Moment) -> Change:
    """Not for this part to decide any more."""
    return _say(replace(part, failure=event.failure), wire.Stage.LEAVING, at, event.failure.error)


def doom(part: TargetPart, event: Cancel | Abandon, _at: Moment) -> Change:
    """As soon as the engine has answered."""
    return replace(part, failure=part.failure or event.failure), ()


def doom_leaderless(part: TargetPart, _event: PeerLost | PeerDead, _at: Moment) -> Change:
    """As soon as the engine has answered."""
    return replace(part, failure=part.failure or _leaderless(part)), ()


def say_again(part: TargetPart, _event: object, at: Moment) -> Change:
    """Repeat where the part stands."""
    if part.siblings is None:
        return part, ()
    siblings, told = membership.tell_again(part.siblings, at)
    return replace(part, siblings=siblings), told


def heard(part: TargetPart, _event: object, _at: Moment) -> Change:
    """The coordinator knows, or nobody is left to know."""
    return replace(part, siblings=part.siblings and membership.heard(part.siblings)), ()


def cut_all(part: TargetPart, event: LegFailed | Cancel | Abandon, at: Moment) -> Change:
    """Cut off every sibling leg before anything else happens (A4)."""
    return _cut_all(part, event.failure, at)


def cut_overdue(part: TargetPart, _event: Tick, at: Moment) -> Change:
    """The deadline."""
    waits = ", ".join(f"{leg.peer} {leg.phase.value}" for leg in part.legs)
    if part.phase is TargetPhase.GATHERED:
        waits = "all has landed here; siblings have not"
    text = f"not done {part.deadline_seconds:g} s after the first ask ({waits})"
    return _cut_all(part, fail(End.EXPIRED, errors.DeadlineError, text), at)


def cut_expired(part: TargetPart, _event: AllCommitted, at: Moment) -> Change:
    """All commits are here, and the first of them is no longer good."""
    text = "the last commit came after the first one's time to live"
    return _cut_all(part, fail(End.EXPIRED, errors.ExpiredError, text), at)


def cut_failed(part: TargetPart, event: InstallFailed, at: Moment) -> Change:
    """The engine would not take the blocks."""
    return _cut_all(part, failure_of(event.error), at)


def cut_doomed(part: TargetPart, _event: InstallDone, at: Moment) -> Change:
    """What came while the engine was taking the blocks; without this part nothing can have been revealed."""
    return _cut_all(part, part.failure or _leaderless(part), at)


def cut_leaderless(part: TargetPart, _event: PeerLost | PeerDead, at: Moment) -> Change:
    """A TP group is one incarnation, and without this part nothing can have been revealed."""
    return _cut_all(part, _leaderless(part), at)


def cut_unknowing(part: TargetPart, event: Abandon | PeerLost | PeerDead | Tick, at: Moment) -> Change:
    """The siblings may have been revealed: this part ends *indeterminate*, and its sources hear that it is not."""
    if part.siblings is None:
        return part, ()
    failure = event.failure if isinstance(event, Abandon) else membership.doubt(part.siblings, _why(part, event))
    told = membership.leaderless(part.siblings)
    siblings, said = membership.tell(part.siblings, wire.Stage.FAILED, at, failure.error)
    part, actions = _each(replace(part, failure=failure, siblings=siblings), Cut(told), at)
    return part, (*said, *actions)


def report_failed(part: TargetPart, _event: AllQuiet, _at: Moment) -> Change:
    """Every cut-off is done: the blocks go back, then the end is told, once (A2)."""
    failure = part.failure or fail(End.FAILED, errors.TransferError, "failed without a word")
    return part, (ReleaseBlocks(), Report(failure.end, failure.error))


def _cut_all(part: TargetPart, failure: Failure, at: Moment) -> Change:
    """No commit is used and nothing was shown, so the siblings can be told at once: none of them must wait."""
    part, said = _say(replace(part, failure=failure), wire.Stage.FAILED, at, failure.error)
    part, actions = _each(part, Cut(failure), at)
    return part, (*actions, *said)


def _say(part: TargetPart, stage: wire.Stage, at: Moment, error: wire.ErrorInfo | None = None) -> Change:
    if part.siblings is None:
        return part, ()
    siblings, told = membership.tell(part.siblings, stage, at, error)
    return replace(part, siblings=siblings), told


def _leaderless(part: TargetPart) -> Failure:
    if part.siblings is None:
        return fail(End.FAILED, errors.TransferError, "failed without a word")
    return membership.leaderless(part.siblings)


def _why(part: TargetPart, event: object) -> str:
    gone = part.siblings.coordinator if part.siblings is not None else ""
    return f"{gone} did not say in time" if isinstance(event, Tick) else f"{gone}, which decides, is gone or silent"


# --- the table ------------------------------------------------------------------------------------------------

P = TargetPhase
TARGET_PART_EVENTS = (
    LegFailed, AllLanded, AllCommitted, AllQuiet, AllTold, InstallDone, InstallFailed, Cancel, Tick,
    Proceed, Reveal, Abandon, Noted, PeerLost, PeerDead,
)  # fmt: skip

# Nothing is committed, or no commit was used: whatever ends this part ends it at once.
_endable = row(
    on(LegFailed, Edge(P.ENDING, cut_all)),
    on(Cancel, Edge(P.ENDING, cut_all)),
    on(Abandon, Edge(P.ENDING, cut_all)),
    on(PeerLost, Edge(P.ENDING, cut_leaderless, leaderless)),
    on(PeerDead, Edge(P.ENDING, cut_leaderless, leaderless)),
    on(Tick, Edge(P.ENDING, cut_overdue, overdue), Edge(None, say_again, unheard)),
)

TARGET_PART = total(
    P,
    TARGET_PART_EVENTS,
    {
        P.LIVE: row(
            _endable,
            on(
                AllLanded,
                Edge(P.ENDING, cut_torn, torn),
                Edge(P.GATHERED, say_landed, together),
                Edge(None, prepare),
            ),
            on(AllCommitted, Edge(P.ENDING, cut_expired, out_of_time), Edge(P.INSTALLING, install)),
            inert(AllQuiet, AllTold, InstallDone, InstallFailed, Proceed, Reveal, Noted),
        ),
        P.GATHERED: row(
            _endable,
            on(Proceed, Edge(P.LIVE, proceed)),
            inert(AllLanded, AllCommitted, AllQuiet, AllTold, InstallDone, InstallFailed, Reveal, Noted),
        ),
        # The engine is taking the blocks: too late for a deadline or a source's end, and, alone, for a cancel.
        P.INSTALLING: row(
            on(
                InstallDone,
                Edge(P.ENDING, cut_doomed, doomed),
                Edge(P.HIDDEN, hide, together),
                Edge(P.ENDED, report_done),
            ),
            on(InstallFailed, Edge(P.ENDING, cut_failed)),
            on(Cancel, Edge(None, doom, together)),
            on(Abandon, Edge(None, doom)),
            on(PeerLost, Edge(None, doom_leaderless, leaderless)),
            on(PeerDead, Edge(None, doom_leaderless, leaderless)),
            inert(LegFailed, AllLanded, AllCommitted, AllQuiet, AllTold, Tick, Proceed, Reveal, Noted),
        ),
        P.HIDDEN: row(
            on(Reveal, Edge(P.ENDED, show)),
            on(Abandon, Edge(P.ENDING, cut_unknowing, doubtful), Edge(P.ENDING, cut_all)),
            on(Cancel, Edge(None, ask_out)),
            on(PeerLost, Edge(P.ENDING, cut_unknowing, leaderless)),
            on(PeerDead, Edge(P.ENDING, cut_unknowing, leaderless)),
            on(Tick, Edge(P.ENDING, cut_unknowing, forsaken), Edge(None, say_again, unheard)),
            inert(LegFailed, AllLanded, AllCommitted, AllQuiet, AllTold, InstallDone, InstallFailed, Proceed, Noted),
        ),
        P.ENDING: row(
            on(AllQuiet, Edge(P.ENDED, report_failed)),
            on(Noted, Edge(None, heard)),
            on(PeerLost, Edge(None, heard, leaderless)),
            on(PeerDead, Edge(None, heard, leaderless)),
            on(Tick, Edge(None, heard, forsaken), Edge(None, say_again, unheard)),
            inert(LegFailed, AllLanded, AllCommitted, AllTold, InstallDone, InstallFailed, Cancel),
            inert(Proceed, Reveal, Abandon),
        ),
        P.ENDED: row(
            on(AllTold, Edge(P.CLOSED)),
            on(Noted, Edge(None, heard)),
            on(PeerLost, Edge(None, heard, leaderless)),
            on(PeerDead, Edge(None, heard, leaderless)),
            on(Tick, Edge(None, heard, forsaken), Edge(None, say_again, unheard)),
            inert(LegFailed, AllLanded, AllCommitted, AllQuiet, InstallDone, InstallFailed, Cancel),
            inert(Proceed, Reveal, Abandon),
        ),
        P.CLOSED: row(inert(*TARGET_PART_EVENTS)),
    },
)
