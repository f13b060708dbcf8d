"""The stream beyond the rules of all transports and of those with lanes (test_lanes.py): frames and asks that break its
protocol, keys, and movers that several peers share."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest
from lane_relay import ASK, FRAME, HEADER
from stream_peer import Rig
from test_conformance_stream import QUICK

from kvlink.errors import TransportError
from kvlink.limits import LEAF_BYTES, MAX_LANES
from kvlink.plan import CopyPlan, Segment
from kvlink.testing.harness import MEMORY_BYTES, REGION, scattered_plan
from kvlink.transports.base import CompletionKind, Exposure, Outcome, Read
from kvlink.transports.stream import StreamTransport


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.close()


def first_ask(rig: Rig) -> tuple[int, ...]:
    rig.read()
    return rig.asked()


# --- a source that breaks the protocol ------------------------------------------------------------------------------

BAD_FRAMES = {
    "of another attempt": lambda ask: (FRAME, 1, 0, 2, ask[4], ask[5]),
    "of other bytes": lambda ask: (FRAME, 1, 0, 1, ask[4] + LEAF_BYTES, ask[5]),
    "longer than asked for": lambda ask: (FRAME, 1, 0, 1, ask[4], ask[5] + LEAF_BYTES),
    "without digests": lambda ask: (FRAME, 0, 0, 1, ask[4], ask[5]),
    "of an unknown kind": lambda ask: (7, 1, 0, 1, ask[4], ask[5]),
}


@pytest.mark.parametrize("bad", BAD_FRAMES.values(), ids=BAD_FRAMES)
def test_a_frame_that_answers_no_ask_loses_the_peer_and_lands_nowhere(rig: Rig, bad) -> None:
    """A hostile source cannot direct bytes: only what was asked for is taken, and only where our plan puts it."""
    rig.lane.sendall(HEADER.pack(*bad(first_ask(rig))) + b"\xee" * 4096)
    assert "frame" in rig.completion(CompletionKind.PEER_LOST).detail
    assert not rig.memory.any()


def test_a_frame_nobody_asked_for_loses_the_peer(rig: Rig) -> None:
    rig.lane.sendall(HEADER.pack(FRAME, 1, 0, 1, 0, LEAF_BYTES))
    assert "nobody asked" in rig.completion(CompletionKind.PEER_LOST).detail


def test_a_source_that_gave_up_in_mid_frame_fails_the_read(rig: Rig) -> None:
    """The trailer says that the payload is not the source's any more; integrity or not, the read does not end well."""
    _, _, _, attempt, begin, end = first_ask(rig)
    leaves = -((begin - end) // LEAF_BYTES)
    rig.lane.sendall(
        HEADER.pack(FRAME, 1, 0, attempt, begin, end) + bytes(end - begin + 8 * leaves) + (3).to_bytes(8, "little")
    )
    ended = rig.completion(CompletionKind.READ)
    assert (ended.outcome, "withdrew" in ended.detail) == (Outcome.SOURCE_FAILED, True)


# --- a target that breaks the protocol ------------------------------------------------------------------------------


def test_asks_without_end_are_bounded(rig: Rig) -> None:
    """A peer that asks and never reads costs a bounded number of asks, then it is lost."""
    rig.expose()
    rig.lane.sendall(HEADER.pack(ASK, 1, 0, 1, 0, 32 * LEAF_BYTES) * 2000)
    assert "asks at a time" in rig.completion(CompletionKind.PEER_LOST).detail


# --- addresses and keys ---------------------------------------------------------------------------------------------


def test_more_lanes_than_there_can_be_are_refused() -> None:
    with pytest.raises(TransportError, match="lanes"):
        StreamTransport(lanes=MAX_LANES + 1)


def test_a_key_tells_no_address(rig: Rig) -> None:
    key = rig.transport.export_key(REGION)
    assert (key.address, key.key, key.length) == (0, b"", MEMORY_BYTES)


# --- threads --------------------------------------------------------------------------------------------------------


def test_many_sources_feed_one_target() -> None:
    """Lanes of several peers share the movers: reads from all of them, at once, each whole."""
    with ExitStack() as closing:
        target = StreamTransport(lanes=2, **QUICK)
        closing.callback(target.close)
        plan = scattered_plan()
        memory = np.zeros((6, MEMORY_BYTES), np.uint8)
        sources = []
        ops = []
        for index in range(6):
            target.register(index, memory[index].ctypes.data, MEMORY_BYTES)
            source = StreamTransport(lanes=1 + index % 2, **QUICK)
            closing.callback(source.close)
            content = np.full(MEMORY_BYTES, index + 1, np.uint8)
            source.register(REGION, content.ctypes.data, MEMORY_BYTES)
            pairs = [socket.socketpair() for _ in range(2 + index % 2)]
            near, far = ([pair[side].detach() for pair in pairs] for side in (0, 1))
            ops.append(target.connect(f"source {index}", source.address(), near[0], near[1:]))
            source.connect("target", target.address(), far[0], far[1:])
            sources.append((source, content))
        all_end(target, ops)
        ops = []
        for index, (source, _) in enumerate(sources):
            target.import_key(f"source {index}", source.export_key(REGION))
            while not source.poll():
                time.sleep(0.001)
            source.expose(
                Exposure(peer="target", attempt=1, plan=plan, lease_seconds=30, integrity=True, chunk_leaves=4)
            )
            ops.append(
                target.read(
                    Read(
                        peer=f"source {index}",
                        attempt=1,
                        plan=into(index, plan),
                        integrity=True,
                        chunk_leaves=4,
                        max_rereads=0,
                    )
                )
            )
        all_end(target, ops)
        for index in range(6):
            assert np.count_nonzero(memory[index] == index + 1) == plan.total_bytes


def into(region: int, plan: CopyPlan) -> CopyPlan:
    """The plan with another region of the target."""
    (segment,) = plan.segments
    bases = segment.bases.copy()
    bases[:, 2] = region
    moved = Segment(bases=bases, pieces=segment.pieces, nest=segment.nest, run_bytes=segment.run_bytes)
    return CopyPlan(segments=(moved,), total_bytes=plan.total_bytes)


def all_end(transport: StreamTransport, ops: list[int]) -> None:
    left, deadline = set(ops), time.monotonic() + 10
    while left:
        assert time.monotonic() < deadline
        for completion in transport.poll():
            assert completion.outcome is Outcome.OK
            left.discard(completion.op)
        time.sleep(0.001)
