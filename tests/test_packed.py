"""The packed path over UCX: hostile frames on its channel, a read's path, and what it leaves alone. See also
test_conformance_ucx.py, which holds it to every transport's rules, and native/tests/test_packing.cpp."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from ucx_pair import Target, exposure, frame, held_channel, receive

from kvlink.errors import TransportError, UnsupportedError
from kvlink.layout import DType
from kvlink.limits import RING_SLOTS, SLOT_BYTES
from kvlink.plan import DIRECT, PACKED, Conversion, CopyPlan, Segment
from kvlink.testing.harness import scattered_plan
from kvlink.transports.base import CompletionKind, Outcome
from kvlink.transports.ucx import UcxTransport

LEAVES, RING_WANTED, RING, PACK, PACKED_FRAME = 3, 5, 6, 7, 8
LEAF = 16 * 1024


@pytest.fixture
def channel() -> Iterator[tuple[Target, socket.socket]]:
    with held_channel(path="packed", ucx_tls="tcp") as held:
        yield held


def ring(slots: int = RING_SLOTS, slot_bytes: int = SLOT_BYTES, handle: bytes = bytes(16)) -> bytes:
    words = [int.from_bytes(handle[at : at + 8].ljust(8, b"\0"), "little") for at in range(0, len(handle), 8)]
    return frame(RING, slots, slot_bytes, len(handle), *words)


MADE_UP = {
    "a ring of other slots": ring(slot_bytes=SLOT_BYTES // 2),
    "a ring of more slots than wanted": ring(RING_SLOTS + 1),
    "a ring without a key": ring(handle=bytes(8)),
    "a ring beyond all memory": ring(handle=b"\xff" * 16),
    "a second ring": ring() + ring(),
    "packed bytes before there is a ring": frame(PACKED_FRAME, 1, 0, 0, 0, 1),
    "packed bytes of another slot": ring() + frame(PACKED_FRAME, 1, 0, RING_SLOTS, 0, 1),
    "packed bytes without digests": ring() + frame(PACKED_FRAME, 1, 0, 0, 0),
    "digests, as the direct path has them": frame(LEAVES, 1, 0, 5),
}


@pytest.mark.parametrize("sent", MADE_UP.values(), ids=MADE_UP)
def test_a_source_that_makes_up_rings_or_answers_is_lost(channel: tuple[Target, socket.socket], sent: bytes) -> None:
    """A violation, by name; the read ends with the peer, and nothing is got from anywhere."""
    target, theirs = channel
    read = target.read(scattered_plan())
    receive(theirs, frame(RING_WANTED, RING_SLOTS))
    theirs.sendall(sent)
    lost = target.event(CompletionKind.PEER_LOST)
    assert "protocol violation" in lost.detail
    assert [completion.op for completion in target.seen] == [read, 0]
    assert not target.memory.any()


def test_a_source_without_memory_for_a_ring_fails_its_readers(channel: tuple[Target, socket.socket]) -> None:
    target, theirs = channel
    for attempt in (1, 2):  # the second asks anew
        read = target.read(scattered_plan(), attempt)
        receive(theirs, frame(RING_WANTED, RING_SLOTS))
        theirs.sendall(ring(0, 0, b""))
        end = target.end_of(read)
        assert (end.outcome, "no memory for another ring" in end.detail) == (Outcome.FAILED, True)


HOSTILE = {
    "pack without a ring": frame(PACK, 1, 0, LEAF, 0, 1),
    "a ring of no slots": frame(RING_WANTED, 0),
    "a ring twice": frame(RING_WANTED, 2) * 2,
    "a slot that is not there": frame(RING_WANTED, 2) + frame(PACK, 1, 0, LEAF, 2, 1),
    "more than a slot holds": frame(RING_WANTED, 2) + frame(PACK, 1, 0, SLOT_BYTES + LEAF, 0, 1),
    "bytes beyond the plan": frame(RING_WANTED, 2) + frame(PACK, 1, 48 * LEAF, 50 * LEAF, 0, 1),
    "bytes from the far end": frame(RING_WANTED, 2) + frame(PACK, 1, 2**64 - LEAF, LEAF, 0, 1),
    "half a leaf": frame(RING_WANTED, 2) + frame(PACK, 1, 0, LEAF // 2, 0, 1),
}


@pytest.mark.parametrize("sent", HOSTILE.values(), ids=HOSTILE)
def test_a_target_that_asks_for_what_is_not_its_is_lost(channel: tuple[Target, socket.socket], sent: bytes) -> None:
    """Slots, ranges and the plan are the source's to check: the lease lapses, and the peer is lost."""
    source, theirs = channel
    source.transport.expose(replace(exposure(scattered_plan()), peer="source"))
    theirs.sendall(sent)
    assert "protocol violation" in source.event(CompletionKind.PEER_LOST).detail
    assert not source.transport.lease("source", 1).held


def test_what_is_not_exposed_is_answered_with_the_reason(channel: tuple[Target, socket.socket]) -> None:
    """C3: an attempt that the source never knew, or withdrew, is no violation: PACKED says why there is nothing."""
    source, theirs = channel
    source.transport.expose(replace(exposure(scattered_plan()), peer="source"))
    source.transport.withdraw("source", 1)
    theirs.sendall(frame(RING_WANTED, 2) + frame(PACK, 1, 0, LEAF, 0, 1) + frame(PACK, 9, LEAF, 2 * LEAF, 1, 0))
    receive(theirs, frame(PACKED_FRAME, 1, 0, 0, 1) + frame(PACKED_FRAME, 9, LEAF, 1, 1))


def test_a_reads_path_is_by_its_plan_unless_it_is_set() -> None:
    """I3: the runs of this plan are short, so by default they are gathered."""
    plan = scattered_plan()
    for path, chosen in (("auto", PACKED), ("direct", DIRECT), ("packed", PACKED)):
        transport = UcxTransport(path=path)
        assert transport.path(plan, "source")[0] == chosen
        transport.close()
    with pytest.raises(TransportError, match="path is 'fast'; it is one of auto, direct, packed"):
        UcxTransport(path="fast")


def test_a_direct_path_that_was_set_does_not_convert() -> None:
    run = Segment(np.array([[0, 0, 0, 0]]), np.array([[0, 0]]), (), 64, Conversion(DType.BFLOAT16, DType.FLOAT32))
    plan = CopyPlan((run,), 64)
    transport = UcxTransport(path="direct")
    with pytest.raises(UnsupportedError, match="set it to auto"):
        transport.path(plan, "source")
    transport.close()
