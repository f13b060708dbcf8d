"""UCX keeps the rules of every transport, against a source in a process of its own that is really stopped and killed.

Over TCP a stopped source answers no get, so a cut-off must end gets that are outstanding (A1); on the same host gets
read its memory all the same.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from process_harness import ProcessHarness, close_spare

from kvlink.testing.conformance import Ability, Harness, TransportConformance
from kvlink.transports.ucx import UcxTransport

QUICK: dict[str, Any] = {
    "ucx_origin": os.environ.get(
        "KVLINK_TEST_UCX_ORIGIN", "auto"
    ),  # to run all this on another UCX, a path to 1.13 say
    "heartbeat_seconds": 0.05,
    "peer_lost_seconds": 0.6,
    "cut_off_grace_seconds": 0.1,
}


DIRECT_CANNOT = {Ability.FLIP: "nothing comes between the source's memory and the target's"}
PACKED_CANNOT = {
    Ability.FLIP: "nothing comes between the source's ring and the target's staging",
    Ability.READ_ELSEWHERE: "the source packs what it exposes, whatever the target's plan says",
}


@pytest.fixture(scope="module", autouse=True)
def _close_spare() -> Iterator[None]:
    yield
    close_spare()


class UcxHarness(ProcessHarness):
    def __init__(self, tls: str | None, path: str) -> None:
        super().__init__("ucx", {"ucx_tls": tls, "path": path, **QUICK})

    def connect_both(self) -> int:
        ours, theirs = socket.socketpair()
        op = self.target.connect("source", self.source.peer.address, ours.detach())
        self.source.peer.connect("target", self.target.address(), theirs)
        return op

    def connect_to_nobody(self) -> int:
        gone = UcxTransport(**self.settings)
        address = gone.address()
        gone.close()
        ours, theirs = socket.socketpair()
        theirs.close()
        return self.target.connect("nobody", address, ours.detach())


class TestDirectOverTcp(TransportConformance):
    cannot = DIRECT_CANNOT

    def open_harness(self) -> Harness:
        return UcxHarness("tcp", "direct")


class TestDirectOnOneHost(TransportConformance):
    cannot = DIRECT_CANNOT

    def open_harness(self) -> Harness:
        return UcxHarness(None, "direct")


class TestPackedOverTcp(TransportConformance):
    """I3: short runs are gathered and scattered, and everything else is as ever."""

    cannot = PACKED_CANNOT

    def open_harness(self) -> Harness:
        return UcxHarness("tcp", "packed")


class TestPackedOnOneHost(TransportConformance):
    cannot = PACKED_CANNOT

    def open_harness(self) -> Harness:
        return UcxHarness(None, "packed")
