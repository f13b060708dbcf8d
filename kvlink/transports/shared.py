"""Memory shared by two ranks of one host: the way to another process that costs no system call a byte.

Three paths, chosen for each read: *mapped*, where all of the source's memory that is read lies in sealed files
(KVLink's own pools, see `kvlink.memory.allocate_pool`): the target maps it read-only and copies it straight into its
blocks. Where an engine owns the source's memory, *pulled*: the target has the kernel copy out of the source's process,
if the kernel lets it; and *ring*: the source gathers into a ring of slots, the target scatters from it. A ring copies
twice, and a pull costs more a run, so short runs go by the ring. Neither side ever maps the other's memory writable,
and what a peer writes into memory that both see is checked like what it sends.

The pair has one lane: a Unix socket, which carries file descriptors and wakes whoever sleeps. The moving is native
(native/src/shared_engine.hpp): one thread per transport, which never calls Python, and a few that help it to copy.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Final

import msgspec

from kvlink._native import _kvlink
from kvlink.errors import PeerIncompatibleError, SchemaError, TransportError, UnavailableError
from kvlink.limits import (
    COPY_THREADS,
    HEARTBEAT_SECONDS,
    LISTEN_BACKLOG,
    MAX_ACTIVE_READS,
    MAX_NAME_BYTES,
    PEER_LOST_SECONDS,
)
from kvlink.plan import MAPPED, PULLED, RING, TYPICAL, Setting, Shape, Speeds, faster, predict
from kvlink.transports import numa
from kvlink.transports.base import Backing, Capabilities, Peer, RegionKey, Way
from kvlink.transports.engine import AUTO, NativeTransport, as_transport_error, closed_on_error, engine_seconds
from kvlink.transports.host import host_id

if TYPE_CHECKING:
    from kvlink.plan import CopyPlan

WIRE_VERSION: Final = 3
"""Of what travels on channel, lane and in shared memory; both ends must have the same."""

MAPPABLE: Final = b"mappable"
"""A region's key, if the source's file of it may be mapped; else it is empty."""

PATH_CHOICES: Final = (AUTO, MAPPED, PULLED, RING)
"""What `SharedTransport` may be told of its reads' path."""

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_BYTES)]


class SharedAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """What `SharedTransport.address` carries: which host and network namespace, and the lane's abstract name there."""

    version: Annotated[int, msgspec.Meta(ge=1, le=65_535)]
    boot: _Name
    namespace: _Name
    name: _Name


