"""A native transport against the rules of every transport: the target here, the source in a process of its own.

So that it is really stopped and killed. What differs between transports is how a pair is connected.
"""

from __future__ import annotations

import select
import time
from abc import abstractmethod
from typing import Any

import numpy as np
from peer_process import KINDS, PeerProcess

from kvlink.testing.conformance import Harness, Source
from kvlink.testing.harness import MEMORY_BYTES, REGION
from kvlink.transports.base import Completion, CompletionKind, Exposure, LeaseReport

spare: list[PeerProcess] = []
"""Processes that outlived their test: starting one takes longer than most tests."""


def close_spare() -> None:
    """For the end of a module."""
    while spare:
        spare.pop().close()


class ProcessSource(Source):
    name = "source"

    def __init__(self, kind: str, settings: dict[str, Any]) -> None:
        if spare:
            self.peer = spare.pop()
            self.peer.open(kind=kind, **settings)
        else:
            self.peer = PeerProcess(kind=kind, **settings)
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


class ProcessHarness(Harness):
    target_name = "target"

    def __init__(self, kind: str, settings: dict[str, Any]) -> None:
        super().__init__()
        self.kind, self.settings = kind, settings
        self.memory = np.zeros(MEMORY_BYTES, np.uint8)
        self.target = KINDS[kind](**{name: value for name, value in settings.items() if name != "shareable"})
        self.target.register(REGION, self.memory.ctypes.data, MEMORY_BYTES)
        self.source: ProcessSource = ProcessSource(kind, settings)
        self.reconnect()

    @abstractmethod
    def connect_both(self) -> int:
        """Give both ends their sockets; the target's op."""

    def clock(self) -> float:
        return time.monotonic()

    def idle(self) -> None:
        if self.target.arm():
            select.select([self.target.fileno()], [], [], 0.01)

    def reconnect(self) -> None:
        self.end_of(self.connect_both())
        self.source_event(CompletionKind.CONNECTED)
        self.target.import_key("source", self.source.peer.key())
        self.seen.clear()

    def replace_source(self) -> None:
        self.source.close()
        self.source = ProcessSource(self.kind, self.settings)
        self.source.memory[:] = np.random.default_rng(3).integers(0, 256, MEMORY_BYTES, dtype=np.uint8)
        self.reconnect()

    def close(self) -> None:
        self.target.close()
        self.source.close()
