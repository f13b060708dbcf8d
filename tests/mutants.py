"""Planted protocol bugs: each changes one cell of a table, or one function, and must be found: by the simulator, those
of streams by the explorer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from kvlink import wire
from kvlink.protocol import (
    EndHold,
    Install,
    Ledger,
    ParkingLot,
    PeerDead,
    PeerLost,
    PreparedArrived,
    ReleaseBlocks,
    Report,
    Seal,
    SourcePart,
    StartIncrement,
    Tick,
    group,
    source,
    source_asks,
    source_leg,
    source_part,
    target,
    target_leg,
)
from kvlink.protocol.increments import Landing, Offering
from kvlink.protocol.source import SOURCE_PART
from kvlink.protocol.source_leg import SOURCE_LEG
from kvlink.protocol.source_leg import LegPhase as S
from kvlink.protocol.source_part import AskArrived, SourcePhase
from kvlink.protocol.table import INERT, Edge
from kvlink.protocol.target import TARGET_PART, TargetPhase
from kvlink.protocol.target_leg import TARGET_LEG
from kvlink.protocol.target_leg import LegPhase as T
from kvlink.testing.simulator.target_rank import TargetRank

Mutant = Callable[[pytest.MonkeyPatch], None]
MUTANTS: dict[str, tuple[Mutant, str]] = {}
"""By name: how to plant it, and the numbers of the invariants of which one must be found broken."""


def mutant(findings: str) -> Callable[[Mutant], Mutant]:
    def add(plant: Mutant) -> Mutant:
        MUTANTS[plant.__name__] = (plant, findings)
        return plant

    return add


STREAM_MUTANTS: dict[str, tuple[Mutant, str]] = {}
"""As `MUTANTS`, for the explorer's worlds in which KV is streamed."""


def stream_mutant(findings: str) -> Callable[[Mutant], Mutant]:
    def add(plant: Mutant) -> Mutant:
        STREAM_MUTANTS[plant.__name__] = (plant, findings)
        return plant

    return add


def cell(patch: pytest.MonkeyPatch, table, phase, event, *edges: Edge) -> None:
    patch.setitem(table[phase], event, (*edges, *INERT))


# --- the target -----------------------------------------------------------------------------------------------------


@mutant("14")
def done_before_cut_off(patch: pytest.MonkeyPatch) -> None:
    """A2, A4: the end is told while bytes may still land."""
    patch.setattr(target, "QUIET", (*target_leg.QUIET, T.CUTTING))


@mutant("14")
def free_on_timeout(patch: pytest.MonkeyPatch) -> None:
    """A1, A3: the deadline gives the blocks back, whatever still moves."""

    def free(part, _event, at):
        failure = target.fail(target.End.EXPIRED, target.errors.DeadlineError, "too late")
        part, cut = target._cut_all(part, failure, at)
        return part, (ReleaseBlocks(), Report(failure.end, failure.error), *cut)

    again = Edge(None, target.say_again, target.unheard)
    cell(patch, TARGET_PART, TargetPhase.LIVE, Tick, Edge(TargetPhase.ENDED, free, target.overdue), again)


@mutant("6")
def attempt_id_reused(patch: pytest.MonkeyPatch) -> None:
    """G2: a retry goes by the name of what it repeats."""

    def again(rank):
        rank._last_attempt = rank._last_attempt % 3 + 1  # the legs of one part differ, as a part demands
        return rank._last_attempt

    patch.setattr(TargetRank, "_next_attempt", again)


@mutant("3C")
def install_without_commit(patch: pytest.MonkeyPatch) -> None:
    """E3: all has landed, so all is well."""

    def pretend(leg, _event, _at):
        return replace(leg, until=float("inf")), ()

    cell(patch, TARGET_LEG, T.LANDED, target_leg.Prepare, Edge(T.COMMITTED, pretend))


@mutant("3CA")
def install_at_the_first_commit(patch: pytest.MonkeyPatch) -> None:
    """A4: one source has promised, the others surely will."""
    whole = target._signal

    def signal(part):
        phases = {leg.phase for leg in part.legs}
        if part.phase is TargetPhase.LIVE and T.COMMITTED in phases and phases <= {T.COMMITTED, T.PREPARED}:
            return target.AllCommitted()
        return whole(part)

    patch.setattr(target, "_signal", signal)


