"""One-sided gets over UCX, direct from the source's blocks into the target's. The way to RDMA and to CMA.

The moving is native (native/src/ucx_engine.hpp): one thread per transport, asleep when idle, which never calls Python.
UCX itself trusts whoever it talks to, so addresses and keys go to authenticated peers only.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from kvlink._native import _kvlink, native_plan
from kvlink.errors import (
    ClosedError,
    LayoutError,
    PeerIncompatibleError,
    SchemaError,
    TransportError,
    UnavailableError,
)
from kvlink.limits import (
    CLOSE_TIMEOUT_SECONDS,
    CUT_OFF_GRACE_SECONDS,
    HEARTBEAT_SECONDS,
    MAX_ACTIVE_READS,
    MAX_BLOB_BYTES,
    MAX_CHUNK_LEAVES,
    MAX_OUTSTANDING_GETS,
    PEER_LOST_SECONDS,
    RENEWAL_LINGER_SECONDS,
)
from kvlink.plan import CopyPlan
from kvlink.transports.base import (
    Capabilities,
    Completion,
    CompletionKind,
    Exposure,
    LeaseReport,
    Outcome,
    Read,
    RegionKey,
    Transport,
    TransportFull,
)
from kvlink.transports.ucx_library import UcxLibrary, choose, has_devices, incompatibility, supports_rdma

__all__ = ["UcxProbe", "UcxTransport", "incompatibility"]

_CHECKSUM_BYTES: Final = 4


class UcxAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """What `UcxTransport.address` carries: whom to reach, and by which UCX."""

    version: str
    worker: bytes


class UcxTransport(Transport):
    """A rank's end of the UCX transport.

    Every call may raise `ClosedError` after `close`, or in a forked child. Attempts are integers in 0..2**64-1, regions
    in 0..4095.
    """

    def __init__(
        self,
        *,
        ucx_origin: str = "auto",
        ucx_tls: str | None = None,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
        peer_lost_seconds: float = PEER_LOST_SECONDS,
        cut_off_grace_seconds: float = CUT_OFF_GRACE_SECONDS,
    ) -> None:
        """Load UCX and start the thread.

        Args:
            ucx_origin: which UCX, see `kvlink.transports.ucx_library.choose`. One UCX serves a whole process.
            ucx_tls: transports UCX may use, in the form of its UCX_TLS; ``None`` leaves it to UCX and its environment.
            heartbeat_seconds: interval of heartbeats, which also renew leases.
            peer_lost_seconds: silence after which a peer is lost.
            cut_off_grace_seconds: how long outstanding gets of a read that was cut off may take to end by themselves,
                before the endpoint is closed by force, which fails all reads from that peer.

        Raises:
            UnavailableError: there is no such UCX, or it cannot start here.
        """
        self._library = choose(ucx_origin)
        seconds = (
            heartbeat_seconds,
            peer_lost_seconds,
            cut_off_grace_seconds,
            CLOSE_TIMEOUT_SECONDS,
            RENEWAL_LINGER_SECONDS,
        )
        try:
            self._engine = _kvlink.UcxEngine(
                self._library.name, ucx_tls, seconds, MAX_ACTIVE_READS, MAX_OUTSTANDING_GETS
            )
        except RuntimeError as error:
            raise UnavailableError(str(error)) from error
        self._pid = os.getpid()
        self._closed = False
        self._capabilities = _capabilities(self._engine, self._library)

    def capabilities(self) -> Capabilities:
        """What this transport is; constant over its life. ``detail`` lists UCX's transports here."""
        return self._capabilities

    def address(self) -> bytes:
        """Opaque address for the peer's `connect`: UCX's version and the worker's address."""
        engine = self._live()
        return msgspec.msgpack.encode(UcxAddress(engine.ucx_version, _sealed(engine.address())))

    def register(self, region: int, address: int, length: int) -> None:
        """See `Transport.register`. It pins pages where the network needs that, which takes time."""
        with _as_transport_error("register"):
            self._live().register(region, address, length)

    def unregister(self, region: int) -> None:
        """See `Transport.unregister`. Memory that a running read or exposure uses stays registered until its end."""
        with _as_transport_error("unregister"):
            self._live().unregister(region)

    def export_key(self, region: int) -> RegionKey:
        """See `Transport.export_key`."""
        with _as_transport_error("export_key"):
            address, length, key = self._live().export_key(region)
        return RegionKey(region=region, address=address, length=length, key=_sealed(key))

    def connect(self, peer: str, address: bytes, channel: int | None) -> int:
        """Start connecting; ends in CONNECTED (UNREACHABLE where UCX finds no way to the address).

        Args:
            peer: name of the peer, new or with its PEER_LOST or DISCONNECTED already polled.
            address: what its `address` returned.
            channel: the pair's authenticated socket; taken over, whatever happens.

        Raises:
            PeerIncompatibleError: the two sides' UCX cannot work together; both versions are named.
            SchemaError: not an address.
            TransportError: the peer is connected already, or ``channel`` is missing.
        """
        if channel is None:
            raise TransportError("ucx needs the pair's native channel", peer=peer, stage="connect", retryable=False)
        engine = self._live_or_close(channel)
        try:
            worker = _checked_address(address, engine.ucx_version, peer)
        except BaseException:
            os.close(channel)
            raise
        with _as_transport_error("connect", peer):
            return engine.connect(peer, worker, channel)

    def import_key(self, peer: str, key: RegionKey) -> None:
        """See `Transport.import_key`. A key told again replaces the earlier one for later reads.

        Raises:
            SchemaError: the key was damaged on the way.
            TransportError: the peer is not connected, or the key states impossible bounds.
        """
        packed = _unsealed(key.key, f"key of region {key.region} of peer {peer}")
        with _as_transport_error("import_key", peer):
            self._live().import_key(peer, key.region, key.address, key.length, packed)

    def disconnect(self, peer: str) -> int:
        """See `Transport.disconnect`. Bounded: what a stopped peer does not answer is closed by force."""
        return self._live().disconnect(peer)

    def expose(self, exposure: Exposure) -> None:
        """See `Transport.expose`.

        Raises:
            TransportError: the peer is not connected, the attempt is exposed already, or the plan leaves a region.
        """
        with _as_transport_error("expose", exposure.peer):
            plan = native_plan(exposure.plan)
            self._live().expose(exposure.peer, exposure.attempt, plan, exposure.lease_seconds)

    def lease(self, peer: str, attempt: int) -> LeaseReport:
        """See `Transport.lease`. Judged by the clock now: the source's thread need not have noticed a lapse."""
        held, root = self._live().lease(peer, attempt)
        return LeaseReport(held=held, root=root)

    def withdraw(self, peer: str, attempt: int) -> LeaseReport:
        """See `Transport.withdraw`. Waits for a digest under way, of 1 MiB at most; none touches it afterwards."""
        held, root = self._live().withdraw(peer, attempt)
        return LeaseReport(held=held, root=root)

    def read(self, read: Read) -> int:
        """See `Transport.read`. Renewals go on for some seconds after an OK end, for its commit, or until `cut_off`."""
        if not 0 < read.chunk_leaves <= MAX_CHUNK_LEAVES:
            raise TransportError(f"chunk_leaves {read.chunk_leaves} is not in 1..{MAX_CHUNK_LEAVES}", retryable=False)
        with _as_transport_error("read", read.peer):
            plan = native_plan(read.plan)
            return self._live().read(read.peer, read.attempt, plan, read.integrity, read.chunk_leaves, read.max_rereads)

    def cut_off(self, peer: str, attempt: int) -> int:
        """See `Transport.cut_off`. Should UCX never end a get, neither READ nor CUT_OFF comes: the blocks stay."""
        return self._live().cut_off(peer, attempt)

    def poll(self, limit: int = 256) -> list[Completion]:
        """See `Transport.poll`. Works after `close`, too: every operation's end can still be collected."""
        self._require_same_process()
        return [_completion(fields) for fields in self._engine.poll(limit)]

    def fileno(self) -> int:
        """See `Transport.fileno`. Works after `close`, too."""
        self._require_same_process()
        return self._engine.fileno()

    def arm(self) -> bool:
        """See `Transport.arm`. Works after `close`, too."""
        self._require_same_process()
        return self._engine.arm()

    def late_frames(self) -> dict[str, int]:
        """Frames about attempts that had ended, by kind (renewals, wants, leaves, failures). A few are normal."""
        counts = self._live().late_frames()
        return dict(zip(("renewals", "wants", "leaves", "failures"), counts, strict=True))

    def close(self) -> None:
        """End everything and free it, within `CLOSE_TIMEOUT_SECONDS`. Idempotent; harmless in a forked child.

        Raises:
            TransportError: UCX did not end all gets in time. Their memory stays registered; it must not be used again.
        """
        self._closed = True
        if not self._engine.close():
            raise TransportError(
                f"UCX did not end every get within {CLOSE_TIMEOUT_SECONDS} s of closing; the target blocks concerned "
                "must not be used again by this process",
                stage="close",
                retryable=False,
            )

    def _require_same_process(self) -> None:
        if os.getpid() != self._pid:
            raise ClosedError("this transport belongs to the parent process; open another one after a fork")

    def _live(self) -> _kvlink.UcxEngine:
        self._require_same_process()
        if self._closed:
            raise ClosedError("this transport is closed")
        return self._engine

    def _live_or_close(self, descriptor: int) -> _kvlink.UcxEngine:
        try:
            return self._live()
        except ClosedError:
            os.close(descriptor)
            raise


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
            raise UnavailableError(str(error)) from error

    def address(self) -> bytes:
        """For the other end's `connect`."""
        return self._probe.address()

    def register(self, region: int, address: int, length: int) -> None:
        """Register ``length`` bytes at ``address`` as ``region``."""
        with _as_transport_error("register"):
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
        with _as_transport_error("connect"):
            self._probe.connect(address)

    def get(self, plan: CopyPlan, *, max_run_bytes: int, window: int = MAX_OUTSTANDING_GETS) -> float:
        """Get a whole plan, runs cut at ``max_run_bytes``, ``window`` gets at a time; blocks.

        Returns:
            Seconds from the first get posted to the last one landed.

        Raises:
            TransportError: a get failed, or the plan leaves a region.
        """
        with _as_transport_error("get"):
            return self._probe.get(native_plan(plan), max_run_bytes, window)

    def close(self) -> None:
        """Stop serving, or drop the connection. Idempotent."""
        self._probe.close()


