"""What the native transports have in common: one engine (native/src/engine.hpp), and its words turned into ours.

The moving is native: threads that are asleep when idle, and never call Python.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from typing import Final, Generic, TypeVar

from kvlink._native import _kvlink, native_plan
from kvlink.errors import ClosedError, LayoutError, TransportError, UnsupportedError
from kvlink.limits import CLOSE_TIMEOUT_SECONDS, MAX_CHUNK_LEAVES, RENEWAL_LINGER_SECONDS
from kvlink.plan import PACKED, RING, CopyPlan
from kvlink.transports.base import (
    Backing,
    Completion,
    CompletionKind,
    Exposure,
    LeaseReport,
    Outcome,
    Read,
    Transport,
    TransportFull,
)

AUTO: Final = "auto"
"""The path of a transport that has several: what is predicted to take less for each plan."""

Pace = _kvlink.Pace
"""``Pace(bytes_per_second)``: a cap on what is read, which the transports of a link share."""

AnyEngine = TypeVar("AnyEngine", bound=_kvlink.Engine)


def engine_seconds(heartbeat_seconds: float, peer_lost_seconds: float) -> tuple[float, float, float, float]:
    """The durations that every engine is told, in the order it takes them."""
    return heartbeat_seconds, peer_lost_seconds, CLOSE_TIMEOUT_SECONDS, RENEWAL_LINGER_SECONDS


class NativeTransport(Transport, Generic[AnyEngine]):
    """A transport whose bytes an engine moves. Each one's own class makes the engine, and connects.

    Every call may raise `ClosedError` after `close`, or in a forked child. Attempts are integers in 0..2**64-1, regions
    in 0..4095.
    """

    def __init__(self, engine: AnyEngine) -> None:
        self._engine = engine
        self._pid = os.getpid()
        self._closed = False

    def pace_by(self, pace: Pace) -> None:
        """Read no faster than a cap, evenly, and fairly between peers and reads. Before the first `connect`."""
        self._live().pace_by(pace)

    def keep_to(self, cpus: Collection[int]) -> None:
        """Run the threads that move bytes on these CPUs only.

        Raises:
            TransportError: none of them is to be had.
        """
        with as_transport_error("keep_to"):
            self._live().keep_to(sorted(cpus))

    def register(self, region: int, address: int, length: int, backing: Backing | None = None) -> None:
        """See `Transport.register`."""
        with as_transport_error("register"):
            self._live().register(region, address, length)

    def unregister(self, region: int) -> None:
        """See `Transport.unregister`. Memory that a running read or exposure uses stays registered until its end."""
        with as_transport_error("unregister"):
            self._live().unregister(region)

    def disconnect(self, peer: str) -> int:
        """See `Transport.disconnect`."""
        return self._live().disconnect(peer)

    def prepare(self, plan: CopyPlan) -> None:
        """See `Transport.prepare`: the native walker's form of it, which the plan keeps."""
        with as_transport_error("prepare"):
            native_plan(plan)

    def expose(self, exposure: Exposure) -> None:
        """See `Transport.expose`.

        Raises:
            TransportError: the peer is not connected, the attempt is exposed already, or the plan leaves a region.
        """
        with as_transport_error("expose", exposure.peer):
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
        with as_transport_error("read", read.peer):
            plan = native_plan(read.plan)
            packed = self.path(read.plan, read.peer)[0] in (PACKED, RING)
            return self._live().read(
                read.peer, read.attempt, plan, read.integrity, read.chunk_leaves, read.max_rereads, packed
            )

    def cut_off(self, peer: str, attempt: int) -> int:
        """See `Transport.cut_off`."""
        return self._live().cut_off(peer, attempt)

    def forget(self, peer: str, attempt: int) -> None:
        """See `Transport.forget`: with the next command or heartbeat, so that no thread wakes for it."""
        self._live().forget(peer, attempt)

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
            TransportError: bytes under way could not be ended in time. Their memory stays held; it must not be used
                again.
        """
        self._closed = True
        if not self._engine.close():
            raise TransportError(
                f"not every read was ended within {CLOSE_TIMEOUT_SECONDS} s of closing; the target blocks concerned "
                "must not be used again by this process",
                stage="close",
                retryable=False,
            )

    def _require_same_process(self) -> None:
        if os.getpid() != self._pid:
            raise ClosedError("this transport belongs to the parent process; open another one after a fork")

    def _live(self) -> AnyEngine:
        """The engine, for a call that needs it open."""
        self._require_same_process()
        if self._closed:
            raise ClosedError("this transport is closed")
        return self._engine


# --- conversions ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def closed_on_error(*descriptors: int) -> Iterator[None]:
    """Descriptors that a call takes over whatever happens, until the native side has them."""
    try:
        yield
    except BaseException:
        for descriptor in descriptors:
            with contextlib.suppress(OSError):
                os.close(descriptor)
        raise


@contextlib.contextmanager
def as_transport_error(stage: str, peer: str | None = None) -> Iterator[None]:
    """Turn what the native side raises into the transport's errors."""
    try:
        yield
    except _kvlink.EngineFull as error:
        raise TransportFull(str(error), peer=peer, stage=stage) from error
    except (ValueError, TypeError, LayoutError, UnsupportedError) as error:
        raise TransportError(str(error), peer=peer, stage=stage, retryable=False) from error
    except RuntimeError as error:
        raise TransportError(str(error), peer=peer, stage=stage) from error


def _completion(fields: _CompletionFields) -> Completion:
    kind, op, peer, attempt, outcome, bytes_moved, root, rereads, bad_leaf, wire, verify, detail, path, reason = fields
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
        path=path,
        path_reason=reason,
    )


_CompletionFields = tuple[int, int, str, int, int, int, int | None, int, int | None, float, float, str, str, str]
