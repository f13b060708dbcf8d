"""The seam between KVLink and whatever moves bytes.

A transport is synchronous, poll-based and driven by the target: it reads remote memory into local memory, and never
writes into a peer. Waiting lives in ``kvlink.link``: it watches `Transport.fileno` and calls `Transport.poll`.

Rules every transport keeps (``kvlink.testing.conformance`` checks them):

- A READ completion with `Outcome.OK` means that the bytes are in local memory and, with integrity on, verified.
- After `Transport.read` returned an op id, failure is only ever a completion; each op ends in exactly one.
- When full, `read` raises `TransportFull` and changes nothing; no call blocks on the network.
- After the CUT_OFF completion of an attempt, no byte of it can land, whatever its peer does.
- When a peer is lost, every op with it completes, then one PEER_LOST completion follows; its name is free again.
- A peer that disconnects or closes is lost to the other side. Its leases lapse: LEASE_LAPSED for each, then PEER_LOST.
- CUT_OFF and DISCONNECTED always carry `Outcome.OK`: they cannot fail, only be late.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import msgspec

from kvlink.errors import TransportError

if TYPE_CHECKING:
    import socket

    from kvlink.plan import CopyPlan, Shape


class TransportFull(TransportError):  # noqa: N818 - a state that passes, not a fault
    """No room for another read now; nothing was changed. Try again after a completion."""

    code = "transport_full"


class CompletionKind(IntEnum):
    """What a completion is about."""

    CONNECTED = 1
    DISCONNECTED = 2
    READ = 3
    CUT_OFF = 4
    PEER_LOST = 5
    LEASE_LAPSED = 6


class Outcome(IntEnum):
    """How an operation ended."""

    OK = 0
    CUT_OFF = 1
    PEER_LOST = 2
    DIGEST_MISMATCH = 3
    SOURCE_FAILED = 4
    UNREACHABLE = 5
    INCOMPATIBLE = 6
    PROTOCOL = 7
    FAILED = 8


class Completion(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One operation's end, or an event (PEER_LOST, LEASE_LAPSED; ``op`` is 0).

    Attributes:
        kind: what ended.
        op: id returned by the call that started it.
        peer: the peer it concerns.
        attempt: the attempt it concerns, or 0.
        outcome: how it ended.
        bytes_moved: payload bytes that landed, re-reads included.
        root: root digest of the bytes that landed (READ, integrity on), else ``None``.
        rereads: chunks read again because a digest differed.
        bad_leaf: first leaf that still differed (DIGEST_MISMATCH), or that differed and was mended, else ``None``.
        wire_seconds: from the first get posted to the last one landed.
        verify_seconds: time spent hashing.
        detail: the transport's own word for a failure, or "".
        path: how the bytes came, of a transport that finds that out as it reads (READ), else "".
        path_reason: why so, if not for the reason that `Transport.path` gave, else "".
    """

    kind: CompletionKind
    op: int = 0
    peer: str = ""
    attempt: int = 0
    outcome: Outcome = Outcome.OK
    bytes_moved: int = 0
    root: int | None = None
    rereads: int = 0
    bad_leaf: int | None = None
    wire_seconds: float = 0.0
    verify_seconds: float = 0.0
    detail: str = ""
    path: str = ""
    path_reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a transport is, for choosing, reporting and refusing."""

    name: str
    paths: tuple[str, ...]
    version: str
    origin: str
    rdma: bool = False
    gpu: bool = False
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Backing:
    """The file that memory lies in, from ``offset`` on, so that other processes of this host may map it.

    The file is sealed: it cannot shrink, and nobody else can write it. ``descriptor`` stays its owner's.
    """

    descriptor: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionKey:
    """What a peer needs to read a region. Told only to authenticated peers."""

    region: int
    address: int
    length: int
    key: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposure:
    """Source side: what one attempt may read, until withdrawn or lapsed.

    ``plan`` is used on its source side only.
    """

    peer: str
    attempt: int
    plan: CopyPlan
    lease_seconds: float
    integrity: bool
    chunk_leaves: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """Target side: move a whole plan. While it runs, the source's lease is renewed natively."""

    peer: str
    attempt: int
    plan: CopyPlan
    integrity: bool
    chunk_leaves: int
    max_rereads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseReport:
    """Source side: ``held`` is False if the lease ever lapsed or the attempt is not exposed.

    ``root`` is the root digest of the exposed bytes once all leaves have been computed.
    """

    held: bool
    root: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """What is known of the other end before the transport is connected to it.

    Attributes:
        address: its `Transport.address`.
        keys: of its regions.
        integrity: bytes will be digested.
    """

    address: bytes
    keys: Sequence[RegionKey]
    integrity: bool


@dataclass(frozen=True, slots=True)
class Way:
    """One path, and the seconds predicted for it."""

    path: str
    seconds: float


