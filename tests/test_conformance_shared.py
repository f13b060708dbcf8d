"""Memory shared within a host keeps the rules of every transport, on both of its paths, against a source in a process
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
    """``shareable``: whether the source's memory may be mapped."""

    def __init__(self, *, shareable: bool) -> None:
        super().__init__("shared", {"shareable": shareable, **QUICK})

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
        return SharedHarness(shareable=False)
