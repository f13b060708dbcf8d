"""One-sided gets over UCX, the way to RDMA and to CMA.

Two paths, and the target chooses for each read. *Direct*: a get a run, from the source's blocks into the target's; for
long runs. *Packed*: the source gathers runs into slots of a ring that it keeps for the peer, the target gets whole
slots and scatters them, converting elements where the plan does.

The moving is native (native/src/ucx_engine.hpp): one thread per transport, asleep when idle, which never calls Python.
UCX itself trusts whoever it talks to, so addresses and keys go to authenticated peers only.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from kvlink._native import _kvlink, native_plan
from kvlink.errors import PeerIncompatibleError, SchemaError, TransportError, UnavailableError, UnsupportedError
from kvlink.limits import (
    CUT_OFF_GRACE_SECONDS,
    HEARTBEAT_SECONDS,
    MAX_ACTIVE_READS,
    MAX_BLOB_BYTES,
    MAX_OUTSTANDING_GETS,
    MAX_RINGS,
    PEER_LOST_SECONDS,
    RING_SLOTS,
    STAGING_SLOTS,
)
from kvlink.plan import DIRECT, PACKED, TYPICAL, CopyPlan, Setting, Shape, Speeds, choose_path, predict
from kvlink.transports.base import Backing, Capabilities, Peer, RegionKey, Way
from kvlink.transports.engine import AUTO, NativeTransport, as_transport_error, closed_on_error, engine_seconds
from kvlink.transports.host import host_id_or_none, is_this_host
from kvlink.transports.ucx_library import UcxLibrary, choose, has_devices, incompatibility, supports_rdma

__all__ = ["UcxProbe", "UcxTransport", "incompatibility"]

PATH_CHOICES: Final = (AUTO, DIRECT, PACKED)
"""What `UcxTransport` may be told of its reads' path."""

_CHECKSUM_BYTES: Final = 4


class UcxAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """What `UcxTransport.address` carries: whom to reach, by which UCX, whether it has RDMA, and on which host."""

    version: str
    rdma: bool
    host: str
    worker: bytes


