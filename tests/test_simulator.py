"""Exactly once or not at all, in thousands of seeded worlds; and planted bugs, each of which must be found in them."""

from __future__ import annotations

from pathlib import Path

import pytest
from mutants import MUTANTS

from kvlink.testing.simulator import simulate
from kvlink.testing.simulator.campaign import Campaign, keep, kept, run, run_on_all_cores
from kvlink.testing.simulator.plan import FAR_DRIFT

SEEDS = 20_000
HUNT = 2_000
KEPT = Path(__file__).parent / "vectors" / "seeds.json"


@pytest.mark.timeout(600)
def test_no_invariant_breaks_in_20_000_seeds() -> None:
    """A1 A2 A3 A4 A6, B1 B3 B4 B5 B6 B7, C1 C3 C5 C6 C7, E3 E4, G1 G2 G3 G4 G5: whoever is late."""
    total = Campaign()
    for batch in run_on_all_cores(range(SEEDS)):
        total.add(batch)
    print(total)
    assert not total.failures, str(total)
    assert total.seeds == SEEDS
    assert total.done > total.seeds, "the last request of every seed succeeds, and many before it"


def test_beyond_the_margin_clocks_cost_knowledge_and_nothing_else() -> None:
    """G3: a source may give up what is being installed, and says that it does not know; all else holds by no clock."""
    findings = [outcome.finding for seed in range(1_500) if (outcome := simulate(seed, drift=FAR_DRIFT)).finding]
    assert not findings, findings[0]


def test_seeds_that_once_failed_do_not_fail_again() -> None:
    total = run(kept(KEPT))
    assert not total.failures, str(total)


def test_the_same_seed_does_the_same_thing() -> None:
    first = simulate(11, trace=True)
    simulate(12)
    assert simulate(11, trace=True) == first
    assert first.trace


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, findings = MUTANTS[name]
    plant(monkeypatch)
    found = next((outcome for seed in range(HUNT) if (outcome := simulate(seed)).finding is not None), None)
    assert found is not None, f"{name} survives {HUNT} seeds"
    print(f"{name}: {found}")
    assert found.finding is not None
    assert found.finding[0] in findings, found.finding


def test_a_failing_seed_is_told_with_its_trace_and_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plant, _ = MUTANTS["install_without_commit"]
    plant(monkeypatch)
    total = run(range(10))
    assert "has not committed" in str(total)
    assert " -> S/0@1: Prepared" in str(total) or " -> S/0@1: Asked" in str(total)
    keep(tmp_path / "seeds.json", total.failures)
    keep(tmp_path / "seeds.json", total.failures)
    assert kept(tmp_path / "seeds.json") == [failure.seed for failure in total.failures]
