"""One request on one target rank: its legs, and the one switch that installs all of them or none.

``begin`` and ``step`` return the new state and the actions that the driver must carry out, in order; ``next_timer``
says when to send a `Tick`. The machine waits for nothing, reads no clock and remembers nothing outside its state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from typing import cast

from msgspec.structs import replace

from kvlink import errors, wire
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
    Tick,
    Timing,
    Value,
    fail,
    failure_of,
)


class TargetPhase(Enum):
    """Where a target part stands."""

    LIVE = "live"
    INSTALLING = "installing"
    ENDING = "ending"
    """Failed; cut-offs are awaited (*draining*)."""
    ENDED = "ended"
    """Reported; sources are still being told."""
    CLOSED = "closed"
    """Nothing is left to do: the driver forgets the part."""


class InstallDone(Value, frozen=True):
    """The engine has the blocks."""


class InstallFailed(Value, frozen=True):
    """The engine does not have the blocks and never will."""

    error: wire.ErrorInfo


class AllLanded(Value, frozen=True):
    """Every leg's bytes are here and verified."""


class AllCommitted(Value, frozen=True):
    """Every source has promised."""


class AllQuiet(Value, frozen=True):
    """No byte of any leg can land."""


class AllTold(Value, frozen=True):
    """Every source has acknowledged, or is past telling."""


TargetEvent = Received | ReadEnded | CutOffDone | PeerLost | PeerDead | InstallDone | InstallFailed | Cancel | Tick


class TargetPart(Value, frozen=True, kw_only=True):
    """One request on one target rank.

    Attributes:
        key: the request's key.
        legs: one attempt per source rank.
        timing: its clocks.
        deadline_seconds: as given to `begin`.
        deadline_at: when the transfer's own clock runs out; pushed back by the time spent parked.
        parked_since: since when a leg is parked, or ``None``. While it is, the transfer's clock stands still.
        phase: where it stands.
        failure: the first cause, once it failed.
    """

    key: str
    legs: tuple[TargetLeg, ...]
    timing: Timing
    deadline_seconds: float
    deadline_at: float
    parked_since: float | None = None
    phase: TargetPhase = TargetPhase.LIVE
    failure: Failure | None = None

    def leg(self, attempt: int) -> TargetLeg | None:
        """The leg of this attempt, if it is ours."""
        return next((leg for leg in self.legs if leg.attempt == attempt), None)


Change = tuple[TargetPart, tuple[object, ...]]
_Concerned = Callable[[TargetLeg], bool]


def begin(
    key: str, legs: Iterable[tuple[str, int]], *, deadline_seconds: float, now: float, timing: Timing
) -> tuple[TargetPart, tuple[Action, ...]]:
    """Ask every source rank.

    Args:
        key: the request's key.
        legs: ``(peer, attempt)`` per source rank: its incarnation, and an id this incarnation never used before.
        deadline_seconds: how long the transfer may take from now, time spent parked apart.
        now: the driver's monotonic clock, seconds.
        timing: the protocol's clocks.

    Raises:
        ValueError: no leg, or two with one attempt or one peer.
    """
    pairs = tuple(legs)
    if not pairs or any(len(set(ids)) < len(pairs) for ids in zip(*pairs, strict=True)):
        raise ValueError(f"a part needs legs with distinct peers and attempts, not {pairs}")
    at = Moment(now, timing)
    asked = [ask(TargetLeg(peer, attempt), at) for peer, attempt in pairs]
    part = TargetPart(
        key=key,
        legs=tuple(leg for leg, _ in asked),
        timing=timing,
        deadline_seconds=deadline_seconds,
        deadline_at=now + deadline_seconds,
    )
    return part, cast("tuple[Action, ...]", tuple(action for _, actions in asked for action in actions))


def step(part: TargetPart, event: TargetEvent, now: float) -> tuple[TargetPart, tuple[Action, ...]]:
    """Take one event. Late, repeated and foreign events are inert; every event is accepted in every state."""
    at = Moment(now, part.timing)
    before = part
    part, actions = _tell_legs(part, event, at)
    if type(event) in TARGET_PART_EVENTS:
        part, more = fire(TARGET_PART, part, event, at)
        actions += more
    part, done = settle(TARGET_PART, TARGET_PART_EVENTS, part, actions, _signal, at)
    return _stop_clock(before, part, now), cast("tuple[Action, ...]", done)


def next_timer(part: TargetPart) -> float | None:
    """When the next `Tick` is due, or ``None``."""
    times = [leg.until for leg in part.legs if leg.until is not None]
    times += [leg.repeat.at for leg in part.legs if leg.repeat is not None]
    if part.phase is TargetPhase.INSTALLING:
        return None
    if part.phase is TargetPhase.LIVE and part.parked_since is None:
        times.append(part.deadline_at)
    return min(times, default=None)


def _tell_legs(part: TargetPart, event: TargetEvent, at: Moment) -> Change:
    """Put an event to the legs it is about."""
    match event:
        case Received(peer=peer, message=wire.Lease() | wire.Parked() | wire.Refused() | wire.Revoked() as message):
            return _each(part, message, at, lambda leg: leg.peer == peer and leg.attempt == message.attempt)
        case Received(peer=peer, message=wire.Commit() | wire.Ack() as message):
            return _each(part, message, at, lambda leg: leg.peer == peer and leg.attempt == message.attempt)
        case ReadEnded() | CutOffDone():
            return _each(part, event, at, lambda leg: leg.attempt == event.attempt)
        case PeerLost() | PeerDead():
            return _each(part, event, at, lambda leg: leg.peer == event.peer)
        case Tick() if part.phase is not TargetPhase.INSTALLING:
            return _each(part, event, at)
        case _:
            return part, ()


