"""One request on one source rank: whom it leases to, what it commits, and when its blocks go back."""

from __future__ import annotations

import pytest

from kvlink import errors, limits, protocol, wire
from kvlink.protocol import (
    AskArrived,
    Cancel,
    DeclineArrived,
    End,
    EndHold,
    Expose,
    Learned,
    LeaseLapsed,
    ParkAsk,
    PeerDead,
    PeerLost,
    PreparedArrived,
    Received,
    RenewHold,
    Report,
    Seal,
    Send,
    SendAnnounce,
    SendLease,
    SourcePhase,
    Tick,
    TicketArrived,
    Timing,
    Unpark,
    Withdraw,
    source,
)

TIMING = Timing(commit_ttl_seconds=4.0, drift_margin_seconds=0.5, retry_hold_seconds=10.0, lost_hold_seconds=2.0)
ROOT, OTHER = b"rootroot", b"otherone"
CANCEL = Cancel(protocol.fail(End.CANCELLED, errors.CancelledError, "preempted"))


class Rank:
    """A source part, its clock, and what it has done."""

    def __init__(self, *, digest: str | None = "digest", ttl: float = 60.0) -> None:
        self.now = 0.0
        self.part = source.begin("key", digest=digest, ttl_seconds=ttl, deadline_seconds=30.0, now=0.0, timing=TIMING)
        self.deeds: list = []

    def see(self, *events) -> tuple:
        done: tuple = ()
        for event in events:
            self.part, actions = source.step(self.part, event, self.now)
            done += actions
        self.deeds += done
        return done

    def ask(self, peer: str = "D0", attempt: int = 1, engine: str = "D", **more) -> tuple:
        fields = {"digest": "digest", "readers": 1} | more
        return self.see(AskArrived(peer=peer, engine=engine, attempt=attempt, **fields))

    def prepared(self, peer: str = "D0", attempt: int = 1, *, root=ROOT, held=True, ours=ROOT) -> tuple:
        return self.see(PreparedArrived(peer, attempt, root, held, ours))

    def installed(self, peer: str = "D0", attempt: int = 1) -> tuple:
        return self.see(Received(peer, wire.Installed(attempt=attempt)))

    def not_installed(self, peer: str = "D0", attempt: int = 1, error=errors.TransportError) -> tuple:
        info = protocol.error_info(error, "it failed over there")
        return self.see(Received(peer, wire.NotInstalled(attempt=attempt, error=info)))

    def until(self, now: float) -> list:
        done: list = []
        while (timer := source.next_timer(self.part)) is not None and timer <= now:
            self.now = max(self.now, timer)
            done += self.see(Tick())
        self.now = now
        return done

    @property
    def reports(self) -> list[Report]:
        return [deed for deed in self.deeds if isinstance(deed, Report)]


def refusal(deeds) -> wire.ErrorInfo:
    (message,) = [deed.message for deed in deeds if isinstance(deed, Send)]
    assert isinstance(message, wire.Refused)
    return message.error


def test_one_leg_from_ask_to_the_blocks_return() -> None:
    rank = Rank()
    assert rank.ask() == (Expose("D0", 1), SendLease("D0", 1))
    commit = wire.Commit(attempt=1, ttl_seconds=4.0, root=ROOT)
    assert rank.prepared() == (Send("D0", commit), Withdraw("D0", 1))
    assert rank.installed() == (Send("D0", wire.Ack(attempt=1)), EndHold(), Report(End.DONE, None))
    assert rank.part.phase is SourcePhase.CLOSED


def test_the_part_is_done_when_all_its_readers_have_installed() -> None:
    rank = Rank()
    for peer, attempt in (("D0", 1), ("D1", 2)):
        rank.ask(peer, attempt, readers=2)
        rank.prepared(peer, attempt)
    rank.installed("D1", 2)
    assert rank.reports == []
    rank.installed("D0", 1)
    assert rank.reports == [Report(End.DONE, None)]


def test_a_repeated_ask_gets_the_same_lease_and_a_repeated_prepared_the_same_commit() -> None:
    """G1 G3: idempotent, and no clock is restarted."""
    rank = Rank()
    rank.ask()
    assert rank.ask(refusal=protocol.error_info(errors.BusyError, "full")) == (SendLease("D0", 1),)
    first = rank.prepared()[0]
    rank.now = 4.4
    assert rank.prepared(held=False) == (first,)
    assert rank.ask() == ()
    rank.until(4.5)
    assert rank.reports[0].end is End.INDETERMINATE


