"""The stream beyond the common rules: peers that break its protocol, held interpreters, and sleep."""

from __future__ import annotations

import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack

import msgspec
import numpy as np
import pytest
from lane_relay import ASK, FRAME, HEADER
from test_conformance_stream import QUICK, StreamHarness, tcp_pair
from watching import Watching

from kvlink.errors import PeerIncompatibleError, SchemaError, TransportError
from kvlink.limits import LEAF_BYTES, MAX_LANES
from kvlink.plan import CopyPlan, Segment
from kvlink.testing.harness import MEMORY_BYTES, REGION, scattered_plan
from kvlink.transports.base import CompletionKind, Exposure, Outcome, Read
from kvlink.transports.stream import StreamAddress, StreamTransport


class Rig(Watching):
    """A transport whose only peer is the test: it holds the other ends of the channel and of one lane."""

    def __init__(self) -> None:
        super().__init__()
        self.transport = StreamTransport(lanes=1, **{**QUICK, "peer_lost_seconds": 30.0})
        self.memory = np.zeros(MEMORY_BYTES, np.uint8)
        self.transport.register(REGION, self.memory.ctypes.data, MEMORY_BYTES)
        (channel, self.channel), (lane, self.lane) = tcp_pair("127.0.0.1"), tcp_pair("127.0.0.1")
        self.lane.settimeout(5)
        address = self.transport.address()
        self.end_of(self.transport.connect("peer", address, channel.detach(), [lane.detach()]))
        self.transport.import_key("peer", self.transport.export_key(REGION))

    def read(self, attempt: int = 1) -> tuple[int, ...]:
        """Start reading the kit's plan; the first ask, as it came."""
        plan = scattered_plan()
        self.transport.read(
            Read(peer="peer", attempt=attempt, plan=plan, integrity=True, chunk_leaves=64, max_rereads=0)
        )
        return HEADER.unpack(self.lane.recv(HEADER.size, socket.MSG_WAITALL))

    def expose(self, attempt: int = 1) -> int:
        """Expose the kit's plan to the peer; its bytes."""
        plan = scattered_plan()
        self.transport.expose(
            Exposure(peer="peer", attempt=attempt, plan=plan, lease_seconds=30, integrity=True, chunk_leaves=64)
        )
        return plan.total_bytes

    def close(self) -> None:
        self.transport.close()
        self.lane.close()
        self.channel.close()


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.close()


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
    rig.lane.sendall(HEADER.pack(*bad(rig.read())) + b"\xee" * 4096)
    assert "frame" in rig.completion(CompletionKind.PEER_LOST).detail
    assert not rig.memory.any()


def test_a_frame_nobody_asked_for_loses_the_peer(rig: Rig) -> None:
    rig.lane.sendall(HEADER.pack(FRAME, 1, 0, 1, 0, LEAF_BYTES))
    assert "nobody asked" in rig.completion(CompletionKind.PEER_LOST).detail