def _each(part: TargetPart, event: object, at: Moment, concerned: _Concerned = lambda _leg: True) -> Change:
    legs, actions = fire_each(TARGET_LEG, part.legs, event, at, concerned)
    return (part if legs is part.legs else replace(part, legs=legs)), actions


def _signal(part: TargetPart) -> object | None:
    """What the legs together say to the part."""
    phases = {leg.phase for leg in part.legs}
    if part.phase is TargetPhase.LIVE and phases == {LegPhase.LANDED}:
        return AllLanded()
    if part.phase is TargetPhase.LIVE and phases == {LegPhase.COMMITTED}:
        return AllCommitted()
    if part.phase is TargetPhase.ENDING and phases <= set(QUIET):
        return AllQuiet()
    if part.phase is TargetPhase.ENDED and phases == {LegPhase.CLOSED}:
        return AllTold()
    return None


def _stop_clock(before: TargetPart, part: TargetPart, now: float) -> TargetPart:
    """The transfer's clock stands still while a leg is parked: waiting for a prefill has its own bound (B7)."""
    parked = any(leg.phase is LegPhase.PARKED for leg in part.legs)
    if parked and before.parked_since is None:
        return replace(part, parked_since=now)
    if not parked and before.parked_since is not None:
        return replace(part, parked_since=None, deadline_at=part.deadline_at + now - before.parked_since)
    return part


# --- guards and effects ---------------------------------------------------------------------------------------


def overdue(part: TargetPart, _event: Tick, at: Moment) -> bool:
    """The transfer's own clock has run out."""
    return part.parked_since is None and at.now >= part.deadline_at


def out_of_time(part: TargetPart, _event: AllCommitted, at: Moment) -> bool:
    """The first commit's time to live ended before the last commit came."""
    return any(leg.until is None or at.now >= leg.until for leg in part.legs)


def prepare(part: TargetPart, _event: AllLanded, at: Moment) -> Change:
    """Only now start the commits' clocks: a slow leg must not let a fast one's run out."""
    return _each(part, Prepare(), at)


def install(part: TargetPart, _event: AllCommitted, _at: Moment) -> Change:
    """The one switch."""
    return part, (Install(),)


def report_done(part: TargetPart, _event: InstallDone, at: Moment) -> Change:
    """Installed, whatever the sources come to hear of it."""
    part, actions = _each(part, Switched(), at)
    return part, (*actions, Report(End.DONE, None))


def cut_all(part: TargetPart, event: LegFailed | Cancel, at: Moment) -> Change:
    """Cut off every sibling before anything else happens (A4)."""
    return _cut_all(part, event.failure, at)


def cut_overdue(part: TargetPart, _event: Tick, at: Moment) -> Change:
    """The deadline."""
    waits = ", ".join(f"{leg.peer} {leg.phase.value}" for leg in part.legs)
    text = f"not done {part.deadline_seconds:g} s after the first ask ({waits})"
    return _cut_all(part, fail(End.EXPIRED, errors.DeadlineError, text), at)


def cut_expired(part: TargetPart, _event: AllCommitted, at: Moment) -> Change:
    """All commits are here, and the first of them is no longer good."""
    text = "the last commit came after the first one's time to live"
    return _cut_all(part, fail(End.EXPIRED, errors.ExpiredError, text), at)


def cut_failed(part: TargetPart, event: InstallFailed, at: Moment) -> Change:
    """The engine would not take the blocks."""
    return _cut_all(part, failure_of(event.error), at)


def report_failed(part: TargetPart, _event: AllQuiet, _at: Moment) -> Change:
    """Every cut-off is done: the blocks go back, then the end is told, once (A2)."""
    failure = part.failure or fail(End.FAILED, errors.TransferError, "failed without a word")
    return part, (ReleaseBlocks(), Report(failure.end, failure.error))


def _cut_all(part: TargetPart, failure: Failure, at: Moment) -> Change:
    return _each(replace(part, failure=failure), Cut(failure), at)


# --- the table ------------------------------------------------------------------------------------------------

P = TargetPhase
TARGET_PART_EVENTS = (
    LegFailed, AllLanded, AllCommitted, AllQuiet, AllTold, InstallDone, InstallFailed, Cancel, Tick,
)  # fmt: skip

TARGET_PART = total(
    P,
    TARGET_PART_EVENTS,
    {
        P.LIVE: row(
            on(LegFailed, Edge(P.ENDING, cut_all)),
            on(Cancel, Edge(P.ENDING, cut_all)),
            on(Tick, Edge(P.ENDING, cut_overdue, overdue)),
            on(AllLanded, Edge(None, prepare)),
            on(AllCommitted, Edge(P.ENDING, cut_expired, out_of_time), Edge(P.INSTALLING, install)),
            inert(AllQuiet, AllTold, InstallDone, InstallFailed),
        ),
        # The engine is taking the blocks: too late for a cancel, a deadline or a source's end.
        P.INSTALLING: row(
            on(InstallDone, Edge(P.ENDED, report_done)),
            on(InstallFailed, Edge(P.ENDING, cut_failed)),
            inert(LegFailed, AllLanded, AllCommitted, AllQuiet, AllTold, Cancel, Tick),
        ),
        P.ENDING: row(
            on(AllQuiet, Edge(P.ENDED, report_failed)),
            inert(LegFailed, AllLanded, AllCommitted, AllTold, InstallDone, InstallFailed, Cancel, Tick),
        ),
        P.ENDED: row(
            on(AllTold, Edge(P.CLOSED)),
            inert(LegFailed, AllLanded, AllCommitted, AllQuiet, InstallDone, InstallFailed, Cancel, Tick),
        ),
        P.CLOSED: row(inert(*TARGET_PART_EVENTS)),
    },
)
