"""The native channel between two UCX transports, with the peer's end in the test's hand."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest
from ucx_pair import QUICK, Target

from kvlink.testing.harness import REGION, scattered_plan
from kvlink.transports.base import CompletionKind, Outcome
from kvlink.transports.ucx import UcxTransport


@pytest.fixture
def channel() -> Iterator[tuple[Target, socket.socket]]:
    """A target whose source's channel is in the test's hand; the source never answers a get."""
    with ExitStack() as closing:
        source, target = UcxTransport(**QUICK), Target(2 << 20)
        closing.callback(source.close)
        closing.callback(target.transport.close)
        ours, theirs = socket.socketpair()
        closing.enter_context(theirs)
        memory = np.zeros(2 << 20, np.uint8)
        source.register(REGION, memory.ctypes.data, len(memory))
        target.end_of(target.transport.connect("source", source.address(), ours.detach()))
        target.transport.import_key("source", source.export_key(REGION))
        target.seen.clear()
        yield target, theirs


def frame(kind: int, *words: int, zero: int = 0) -> bytes:
    payload = b"".join(word.to_bytes(8, "little") for word in words)
    return kind.to_bytes(2, "little") + zero.to_bytes(2, "little") + len(payload).to_bytes(4, "little") + payload


def receive(theirs: socket.socket, wanted: bytes) -> None:
    """Read the channel until a frame has come."""
    theirs.settimeout(5)
    received = b""
    while wanted not in received:
        received += theirs.recv(4096)


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