def test_a_source_that_gave_up_in_mid_frame_fails_the_read(rig: Rig) -> None:
    """The trailer says that the payload is not the source's any more; integrity or not, the read does not end well."""
    _, _, _, attempt, begin, end = rig.read()
    leaves = -((begin - end) // LEAF_BYTES)
    rig.lane.sendall(
        HEADER.pack(FRAME, 1, 0, attempt, begin, end) + bytes(8 * leaves + end - begin) + (3).to_bytes(8, "little")
    )
    ended = rig.completion(CompletionKind.READ)
    assert (ended.outcome, "withdrew" in ended.detail) == (Outcome.SOURCE_FAILED, True)


def test_a_lane_that_closes_is_a_lost_peer(rig: Rig) -> None:
    rig.read()
    rig.lane.close()
    ended = rig.completion(CompletionKind.READ)
    assert (ended.outcome, "lane" in ended.detail) == (Outcome.PEER_LOST, True)
    rig.completion(CompletionKind.PEER_LOST)


# --- a target that breaks the protocol ------------------------------------------------------------------------------

BAD_ASKS = {
    "beyond the plan": lambda total: (ASK, 1, 0, 1, 0, -(-total // LEAF_BYTES) * LEAF_BYTES),
    "far beyond the plan": lambda total: (ASK, 1, 0, 1, 1 << 40, (1 << 40) + LEAF_BYTES),
    "within a leaf": lambda total: (ASK, 1, 0, 1, 8, LEAF_BYTES),
    "ending within a leaf": lambda total: (ASK, 1, 0, 1, 0, 100),
    "of nothing": lambda total: (ASK, 1, 0, 1, 0, 0),
    "backwards": lambda total: (ASK, 1, 0, 1, LEAF_BYTES, 0),
    "negative": lambda total: (ASK, 1, 0, 1, -LEAF_BYTES, LEAF_BYTES),
    "too large": lambda total: (ASK, 1, 0, 1, 0, 1 << 30),
    "with flags from nowhere": lambda total: (ASK, 9, 0, 1, 0, LEAF_BYTES),
}


@pytest.mark.parametrize("bad", BAD_ASKS.values(), ids=BAD_ASKS)
def test_an_ask_for_what_is_not_exposed_loses_the_peer_and_gets_nothing(rig: Rig, bad) -> None:
    """K2: wire offsets inside the exposure's plan are all that a target can name; never memory."""
    rig.memory[:] = 0x5A
    rig.lane.sendall(HEADER.pack(*bad(rig.expose())))
    rig.completion(CompletionKind.PEER_LOST)
    got = b""
    try:
        while piece := rig.lane.recv(1 << 16):
            got += piece
    except ConnectionResetError:
        pass
    assert b"\x5a" not in got


def test_an_attempt_of_another_peer_is_not_served(rig: Rig) -> None:
    """K2: exposures are by peer; an ask for an attempt that is not this peer's is answered with why not."""
    rig.lane.sendall(HEADER.pack(ASK, 1, 0, 77, 0, LEAF_BYTES))
    word, _, reason, attempt, _, _ = HEADER.unpack(rig.lane.recv(HEADER.size, socket.MSG_WAITALL))
    assert (word, reason, attempt) == (FRAME, 1, 77)
    rig.expose()
    rig.lane.sendall(HEADER.pack(ASK, 0, 0, 1, 0, LEAF_BYTES))
    assert len(rig.lane.recv(HEADER.size + LEAF_BYTES + 8, socket.MSG_WAITALL)) == HEADER.size + LEAF_BYTES + 8


def test_asks_without_end_are_bounded(rig: Rig) -> None:
    """A peer that asks and never reads costs a bounded number of asks, then it is lost."""
    rig.expose()
    rig.lane.sendall(HEADER.pack(ASK, 1, 0, 1, 0, 32 * LEAF_BYTES) * 2000)
    assert "asks at a time" in rig.completion(CompletionKind.PEER_LOST).detail


# --- addresses ------------------------------------------------------------------------------------------------------


def test_addresses_that_cannot_work_are_refused_and_sockets_taken_over() -> None:
    """J3: both versions are named; every descriptor that was given is closed."""
    with ExitStack() as closing:
        transport = StreamTransport(lanes=2)
        closing.callback(transport.close)
        cases = [
            (msgspec.msgpack.encode(StreamAddress(9, 2)), 2, PeerIncompatibleError),
            (b"\xc1", 2, SchemaError),
            (msgspec.msgpack.encode([1, MAX_LANES + 1]), 2, SchemaError),
            (transport.address(), 1, TransportError),
            (transport.address(), 0, TransportError),
        ]
        for address, lanes, error in cases:
            pairs = [socket.socketpair() for _ in range(1 + lanes)]
            with pytest.raises(error):
                transport.connect("peer", address, pairs[0][0].detach(), [ours.detach() for ours, _ in pairs[1:]])
            for _, theirs in pairs:
                theirs.settimeout(5)
                assert theirs.recv(1) == b""
                theirs.close()
        with pytest.raises(TransportError, match="lanes"):
            StreamTransport(lanes=MAX_LANES + 1)


def test_a_key_tells_no_address(rig: Rig) -> None:
    key = rig.transport.export_key(REGION)
    assert (key.address, key.key, key.length) == (0, b"", MEMORY_BYTES)


# --- threads --------------------------------------------------------------------------------------------------------


def test_a_held_interpreter_stops_nothing() -> None:
    """B9: the source's GIL is held for longer than silence is borne; heartbeats and payload go on."""
    with StreamHarness() as harness:
        plan = scattered_plan()
        harness.source.expose(harness.exposure(1, plan, lease_seconds=0.5))
        harness.source.peer.send("hold_gil", seconds=1.2)
        op = harness.start_read(1, plan)
        assert harness.end_of(op).outcome is Outcome.OK
        harness.let_pass(1.0)
        assert harness.source.peer.answer() is None
        assert harness.source.lease(1).held
        assert [completion.op for completion in harness.seen] == [op]


@pytest.mark.parametrize("reading", [False, True])
def test_it_sleeps_while_there_is_nothing_to_move(*, reading: bool) -> None:
    """Idle, or waiting for a source that is stopped: threads sleep, heartbeats apart."""
    with StreamHarness() as harness:
        if reading:
            plan = scattered_plan()
            harness.source.expose(harness.exposure(1, plan))
            harness.source.stop()
            harness.start_read(1, plan)
        time.sleep(0.05)
        before = resource.getrusage(resource.RUSAGE_SELF)
        time.sleep(0.4)
        after = resource.getrusage(resource.RUSAGE_SELF)
        spent = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
        assert spent < 0.04, "a tenth of a core, at a heartbeat every 50 ms"


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
