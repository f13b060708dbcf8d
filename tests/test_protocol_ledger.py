"""What is remembered of request keys, and which asks are parked."""

from __future__ import annotations

from kvlink import errors, protocol
from kvlink.protocol import End, Fresh, Join, Ledger, ParkingLot, Recorded, Refuse


def test_a_repeated_request_joins_the_live_one() -> None:
    """G1."""
    ledger: Ledger[str] = Ledger()
    assert ledger.look("k", "a", 0.0) == Fresh()
    ledger.begin("k", "a", "part")
    assert ledger.look("k", "a", 1.0) == Join("part")


def test_the_outcome_is_answered_until_the_blocks_are_released() -> None:
    """G3 G5: never the old outcome for new blocks."""
    ledger: Ledger[str] = Ledger(horizon_seconds=10.0)
    ledger.begin("k", "a", "part")
    ledger.end("k", End.DONE, None, 0.0, standing=True)
    assert ledger.look("k", "a", 99.0) == Recorded(End.DONE, None)
    ledger.release("k", 100.0)
    assert ledger.look("k", "a", 100.0) == Fresh()
    assert ledger.outcome("k") == Recorded(End.DONE, None)
    ledger.release("k", 109.0)
    assert ledger.look("other", None, 110.0) == Fresh()
    assert ledger.outcome("k") is None


def test_other_content_under_a_live_or_standing_key_is_a_conflict_that_names_both() -> None:
    """G4."""
    ledger: Ledger[str] = Ledger()
    ledger.begin("k", None, "part")
    assert ledger.look("k", "a", 0.0) == Join("part")
    ledger.content("k", "a")
    verdict = ledger.look("k", "b", 0.0)
    assert isinstance(verdict, Refuse)
    assert verdict.error.code == errors.ConflictError.code
    assert "content a" in verdict.error.message
    assert "with b" in verdict.error.message
    ledger.end("k", End.INDETERMINATE, None, 0.0, standing=True)
    assert isinstance(ledger.look("k", "b", 0.0), Refuse)


def test_a_failed_request_may_come_again_with_other_blocks() -> None:
    ledger: Ledger[str] = Ledger()
    ledger.begin("k", "a", "part")
    ledger.end("k", End.FAILED, protocol.error_info(errors.TransportError, "x"), 0.0, standing=False)
    assert ledger.look("k", "b", 1.0) == Fresh()
    ledger.begin("k", "b", "next")
    assert ledger.look("k", "b", 700.0) == Join("next"), "the horizon of its first life must not end its second"


def test_a_full_ledger_refuses_as_busy_and_recovers_at_the_horizon() -> None:
    ledger: Ledger[str] = Ledger(limit=2, horizon_seconds=10.0)
    for key in ("a", "b"):
        ledger.begin(key, None, key)
        ledger.end(key, End.FAILED, None, 0.0, standing=False)
    verdict = ledger.look("c", None, 9.0)
    assert isinstance(verdict, Refuse)
    assert verdict.error.code == errors.BusyError.code
    assert verdict.error.retryable
    assert ledger.look("c", None, 10.0) == Fresh()
    assert len(ledger) == 0


def test_parked_asks_are_bounded_in_number_and_time() -> None:
    lot: ParkingLot[str] = ParkingLot(limit=2)
    assert lot.park("k", "A", 1, "first", 10.0)
    assert lot.park("k", "A", 1, "repeat", 99.0), "a repeat does not restart the clock"
    assert lot.park("k", "B", 1, "second", 20.0)
    assert not lot.park("j", "C", 1, "third", 20.0)
    assert lot.next_timer() == 10.0
    assert lot.expire(10.0) == ["first"]
    assert lot.take("k") == ["second"]
    assert lot.take("k") == []
    assert len(lot) == 0
    assert lot.next_timer() is None


def test_a_younger_attempt_takes_its_elders_spot_and_a_lost_peer_frees_its_own() -> None:
    """G2."""
    lot: ParkingLot[str] = ParkingLot()
    lot.park("k", "A", 1, "old", 10.0)
    lot.park("k", "A", 2, "new", 12.0)
    lot.park("k", "A", 1, "late copy", 10.0)
    lot.park("j", "A", 3, "other", 10.0)
    lot.park("j", "B", 1, "kept", 10.0)
    lot.drop("k", "A", 1)
    assert lot.take("k") == ["new"]
    lot.forget("A")
    assert len(lot) == 1
    lot.drop("j", "B", 1)
    assert len(lot) == 0
