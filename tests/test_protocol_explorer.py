"""The eight invariants over every interleaving of small worlds, and changed rules that must break them.

A changed rule is a changed cell of a table: it shows that the check sees what it is there for.
"""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kvlink import errors, wire
from kvlink.protocol import PeerDead, PreparedArrived, Tick, error_info, group, source_leg, target, target_leg
from kvlink.protocol.source_leg import SOURCE_LEG
from kvlink.protocol.source_leg import LegPhase as SourceLegPhase
from kvlink.protocol.table import Edge
from kvlink.protocol.target import TARGET_PART, TargetPhase
from kvlink.protocol.target_leg import TARGET_LEG, Cut, Prepare
from kvlink.protocol.target_leg import LegPhase as TargetLegPhase
from kvlink.testing.explorer import Exploration, explore
from kvlink.testing.protocol_model import ProtocolModel
from kvlink.testing.worlds import FAST, UNREPEATED, Scenario

S, T = SourceLegPhase, TargetLegPhase


def explored(*kinds: str, **scenario) -> Exploration:
    return explore(ProtocolModel(Scenario(kinds=frozenset(kinds), **scenario)))


def assert_holds(seen: Exploration) -> None:
    assert seen.violation is None, str(seen)
    assert seen.complete
    assert seen.rests > 0, "a world that never comes to rest proves no progress"


# --- the rule of docs/protocol.md -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["lose", "duplicate", "fail", "lapse", "cancel", "crash", "silence"])
def test_one_fault_of_any_kind_breaks_no_invariant(kind: str) -> None:
    """A1 A2 A3 A6, B1 B3 B5, C5 C6 C7, E3, G2: one source, one target, one fault, every interleaving."""
    assert_holds(explored(kind))


def test_two_lost_messages_break_no_invariant() -> None:
    """B3, G3: whatever two messages are lost, repeats or bounds bring both sides to an end."""
    assert_holds(explored("lose", faults=2))


def test_a_gateway_that_turns_to_another_engine_gets_no_second_install() -> None:
    """G3: the second target is committed only after the first said *not installed*, or not at all."""
    assert_holds(explored("elsewhere", timing=UNREPEATED, deadline_seconds=4.0, ttl_seconds=4.0))


@pytest.mark.parametrize("sealed", [True, False])
def test_push_comes_to_rest_whatever_is_lost(sealed: bool) -> None:
    """E4: nobody waits without a bound when the ticket, the announcement or the ask is lost."""
    assert_holds(explored("lose", push=True, sealed=sealed))


def test_an_ask_before_the_seal_is_parked_and_served() -> None:
    assert_holds(explored(sealed=False, faults=0))


# --- other rules, which must fail -----------------------------------------------------------------------------


def changed(patch: pytest.MonkeyPatch, table, phase, event, *edges: Edge) -> None:
    patch.setitem(table[phase], event, edges)


def assert_breaks(seen: Exploration, finding: str) -> None:
    assert seen.violation is not None, f"nothing was found: {seen}"
    assert finding in seen.violation.what, str(seen)
    assert seen.violation.trace, "a finding comes with the way there"