class UcxTransport(NativeTransport[_kvlink.UcxEngine]):
    """A rank's end of the UCX transport.

    Should UCX never end a get, neither the READ nor the CUT_OFF of its attempt comes: its blocks stay taken.
    """

    def __init__(  # noqa: PLR0913 - settings, all by name
        self,
        *,
        ucx_origin: str = "auto",
        ucx_tls: str | None = None,
        path: str = AUTO,
        speeds: Speeds = TYPICAL,
        gpu: _kvlink.CudaGpu | None = None,
        staging_on_gpu: bool = False,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
        peer_lost_seconds: float = PEER_LOST_SECONDS,
        cut_off_grace_seconds: float = CUT_OFF_GRACE_SECONDS,
    ) -> None:
        """Load UCX and start the thread.

        Args:
            ucx_origin: which UCX, see `kvlink.transports.ucx_library.choose`. One UCX serves a whole process.
            ucx_tls: transports UCX may use, in the form of its UCX_TLS; ``None`` leaves it to UCX and its environment.
            path: of our reads: ``direct``, ``packed``, or ``auto``, what is predicted to take less for each plan.
            speeds: of this machine, for predictions.
            gpu: where the regions lie; ``None`` for the host. Its kernels gather and scatter: all reads are packed, and
                peers can read it so only. Those of plain copies, and of whatever `read` converts, are loaded already.
            staging_on_gpu: slots are the GPU's memory, which needs a UCX that knows it; else pinned memory of the host.
            heartbeat_seconds: interval of heartbeats, which also renew leases.
            peer_lost_seconds: silence after which a peer is lost.
            cut_off_grace_seconds: how long outstanding gets of a read that was cut off may take to end by themselves,
                before the endpoint is closed by force, which fails all reads from that peer.

        Raises:
            TransportError: there is no such path.
            UnavailableError: there is no such UCX, or it cannot start here.
        """
        if path not in PATH_CHOICES:
            raise TransportError(f"path is {path!r}; it is one of {', '.join(PATH_CHOICES)}", retryable=False)
        self._path = path
        self._gpu = gpu
        self._speeds = speeds
        self._packing_peers: set[str] = set()
        self._settings: dict[str, Setting] = {}
        self._library = choose(ucx_origin)
        try:
            engine = _kvlink.UcxEngine(
                self._library.name,
                ucx_tls,
                engine_seconds(heartbeat_seconds, peer_lost_seconds),
                MAX_ACTIVE_READS,
                cut_off_grace_seconds,
                MAX_OUTSTANDING_GETS,
                (RING_SLOTS, MAX_RINGS, STAGING_SLOTS),
                gpu,
                staging_on_gpu,
            )
        except RuntimeError as error:
            raise _unavailable(error, ucx_tls) from error
        super().__init__(engine)
        self._capabilities = _capabilities(self._engine, self._library, gpu)

    def capabilities(self) -> Capabilities:
        """What this transport is; constant over its life. ``detail`` lists UCX's transports here."""
        return self._capabilities

    def path(self, plan: CopyPlan, peer: str) -> tuple[str, str]:
        """See `Transport.path`.

        Raises:
            UnsupportedError: the path was set to ``direct``, and elements must be converted, or a GPU's kernels pack.
        """
        on_gpu = "our cache" if self._gpu is not None else "the peer's cache" if peer in self._packing_peers else ""
        if on_gpu:
            chosen: str | None = PACKED if self._path != DIRECT else None
            reason = f"{on_gpu} is a GPU's: its kernels pack" + ("" if chosen else "; set the path to auto")
        elif self._path == AUTO:
            chosen, reason = choose_path(plan, self._capabilities.paths, self._speeds, self._settings.get(peer))
        elif self._path == DIRECT and plan.converts:
            chosen, reason = None, "elements must be converted, and the path is set to direct; set it to auto"
        else:
            chosen, reason = self._path, "set by the configuration"
        if chosen is None:
            raise UnsupportedError(reason)
        return chosen, reason

    def address(self) -> bytes:
        """Opaque address for the peer's `connect`: UCX's version and the worker's address."""
        engine = self._live()
        address = UcxAddress(
            version=engine.ucx_version,
            rdma=self._capabilities.rdma,
            host=host_id_or_none(),
            worker=_sealed(engine.address()),
        )
        return msgspec.msgpack.encode(address)

    def refusal(self, address: bytes) -> str | None:
        """See `Transport.refusal`: two releases of UCX that cannot work together.

        Raises:
            SchemaError: not an address.
        """
        return incompatibility(self._capabilities.version, _decoded(address).version)

    def ways(self, shape: Shape, peer: Peer) -> tuple[Way, ...]:
        """See `Transport.ways`: both paths, or the one that is set, or that a GPU's cache needs."""
        setting = self._setting(_decoded(peer.address), integrity=peer.integrity)
        on_gpu = self._gpu is not None or any(not key.key and not key.address for key in peer.keys)
        paths = (PACKED,) if on_gpu else (DIRECT, PACKED) if self._path == AUTO else (self._path,)
        return tuple(Way(path, predict(path, shape, self._speeds, setting)) for path in paths)

    def register(self, region: int, address: int, length: int, backing: Backing | None = None) -> None:
        """See `Transport.register`. It pins pages where the network needs that, which takes time."""
        super().register(region, address, length, backing)

    def export_key(self, region: int) -> RegionKey:
        """See `Transport.export_key`. A GPU's has an address of 0 and no key: it is read by the packed path only."""
        with as_transport_error("export_key"):
            address, length, key = self._live().export_key(region)
        if self._gpu is not None:
            return RegionKey(region=region, address=0, length=length, key=b"")
        return RegionKey(region=region, address=address, length=length, key=_sealed(key))

    def connect(self, peer: str, address: bytes, channel: int | None, lanes: Sequence[int] = ()) -> int:
        """Start connecting; ends in CONNECTED (UNREACHABLE where UCX finds no way to the address).

        Args:
            peer: name of the peer, new or with its PEER_LOST or DISCONNECTED already polled.
            address: what its `address` returned.
            channel: the pair's authenticated socket; taken over, whatever happens.
            lanes: UCX has its own, and closes them.

        Raises:
            PeerIncompatibleError: the two sides' UCX cannot work together; both versions are named.
            SchemaError: not an address.
            TransportError: the peer is connected already, or ``channel`` is missing.
        """
        for lane in lanes:
            os.close(lane)
        if channel is None:
            raise TransportError("ucx needs the pair's native channel", peer=peer, stage="connect", retryable=False)
        with closed_on_error(channel):
            engine = self._live()
            worker = _checked_address(address, engine.ucx_version, peer)
            self._settings[peer] = self._setting(_decoded(address))
        with as_transport_error("connect", peer):
            return engine.connect(peer, worker, channel)

    def disconnect(self, peer: str) -> int:
        """See `Transport.disconnect`."""
        self._settings.pop(peer, None)
        self._packing_peers.discard(peer)
        return super().disconnect(peer)

    def import_key(self, peer: str, key: RegionKey) -> None:
        """See `Transport.import_key`. A key told again replaces the earlier one for later reads.

        Raises:
            SchemaError: the key was damaged on the way.
            TransportError: the peer is not connected, or the key states impossible bounds.
        """
        if key.key or key.address:  # a GPU's region has neither; with one of them it is damaged
            packed = _unsealed(key.key, f"key of region {key.region} of peer {peer}")
        else:
            packed = b""
            self._packing_peers.add(peer)
        with as_transport_error("import_key", peer):
            self._live().import_key(peer, key.region, key.address, key.length, packed)

    def _setting(self, told: UcxAddress, *, integrity: bool = True) -> Setting:
        rdma = self._capabilities.rdma and told.rdma
        return Setting(near=is_this_host(told.host), rdma=rdma, integrity=integrity)


