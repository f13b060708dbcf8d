"""One request on one target rank: what it asks, when it installs, and that it ends only after every cut-off."""

from __future__ import annotations

import pytest

from kvlink import errors, protocol, wire
from kvlink.protocol import (
    Cancel,
    CutOff,
    CutOffDone,
    End,
    Install,
    InstallDone,
    InstallFailed,
    PeerDead,
    PeerLost,
    ReadEnded,
    Received,
    ReleaseBlocks,
    Report,
    Send,
    SendAsk,
    StartRead,
    StopRenewing,
    TargetPhase,
    Tick,
    Timing,
    target,
)

TIMING = Timing(
    commit_ttl_seconds=4.0, repeat_seconds=0.5, max_repeat_seconds=2.0, park_seconds=10.0, tell_seconds=30.0
)
CAPACITY = wire.Capacity(leased_blocks=0, active_legs=0, max_legs=1)
ROOT, OTHER = b"rootroot", b"otherone"
CANCEL = Cancel(protocol.fail(End.CANCELLED, errors.CancelledError, "the client went away"))


class Rank:
    """A target part, its clock, and what it has done."""

    def __init__(self, *peers: str, deadline: float = 60.0) -> None:
        self.now = 0.0
        legs = [(peer, number) for number, peer in enumerate(peers, 1)]
        self.part, actions = target.begin("key", legs, deadline_seconds=deadline, now=0.0, timing=TIMING)
        self.deeds = list(actions)
        self.peers = dict(legs)

    def see(self, *events) -> tuple:
        done: tuple = ()
        for event in events:
            self.part, actions = target.step(self.part, event, self.now)
            done += actions
        self.deeds += done
        return done

    def hear(self, peer: str, kind, **fields) -> tuple:
        return self.see(Received(peer, kind(attempt=self.peers[peer], **fields)))

    def lease(self, peer: str) -> tuple:
        return self.hear(peer, wire.Lease, lease_seconds=2.5, total_bytes=1, capacity=CAPACITY)

    def commit(self, peer: str, ttl: float = 4.0, root: bytes | None = ROOT) -> tuple:
        return self.hear(peer, wire.Commit, ttl_seconds=ttl, root=root)

    def land(self, peer: str) -> tuple:
        return self.see(ReadEnded(self.peers[peer], ROOT))

    def until(self, now: float) -> list:
        """Let time pass, timer by timer."""
        done: list = []
        while (timer := target.next_timer(self.part)) is not None and timer <= now:
            self.now = max(self.now, timer)
            done += self.see(Tick())
        self.now = now
        return done

    def prepare(self) -> None:
        for peer in self.peers:
            self.lease(peer)
        for peer in self.peers:
            self.land(peer)

    @property
    def reports(self) -> list[Report]:
        return [deed for deed in self.deeds if isinstance(deed, Report)]


def sent(deeds, kind) -> list:
    return [deed.message for deed in deeds if isinstance(deed, Send) and isinstance(deed.message, kind)]


def test_one_leg_from_ask_to_acknowledgement() -> None:
    rank = Rank("A")
    assert rank.deeds == [SendAsk("A", 1)]
    assert isinstance(rank.lease("A")[0], StartRead)
    assert sent(rank.land("A"), wire.Prepared) == [wire.Prepared(attempt=1, root=ROOT)]
    assert rank.commit("A") == (StopRenewing("A", 1), Install())
    assert rank.see(InstallDone()) == (Send("A", wire.Installed(attempt=1)), Report(End.DONE, None))
    assert rank.part.phase is TargetPhase.ENDED
    rank.hear("A", wire.Ack)
    assert rank.part.phase is TargetPhase.CLOSED
    assert target.next_timer(rank.part) is None


def test_all_legs_are_prepared_together_and_installed_together() -> None:
    """A slow leg does not let a fast one's commit run out."""
    rank = Rank("A", "B")
    rank.lease("A"), rank.lease("B")
    assert rank.land("A") == ()
    rank.until(20.0)
    assert [m.attempt for m in sent(rank.land("B"), wire.Prepared)] == [1, 2]
    assert Install() not in rank.commit("A")
    assert Install() in rank.commit("B")


def test_unanswered_messages_repeat_at_doubling_intervals_up_to_the_bound() -> None:
    rank = Rank("A")
    times = []
    while len(times) < 5:
        rank.now = target.next_timer(rank.part)
        assert SendAsk("A", 1) in rank.see(Tick())
        times.append(rank.now)
    assert times == [0.5, 1.5, 3.5, 5.5, 7.5]


@pytest.mark.parametrize("repeats_at", [1.0, 3.5])
def test_a_commit_after_its_time_to_live_is_never_installed(repeats_at: float) -> None:
    """The clock runs from first sending *prepared*; repeats do not restart it."""
    rank = Rank("A")
    rank.prepare()
    rank.until(repeats_at)
    rank.now = 3.0 + repeats_at / 10
    assert CutOff("A", 1) in rank.commit("A", ttl=3.0)
    rank.see(CutOffDone(1))
    assert Install() not in rank.deeds
    assert rank.reports[0].end is End.EXPIRED


def test_a_target_without_a_commit_ends_expired() -> None:
    rank = Rank("A")
    rank.prepare()
    assert CutOff("A", 1) in rank.until(4.0)
    rank.see(CutOffDone(1))
    assert rank.reports[0].error.code == errors.ExpiredError.code


def test_the_first_commit_running_out_before_the_last_comes_fails_the_part() -> None:
    rank = Rank("A", "B")
    rank.prepare()
    rank.commit("A", ttl=1.0)
    rank.until(1.0)
    rank.see(CutOffDone(1), CutOffDone(2))
    rank.commit("B")
    assert Install() not in rank.deeds
    assert [report.end for report in rank.reports] == [End.EXPIRED]


