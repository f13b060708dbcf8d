"""A transport under test, and every completion that it has reported; and one whose only peer the test plays."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

import numpy as np

from kvlink.testing.harness import MEMORY_BYTES, REGION, scattered_plan
from kvlink.transports.base import Completion, CompletionKind, Exposure, Transport


class Watching:
    """Keeps what ``transport``, which whoever derives from it makes, reports; waits up to 5 s for more."""

    transport: Transport

    def __init__(self) -> None:
        self.seen: list[Completion] = []

    def wait(self, wanted: Callable[[Completion], bool]) -> Completion:
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            self.seen += self.transport.poll()
            for completion in self.seen:
                if wanted(completion):
                    return completion
            time.sleep(0.002)
        raise AssertionError(f"not seen: {self.seen}")

    def completion(self, kind: CompletionKind) -> Completion:
        return self.wait(lambda completion: completion.kind is kind)

    def end_of(self, op: int) -> Completion:
        return self.wait(lambda completion: completion.op == op)


class Played(Watching):
    """A transport with lanes, connected to the test: it holds the other ends of ``channel`` and ``lane``.

    Args:
        transport: the one under test.
        channel, lane: sockets in pairs, its end and ours.
        chunk_leaves: of what is exposed.
    """

    def __init__(
        self,
        transport: Transport,
        channel: tuple[socket.socket, socket.socket],
        lane: tuple[socket.socket, socket.socket],
        chunk_leaves: int,
    ) -> None:
        super().__init__()
        self.transport = transport
        self.memory = np.zeros(MEMORY_BYTES, np.uint8)
        transport.register(REGION, self.memory.ctypes.data, MEMORY_BYTES)
        (theirs, self.channel), (lane_there, self.lane) = channel, lane
        self.lane.settimeout(5)
        self._chunk_leaves = chunk_leaves
        self.end_of(transport.connect("peer", transport.address(), theirs.detach(), [lane_there.detach()]))

    def expose(self) -> int:
        """Expose the kit's plan to the test; its bytes."""
        plan, leaves = scattered_plan(), self._chunk_leaves
        self.transport.expose(
            Exposure(peer="peer", attempt=1, plan=plan, lease_seconds=30, integrity=True, chunk_leaves=leaves)
        )
        return plan.total_bytes

    def lost(self) -> str:
        """Why the peer was lost."""
        return self.completion(CompletionKind.PEER_LOST).detail

    def close(self) -> None:
        self.transport.close()
        self.lane.close()
        self.channel.close()
