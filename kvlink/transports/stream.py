"""Native TCP: the source gathers where its bytes lie, the target scatters where they belong. For hosts without RDMA.

The target asks for stretches of an attempt on one of the pair's *lanes* (sockets for payload beside the channel, over
TCP or Unix sockets), and the source answers in plan order, with digests. Both sides check by themselves: a source
sends only what it has exposed to that peer and attempt, inside the exposure's plan and under its lease; at a target
bytes land only where its own plan puts what it asked for, and only until its cut-off. Renewals and heartbeats travel on
the channel, so they never wait for payload. The moving is native (native/src/stream_engine.hpp).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final

import msgspec

from kvlink._native import _kvlink
from kvlink.errors import PeerIncompatibleError, SchemaError, TransportError
from kvlink.limits import (
    HEARTBEAT_SECONDS,
    MAX_ACTIVE_READS,
    MAX_LANES,
    MAX_NAME_BYTES,
    PEER_LOST_SECONDS,
    STREAM_LANES,
)
from kvlink.plan import STREAM, TYPICAL, Setting, Shape, Speeds, predict
from kvlink.transports.base import Capabilities, Peer, RegionKey, Way
from kvlink.transports.engine import NativeTransport, as_transport_error, closed_on_error, engine_seconds
from kvlink.transports.host import host_id_or_none, is_this_host

WIRE_VERSION: Final = 2
"""Of what travels on channel and lanes; both ends must have the same."""


class StreamAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """What `StreamTransport.address` carries. Where to connect is the link's business."""

    version: Annotated[int, msgspec.Meta(ge=1, le=65_535)]
    lanes: Annotated[int, msgspec.Meta(ge=1, le=MAX_LANES)]
    host: Annotated[str, msgspec.Meta(max_length=MAX_NAME_BYTES)] = ""


class StreamTransport(NativeTransport[_kvlink.StreamEngine]):
    """A rank's end of the stream transport."""

    def __init__(
        self,
        *,
        lanes: int = STREAM_LANES,
        speeds: Speeds = TYPICAL,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
        peer_lost_seconds: float = PEER_LOST_SECONDS,
    ) -> None:
        """Start the threads: one for each lane, asleep when idle.

        Args:
            lanes: sockets for payload that a pair has, at most; the smaller number of the two ends counts.
            speeds: of this machine, for `ways`.
            heartbeat_seconds: interval of heartbeats, which also renew leases.
            peer_lost_seconds: silence after which a peer is lost.

        Raises:
            TransportError: ``lanes`` is not in 1..`MAX_LANES`.
        """
        if not 1 <= lanes <= MAX_LANES:
            raise TransportError(f"lanes is {lanes}; a pair has 1 to {MAX_LANES}", retryable=False)
        super().__init__(
            _kvlink.StreamEngine(engine_seconds(heartbeat_seconds, peer_lost_seconds), MAX_ACTIVE_READS, lanes)
        )
        self._lanes = lanes
        self._speeds = speeds

    def capabilities(self) -> Capabilities:
        """What this transport is; constant over its life."""
        return Capabilities(
            name="stream",
            paths=(STREAM,),
            version=str(WIRE_VERSION),
            origin="kvlink",
            detail=f"{self._lanes} lane{'s' if self._lanes > 1 else ''} a peer",
        )

    def ways(self, shape: Shape, peer: Peer) -> tuple[Way, ...]:
        """See `Transport.ways`. What the network between two hosts can do is not known, only what the ends can."""
        near = is_this_host(_decoded(peer.address).host)
        setting = Setting(near=near, integrity=peer.integrity, lanes=self.lanes(peer.address))
        return (Way(STREAM, predict(STREAM, shape, self._speeds, setting)),)

    def address(self) -> bytes:
        """Opaque address for the peer's `connect`: what this end speaks, and how many lanes it takes."""
        self._live()
        return msgspec.msgpack.encode(StreamAddress(WIRE_VERSION, self._lanes, host_id_or_none()))

    def lanes(self, address: bytes) -> int:
        """See `Transport.lanes`.

        Raises:
            PeerIncompatibleError: the peer's end speaks another version.
            SchemaError: not an address.
        """
        told = _decoded(address)
        if told.version != WIRE_VERSION:
            msg = (
                f"stream transport versions differ: {WIRE_VERSION} here, {told.version} there; install the same kvlink"
            )
            raise PeerIncompatibleError(msg, stage="connect")
        return min(self._lanes, told.lanes)

    def export_key(self, region: int) -> RegionKey:
        """See `Transport.export_key`. No address is told: a peer names attempts and wire offsets, never memory."""
        with as_transport_error("export_key"):
            return RegionKey(region=region, address=0, length=self._live().region_length(region), key=b"")

    def connect(self, peer: str, address: bytes, channel: int | None, lanes: Sequence[int] = ()) -> int:
        """Start connecting; ends in CONNECTED.

        Args:
            peer: name of the peer, new or with its PEER_LOST or DISCONNECTED already polled.
            address: what its `address` returned.
            channel: the pair's authenticated socket; taken over, whatever happens.
            lanes: as many as `lanes` said, in the same order at both ends; taken over, too.

        Raises:
            PeerIncompatibleError: the peer's end speaks another version.
            SchemaError: not an address.
            TransportError: the peer is connected already, or sockets are missing.
        """
        given = tuple(lanes) if channel is None else (channel, *lanes)
        with closed_on_error(*given):
            engine = self._live()
            wanted = self.lanes(address)
            if channel is None or len(lanes) != wanted:
                msg = f"stream needs a channel and {wanted} lanes, got {len(given)} sockets"
                raise TransportError(msg, peer=peer, stage="connect", retryable=False)
        with as_transport_error("connect", peer):
            return engine.connect(peer, channel, list(lanes))

    def import_key(self, peer: str, key: RegionKey) -> None:
        """See `Transport.import_key`. A key told again replaces the earlier one for later reads."""
        with as_transport_error("import_key", peer):
            self._live().import_region(peer, key.region, key.length)


def _decoded(address: bytes) -> StreamAddress:
    try:
        return msgspec.msgpack.decode(address, type=StreamAddress)
    except msgspec.MsgspecError as error:
        raise SchemaError(f"not a stream address: {error}", stage="connect") from error
