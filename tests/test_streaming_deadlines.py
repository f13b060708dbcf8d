"""Whatever step a streamed request is left at, it ends in time, on both sides, and gives everything back."""

from __future__ import annotations

import pytest
from test_protocol_source import ROOT, TIMING
from test_protocol_source import Rank as SourceRank
from test_protocol_target import CAPACITY

from kvlink import wire
from kvlink.errors import DeadlineError, ExpiredError, IndeterminateError
from kvlink.layout import Frontier
from kvlink.protocol import (
    Advanced,
    CutOff,
    CutOffDone,
    End,
    LandedArrived,
    PreparedArrived,
    ReadEnded,
    Received,
    ReleaseBlocks,
    Report,
    Seal,
    SendAdvance,
    Tick,
    target,
)

DEADLINE = 30.0
HALF, WHOLE = Frontier.whole(50), Frontier.whole(100)
LEASE = wire.Lease(attempt=1, lease_seconds=2.5, total_bytes=0, capacity=CAPACITY)
PARKED = wire.Parked(attempt=1, park_seconds=10.0)


def advance(number: int, frontier: Frontier, sealed: str | None = None) -> wire.Advance:
    return wire.Advance(attempt=1, number=number, frontier=frontier, blocks=((number,),), total_bytes=1, sealed=sealed)


FIRST, LAST = advance(1, HALF), advance(2, WHOLE, "all of it")
BOTH_LANDED = (LEASE, FIRST, ReadEnded(1, ROOT, number=1), LAST, ReadEnded(1, ROOT, number=2))
LEFT = {
    "its ask is not answered": ((), DEADLINE, DeadlineError),
    "its ask is parked": ((PARKED,), TIMING.park_seconds, DeadlineError),
    "nothing becomes ready": ((LEASE,), TIMING.rest_seconds, DeadlineError),
    "an increment does not land": ((LEASE, FIRST), DEADLINE, DeadlineError),
    "nothing more becomes ready": ((LEASE, FIRST, ReadEnded(1, ROOT, number=1)), TIMING.rest_seconds, DeadlineError),
    "one of two increments does not land": (
        (LEASE, FIRST, LAST, ReadEnded(1, ROOT, number=2)),
        DEADLINE,
        DeadlineError,
    ),
    "its prepared is not answered": (BOTH_LANDED, TIMING.commit_ttl_seconds, ExpiredError),
}


@pytest.mark.parametrize("waited", [0.0, 25.0], ids=["at once", "after a rest"])
@pytest.mark.parametrize(("heard", "seconds", "error"), LEFT.values(), ids=LEFT)
def test_a_target_ends_a_stream_wherever_its_source_leaves_it(
    heard, seconds: float, error: type, waited: float
) -> None:
    """B1, B3; B7: the time that it rested before, by its source's own word, is not the transfer's."""
    rests = waited if heard[:1] == (LEASE,) and len(heard) > 1 else 0.0
    part, _ = target.begin("key", [("A", 1)], deadline_seconds=DEADLINE, now=0.0, timing=TIMING, stream=True)
    for event in heard:
        now = 0.0 if event in (LEASE, PARKED) else rests
        part, _ = target.step(part, Received("A", event) if isinstance(event, wire.Message) else event, now)
    done: list = []
    now = rests
    while part.failure is None:
        timer = target.next_timer(part)
        assert timer is not None, "whoever waits has a bound"
        now = max(now, timer)
        part, actions = target.step(part, Tick(), now)
        done += actions
    assert now == pytest.approx(rests + seconds)
    assert (part.failure.end, part.failure.error.code) == (End.EXPIRED, error.code)
    if any(isinstance(action, CutOff) for action in done):
        assert not any(isinstance(action, ReleaseBlocks | Report) for action in done), "bytes may still land"
        part, actions = target.step(part, CutOffDone(1), now)
        done += actions
    assert [action for action in done if isinstance(action, ReleaseBlocks)] == [ReleaseBlocks()]
    assert [action.end for action in done if isinstance(action, Report)] == [End.EXPIRED]
    told = [action.message for action in done if isinstance(getattr(action, "message", None), wire.NotInstalled)]
    assert [message.attempt for message in told] == [1], "its source hears that its blocks are free"


def streaming() -> SourceRank:
    """A source rank of whose stream one increment is told, and read by nobody yet."""
    rank = SourceRank(digest=None)
    rank.see(Advanced(HALF, "opening"))
    rank.ask(digest="opening")
    assert SendAdvance("D0", 1, 1) in rank.deeds
    return rank


def test_a_source_takes_back_an_increment_that_is_not_read_in_time() -> None:
    """B1: each increment has the attempt's time anew, so that a long computation costs no attempt."""
    bound = DEADLINE + TIMING.park_seconds + TIMING.drift_margin_seconds
    rank = streaming()
    rank.until(29.0)
    rank.see(LandedArrived("D0", 1, 1, True, ROOT), Advanced(WHOLE, "opening"))
    rank.until(29.0 + bound - 0.1)
    assert rank.part.leg("D0").error is None
    rank.until(29.0 + bound + 0.1)
    assert rank.part.leg("D0").error.code == DeadlineError.code


def test_a_source_whose_stream_is_prepared_and_then_never_heard_of_ends_indeterminate() -> None:
    """B1, G3: its commit's time, with the margin, after the last word."""
    rank = streaming()
    rank.see(LandedArrived("D0", 1, 1, True, ROOT), Advanced(WHOLE, "opening"), Seal("content", WHOLE, "opening"))
    rank.see(LandedArrived("D0", 1, 2, True, ROOT), LandedArrived("D0", 1, 3, True, ROOT))
    root = rank.part.leg("D0").stream.root
    rank.see(PreparedArrived("D0", 1, root, True, None, 3, "content"))
    rank.until(4.4)
    assert rank.reports == []
    rank.until(4.6)
    assert [(report.end, report.error.code) for report in rank.reports] == [
        (End.INDETERMINATE, IndeterminateError.code)
    ]
