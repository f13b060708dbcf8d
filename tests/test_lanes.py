"""What the transports with lanes, the stream and shared memory, have in common: how they bear a peer that breaks their
protocol (the test plays it), and threads of their own. What is one's alone is in test_stream.py and test_shared.py."""

from __future__ import annotations

import resource
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import shared_peer
import stream_peer
from process_harness import ProcessHarness, close_spare
from test_conformance_shared import PulledHarness, SharedHarness
from test_conformance_stream import StreamHarness
from test_conformance_ucx import UcxHarness

from kvlink.limits import LEAF_BYTES
from kvlink.testing.harness import scattered_plan, wire_bytes
from kvlink.transports.base import CompletionKind, Outcome

HARNESSES: dict[str, Callable[[], ProcessHarness]] = {
    "stream": StreamHarness,
    "mapped": partial(SharedHarness, shareable=True),
    "pulled": PulledHarness,
    "ring": partial(SharedHarness, shareable=False, path="ring"),
    "ucx": partial(UcxHarness, None, "direct"),
    "ucx-tcp": partial(UcxHarness, "tcp", "direct"),
}


@pytest.fixture(scope="module", autouse=True)
def _close_spare() -> Iterator[None]:
    yield
    close_spare()


@pytest.fixture(params=[stream_peer, shared_peer], ids=["stream", "shared"])
def played(request: pytest.FixtureRequest) -> ModuleType:
    """Who plays the peer."""
    return request.param


@pytest.fixture
def rig(played: ModuleType) -> Iterator[Any]:
    rig = played.Rig()
    yield rig
    rig.close()


# --- a target that breaks the protocol ------------------------------------------------------------------------------

BAD_ASKS = {
    "beyond the plan": lambda total, _: (0, -(-total // LEAF_BYTES) * LEAF_BYTES),
    "far beyond the plan": lambda *_: (1 << 40, (1 << 40) + LEAF_BYTES),
    "within a leaf": lambda *_: (8, LEAF_BYTES),
    "ending within a leaf": lambda *_: (0, 100),
    "of nothing": lambda *_: (0, 0),
    "backwards": lambda *_: (LEAF_BYTES, 0),
    "negative": lambda *_: (-LEAF_BYTES, LEAF_BYTES),
    "larger than the largest": lambda _, most: (0, most + LEAF_BYTES),
    "far larger than the largest": lambda *_: (0, 1 << 30),
    "with flags from nowhere": lambda *_: (0, LEAF_BYTES, 7),
}


@pytest.mark.parametrize("bad", BAD_ASKS.values(), ids=BAD_ASKS)
def test_an_ask_for_what_is_not_exposed_loses_the_peer_and_gets_nothing(played: ModuleType, rig: Any, bad) -> None:
    """K2: wire offsets inside the exposure's plan are all that a target can name; never memory."""
    rig.memory[:] = 0x5A
    total = rig.expose()
    target = played.FakeTarget(rig)
    target.ask(1, *bad(total, played.LARGEST_ASK_BYTES))
    assert "ask for bytes" in rig.lost()
    assert b"\x5a" not in target.got()


def test_an_attempt_of_another_peer_is_not_served(played: ModuleType, rig: Any) -> None:
    """K2: exposures are by peer; an ask for an attempt that is not this peer's is answered with why not."""
    target = played.FakeTarget(rig)
    target.ask(77, 0, LEAF_BYTES)
    assert target.answer(LEAF_BYTES) == (1, b"")
    rig.memory[:] = np.random.default_rng(6).integers(0, 256, len(rig.memory), np.uint8)
    rig.expose()
    target.ask(1, 0, LEAF_BYTES)
    assert target.answer(LEAF_BYTES) == (0, wire_bytes(scattered_plan(), rig.memory)[:LEAF_BYTES])


def test_a_lane_that_closes_is_a_lost_peer(rig: Any) -> None:
    rig.read()
    rig.lane.close()
    ended = rig.completion(CompletionKind.READ)
    assert (ended.outcome, "lane" in ended.detail) == (Outcome.PEER_LOST, True)
    assert "lane" in rig.lost()


# --- addresses ------------------------------------------------------------------------------------------------------


def test_addresses_that_cannot_work_are_refused_and_sockets_taken_over(played: ModuleType, rig: Any) -> None:
    """J3: the reason is named; every descriptor that was given is closed."""
    for address, lanes, error in played.bad_addresses(rig.transport.address()):
        pairs = [socket.socketpair() for _ in range(1 + lanes)]
        with pytest.raises(error):
            rig.transport.connect("other", address, pairs[0][0].detach(), [ours.detach() for ours, _ in pairs[1:]])
        for _, theirs in pairs:
            theirs.settimeout(5)
            assert theirs.recv(1) == b""
            theirs.close()


# --- threads --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["stream", "mapped", "pulled", "ring"])
def test_a_held_interpreter_stops_nothing(name: str) -> None:
    """B9: the source's GIL is held for longer than silence is borne; heartbeats and payload go on."""
    with HARNESSES[name]() as harness:
        plan = scattered_plan()
        harness.source.expose(harness.exposure(1, plan, lease_seconds=0.5))
        harness.source.peer.send("hold_gil", seconds=1.0)
        op = harness.start_read(1, plan)
        assert harness.end_of(op).outcome is Outcome.OK
        harness.let_pass(0.9)
        assert harness.source.peer.answer() is None
        assert harness.source.lease(1).held
        assert [completion.op for completion in harness.seen] == [op]


@pytest.mark.parametrize(
    ("name", "reading"),
    [("stream", False), ("stream", True), ("ring", False), ("ring", True), ("ucx", False), ("ucx-tcp", False)],
)
def test_it_sleeps_while_there_is_nothing_to_move(name: str, *, reading: bool) -> None:
    """Idle, or waiting for a source that is stopped: threads sleep, heartbeats apart."""
    with HARNESSES[name]() as harness:
        plan = scattered_plan()
        harness.source.expose(harness.exposure(1, plan))
        harness.end_of(harness.start_read(1, plan))  # all that a first read makes is there
        if reading:
            harness.source.expose(harness.exposure(2, plan))
            harness.source.stop()
            harness.start_read(2, plan)
        time.sleep(0.05)
        before = resource.getrusage(resource.RUSAGE_SELF)
        time.sleep(0.4)
        after = resource.getrusage(resource.RUSAGE_SELF)
        spent = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
        assert spent < 0.04, "a tenth of a core, at a heartbeat every 50 ms"