def test_a_lease_that_lapsed_is_never_committed() -> None:
    """A6: counted as expiry, whether the notice or *prepared* comes first."""
    rank = Rank()
    rank.ask()
    assert refusal(rank.prepared(held=False)).code == errors.LeaseLapsedError.code
    assert refusal(rank.prepared(held=True)).code == errors.LeaseLapsedError.code
    other = Rank()
    other.ask()
    (withdraw, revoked) = other.see(LeaseLapsed("D0", 1))
    assert withdraw == Withdraw("D0", 1)
    assert isinstance(revoked.message, wire.Revoked)
    assert refusal(other.prepared()).code == errors.LeaseLapsedError.code


def test_a_target_that_gives_up_after_its_lease_has_lapsed_ends_the_hold_at_once() -> None:
    """B4, C6: nobody will ask afresh, so nothing is kept for that; said again, it is acknowledged again."""
    rank = Rank()
    rank.ask()
    rank.see(LeaseLapsed("D0", 1))
    acknowledged, *ended = rank.not_installed(error=errors.CancelledError)
    assert acknowledged == Send("D0", wire.Ack(attempt=1))
    assert ended[0] == EndHold()
    assert rank.reports[0].end is End.CANCELLED
    assert rank.not_installed(error=errors.CancelledError) == (acknowledged,)
    patient = Rank()
    patient.ask()
    patient.see(LeaseLapsed("D0", 1))
    assert patient.not_installed() == (acknowledged,)
    assert patient.part.phase is SourcePhase.HELD


def test_other_bytes_are_not_committed() -> None:
    rank = Rank()
    rank.ask()
    error = refusal(rank.prepared(root=OTHER))
    assert error.code == errors.IntegrityError.code
    assert ROOT.hex() in error.message
    assert OTHER.hex() in error.message


def test_a_fresh_attempt_of_the_same_rank_takes_the_place_of_its_lease() -> None:
    """G2."""
    rank = Rank()
    rank.ask()
    done = rank.ask(attempt=2)
    assert done[0] == Withdraw("D0", 1)
    assert done[-2:] == (Expose("D0", 2), SendLease("D0", 2))
    assert rank.ask(attempt=1) == (), "a late copy of the old ask is inert"
    assert refusal(rank.prepared(attempt=1)).code == errors.UnknownRequestError.code
    assert rank.not_installed(attempt=1) == (Send("D0", wire.Ack(attempt=1)),)
    assert rank.part.leg("D0").attempt == 2


def test_a_committed_leg_goes_to_no_other_attempt_until_it_is_known_not_installed() -> None:
    """G3."""
    rank = Rank()
    rank.ask(), rank.prepared()
    assert refusal(rank.ask(attempt=2)).code == errors.ConflictError.code
    assert refusal(rank.ask("E0", 1, "E")).retryable
    rank.not_installed()
    assert SendLease("E0", 1) in rank.ask("E0", 1, "E")


def test_an_unknown_end_is_said_to_be_unknown_and_may_still_be_learned() -> None:
    """G3."""
    for late, end in (("installed", End.DONE), ("not_installed", End.FAILED)):
        rank = Rank()
        rank.ask(), rank.prepared()
        rank.until(4.6)
        assert [report.end for report in rank.reports] == [End.INDETERMINATE]
        assert rank.deeds.count(EndHold()) == 1
        assert refusal(rank.ask("E0", 9, "E")).code == errors.IndeterminateError.code
        assert Learned(end) in getattr(rank, late)()
        assert len(rank.reports) == 1
        rank.until(200.0)
        assert rank.part.phase is SourcePhase.CLOSED


def test_proof_of_death_frees_a_committed_leg_and_silence_does_not() -> None:
    """C1 C7 G3."""
    rank = Rank()
    rank.ask(), rank.prepared()
    rank.see(PeerLost("D0"))
    assert refusal(rank.ask("E0", 1, "E")).code == errors.ConflictError.code
    rank.see(PeerDead("D0"))
    assert SendLease("E0", 1) in rank.ask("E0", 1, "E")