def test_two_roots_are_both_named() -> None:
    rank = Rank("A")
    rank.prepare()
    rank.commit("A", root=OTHER)
    rank.see(CutOffDone(1))
    error = rank.reports[0].error
    assert error.code == errors.IntegrityError.code
    assert ROOT.hex() in error.message
    assert OTHER.hex() in error.message


def test_siblings_are_cut_off_before_the_blocks_go_back_and_the_end_is_told_once() -> None:
    """A2 A4."""
    rank = Rank("A", "B", "C")
    rank.lease("A"), rank.lease("B")
    broke = protocol.error_info(errors.TransportError, "the wire broke")
    failed = rank.see(ReadEnded(1, error=broke))
    assert [deed for deed in failed if isinstance(deed, CutOff)] == [CutOff("A", 1), CutOff("B", 2)]
    assert sent(failed, wire.NotInstalled)[0].attempt == 3, "nothing was read of C: it hears at once"
    rank.see(CutOffDone(2), ReadEnded(2, ROOT))
    assert rank.reports == []
    last = rank.see(CutOffDone(1))
    assert last[-2:] == (
        ReleaseBlocks(),
        Report(End.FAILED, broke),
    )
    rank.see(CANCEL, CutOffDone(1), PeerLost("B"))
    assert len(rank.reports) == 1


def test_a_cancel_is_told_to_every_source_and_ends_after_the_cut_off() -> None:
    """A2 B4."""
    rank = Rank("A")
    rank.lease("A")
    assert rank.see(CANCEL) == (CutOff("A", 1),)
    done = rank.see(CutOffDone(1))
    assert sent(done, wire.NotInstalled)[0].error.code == errors.CancelledError.code
    assert rank.reports[0].end is End.CANCELLED


def test_not_installed_is_repeated_until_acknowledged_or_the_bound() -> None:
    rank = Rank("A")
    rank.see(CANCEL)
    told = sent(rank.until(29.0), wire.NotInstalled)
    assert len(told) > 5
    rank.until(31.0)
    assert rank.part.phase is TargetPhase.CLOSED


def test_it_is_too_late_to_cancel_while_the_engine_takes_the_blocks() -> None:
    rank = Rank("A")
    rank.prepare()
    rank.commit("A")
    rank.now = 100.0
    assert rank.see(CANCEL, Tick(), PeerLost("A")) == ()
    assert rank.see(InstallDone())[-1] == Report(End.DONE, None)


def test_an_engine_that_refuses_the_blocks_fails_the_part() -> None:
    rank = Rank("A")
    rank.prepare()
    rank.commit("A")
    assert CutOff("A", 1) in rank.see(InstallFailed(protocol.error_info(errors.LayoutError, "no such block")))
    rank.see(CutOffDone(1))
    assert rank.reports[0].error.code == errors.LayoutError.code
    assert ReleaseBlocks() in rank.deeds


def test_a_lost_source_fails_the_part_until_it_has_committed() -> None:
    """B1 C7."""
    rank = Rank("A", "B")
    rank.prepare()
    rank.commit("A")
    assert rank.see(PeerLost("A"), PeerDead("A")) == ()
    assert CutOff("B", 2) in rank.see(PeerLost("B"))
    rank.see(CutOffDone(1), CutOffDone(2))
    assert rank.reports[0].error.code == errors.PeerLostError.code
    assert rank.reports[0].error.retryable
    assert rank.part.leg(1).phase.value == "closed", "nobody is left to tell"


@pytest.mark.parametrize("code", ["busy", "mismatch", "conflict"])
def test_a_refusal_ends_the_part_with_the_sources_own_words(code: str) -> None:
    rank = Rank("A")
    error = wire.ErrorInfo(code=code, message="no", retryable=code == "busy", retry_after_seconds=0.25)
    done = rank.hear("A", wire.Refused, error=error)
    assert done == (ReleaseBlocks(), Report(End.FAILED, error))
    assert rank.part.phase is TargetPhase.CLOSED


def test_time_spent_parked_is_not_the_transfers_and_has_its_own_bound() -> None:
    """B7."""
    rank = Rank("A", deadline=2.0)
    rank.hear("A", wire.Parked, park_seconds=1000.0)
    rank.until(9.0)
    assert rank.reports == []
    rank.lease("A")
    rank.until(10.5)
    assert rank.reports == []
    assert CutOff("A", 1) in rank.until(11.5)

    other = Rank("A", deadline=2.0)
    other.hear("A", wire.Parked, park_seconds=1000.0)
    other.until(10.0)
    assert other.reports[0].end is End.EXPIRED


def test_messages_of_another_peer_or_attempt_are_inert() -> None:
    """C3 G2."""
    rank = Rank("A", "B")
    before = rank.part
    lease = wire.Lease(attempt=1, lease_seconds=1.0, total_bytes=1, capacity=CAPACITY)
    error = protocol.error_info(errors.CancelledError, "x")
    assert rank.see(Received("B", lease), Received("A", wire.Revoked(attempt=7, error=error)), PeerLost("Z")) == ()
    assert rank.see(ReadEnded(9, ROOT), CutOffDone(9), InstallDone()) == ()
    assert rank.part == before


def test_legs_must_be_distinct() -> None:
    with pytest.raises(ValueError, match="distinct"):
        target.begin("k", [("A", 1), ("B", 1)], deadline_seconds=1.0, now=0.0, timing=TIMING)
    with pytest.raises(ValueError, match="distinct"):
        target.begin("k", [], deadline_seconds=1.0, now=0.0, timing=TIMING)