class Transport(ABC):
    """One rank's end of a transport. Not thread-safe: one thread calls it."""

    @abstractmethod
    def capabilities(self) -> Capabilities:
        """What this transport is; constant over its life."""

    def path(self, plan: CopyPlan, peer: str) -> tuple[str, str]:
        """How `read` would move a plan from a peer: one of the capabilities' paths, and why.

        Raises:
            UnsupportedError: by none of them.
        """
        return self.capabilities().paths[0], "the transport's only path"

    def prepare(self, plan: CopyPlan) -> None:  # noqa: B027 - nothing is a whole answer
        """In spare time: make ready what a `read` or an `expose` of this very plan will need. By default, nothing.

        Raises:
            TransportError: it cannot be moved.
        """

    def ways(self, shape: Shape, peer: Peer) -> tuple[Way, ...]:
        """What reading ``shape`` from a peer would take, by each path that could be taken; for choosing a transport.

        Empty: it cannot tell, as by default.
        """
        return ()

    @abstractmethod
    def address(self) -> bytes:
        """Opaque address for the peer's `connect`. Told only to authenticated peers."""

    @abstractmethod
    def register(self, region: int, address: int, length: int, backing: Backing | None = None) -> None:
        """Make ``length`` bytes at ``address`` readable and fillable as ``region``.

        Args:
            region: its number.
            address: of its first byte.
            length: in bytes.
            backing: the file that they lie in, if they lie in one; for transports that map memory.

        Raises:
            TransportError: registration failed; nothing is registered under this id.
        """

    @abstractmethod
    def unregister(self, region: int) -> None:
        """Undo `register`. Only after no exposure and no read uses it."""

    @abstractmethod
    def export_key(self, region: int) -> RegionKey:
        """The key by which a peer may read ``region``."""

    def refusal(self, address: bytes) -> str | None:
        """Why a pair cannot use this transport, given the other end's address; both ends answer alike.

        ``None``: as far as addresses tell, it can. Asked before `lanes`, so that another transport may be taken.
        """
        return None

    def lane_listener(self) -> socket.socket | None:
        """A listening socket of its own, if the lanes of its peers must come that way; else they come as channels do.

        The transport closes it. The link accepts, and lets in only who proves itself, as everywhere.
        """
        return None

    def lane_path(self, address: bytes) -> str | None:
        """Where the other end's `lane_listener` is reached: the path of a Unix socket; else as channels are."""
        return None

    def lanes(self, address: bytes) -> int:
        """Sockets beside the channel that a pair needs, given the other end's address; both ends answer alike.

        Raises:
            PeerIncompatibleError, SchemaError: as `connect` would.
        """
        return 0

    @abstractmethod
    def connect(self, peer: str, address: bytes, channel: int | None, lanes: Sequence[int] = ()) -> int:
        """Start connecting; ends in CONNECTED. Takes over all file descriptors, whatever happens.

        CONNECTED with OK does not promise that the peer lives: PEER_LOST may be next.

        Args:
            peer: what to call it; a name that is not connected.
            address: its `address`.
            channel: descriptor of the pair's authenticated socket.
            lanes: descriptors of as many more as `lanes` said; the nth of one end goes with the nth of the other.

        Raises:
            TransportError: a peer of that name is connected.
        """

    @abstractmethod
    def import_key(self, peer: str, key: RegionKey) -> None:
        """Learn a peer's region. Only after CONNECTED with OK.

        Raises:
            TransportError: the peer is not connected, or the key is not one of its.
        """

    @abstractmethod
    def disconnect(self, peer: str) -> int:
        """End all with ``peer``: its reads complete with CUT_OFF, its exposures lapse; ends in DISCONNECTED.

        Unknown peers end in DISCONNECTED, too.
        """

    @abstractmethod
    def expose(self, exposure: Exposure) -> None:
        """Let an attempt read its plan's source side.

        The lease runs from now. The peer renews it while its read runs, and for a while after it ended well.

        Raises:
            TransportError: the peer is not connected, the attempt is exposed already, or the plan leaves a registered
                region; nothing is exposed.
        """

    @abstractmethod
    def lease(self, peer: str, attempt: int) -> LeaseReport:
        """Whether the attempt's lease has been held without a gap up to now."""

    @abstractmethod
    def withdraw(self, peer: str, attempt: int) -> LeaseReport:
        """End an exposure. The answer is the last word on its lease. Unknown attempts answer ``held=False``."""

    @abstractmethod
    def read(self, read: Read) -> int:
        """Start moving; ends in READ. An attempt that the source does not expose, or no longer, ends in SOURCE_FAILED.

        Raises:
            TransportFull: no room now.
            TransportError: the peer is not connected, the attempt is being read, or the plan leaves a registered
                region; nothing was started.
        """

    @abstractmethod
    def cut_off(self, peer: str, attempt: int) -> int:
        """End an attempt's read; idempotent. Its READ completes first (CUT_OFF if it was live), then CUT_OFF.

        Bytes may land until then. An attempt or a peer that is not known ends in CUT_OFF all the same.
        """

    def forget(self, peer: str, attempt: int) -> None:
        """Renew the lease of an attempt no longer whose READ has completed. Soon; nothing tells of it."""
        self.cut_off(peer, attempt)

    @abstractmethod
    def poll(self, limit: int = 256) -> list[Completion]:
        """Up to ``limit`` completions, oldest first. Never blocks."""

    @abstractmethod
    def fileno(self) -> int:
        """Readable while completions may be waiting."""

    @abstractmethod
    def arm(self) -> bool:
        """Clear the descriptor before a wait; False if completions are waiting already (poll again)."""

    @abstractmethod
    def close(self) -> None:
        """End everything and free it. Blocks at most the cut-off bound. Idempotent.

        When it has returned no byte lands any more. Completions that were not polled before may be lost with it.
        """
