"""Threads that copy beside the shared transport's own: the same bytes whoever brings them, and none after the end."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Iterator

import numpy as np
import pytest
from peer_process import PeerProcess

from kvlink._native import _kvlink, native_plan
from kvlink.config import Config
from kvlink.errors import ConfigError
from kvlink.layout import DType
from kvlink.limits import MAX_COPY_THREADS
from kvlink.plan import Conversion, CopyPlan, Dim, Segment
from kvlink.testing.harness import REGION
from kvlink.transports.base import Completion, Exposure, Outcome, Read
from kvlink.transports.shared import SharedTransport

POOL_BYTES = 32 << 20
PEER = "source"


def pieces(count: int, source_step: int, target_step: int) -> np.ndarray:
    order = np.random.default_rng(count).permutation(count)
    return np.stack([order * source_step, order[::-1] * target_step], axis=1).astype(np.int64)


def plan_of(kind: str) -> CopyPlan:
    """``odd``: runs that divide no leaf; ``converted``: elements of twice the size at the target."""
    base = np.array([[REGION, 320, REGION, 704]], np.int64)
    if kind == "odd":
        segment = Segment(base, pieces(700, 42_000, 41_000), (Dim(4, 10_300, 10_100),), 10_007)
        return CopyPlan((segment,), 700 * 4 * 10_007)
    convert = Conversion(DType.BFLOAT16, DType.FLOAT32)
    segment = Segment(base, pieces(300, 40_000, 80_128), (), 38_912, convert)
    return CopyPlan((segment,), 300 * 38_912)


class Pair:
    """A target here and a source in a process of its own, whose pool may be mapped."""

    def __init__(self, copy_threads: int) -> None:
        quick = {"heartbeat_seconds": 0.05, "peer_lost_seconds": 0.6}
        self.source = PeerProcess(kind="shared", length=POOL_BYTES, shareable=True, **quick)
        self.memory = np.zeros(POOL_BYTES, np.uint8)
        self.target = SharedTransport(copy_threads=copy_threads, **quick)
        self.target.register(REGION, self.memory.ctypes.data, POOL_BYTES)
        (ours, theirs), (lane, their_lane) = socket.socketpair(), socket.socketpair()
        op = self.target.connect(PEER, self.source.address, ours.detach(), [lane.detach()])
        self.source.connect("target", self.target.address(), theirs, their_lane)
        assert self.end_of(op).outcome is Outcome.OK
        self.target.import_key(PEER, self.source.key())
        content = np.random.default_rng(7).integers(0, 0x3F, POOL_BYTES, dtype=np.uint8)
        self.source.memory[:] = content

    def close(self) -> None:
        self.target.close()
        self.source.close()

    def end_of(self, op: int) -> Completion:
        for _ in range(1000):
            for completion in self.target.poll():
                if completion.op == op:
                    return completion
            if self.target.arm():
                select.select([self.target.fileno()], [], [], 0.1)
        raise AssertionError(f"operation {op} does not end")

    def start(self, attempt: int, plan: CopyPlan, *, integrity: bool = False) -> int:
        how = {"attempt": attempt, "plan": plan, "integrity": integrity, "chunk_leaves": 16}
        self.source.expose(Exposure(peer="target", lease_seconds=5.0, **how))
        return self.target.read(Read(peer=PEER, max_rereads=0, **how))


@pytest.fixture(params=[0, 1, 3], ids=lambda count: f"{count} beside")
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = Pair(request.param)
    yield pair
    pair.close()


@pytest.mark.parametrize("kind", ["odd", "converted"])
def test_bytes_are_the_same_whoever_copies_them(pair: Pair, kind: str) -> None:
    """Every run, and nothing beside the runs, with digests and without."""
    plan = plan_of(kind)
    expected = np.zeros_like(pair.memory)
    source, target = ([(array.ctypes.data, POOL_BYTES)] * (REGION + 1) for array in (pair.source.memory, expected))
    _kvlink.move(native_plan(plan), source, target)
    for attempt in range(1, 7):
        pair.memory[:] = 0
        end = pair.end_of(pair.start(attempt, plan, integrity=attempt % 3 == 0))
        assert (end.outcome, end.path, end.bytes_moved) == (Outcome.OK, "mapped", plan.total_bytes)
        assert np.array_equal(pair.memory, expected)


def test_after_a_cut_off_no_thread_writes(pair: Pair) -> None:
    """A2: a CUT_OFF says that no byte can land any more, whoever was in the middle of a piece."""
    plan = plan_of("odd")
    for attempt in range(1, 13):
        pair.start(attempt, plan)
        time.sleep(0.0004 * attempt)
        pair.end_of(pair.target.cut_off(PEER, attempt))
        pair.memory[:] = 9
        time.sleep(0.002)
        assert (pair.memory == 9).all()


def test_a_source_that_dies_while_threads_copy_costs_its_reads_and_nothing_else(pair: Pair) -> None:
    """B1: its memory stays mapped until the last has left; the read ends once, and nothing lands after it."""
    op = pair.start(1, plan_of("odd"))
    pair.source.kill()
    assert pair.end_of(op).outcome in {Outcome.OK, Outcome.PEER_LOST}
    pair.memory[:] = 9
    time.sleep(0.01)
    assert (pair.memory == 9).all()


def test_a_close_waits_for_pieces_in_hand(pair: Pair) -> None:
    pair.start(1, plan_of("odd"))
    pair.target.close()
    pair.memory[:] = 9
    time.sleep(0.01)
    assert (pair.memory == 9).all()


def test_how_many_there_are_is_checked() -> None:
    assert Config(copy_threads=0).copy_threads == 0
    assert Config.load({}, {"KVLINK_COPY_THREADS": ""}).copy_threads is None
    assert Config.load({}, {"KVLINK_COPY_THREADS": "2"}).copy_threads == 2
    for wrong in (-1, MAX_COPY_THREADS + 1, True, "many"):
        with pytest.raises(ConfigError, match="copy_threads"):
            Config(copy_threads=wrong)
