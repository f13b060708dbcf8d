"""The stream keeps the rules of every transport, against a source in a process of its own that is really stopped and
killed: over TCP with several lanes, and over Unix sockets with one.

Flipped bytes are really flipped: over TCP a relay stands on every lane, and spoils payload on its way.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from lane_relay import Relay, Spoil
from process_harness import ProcessHarness, close_spare

from kvlink.limits import LEAF_BYTES
from kvlink.testing.conformance import Ability, Harness, TransportConformance
from kvlink.testing.harness import CHUNK_LEAVES

QUICK: dict[str, Any] = {"heartbeat_seconds": 0.05, "peer_lost_seconds": 0.6}


@pytest.fixture(scope="module", autouse=True)
def _close_spare() -> Iterator[None]:
    yield
    close_spare()


def tcp_pair(host: str) -> tuple[socket.socket, socket.socket]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        ours = socket.create_connection(listener.getsockname()[:2])
        theirs, _ = listener.accept()
    return ours, theirs


class StreamHarness(ProcessHarness):
    lanes = 1

    def __init__(self) -> None:
        super().__init__("stream", {"lanes": self.lanes, **QUICK})

    def pair(self) -> tuple[socket.socket, socket.socket]:
        return socket.socketpair()

    def lane(self) -> tuple[socket.socket, socket.socket]:
        return self.pair()

    def connect_both(self) -> int:
        pairs = [self.pair(), *(self.lane() for _ in range(self.lanes))]
        channel, *lanes = (ours.detach() for ours, _ in pairs)
        op = self.target.connect("source", self.source.peer.address, channel, lanes)
        self.source.peer.connect("target", self.target.address(), *(theirs for _, theirs in pairs))
        return op

    def connect_to_nobody(self) -> int:
        pairs = [self.pair() for _ in range(1 + self.lanes)]
        for _, theirs in pairs:
            theirs.close()
        channel, *lanes = (ours.detach() for ours, _ in pairs)
        return self.target.connect("nobody", self.target.address(), channel, lanes)


class RelayedHarness(StreamHarness):
    """Every lane is a TCP connection through a relay of this process."""

    lanes = 2
    host = "127.0.0.1"

    def __init__(self) -> None:
        self.relays = contextlib.ExitStack()
        self.spoil = Spoil()
        super().__init__()

    def pair(self) -> tuple[socket.socket, socket.socket]:
        return tcp_pair(self.host)

    def lane(self) -> tuple[socket.socket, socket.socket]:
        (ours, near), (far, theirs) = self.pair(), self.pair()
        self.relays.enter_context(Relay(near, far, self.spoil))
        return ours, theirs

    def flip(self, chunk: int, on_try: int | None) -> None:
        self.spoil.on_try[chunk * CHUNK_LEAVES * LEAF_BYTES] = on_try

    def close(self) -> None:
        super().close()
        self.relays.close()


ELSEWHERE = {Ability.READ_ELSEWHERE: "the source reads its own memory, by its own plan"}


class TestStreamOverTcp(TransportConformance):
    cannot: ClassVar = ELSEWHERE

    def open_harness(self) -> Harness:
        return RelayedHarness()


class TestStreamOverUnixSockets(TransportConformance):
    cannot: ClassVar = {**ELSEWHERE, Ability.FLIP: "a relay spoils bytes over TCP already"}

    def open_harness(self) -> Harness:
        return StreamHarness()


def test_it_moves_bytes_over_ipv6() -> None:
    """J2: lanes and channel over ::1."""

    class OverIpv6(RelayedHarness):
        host = "::1"

    class Kit(TransportConformance):
        cannot: ClassVar = ELSEWHERE

        def open_harness(self) -> Harness:
            return OverIpv6()

    with OverIpv6() as harness:
        Kit().test_bytes_land_exactly_where_the_plan_says(harness, integrity=True)