def default_copy_threads(cpus: int) -> int:
    """How many threads copy beside the transport's own, of so many CPUs: half of them are for others.

    >>> [default_copy_threads(cpus) for cpus in (1, 2, 4, 6, 64)]
    [0, 1, 1, 2, 3]
    """
    return 0 if cpus == 1 else min(max(cpus // 2 - 1, 1), COPY_THREADS)


class SharedTransport(NativeTransport[_kvlink.SharedEngine]):
    """A rank's end of the shared transport."""

    def __init__(
        self,
        *,
        path: str = AUTO,
        integrity: bool = True,
        copy_threads: int | None = None,
        speeds: Speeds = TYPICAL,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
        peer_lost_seconds: float = PEER_LOST_SECONDS,
    ) -> None:
        """Start the threads, asleep when idle, and listen for lanes.

        Args:
            path: of our reads. ``mapped`` and ``pulled`` count where they can be; elsewhere the ring stands in, and
                says why. ``auto``: mapped where that can be, else what is predicted to take less for each plan.
            copy_threads: how many copy beside the transport's own; by default `default_copy_threads` of the CPUs that
                this process may use.
            integrity: whether our reads will be digested, for predictions.
            speeds: of this machine, for predictions.
            heartbeat_seconds: interval of heartbeats, which also renew leases.
            peer_lost_seconds: silence after which a peer is lost.

        Raises:
            TransportError: there is no such path.
            UnavailableError: this machine does not say which it is, or has no Unix sockets without a path (Linux).
        """
        if path not in PATH_CHOICES:
            raise TransportError(f"path is {path!r}; it is one of {', '.join(PATH_CHOICES)}", retryable=False)
        name = f"kvlink-{secrets.token_hex(16)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._address = SharedAddress(WIRE_VERSION, host_id(), _network_namespace(), name)
            self._listener.setblocking(False)
            self._listener.bind(f"\0{name}")
            self._listener.listen(LISTEN_BACKLOG)
            if copy_threads is None:
                copy_threads = default_copy_threads(len(numa.allowed_cpus()))
            seconds = engine_seconds(heartbeat_seconds, peer_lost_seconds)
            engine = _kvlink.SharedEngine(seconds, MAX_ACTIVE_READS, copy_threads)
        except OSError as error:
            self._listener.close()
            raise UnavailableError(
                f"memory cannot be shared within this host: {error}; leave 'shared' out of transports"
            ) from error
        super().__init__(engine)
        self._copy_threads = copy_threads
        self._path = path
        self._setting = Setting(integrity=integrity, copy_threads=copy_threads)
        self._speeds = speeds
        self._hidden: dict[str, set[int]] = {}
        """By peer: which of its regions cannot be mapped."""

    def capabilities(self) -> Capabilities:
        """What this transport is; constant over its life."""
        return Capabilities(
            name="shared",
            paths=(MAPPED, PULLED, RING),
            version=str(WIRE_VERSION),
            origin="kvlink",
            detail=f"boot {self._address.boot}, network namespace {self._address.namespace}, "
            f"{self._copy_threads} copy threads beside its own",
        )

    def path(self, plan: CopyPlan, peer: str) -> tuple[str, str]:
        """See `Transport.path`. Which it was is in the read's completion: the kernel has a word in it, too."""
        hidden = self._hidden.get(peer, set())
        if self._path in (PULLED, RING):
            return self._path, "set by the configuration"
        if not hidden or hidden.isdisjoint(int(region) for s in plan.segments for region in s.bases[:, 0]):
            return MAPPED, "the source shares all of the memory that is read"
        if self._path == MAPPED:
            return RING, "the source does not share all of the memory that is read"
        return faster(PULLED, RING, Shape.of(plan), self._speeds, self._setting)

    def ways(self, shape: Shape, peer: Peer) -> tuple[Way, ...]:
        """See `Transport.ways`: mapped where all of its memory may be, else both others; or the one that is set."""
        setting = replace(self._setting, integrity=peer.integrity)
        paths: tuple[str, ...] = (self._path,)
        if self._path in (AUTO, MAPPED):
            mappable = all(key.key == MAPPABLE for key in peer.keys)
            paths = (MAPPED,) if mappable else (PULLED, RING) if self._path == AUTO else (RING,)
        return tuple(Way(path, predict(path, shape, self._speeds, setting)) for path in paths)

    def address(self) -> bytes:
        """Opaque address for the peer's `connect`: which host this is, and where lanes come in."""
        self._live()
        return msgspec.msgpack.encode(self._address)

    def register(self, region: int, address: int, length: int, backing: Backing | None = None) -> None:
        """See `Transport.register`. Without a backing peers pull, or are served by the ring.

        Raises:
            TransportError: the file is not sealed, or does not have the region; nothing is registered.
        """
        with as_transport_error("register"):
            if backing is None:
                self._live().register(region, address, length)
            else:
                self._live().register_backed(region, address, length, backing.descriptor, backing.offset)

    def unregister(self, region: int) -> None:
        """See `Transport.unregister`. Peers that have mapped it keep their mapping until they lose us.

        Those who were told where it lies in our memory still know it, and find there whatever there is.
        """
        super().unregister(region)

    def export_key(self, region: int) -> RegionKey:
        """See `Transport.export_key`: whether the region's file may be had. Addresses are told on the lane alone."""
        with as_transport_error("export_key"):
            engine = self._live()
            key = MAPPABLE if engine.is_backed(region) else b""
            return RegionKey(region=region, address=0, length=engine.region_length(region), key=key)

    def refusal(self, address: bytes) -> str | None:
        """Why the other end cannot share memory with this one: another host, namespace or version.

        Raises:
            SchemaError: not an address.
        """
        told, ours = _decoded(address), self._address
        if told.boot != ours.boot:
            return "the ranks run on different hosts"
        if told.namespace != ours.namespace:
            return "the ranks run in different network namespaces, and no Unix socket reaches from one into the other"
        if told.version != ours.version:
            return f"shared transport versions differ: {ours.version} here, {told.version} there"
        return None

    def lane_listener(self) -> socket.socket | None:
        """See `Transport.lane_listener`: descriptors cannot travel over TCP, so lanes are Unix sockets."""
        self._live()
        return self._listener

    def lane_path(self, address: bytes) -> str | None:
        """See `Transport.lane_path`: the name that the other end listens on, in the abstract namespace."""
        return f"\0{_decoded(address).name}"

    def lanes(self, address: bytes) -> int:
        """See `Transport.lanes`: one.

        Raises:
            PeerIncompatibleError: the other end cannot share memory with this one.
            SchemaError: not an address.
        """
        if (reason := self.refusal(address)) is not None:
            raise PeerIncompatibleError(f"{reason}; use another transport", stage="connect")
        return 1

    def connect(self, peer: str, address: bytes, channel: int | None, lanes: Sequence[int] = ()) -> int:
        """Start connecting; ends in CONNECTED.

        Args:
            peer: name of the peer, new or with its PEER_LOST or DISCONNECTED already polled.
            address: what its `address` returned.
            channel: the pair's authenticated socket; taken over, whatever happens.
            lanes: one, a Unix stream socket; taken over, too.

        Raises:
            PeerIncompatibleError: the other end cannot share memory with this one.
            SchemaError: not an address.
            TransportError: the peer is connected already, or a socket is missing or of another kind.
        """
        given = tuple(lanes) if channel is None else (channel, *lanes)
        with closed_on_error(*given):
            engine = self._live()
            self.lanes(address)
            if channel is None or len(lanes) != 1:
                msg = f"shared needs a channel and one lane, got {len(given)} sockets"
                raise TransportError(msg, peer=peer, stage="connect", retryable=False)
        self._hidden[peer] = set()
        with as_transport_error("connect", peer):
            return engine.connect(peer, channel, lanes[0])

    def import_key(self, peer: str, key: RegionKey) -> None:
        """See `Transport.import_key`. A key told again replaces the earlier one for later reads."""
        mappable = key.key == MAPPABLE and self._path != PULLED
        with as_transport_error("import_key", peer):
            self._live().import_region(peer, key.region, key.length, mappable)
        hidden = self._hidden.setdefault(peer, set())
        hidden.discard(key.region) if mappable else hidden.add(key.region)

    def disconnect(self, peer: str) -> int:
        """See `Transport.disconnect`."""
        self._hidden.pop(peer, None)
        return super().disconnect(peer)

    def close(self) -> None:
        """See `Transport.close`; lanes are not let in any more."""
        self._listener.close()
        super().close()


def _decoded(address: bytes) -> SharedAddress:
    try:
        return msgspec.msgpack.decode(address, type=SharedAddress)
    except msgspec.MsgspecError as error:
        raise SchemaError(f"not an address of the shared transport: {error}", stage="connect") from error


def _network_namespace() -> str:
    """Names of Unix sockets that have no path are of one network namespace."""
    status = os.stat("/proc/self/ns/net")
    return f"{status.st_dev}:{status.st_ino}"