class UcxProbe:
    """The limit that transfers are compared with: a bare loop of UCX gets over the same runs.

    It shares with `UcxTransport` only what makes it fair: UCX itself, its settings, error mode and wake-up progress.
    One end serves, the other connects, imports keys and gets. For benchmarks only.
    """

    def __init__(self, *, ucx_origin: str = "auto", ucx_tls: str | None = None) -> None:
        """As for `UcxTransport`."""
        try:
            self._probe = _kvlink.UcxProbe(choose(ucx_origin).name, ucx_tls)
        except RuntimeError as error:
            raise _unavailable(error, ucx_tls) from error

    def address(self) -> bytes:
        """For the other end's `connect`."""
        return self._probe.address()

    def register(self, region: int, address: int, length: int) -> None:
        """Register ``length`` bytes at ``address`` as ``region``."""
        with as_transport_error("register"):
            self._probe.register(region, address, length)

    def export_key(self, region: int) -> RegionKey:
        """The key by which the other end gets from ``region``."""
        address, length, key = self._probe.export_key(region)
        return RegionKey(region=region, address=address, length=length, key=key)

    def import_key(self, key: RegionKey) -> None:
        """Learn a region of the other end."""
        self._probe.import_key(key.region, key.address, key.length, key.key)

    def serve(self) -> None:
        """Progress in a thread, until `close`."""
        self._probe.serve()

    def connect(self, address: bytes) -> None:
        """Make the endpoint to a serving end."""
        with as_transport_error("connect"):
            self._probe.connect(address)

    def get(self, plan: CopyPlan, *, max_run_bytes: int, window: int = MAX_OUTSTANDING_GETS) -> float:
        """Get a whole plan, runs cut at ``max_run_bytes``, ``window`` gets at a time; blocks.

        Returns:
            Seconds from the first get posted to the last one landed.

        Raises:
            TransportError: a get failed, or the plan leaves a region.
        """
        with as_transport_error("get"):
            return self._probe.get(native_plan(plan), max_run_bytes, window)

    def close(self) -> None:
        """Stop serving, or drop the connection. Idempotent."""
        self._probe.close()


# --- conversions ----------------------------------------------------------------------------------------------------


def _capabilities(engine: _kvlink.UcxEngine, library: UcxLibrary, gpu: _kvlink.CudaGpu | None) -> Capabilities:
    path = Path(engine.ucx_path)
    return Capabilities(
        name="ucx",
        paths=(DIRECT, PACKED) if gpu is None else (PACKED,),
        version=engine.ucx_version,
        origin=f"{library.kind}: {path.name if library.kind == 'wheel' else path}",
        rdma=supports_rdma(path) and has_devices(),
        gpu=gpu is not None,
        detail=f"{', '.join(engine.transports())}; {library.kind} because {library.reason}",
    )


def _sealed(blob: bytes) -> bytes:
    """With a checksum: UCX parses addresses and keys without looking, so accidents must not reach it."""
    return zlib.crc32(blob).to_bytes(_CHECKSUM_BYTES, "little") + blob


def _unsealed(sealed: bytes, what: str) -> bytes:
    blob = sealed[_CHECKSUM_BYTES:]
    if not blob or len(sealed) > MAX_BLOB_BYTES or sealed != _sealed(blob):
        raise SchemaError(f"{what} is damaged; it must arrive as it was exported")
    return blob


def _decoded(address: bytes) -> UcxAddress:
    try:
        return msgspec.msgpack.decode(address, type=UcxAddress)
    except msgspec.MsgspecError as error:
        raise SchemaError(f"not a UCX address: {error}", stage="connect") from error


def _checked_address(address: bytes, version: str, peer: str) -> bytes:
    told = _decoded(address)
    reason = incompatibility(version, told.version)
    if reason is not None:
        raise PeerIncompatibleError(reason, peer=peer, stage="connect")
    return _unsealed(told.worker, f"UCX address of peer {peer}")


def _unavailable(error: RuntimeError, ucx_tls: str | None) -> UnavailableError:
    """Why UCX does not load or start; where somebody chose its transports, that first."""
    chosen = ucx_tls or os.environ.get("UCX_TLS")
    if not chosen:
        return UnavailableError(str(error))
    return UnavailableError(
        f"{error}; {chosen!r} is what ucx_tls or UCX_TLS lets it use: leave that out, or name what is here"
    )