def test_a_silent_reader_loses_its_lease_and_the_hold_ends_soon_after() -> None:
    """B3 C7: typed, within five seconds of the silence that the native channel needs to notice."""
    rank = Rank()
    rank.ask()
    rank.now = limits.PEER_LOST_SECONDS
    rank.see(PeerLost("D0"))
    rank.until(5.0)
    assert rank.reports[0].error.code == errors.PeerLostError.code


@pytest.mark.parametrize("gone", [PeerLost("D0"), PeerDead("D0")])
def test_a_reader_that_goes_after_its_attempt_was_over_leaves_no_hold_behind(gone) -> None:
    """B3 C7: a transport tells the lapse of a lost peer's leases before the loss itself."""
    rank = Rank()
    rank.ask()
    rank.see(LeaseLapsed("D0", 1), gone)
    rank.now = 1.0
    rank.see(PeerLost("D0"))  # its coming and going does not keep the blocks
    rank.until(TIMING.lost_hold_seconds)
    assert rank.reports[0].error.code in (errors.PeerLostError.code, errors.PeerRestartedError.code)
    assert EndHold() in rank.deeds


def test_blocks_return_at_once_when_the_target_will_not_come_back() -> None:
    """B2 B4."""
    for event in (DeclineArrived("D0", "full local hit", unread=False), CANCEL):
        rank = Rank()
        rank.ask()
        assert EndHold() in rank.see(event)
    rank = Rank()
    rank.ask()
    rank.not_installed(error=errors.CancelledError)
    assert rank.reports[0].end is End.CANCELLED
    unread = Rank()
    assert unread.see(DeclineArrived("D0", "replica", unread=True)) == (EndHold(), Report(End.DONE, None))


def test_a_retryable_failure_keeps_the_hold_for_a_fresh_attempt_bounded_in_time_and_number() -> None:
    rank = Rank(ttl=3.0)
    for attempt in range(1, limits.MAX_ATTEMPTS_PER_LEG + 1):
        assert SendLease("D0", attempt) in rank.ask(attempt=attempt)
        rank.not_installed(attempt=attempt)
    assert refusal(rank.ask(attempt=99)).code == errors.TransferError.code
    rank.until(9.9)
    assert rank.reports == []
    rank.until(10.1)
    assert rank.reports[0].error.code == errors.TransportError.code


def test_an_unasked_hold_ends_by_its_time_to_live_unless_renewed() -> None:
    """A7 B1."""
    rank = Rank(ttl=3.0)
    rank.now = 2.0
    rank.see(RenewHold())
    rank.until(4.9)
    assert rank.reports == []
    rank.until(5.1)
    assert rank.reports[0].end is End.EXPIRED
    assert rank.deeds.count(EndHold()) == 1


def test_a_cancel_ends_leases_at_once_and_waits_for_commits() -> None:
    """A3 A7: what is promised is not taken back."""
    rank = Rank()
    rank.ask("D0", 1, readers=2), rank.ask("D1", 2, readers=2)
    rank.prepared("D0", 1)
    done = rank.see(CANCEL)
    assert Withdraw("D1", 2) in done
    assert EndHold() not in done
    rank.installed("D0", 1)
    assert rank.reports[0].end is End.CANCELLED


def test_a_target_that_renews_for_ever_does_not_hold_for_ever() -> None:
    rank = Rank()
    rank.ask()
    rank.until(30.0 + TIMING.park_seconds + 0.6)
    assert rank.part.leg("D0").phase.value == "revoked"


def test_the_same_key_with_other_content_is_refused_and_both_digests_are_named() -> None:
    """G4."""
    error = refusal(Rank().ask(digest="elsewhere"))
    assert error.code == errors.ConflictError.code
    assert "digest" in error.message
    assert "elsewhere" in error.message


def test_verdicts_from_outside_are_passed_on() -> None:
    busy = protocol.error_info(errors.BusyError, "no room")
    assert refusal(Rank().ask(refusal=busy)) == busy
    rank = Rank()
    rank.ask("D0", 1, readers=2)
    assert "2" in refusal(rank.ask("D1", 2, readers=3)).message


def test_asks_before_the_seal_are_parked_and_served_after() -> None:
    rank = Rank(digest=None)
    assert rank.ask() == (ParkAsk("D0", 1),)
    assert rank.see(Seal("digest")) == (Unpark(),)
    assert SendLease("D0", 1) in rank.ask()


