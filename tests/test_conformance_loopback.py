"""The loopback keeps the rules of every transport."""

from __future__ import annotations

import numpy as np

from kvlink.testing.clock import VirtualClock
from kvlink.testing.conformance import Harness, Source, TransportConformance
from kvlink.testing.harness import MEMORY_BYTES, REGION
from kvlink.transports.base import Completion, Exposure, LeaseReport
from kvlink.transports.faults import FlipByte
from kvlink.transports.loopback import LoopbackFabric, LoopbackTransport


class LoopbackSource(Source):
    name = "source"

    def __init__(self, fabric: LoopbackFabric) -> None:
        self.memory = np.zeros(MEMORY_BYTES, np.uint8)
        self.fabric = fabric
        self.transport = LoopbackTransport(fabric, self.name)
        self.transport.register(REGION, self.memory.ctypes.data, MEMORY_BYTES)

    def expose(self, exposure: Exposure) -> None:
        self.transport.expose(exposure)

    def lease(self, attempt: int) -> LeaseReport:
        return self.transport.lease("target", attempt)

    def withdraw(self, attempt: int) -> LeaseReport:
        return self.transport.withdraw("target", attempt)

    def completions(self) -> list[Completion]:
        return self.transport.poll()

    def stop(self) -> None:
        self.fabric.stop(self.name)

    def resume(self) -> None:
        self.fabric.resume(self.name)

    def kill(self) -> None:
        self.fabric.kill(self.name)


class LoopbackHarness(Harness):
    target_name = "target"

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.virtual = VirtualClock()
        self.fabric = LoopbackFabric(seed, clock=self.virtual)
        self.memory = np.zeros(MEMORY_BYTES, np.uint8)
        self.target = LoopbackTransport(self.fabric, "target")
        self.target.register(REGION, self.memory.ctypes.data, MEMORY_BYTES)
        self.source = LoopbackSource(self.fabric)
        self.reconnect()

    def clock(self) -> float:
        return self.virtual()

    def idle(self) -> None:
        self.virtual.advance(0.01)

    def reconnect(self) -> None:
        op = self.target.connect("source", self.source.transport.address(), None)
        self.source.transport.connect("target", self.target.address(), None)
        self.end_of(op)
        self.source.completions()
        self.target.import_key("source", self.source.transport.export_key(REGION))
        self.seen.clear()

    def replace_source(self) -> None:
        self.source = LoopbackSource(self.fabric)
        self.source.memory[:] = np.random.default_rng(3).integers(0, 256, MEMORY_BYTES, dtype=np.uint8)
        self.reconnect()

    def connect_to_nobody(self) -> int:
        return self.target.connect("nobody", b"loopback:999:nobody", None)

    def flip(self, chunk: int, on_try: int | None) -> None:
        self.fabric.inject(FlipByte(chunk=chunk, on_try=on_try))

    def close(self) -> None:
        self.target.close()
        self.source.transport.close()


class TestLoopback(TransportConformance):
    def open_harness(self) -> Harness:
        return LoopbackHarness(seed=11)
