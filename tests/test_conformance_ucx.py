"""UCX keeps the rules of every transport, against a source in a process of its own that is really stopped and killed.

Over TCP a stopped source answers no get, so a cut-off must end gets that are outstanding (A1); on the same host gets
read its memory all the same.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from ucx_peer import PeerProcess

from kvlink.testing.conformance import Ability, Harness, Source, TransportConformance
from kvlink.testing.harness import MEMORY_BYTES, REGION
from kvlink.transports.base import Completion, CompletionKind, Exposure, LeaseReport
from kvlink.transports.ucx import UcxTransport

QUICK: dict[str, Any] = {
    "ucx_origin": os.environ.get(
        "KVLINK_TEST_UCX_ORIGIN", "auto"
    ),  # to run all this on another UCX, a path to 1.13 say
    "heartbeat_seconds": 0.05,
    "peer_lost_seconds": 0.6,
    "cut_off_grace_seconds": 0.1,
}


CANNOT = {Ability.FLIP: "nothing comes between the source's memory and the target's"}

spare: list[PeerProcess] = []
"""Processes that outlived their test: starting one takes longer than most tests."""


@pytest.fixture(scope="module", autouse=True)
def _close_spare() -> Iterator[None]:
    yield
    while spare:
        spare.pop().close()


class UcxSource(Source):
    name = "source"

    def __init__(self, tls: str | None) -> None:
        if spare:
            self.peer = spare.pop()
            self.peer.open(ucx_tls=tls, **QUICK)
        else:
            self.peer = PeerProcess(ucx_tls=tls, **QUICK)
        self.memory = self.peer.memory

    def close(self) -> None:
        if self.peer.process.poll() is None:
            self.peer.resume()
            spare.append(self.peer)
        else:
            self.peer.close()

    def expose(self, exposure: Exposure) -> None:
        self.peer.expose(exposure)

    def lease(self, attempt: int) -> LeaseReport:
        return self.peer.lease("target", attempt)

    def withdraw(self, attempt: int) -> LeaseReport:
        return self.peer.withdraw("target", attempt)

    def completions(self) -> list[Completion]:
        return self.peer.poll()

    def stop(self) -> None:
        self.peer.stop()

    def resume(self) -> None:
        self.peer.resume()

    def kill(self) -> None:
        self.peer.kill()


class UcxHarness(Harness):
    target_name = "target"

    def __init__(self, tls: str | None) -> None:
        super().__init__()
        self.tls = tls
        self.memory = np.zeros(MEMORY_BYTES, np.uint8)
        self.target = UcxTransport(ucx_tls=tls, **QUICK)
        self.target.register(REGION, self.memory.ctypes.data, MEMORY_BYTES)
        self.source = UcxSource(tls)
        self.reconnect()

    def clock(self) -> float:
        return time.monotonic()

    def idle(self) -> None:
        if self.target.arm():
            select.select([self.target.fileno()], [], [], 0.01)

    def reconnect(self) -> None:
        ours, theirs = socket.socketpair()
        op = self.target.connect("source", self.source.peer.address, ours.detach())
        self.source.peer.connect("target", self.target.address(), theirs)
        self.end_of(op)
        self.source_event(CompletionKind.CONNECTED)
        self.target.import_key("source", self.source.peer.key())
        self.seen.clear()

    def replace_source(self) -> None:
        self.source.close()
        self.source = UcxSource(self.tls)
        self.source.memory[:] = np.random.default_rng(3).integers(0, 256, MEMORY_BYTES, dtype=np.uint8)
        self.reconnect()

    def connect_to_nobody(self) -> int:
        gone = UcxTransport(ucx_tls=self.tls, **QUICK)
        address = gone.address()
        gone.close()
        ours, theirs = socket.socketpair()
        theirs.close()
        return self.target.connect("nobody", address, ours.detach())

    def close(self) -> None:
        self.target.close()
        self.source.close()


class TestUcxOverTcp(TransportConformance):
    cannot = CANNOT

    def open_harness(self) -> Harness:
        return UcxHarness("tcp")


class TestUcxOnOneHost(TransportConformance):
    cannot = CANNOT

    def open_harness(self) -> Harness:
        return UcxHarness(None)