@pytest.fixture
def naive(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target installs when landed; the source serves another attempt when it has waited long enough."""

    def pretend(leg, _event, _at):
        return replace(leg, until=float("inf")), ()

    changed(monkeypatch, TARGET_LEG, T.LANDED, Prepare, Edge(T.COMMITTED, pretend))
    changed(monkeypatch, SOURCE_LEG, S.LEASED, wire.Installed, Edge(S.INSTALLED, source_leg.record_installed))


@pytest.mark.usefixtures("naive")
def test_the_naive_rule_installs_twice() -> None:
    """G3: one slow *installed*, one gateway that turns elsewhere."""
    assert_breaks(explored("elsewhere", timing=UNREPEATED, checks="2"), "2: E0 installs, and ['D0'] have installed")


@pytest.mark.usefixtures("naive")
def test_the_naive_rule_installs_after_the_source_freed_its_blocks() -> None:
    """A6: one lapsed lease."""
    assert_breaks(explored("lapse", checks="C"), "C: D0 installs, and S0 has given up")
    assert_breaks(explored("lapse", ttl_seconds=4.0, checks="8"), "read from blocks after their lease")


def test_a_source_that_takes_silence_for_not_installed_installs_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """G3: *indeterminate* is not *not installed*."""
    changed(monkeypatch, SOURCE_LEG, S.COMMITTED, Tick, Edge(S.LAPSED, source_leg.give_up, source_leg.over), Edge())
    assert_breaks(explored("elsewhere", timing=UNREPEATED, checks="2"), "2: E0 installs, and ['D0'] have installed")


def test_a_target_that_restarts_the_clock_on_a_repeat_installs_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    def restart(leg, event, at):
        leg, actions = target_leg.prepared_again(leg, event, at)
        return replace(leg, prepared_at=at.now, until=at.now + at.timing.commit_ttl_seconds), actions

    over = Edge(T.CUTTING, target_leg.cut_late, target_leg.over)
    changed(monkeypatch, TARGET_LEG, T.PREPARED, Tick, over, Edge(None, restart, target_leg.due), Edge())
    assert_breaks(explored("lose"), "C: D0 installs, and S0 has given up")


def test_a_source_that_commits_a_lapsed_lease_has_rubbish_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A6: integrity off, blocks refilled under the read."""
    changed(monkeypatch, SOURCE_LEG, S.LEASED, PreparedArrived, Edge(S.COMMITTED, source_leg.commit))
    changed(monkeypatch, SOURCE_LEG, S.LAPSED, PreparedArrived, Edge(S.COMMITTED, source_leg.commit))
    assert_breaks(explored("lapse", "silence", checks="8"), "8: D0 installs what {100} read from blocks")


def test_a_target_that_skips_the_cut_off_releases_blocks_under_a_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A1, A2, A4."""
    changed(monkeypatch, TARGET_LEG, T.MOVING, Cut, Edge(T.NOT_INSTALLED, target_leg.tell_with_siblings))
    assert_breaks(explored("cancel"), "1: D0 releases blocks into which {100} may still land")


def test_a_source_that_takes_its_commit_back_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    changed(monkeypatch, SOURCE_LEG, S.COMMITTED, source_leg.Revoke, Edge(S.REVOKED, source_leg.revoke))
    assert_breaks(explored("cancel"), "C: D0 installs, and S0 has given up")


def test_a_source_that_waits_for_ever_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """B1, B3: a hold whose target never speaks again must come back."""
    changed(monkeypatch, SOURCE_LEG, S.COMMITTED, Tick, Edge())
    changed(monkeypatch, SOURCE_LEG, S.COMMITTED, PeerDead, Edge())
    assert_breaks(explored("crash"), "5: the timer of 5 is due, and nothing comes of it")


def test_a_part_that_is_cancelled_alone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """C6: installed, and taken back on one rank while its siblings become visible."""
    cancelled = Edge(TargetPhase.ENDING, target.cut_all)
    changed(monkeypatch, TARGET_PART, TargetPhase.HIDDEN, target.Cancel, cancelled)
    assert_breaks(explored("cancel", readers=2, together=True, prompt=True), "3: ")


def test_a_late_word_of_an_earlier_try_counts_for_nothing() -> None:
    """G2: *installed* of a part that is over neither joins the next try nor lets it become visible."""
    known = group.begin("k", 9, "D0", ["D0", "D1"], now=0.0, timing=FAST)

    def say(peer: str, part: int, stage: wire.Stage, number: int = 0) -> list[wire.Decided]:
        nonlocal known
        word = wire.Stands(key="k", part=part, group=number, content="c", stage=stage)
        known, actions = group.step(known, group.Stood(peer, word), 1.0)
        return [send.message for send in actions if send.peer == "D1"]

    say("D0", 5, wire.Stage.LANDED)
    say("D1", 6, wire.Stage.LANDED)
    assert known.phase is group.GroupPhase.PROCEEDING
    say("D0", 5, wire.Stage.INSTALLED, 9)
    (late,) = say("D1", 6, wire.Stage.INSTALLED, 8)
    assert late.verdict is wire.Verdict.ABANDON
    say("D1", 4, wire.Stage.INSTALLED, 9)
    assert known.phase is group.GroupPhase.PROCEEDING
    (word,) = say("D1", 6, wire.Stage.INSTALLED, 9)
    assert word.verdict is wire.Verdict.REVEAL


@pytest.mark.parametrize("tokens", [96, None], ids=["another length", "none stated"])
def test_shares_that_end_at_different_positions_are_abandoned_before_any_is_committed(tokens: int | None) -> None:
    known = group.begin("k", 9, "D0", ["D0", "D1"], now=0.0, timing=FAST)
    verdicts = []
    for peer, end in (("D0", 97), ("D1", tokens)):
        word = wire.Stands(key="k", part=5, group=0, content="c", stage=wire.Stage.LANDED, tokens=end)
        known, actions = group.step(known, group.Stood(peer, word), 1.0)
        verdicts += [(send.peer, send.message.verdict) for send in actions]
    assert verdicts == [("D0", wire.Verdict.ABANDON), ("D1", wire.Verdict.ABANDON)]
    assert known.error is not None
    assert known.error.code == errors.ConflictError.code


def test_the_end_of_an_earlier_try_does_not_end_the_next() -> None:
    """G2: a rank that is still cutting off its first try, told *failed* late or twice, leaves its siblings' second."""
    word = wire.Stands(
        key="k", part=5, group=0, content="c", stage=wire.Stage.FAILED, error=error_info(errors.TransferError, "no")
    )
    first = group.begin("k", 1, "D0", ["D0", "D1"], now=0.0, timing=FAST)
    first, _ = group.step(first, group.Stood("D1", replace(word, stage=wire.Stage.JOINED, error=None)), 0.1)
    first, _ = group.step(first, group.Stood("D0", replace(word, part=3)), 0.2)
    assert first.phase is group.GroupPhase.ABANDONED
    again = replace(word, part=4, stage=wire.Stage.JOINED, error=None)
    assert group.begins(first, "D0", again)
    second = group.begin("k", 2, "D0", ["D0", "D1"], now=0.3, timing=FAST, after=first)
    second, _ = group.step(second, group.Stood("D0", again), 0.3)
    second, (noted,) = group.step(second, group.Stood("D1", word), 0.4)
    assert noted.message.verdict is wire.Verdict.NOTED
    second, (over,) = group.step(second, group.Stood("D1", replace(word, stage=wire.Stage.LANDED)), 0.4)
    assert over.message.verdict is wire.Verdict.ABANDON
    assert second.phase is group.GroupPhase.GATHERING
    assert not group.begins(replace(second, phase=group.GroupPhase.ABANDONED), "D1", replace(word, stage=again.stage))


@pytest.mark.parametrize("stage", [wire.Stage.INSTALLED, wire.Stage.LEAVING])
def test_a_part_whose_group_is_forgotten_does_not_say_that_it_failed(stage: wire.Stage) -> None:
    """G3: its siblings may have been told to become visible before the coordinator forgot."""
    stands = wire.Stands(key="k", part=5, group=1, content="c", stage=stage)
    error = group.answer_unknown("D1", stands).message.error
    assert error.code == errors.IndeterminateError.code
