"""Memory shared within a host keeps the rules of every transport, on each of its paths, against a source in a process
of its own that is really stopped and killed.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from process_harness import ProcessHarness, close_spare

from kvlink.testing.conformance import Ability, Harness, TransportConformance

QUICK: dict[str, Any] = {"heartbeat_seconds": 0.05, "peer_lost_seconds": 0.6}


@pytest.fixture(scope="module", autouse=True)
def _close_spare() -> Iterator[None]:
    yield
    close_spare()


class SharedHarness(ProcessHarness):
    """``shareable``: whether the source's memory may be mapped; ``path`` as the transport takes it."""

    def __init__(self, *, shareable: bool, path: str = "auto") -> None:
        super().__init__("shared", {"shareable": shareable, "path": path, **QUICK})

    def connect_both(self) -> int:
        (channel, their_channel), (lane, their_lane) = socket.socketpair(), socket.socketpair()
        op = self.target.connect("source", self.source.peer.address, channel.detach(), [lane.detach()])
        self.source.peer.connect("target", self.target.address(), their_channel, their_lane)
        return op

    def connect_to_nobody(self) -> int:
        pairs = [socket.socketpair(), socket.socketpair()]
        for _, theirs in pairs:
            theirs.close()
        channel, lane = (ours.detach() for ours, _ in pairs)
        return self.target.connect("nobody", self.target.address(), channel, [lane])


class PulledHarness(SharedHarness):
    """The source opens the lane itself, as the kernel tells whose it is by that."""

    def __init__(self) -> None:
        super().__init__(shareable=False, path="pulled")

    def connect_both(self) -> int:
        channel, their_channel = socket.socketpair()
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind("")  # to a name that the kernel gives
            listener.listen()
            name = listener.getsockname()
            self.source.peer.connect("target", self.target.address(), their_channel, lane_name=name)
            lane, _ = listener.accept()
        return self.target.connect("source", self.source.peer.address, channel.detach(), [lane.detach()])


NOTHING_BETWEEN = {Ability.FLIP: "nothing comes between one process's memory and the other's; see test_shared.py"}


class TestSharedMapped(TransportConformance):
    cannot: ClassVar = NOTHING_BETWEEN

    def open_harness(self) -> Harness:
        return SharedHarness(shareable=True)


class TestSharedRing(TransportConformance):
    cannot: ClassVar = {
        **NOTHING_BETWEEN,
        Ability.READ_ELSEWHERE: "the source reads its own memory, by its own plan",
    }

    def open_harness(self) -> Harness:
        return SharedHarness(shareable=False, path="ring")


class TestSharedPulled(TransportConformance):
    cannot: ClassVar = NOTHING_BETWEEN

    def open_harness(self) -> Harness:
        return PulledHarness()
