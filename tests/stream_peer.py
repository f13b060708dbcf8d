"""A peer of the stream that a test plays itself, to break the rules: it has the other ends of a channel and a lane."""

from __future__ import annotations

import socket

import msgspec
from lane_relay import ASK, FRAME, HEADER
from test_conformance_stream import QUICK, tcp_pair
from watching import Played

from kvlink.errors import KVLinkError, PeerIncompatibleError, SchemaError, TransportError
from kvlink.limits import LEAF_BYTES, MAX_LANES
from kvlink.testing.harness import REGION, scattered_plan
from kvlink.transports.base import Read
from kvlink.transports.stream import StreamAddress, StreamTransport

LARGEST_ASK_BYTES = 512 * 1024


class Rig(Played):
    """A transport whose only peer is the test."""

    def __init__(self) -> None:
        transport = StreamTransport(lanes=1, **{**QUICK, "peer_lost_seconds": 30.0})
        super().__init__(transport, tcp_pair("127.0.0.1"), tcp_pair("127.0.0.1"), chunk_leaves=64)
        transport.import_key("peer", transport.export_key(REGION))

    def read(self) -> int:
        """Start reading the kit's plan from the test."""
        plan = scattered_plan()
        return self.transport.read(
            Read(peer="peer", attempt=1, plan=plan, integrity=True, chunk_leaves=64, max_rereads=0)
        )

    def asked(self) -> tuple[int, ...]:
        """The next ask, as it comes."""
        return HEADER.unpack(self.lane.recv(HEADER.size, socket.MSG_WAITALL))


class FakeTarget:
    """Asks for what it should not."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig

    def ask(self, attempt: int, begin: int, end: int, digests: int = 1) -> None:
        self.rig.lane.sendall(HEADER.pack(ASK, digests, 0, attempt, begin, end))

    def answer(self, length: int) -> tuple[int, bytes]:
        """The answer of the last ask: the reason why there are no bytes, or 0 and ``length`` bytes."""
        word, digests, reason, _, _, _ = HEADER.unpack(self.rig.lane.recv(HEADER.size, socket.MSG_WAITALL))
        assert word == FRAME
        if reason:
            return reason, b""
        behind, trailer = digests * -(-length // LEAF_BYTES) * 8, 8
        return 0, self.rig.lane.recv(length + behind + trailer, socket.MSG_WAITALL)[:length]

    def got(self) -> bytes:
        """All that has come since, until the lane is closed over there."""
        got = b""
        try:
            while piece := self.rig.lane.recv(1 << 16):
                got += piece
        except ConnectionResetError:
            pass
        return got


def bad_addresses(own: bytes) -> list[tuple[bytes, int, type[KVLinkError]]]:
    """An address, the number of lanes that come with it, and how it is refused."""
    return [
        (msgspec.msgpack.encode(StreamAddress(9, 1)), 1, PeerIncompatibleError),
        (b"\xc1", 1, SchemaError),
        (msgspec.msgpack.encode([2, MAX_LANES + 1]), 1, SchemaError),
        (own, 0, TransportError),
        (own, 2, TransportError),
    ]