def test_push_announces_when_sealed_and_ticketed_and_repeats_until_asked() -> None:
    rank = Rank(digest=None)
    assert rank.see(TicketArrived("D0")) == ()
    assert rank.see(Seal("digest")) == (Unpark(), SendAnnounce("D0"))
    assert rank.until(2.0) == [SendAnnounce("D0")] * 2
    rank.ask()
    assert SendAnnounce("D0") not in rank.until(6.0)
    assert rank.see(TicketArrived("D1")) == (SendAnnounce("D1"),)


def test_a_ticket_holder_is_told_when_the_prefill_fails() -> None:
    """B5."""
    rank = Rank(digest=None)
    rank.see(TicketArrived("D0"))
    done = rank.see(CANCEL)
    assert any(isinstance(deed, Send) and isinstance(deed.message, wire.Withdrawn) for deed in done)
    assert Unpark() in done
    late = rank.see(TicketArrived("D1"))
    assert isinstance(late[0].message, wire.Withdrawn)


def test_a_lost_ticket_holder_ends_the_hold_soon() -> None:
    """B1."""
    rank = Rank()
    rank.see(TicketArrived("D0"), PeerLost("D0"))
    rank.until(2.1)
    assert rank.reports[0].error.code == errors.PeerLostError.code


@pytest.mark.parametrize(
    ("message", "answer"),
    [
        (wire.Installed(attempt=7), wire.Ack),
        (wire.NotInstalled(attempt=7, error=protocol.error_info(errors.BusyError, "x")), wire.Ack),
        (wire.Prepared(attempt=7, root=None), wire.Refused),
        (wire.Goodbye(why="x"), None),
    ],
)
def test_messages_about_unknown_attempts_are_answered_or_dropped(message, answer) -> None:
    """C3."""
    sends = protocol.answer_unknown("D0", message)
    assert [type(send.message) for send in sends] == ([] if answer is None else [answer])


def test_a_lie_about_an_uncommitted_install_earns_nothing() -> None:
    rank = Rank()
    rank.ask()
    assert rank.installed() == ()
    assert rank.part.leg("D0").phase.value == "leased"


# --- found by the simulator -------------------------------------------------------------------------------------------

NOT_INSTALLED = protocol.error_info(errors.TransportError, "the read failed", retryable=True)


def fail_leg(rank: Rank, peer: str, attempt: int) -> None:
    rank.see(Received(peer, wire.NotInstalled(attempt=attempt, error=NOT_INSTALLED)))


def test_g2_a_late_copy_of_an_ask_is_not_leased_again_after_another_engine_was_served() -> None:
    """Its leg gave way to the other engine's; its attempt is over all the same, and its target is told so."""
    rank = Rank()
    rank.ask("E0", 7, engine="E")
    fail_leg(rank, "E0", 7)
    rank.ask("D0", 4)
    fail_leg(rank, "D0", 4)
    (refusal,) = rank.ask("E0", 7, engine="E")
    assert isinstance(refusal.message, wire.Refused)
    assert rank.ask("E0", 6, engine="E") == ()
    assert Expose("E0", 8) in rank.ask("E0", 8, engine="E")


def test_attempts_of_a_rank_are_counted_over_another_engines_turns() -> None:
    rank = Rank()
    for attempt in range(1, limits.MAX_ATTEMPTS_PER_LEG + 1):
        engine = "DE"[attempt % 2]
        for number in (0, 1):
            exposed = rank.ask(f"{engine}{number}", attempt, engine=engine, readers=2)
            assert Expose(f"{engine}{number}", attempt) in exposed
        for number in (0, 1):
            fail_leg(rank, f"{engine}{number}", attempt)
    for engine in "DE":
        (refusal,) = rank.ask(f"{engine}1", 99, engine=engine, readers=2)
        assert "attempts" in refusal.message.error.message


def test_a_ticket_that_comes_while_an_earlier_attempt_is_committed_is_announced() -> None:
    """Its *not installed* may come after the ticket of its next try, and a ticket comes once."""
    rank = Rank()
    rank.ask()
    rank.prepared()
    assert rank.see(TicketArrived("D0")) == (SendAnnounce("D0"),)
    assert refusal(rank.ask(attempt=2)).retryable
    rank.not_installed()
    assert SendAnnounce("D0") in rank.until(10.0)
    assert Expose("D0", 3) in rank.ask(attempt=3)