@mutant("C")
def clock_restarted_on_a_repeat(patch: pytest.MonkeyPatch) -> None:
    """The commit's time to live counts from the last *prepared*, not from the first."""

    def restart(leg, event, at):
        leg, actions = target_leg.prepared_again(leg, event, at)
        return replace(leg, prepared_at=at.now, until=at.now + at.timing.commit_ttl_seconds), actions

    over = Edge(T.CUTTING, target_leg.cut_late, target_leg.over)
    cell(patch, TARGET_LEG, T.PREPARED, Tick, over, Edge(None, restart, target_leg.due))


@mutant("C")
def install_after_the_time_to_live(patch: pytest.MonkeyPatch) -> None:
    """G3: a commit is a commit, however late."""

    def patient(effect):
        def do(leg, event, at):
            leg, actions = effect(leg, event, at)
            return replace(leg, until=None), actions

        return do

    cell(patch, TARGET_LEG, T.LANDED, target_leg.Prepare, Edge(T.PREPARED, patient(target_leg.send_prepared)))
    cell(patch, TARGET_LEG, T.PREPARED, wire.Commit, Edge(T.COMMITTED, patient(target_leg.take_commit)))
    cell(patch, TARGET_PART, TargetPhase.LIVE, target.AllCommitted, Edge(TargetPhase.INSTALLING, target.install))


@mutant("4")
def blocks_returned_twice(patch: pytest.MonkeyPatch) -> None:
    """Once when it failed, and once when it ended."""

    def twice(part, event, at):
        part, actions = target.report_failed(part, event, at)
        return part, (*actions, ReleaseBlocks())

    cell(patch, TARGET_PART, TargetPhase.ENDING, target.AllQuiet, Edge(TargetPhase.ENDED, twice))


@mutant("34")
def cancelled_while_it_installs(patch: pytest.MonkeyPatch) -> None:
    """A2: a cancel that comes in the middle of the one switch is heeded."""
    cell(patch, TARGET_PART, TargetPhase.INSTALLING, target.Cancel, Edge(TargetPhase.ENDING, target.cut_all))


@mutant("34")
def installed_twice(patch: pytest.MonkeyPatch) -> None:
    """The switch is thrown again when its answer is slow."""
    patch.setattr(target, "install", lambda part, _event, _at: (part, (Install(), Install())))
    cell(patch, TARGET_PART, TargetPhase.LIVE, target.AllCommitted, Edge(TargetPhase.INSTALLING, target.install))


@mutant("7")
def outcome_answered_for_a_released_reservation(patch: pytest.MonkeyPatch) -> None:
    """G5: *done* is answered long after the engine has reused the blocks."""
    patch.setattr(Ledger, "release", lambda _ledger, _key, _now: None)


# --- siblings, and who coordinates them -----------------------------------------------------------------------------


@mutant("3")
def visible_when_installed(patch: pytest.MonkeyPatch) -> None:
    """A4: a rank shows its part as soon as it is installed, whatever becomes of its siblings'."""

    def show(part, event, at):
        return target.show(part, event, at)

    hide = Edge(TargetPhase.ENDED, show, target.together)
    cell(
        patch,
        TARGET_PART,
        TargetPhase.INSTALLING,
        target.InstallDone,
        hide,
        Edge(TargetPhase.ENDED, target.report_done),
    )


@mutant("3")
def revealed_when_landed(patch: pytest.MonkeyPatch) -> None:
    """A4: the coordinator takes *landed* for *installed*."""
    all_at = group._all
    landed = group.Stage.LANDED
    patch.setattr(
        group,
        "_all",
        lambda parts, stage, but="": all_at(parts, landed if stage.value == "installed" else stage, but=but),
    )


@mutant("3")
def sources_told_before_siblings_are_installed(patch: pytest.MonkeyPatch) -> None:
    """A6: a source frees its blocks while another rank may still have to read."""

    def hide(part, event, at):
        part, told = target.hide(part, event, at)
        part, actions = target._each(part, target.Switched(), at)
        return part, (*told, *actions)

    doomed = Edge(TargetPhase.ENDING, target.cut_doomed, target.doomed)
    hidden = Edge(TargetPhase.HIDDEN, hide, target.together)
    done = Edge(TargetPhase.ENDED, target.report_done)
    cell(patch, TARGET_PART, TargetPhase.INSTALLING, target.InstallDone, doomed, hidden, done)


