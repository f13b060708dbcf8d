"""The native channel between two UCX transports, with the peer's end in the test's hand."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest
from ucx_pair import Target, frame, held_channel, receive

from kvlink.testing.harness import scattered_plan
from kvlink.transports.base import CompletionKind, Outcome


@pytest.fixture
def channel() -> Iterator[tuple[Target, socket.socket]]:
    with held_channel(path="direct") as held:
        yield held


HEARTBEAT, WANT, LEAVES, FAILED = 1, 2, 3, 4
MALFORMED = {
    "type 0": frame(0, 1),
    "type 9": frame(9, 1),
    "reserved bits": frame(HEARTBEAT, 0, zero=1),
    "empty": frame(HEARTBEAT),
    "ragged": HEARTBEAT.to_bytes(2, "little") + b"\0\0\x09\0\0\0" + bytes(9),
    "a gigabyte": HEARTBEAT.to_bytes(2, "little") + b"\0\0\0\0\0\x40",
    "heartbeat that counts too many": frame(HEARTBEAT, 3, 1),
    "heartbeat that counts beyond all": frame(HEARTBEAT, 2**64 - 1, 1),
    "heartbeat longer than allowed": frame(HEARTBEAT, 1025, *range(1025)),
    "want of two": frame(WANT, 1, 2),
    "leaves of none": frame(LEAVES, 1, 0),
    "leaves that skip": frame(LEAVES, 1, 1, 5),
    "leaves from the far end": frame(LEAVES, 1, 2**64 - 1, 5),
    "more leaves than the plan has": frame(LEAVES, 1, 0, *range(50)),
    "failure cut short": frame(FAILED, 1),
    "failure for no 32-bit reason": frame(FAILED, 1, 2**40),
}


@pytest.mark.parametrize("sent", MALFORMED.values(), ids=MALFORMED)
def test_a_peer_that_breaks_the_channel_protocol_is_lost(channel: tuple[Target, socket.socket], sent: bytes) -> None:
    """Whatever arrives ends in PEER_LOST with the reason, within bounded memory; no crash."""
    target, theirs = channel
    plan = scattered_plan()  # 49 leaves
    read = target.read(plan)
    receive(theirs, frame(WANT, 1))  # the read is known to the channel's thread now
    theirs.sendall(sent)
    lost = target.event(CompletionKind.PEER_LOST)
    assert "protocol violation" in lost.detail
    assert [completion.op for completion in target.seen] == [read, 0]


def test_frames_in_pieces_are_put_together(channel: tuple[Target, socket.socket]) -> None:
    target, theirs = channel
    read = target.read(scattered_plan())
    sent = frame(HEARTBEAT, 0) + frame(FAILED, 1, 2)
    for start in range(0, len(sent), 3):
        theirs.sendall(sent[start : start + 3])
        time.sleep(0.001)
    end = target.end_of(read)
    assert (end.outcome, "lapsed" in end.detail) == (Outcome.SOURCE_FAILED, True)


def test_late_frames_are_counted_and_dropped(channel: tuple[Target, socket.socket]) -> None:
    """C3: about attempts nobody knows (any more), they change nothing, except that a want is answered."""
    target, theirs = channel
    theirs.sendall(frame(HEARTBEAT, 2, 8, 9) + frame(WANT, 8) + frame(LEAVES, 8, 0, 1) + frame(FAILED, 8, 1))
    receive(theirs, frame(FAILED, 8, 1))
    late = target.transport.late_frames()
    while late["failures"] == 0:
        late = target.transport.late_frames()
    assert late == {"renewals": 2, "wants": 1, "leaves": 1, "failures": 1}
    assert not [completion for completion in target.transport.poll() if completion.kind is CompletionKind.PEER_LOST]


def test_a_closed_channel_is_a_lost_peer(channel: tuple[Target, socket.socket]) -> None:
    target, theirs = channel
    theirs.close()
    detail = target.event(CompletionKind.PEER_LOST).detail
    assert "closed" in detail or "reset" in detail
