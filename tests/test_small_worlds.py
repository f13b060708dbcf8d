"""Every interleaving of two parts, two engines and two faults; what is *free* is in test_protocol_explorer.py."""

from __future__ import annotations

import pytest
from mutants import STREAM_MUTANTS

from kvlink.protocol import PeerDead, PeerLost, Tick, source_leg
from kvlink.protocol.source_leg import SOURCE_LEG
from kvlink.protocol.source_leg import LegPhase as S
from kvlink.protocol.table import Edge
from kvlink.testing.explorer import explore
from kvlink.testing.protocol_model import ProtocolModel
from kvlink.testing.small_worlds import ALL, PROMPT, main, see_all
from kvlink.testing.worlds import Scenario


@pytest.mark.timeout(900)
def test_two_parts_two_targets_and_two_faults_break_nothing() -> None:
    """A1 A2 A3 A4 A6, B1 B3, C1 C5 C6 C7, G2 G3: explored to the end, and no world rests with anything owed."""
    seen = list(see_all(PROMPT))
    print(*seen, sep="\n")
    for world in seen:
        assert world.exploration.violation is None, str(world.exploration.violation)
        assert world.exploration.complete
        assert world.exploration.rests > 0
    assert sum(world.exploration.states for world in seen) > 1_000_000


def test_the_command_reports_and_says_whether_all_is_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["push, two", "--workers", "1"]) == 0
    said = capsys.readouterr().out
    assert "0 violations 0 dead ends" in said
    assert "1 worlds," in said


def test_what_is_late_holds_no_clock_and_is_found_by_its_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """A late *installed* is all that it takes to install twice, if silence is taken for *not installed*."""
    world = Scenario(kinds=frozenset({"late", "elsewhere"}), faults=2, prompt=True)
    assert explore(ProtocolModel(world)).violation is None
    monkeypatch.setitem(SOURCE_LEG[S.COMMITTED], Tick, (Edge(S.LAPSED, source_leg.give_up, source_leg.over), Edge()))
    found = explore(ProtocolModel(world)).violation
    assert found is not None
    assert found.what.startswith(("2", "A", "C")), str(found)
    assert any("is late" in step for step in found.trace), str(found)


def test_loss_taken_for_death_is_found_with_two_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """B3: whoever cannot be heard may have installed."""
    gone = SOURCE_LEG[S.COMMITTED][PeerDead]
    monkeypatch.setitem(SOURCE_LEG[S.COMMITTED], PeerLost, gone)
    found = explore(ProtocolModel(Scenario(kinds=ALL, prompt=True, readers=2))).violation
    assert found is not None
    assert found.what[0] in "2AC", str(found)


@pytest.mark.parametrize("name", STREAM_MUTANTS)
def test_a_bug_planted_in_streams_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Landed before the seal, lost, read twice, not covered by the seal, freed too early: with one fault at most."""
    plant, findings = STREAM_MUTANTS[name]
    plant(monkeypatch)
    world = Scenario(kinds=ALL, prompt=True, push=True, sealed=False, chunks=2)
    found = explore(ProtocolModel(world)).violation
    assert found is not None, f"{name} survives"
    assert found.what[0] in findings, str(found)