@mutant("3")
def coordinators_silence_taken_for_failure(patch: pytest.MonkeyPatch) -> None:
    """G3: who does not know whether his siblings are visible says that the request has failed."""
    for event in (PeerLost, PeerDead):
        failed = Edge(TargetPhase.ENDING, target.cut_leaderless, target.leaderless)
        cell(patch, TARGET_PART, TargetPhase.HIDDEN, event, failed)


@mutant("3")
def ranks_silence_taken_for_visible(patch: pytest.MonkeyPatch) -> None:
    """A4: the coordinator says *done* of a rank that it has lost."""
    table = group.GROUP[group.GroupPhase.REVEALING]
    for event in (PeerLost, PeerDead):
        shown = Edge(
            group.GroupPhase.SHOWING, lambda parts, _event, at: group.reveal_own(parts, None, at), group.undecided
        )
        patch.setitem(table, event, (shown, *INERT))


# --- the source -----------------------------------------------------------------------------------------------------


@mutant("2AC4R")
def commit_to_two_targets(patch: pytest.MonkeyPatch) -> None:
    """G3: a gateway that turns elsewhere is served, whatever the first target may have done."""
    patch.setattr(source_asks, "_in_the_way", lambda _part, _event: None)


@mutant("2AC")
def silence_taken_for_not_installed(patch: pytest.MonkeyPatch) -> None:
    """G3: *indeterminate* is not *not installed*."""
    cell(patch, SOURCE_LEG, S.COMMITTED, Tick, Edge(S.LAPSED, source_leg.give_up, source_leg.over))


@mutant("2AC")
def loss_taken_for_death(patch: pytest.MonkeyPatch) -> None:
    """G3: a target that cannot be heard may have installed."""

    def died(leg, event, at):
        return source_leg.record_dead(leg, event, at)

    cell(patch, SOURCE_LEG, S.COMMITTED, PeerLost, Edge(S.NOT_INSTALLED, died))


@mutant("8")
def commit_after_a_lapsed_lease(patch: pytest.MonkeyPatch) -> None:
    """A6: the blocks may have been given to others while they were read."""
    cell(patch, SOURCE_LEG, S.LEASED, PreparedArrived, Edge(S.COMMITTED, source_leg.commit))
    cell(patch, SOURCE_LEG, S.LAPSED, PreparedArrived, Edge(S.COMMITTED, source_leg.commit))


@mutant("8")
def root_not_compared(patch: pytest.MonkeyPatch) -> None:
    """A6: what landed is not what lies here, and nobody looks."""
    lapsed = Edge(S.LAPSED, source_leg.refuse_lapsed, source_leg.lapsed)
    commit = Edge(S.COMMITTED, lambda leg, event, at: source_leg.commit(leg, replace(event, source_root=None), at))
    cell(patch, SOURCE_LEG, S.LEASED, PreparedArrived, lapsed, commit)


@mutant("ACR")
def commit_taken_back_by_a_cancel(patch: pytest.MonkeyPatch) -> None:
    """C6: a promise is a promise."""
    cell(patch, SOURCE_LEG, S.COMMITTED, source_leg.Revoke, Edge(S.REVOKED, source_leg.revoke))


@mutant("R")
def lost_refusal(patch: pytest.MonkeyPatch) -> None:
    """B3: a refusal is sent once; if it is lost, its target waits for its own clock."""
    for phase in (S.NOT_INSTALLED, S.LAPSED, S.REVOKED):
        cell(patch, SOURCE_LEG, phase, PreparedArrived)


@mutant("R")
def acknowledged_before_it_is_recorded(patch: pytest.MonkeyPatch) -> None:
    """The target stops telling, and the source waits on."""
    cell(patch, SOURCE_LEG, S.COMMITTED, wire.Installed, Edge(None, source_leg.acknowledge))


@mutant("A2CR")
def death_of_an_old_incarnation_taken_for_its_successors(patch: pytest.MonkeyPatch) -> None:
    """C1: a rank's place is not its incarnation."""
    told = source._tell_legs

    def slot(peer: str) -> str:
        return peer.split("@", maxsplit=1)[0]

    def tell(part, event, at):
        if isinstance(event, PeerDead):
            legs = (leg.peer for leg in part.legs if slot(leg.peer) == slot(event.peer))
            event = PeerDead(next(legs, event.peer))
        return told(part, event, at)

    patch.setattr(source, "_tell_legs", tell)


