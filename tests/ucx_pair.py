"""What the tests of UCX are written with: a target in this process, and a source in another, connected."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import msgspec
import numpy as np
from peer_process import PeerProcess

from kvlink.plan import CopyPlan, Segment
from kvlink.testing.harness import REGION
from kvlink.transports.base import Completion, CompletionKind, Exposure, Outcome, Read
from kvlink.transports.ucx import UcxTransport

QUICK: dict[str, Any] = {"heartbeat_seconds": 0.05, "peer_lost_seconds": 0.6, "cut_off_grace_seconds": 0.1}
BLOCK_BYTES = 64 * 1024


class Target:
    """The transport of this process, with memory, and the completions it has reported."""

    def __init__(self, length: int, **settings: Any) -> None:
        self.transport = UcxTransport(**{**QUICK, **settings})
        self.memory = np.zeros(length, np.uint8)
        self.transport.register(REGION, self.memory.ctypes.data, length)
        self.seen: list[Completion] = []

    def wait(self, wanted: Callable[[Completion], bool], within_seconds: float = 10.0) -> Completion:
        deadline = time.monotonic() + within_seconds
        while time.monotonic() < deadline:
            self.seen += self.transport.poll()
            for completion in self.seen:
                if wanted(completion):
                    return completion
            if self.transport.arm():
                select.select([self.transport.fileno()], [], [], 0.1)
        raise AssertionError(f"not within {within_seconds} s; seen: {self.seen}")

    def end_of(self, op: int, within_seconds: float = 10.0) -> Completion:
        return self.wait(lambda completion: completion.op == op, within_seconds)

    def event(self, kind: CompletionKind) -> Completion:
        return self.wait(lambda completion: completion.kind is kind)

    def read(self, plan: CopyPlan, attempt: int = 1, *, integrity: bool = True) -> int:
        return self.transport.read(
            Read(peer="source", attempt=attempt, plan=plan, integrity=integrity, chunk_leaves=64, max_rereads=1)
        )


@contextmanager
def held_channel(**settings: Any) -> Iterator[tuple[Target, socket.socket]]:
    """A transport whose peer's channel is in the test's hand; nobody progresses that peer, so it answers no get."""
    with ExitStack() as closing:
        source, target = UcxTransport(**QUICK), Target(2 << 20, **settings)
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


def exposure(plan: CopyPlan, attempt: int = 1, lease_seconds: float = 30.0) -> Exposure:
    return Exposure(
        peer="target", attempt=attempt, plan=plan, lease_seconds=lease_seconds, integrity=True, chunk_leaves=64
    )


def join(target: Target, source: PeerProcess) -> None:
    """Connect both ways, and give both keys."""
    ours, theirs = socket.socketpair()
    op = target.transport.connect("source", source.address, ours.detach())
    source.connect("target", target.transport.address(), theirs)
    assert target.end_of(op).outcome is Outcome.OK
    target.seen.clear()
    while not source.poll():
        time.sleep(0.001)
    target.transport.import_key("source", source.key())
    source.call("import_key", peer="target", key=msgspec.to_builtins(target.transport.export_key(REGION)))


def shuffled_blocks(length: int) -> CopyPlan:
    """All blocks of one region into all blocks of another, in other places."""
    blocks = length // BLOCK_BYTES
    random = np.random.default_rng(5)
    pieces = np.stack([random.permutation(blocks), random.permutation(blocks)], axis=1) * BLOCK_BYTES
    segment = Segment(np.array([[REGION, 0, REGION, 0]], np.int64), pieces.astype(np.int64), (), BLOCK_BYTES)
    return CopyPlan(segments=(segment,), total_bytes=length)