# --- conversions ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _as_transport_error(stage: str, peer: str | None = None) -> Iterator[None]:
    """Turn what the native side raises into the transport's errors."""
    try:
        yield
    except _kvlink.EngineFull as error:
        raise TransportFull(str(error), peer=peer, stage=stage) from error
    except (ValueError, TypeError, LayoutError) as error:
        raise TransportError(str(error), peer=peer, stage=stage, retryable=False) from error
    except RuntimeError as error:
        raise TransportError(str(error), peer=peer, stage=stage) from error


def _capabilities(engine: _kvlink.UcxEngine, library: UcxLibrary) -> Capabilities:
    path = Path(engine.ucx_path)
    return Capabilities(
        name="ucx",
        paths=("direct",),
        version=engine.ucx_version,
        origin=f"{library.kind}: {path.name if library.kind == 'wheel' else path}",
        rdma=supports_rdma(path) and has_devices(),
        detail=f"{', '.join(engine.transports())}; {library.kind} because {library.reason}",
    )


def _completion(fields: _CompletionFields) -> Completion:
    kind, op, peer, attempt, outcome, bytes_moved, root, rereads, bad_leaf, wire, verify, detail = fields
    return Completion(
        kind=CompletionKind(kind),
        op=op,
        peer=peer,
        attempt=attempt,
        outcome=Outcome(outcome),
        bytes_moved=bytes_moved,
        root=root,
        rereads=rereads,
        bad_leaf=bad_leaf,
        wire_seconds=wire,
        verify_seconds=verify,
        detail=detail,
    )


_CompletionFields = tuple[int, int, str, int, int, int, int | None, int, int | None, float, float, str]


def _sealed(blob: bytes) -> bytes:
    """With a checksum: UCX parses addresses and keys without looking, so accidents must not reach it."""
    return zlib.crc32(blob).to_bytes(_CHECKSUM_BYTES, "little") + blob


def _unsealed(sealed: bytes, what: str) -> bytes:
    blob = sealed[_CHECKSUM_BYTES:]
    if not blob or len(sealed) > MAX_BLOB_BYTES or sealed != _sealed(blob):
        raise SchemaError(f"{what} is damaged; it must arrive as it was exported")
    return blob


def _checked_address(address: bytes, version: str, peer: str) -> bytes:
    try:
        told = msgspec.msgpack.decode(address, type=UcxAddress)
    except msgspec.MsgspecError as error:
        raise SchemaError(f"not a UCX address: {error}", peer=peer, stage="connect") from error
    reason = incompatibility(version, told.version)
    if reason is not None:
        raise PeerIncompatibleError(reason, peer=peer, stage="connect")
    return _unsealed(told.worker, f"UCX address of peer {peer}")