@mutant("RA6C")
def stale_incarnation_accepted(patch: pytest.MonkeyPatch) -> None:
    """C1, G2: a rank that has restarted is taken for what it was: its attempts start anew, and are held for copies."""

    def leg(part, peer: str):
        return next((leg for leg in part.legs if leg.peer.split("@")[0] == peer.split("@", maxsplit=1)[0]), None)

    patch.setattr(SourcePart, "leg", leg)


@mutant("6")
def late_ask_revived(patch: pytest.MonkeyPatch) -> None:
    """G2: a late copy of an ask, after another engine has been served and has failed, is leased again."""
    patch.setattr(SourcePart, "latest", SourcePart.leg)


@mutant("5")
def park_without_bound(patch: pytest.MonkeyPatch) -> None:
    """B4: every early ask is kept."""
    park = ParkingLot.park

    def keep(lot, *args):
        lot._limit = 1 << 30
        return park(lot, *args)

    patch.setattr(ParkingLot, "park", keep)


@mutant("45")
def hold_without_bound(patch: pytest.MonkeyPatch) -> None:
    """B1: a committed leg whose target never speaks again keeps its blocks for ever."""
    cell(patch, SOURCE_LEG, S.COMMITTED, Tick)
    cell(patch, SOURCE_LEG, S.COMMITTED, PeerDead)


@mutant("4")
def hold_ended_under_a_lease(patch: pytest.MonkeyPatch) -> None:
    """A3: the hold's time to live is over, so the blocks go back, whoever reads."""
    patch.setattr(source_part.SourcePart, "idle", property(lambda _part: True))


@mutant("R5")
def same_lease_for_an_attempt_that_is_over(patch: pytest.MonkeyPatch) -> None:
    """A repeated ask is answered as if its lease still stood, or not at all."""
    edges = SOURCE_PART[SourcePhase.HELD][AskArrived]
    kept = tuple(edge for edge in edges if edge.do is not source_asks.refuse_over)
    over = Edge(None, None, source_asks.over_already)
    patch.setitem(SOURCE_PART[SourcePhase.HELD], AskArrived, (kept[0], kept[1], over, *kept[2:]))


# --- streams ----------------------------------------------------------------------------------------------------------


@stream_mutant("3")
def landed_before_the_seal(patch: pytest.MonkeyPatch) -> None:
    """All that was told is here, so all is here; and the source commits whatever was told."""
    patch.setattr(Landing, "whole", Landing.resting)
    patch.setattr(Offering, "closes", lambda *_: True)


@stream_mutant("3")
def increments_counted_and_not_numbered(patch: pytest.MonkeyPatch) -> None:
    """One that was lost on the way is not missed; and no digest tells."""

    def land(stream, number, _root):
        return replace(stream, landed=number, root=None)

    patch.setattr(Landing, "expects", lambda stream, advance: advance.number > stream.taken)
    patch.setattr(Landing, "land", land)


@stream_mutant("3")
def a_frontier_that_the_seal_does_not_cover(patch: pytest.MonkeyPatch) -> None:
    """The seal is told at once, and what had become ready with it is not."""

    def expose(offering):
        content = offering.content is not None
        told = offering.told if content and offering.exposed else offering.ready
        return replace(offering, exposed=offering.exposed + 1, ready=told, told=told, sealed=content)

    patch.setattr(Offering, "expose", expose)


@stream_mutant("3")
def an_increment_read_again(patch: pytest.MonkeyPatch) -> None:
    """A late copy of an increment's words starts its read anew, and nobody waits for that to end."""

    def take(leg, event, at):
        stream = leg.stream if leg.stream.taken >= event.number else leg.stream.take(event)
        leg = replace(leg, stream=stream, repeat=None, until=None)
        return leg, (StartIncrement(leg.peer, leg.attempt, event),)

    known = Edge(None, take, lambda leg, event, _at: event.number <= leg.stream.taken)
    following = Edge(None, target_leg.take_increment, target_leg.following)
    cell(patch, TARGET_LEG, T.MOVING, wire.Advance, known, following)


@stream_mutant("4")
def a_stream_whose_hold_ends_when_all_is_told(patch: pytest.MonkeyPatch) -> None:
    """A3: the blocks go back while the last increment is still read."""

    def sealed(part, event, at):
        part, actions = source.seal_stream(part, event, at)
        return part, (*actions, EndHold())

    cell(patch, SOURCE_PART, SourcePhase.STREAMING, Seal, Edge(SourcePhase.HELD, sealed))
