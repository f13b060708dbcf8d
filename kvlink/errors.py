"""Every error KVLink raises, as one tree.

::

    KVLinkError
    ├── ConfigError               a setting is wrong (also a ValueError)
    ├── LayoutError               a spec or cache geometry is malformed (also a ValueError)
    ├── MismatchError             two sides state different things about the same field
    ├── UnsupportedError          a pair that cannot be converted, refused by name
    ├── UnavailableError          the machine lacks something (exit code 3)
    ├── GpuError                  the GPU's driver refused a call, or a kernel failed
    ├── ClosedError               the link is closed, or was used after a fork
    ├── WireError                 bytes from a peer or a file are not what they must be
    │   ├── FrameError            truncated, oversized or unframed
    │   ├── SchemaError           unknown field, wrong type, out of range, nested too deep
    │   └── VersionError          no common version
    ├── AuthenticationError       wrong, missing or replayed proof, bad signature
    ├── PeerError                 about the other process
    │   ├── PeerLostError         reset or silence
    │   ├── PeerUnreachableError  could not connect
    │   ├── PeerRestartedError    another incarnation answers: the old one is proven dead
    │   └── PeerIncompatibleError its UCX or transports cannot work with ours
    └── TransferError             about one request
        ├── BusyError             no room now; carries ``retry_after_seconds``
        ├── TooLargeError         it can never fit; refused at once
        ├── ConflictError         same request id, different content
        ├── UnknownRequestError   nobody knows this key (any more)
        ├── DeclinedError         the other side declined it
        ├── CancelledError        cancelled by either side
        ├── DeadlineError         the transfer's own clock ran out
        ├── LeaseLapsedError      source blocks may have been reused: never installed
        ├── ExpiredError          commit or claim came after its time to live
        ├── IntegrityError        a chunk's digest differed on every try
        ├── IndeterminateError    it cannot be known whether the target installed
        └── TransportError        an operation failed below us

Each error says what differed, on which side, and what to do, and carries where it happened. Errors that cross
the wire travel as ``ErrorInfo`` (see ``kvlink.wire``) under the stable ``code`` of their class.
"""

from __future__ import annotations

from typing import ClassVar


class KVLinkError(Exception):
    """Root of all errors raised by KVLink.

    Attributes:
        request_id: key of the request concerned, or ``None``.
        peer: the other rank, as ``engine/pp/tp@incarnation``, or ``None``.
        stage: where it happened (``"ask"``, ``"read"``, ``"commit"``, ...), or ``None``.
        retryable: whether the same request may succeed in a fresh attempt.
    """

    code: ClassVar[str] = "error"
    default_retryable: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        *,
        request_id: str | None = None,
        peer: str | None = None,
        stage: str | None = None,
        retryable: bool | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.request_id = request_id
        self.peer = peer
        self.stage = stage
        self.retryable = self.default_retryable if retryable is None else retryable

    def __str__(self) -> str:
        where = [
            f"{name} {value}"
            for name, value in (("request", self.request_id), ("peer", self.peer), ("stage", self.stage))
            if value is not None
        ]
        return f"{self.message} [{', '.join(where)}]" if where else self.message


class ConfigError(KVLinkError, ValueError):
    """A setting is wrong; the message names it, its origin and what is accepted."""

    code = "config"


class LayoutError(KVLinkError, ValueError):
    """A cache spec or block list is malformed."""

    code = "layout"


class MismatchError(KVLinkError):
    """Both sides state a field, and differ.

    Attributes:
        field: dotted name of the field.
        source_value: what the source states, as text.
        target_value: what the target states, as text.
    """

    code = "mismatch"

    def __init__(  # noqa: PLR0913 - what differed, where, and whose it is
        self,
        field: str,
        source_value: object,
        target_value: object,
        *,
        source: str = "source",
        target: str = "target",
        request_id: str | None = None,
        stage: str | None = None,
    ) -> None:
        super().__init__(
            f"{field} differs: {source} has {source_value!r}, {target} has {target_value!r}; "
            "serve both sides from the same model, revision and settings",
            request_id=request_id,
            stage=stage,
        )
        self.field = field
        self.source_value = source_value
        self.target_value = target_value


class UnsupportedError(KVLinkError):
    """This pair of layouts (or dtypes) cannot be converted; the message says which field and why."""

    code = "unsupported"


class UnavailableError(KVLinkError):
    """The machine lacks something; the message says what, and the remedy."""

    code = "unavailable"


class GpuError(KVLinkError):
    """The GPU's driver refused a call, or a kernel failed; the message has the call and the driver's own words."""

    code = "gpu"


class ClosedError(KVLinkError):
    """The link is closed, paused, or was used after a fork."""

    code = "closed"


class WireError(KVLinkError):
    """Bytes from outside are not what they must be."""

    code = "wire"


class FrameError(WireError):
    """A frame is truncated, oversized, or not a frame."""

    code = "frame"


class SchemaError(WireError):
    """A frame's content breaks its schema: unknown field, wrong type, out of range, too deep."""

    code = "schema"


class VersionError(WireError):
    """The two sides have no protocol or schema version in common."""

    code = "version"


class AuthenticationError(KVLinkError):
    """The other side did not prove that it knows the secret, or a signature is wrong."""

    code = "authentication"


class PeerError(KVLinkError):
    """About the process on the other side."""

    code = "peer"
    default_retryable = True


class PeerLostError(PeerError):
    """No word from the peer: its connection was reset or fell silent."""

    code = "peer_lost"


class PeerUnreachableError(PeerError):
    """The peer could not be connected to within the bound."""

    code = "peer_unreachable"


class PeerRestartedError(PeerError):
    """Another incarnation answers at the peer's address; the one asked for is proven dead."""

    code = "peer_restarted"


class PeerIncompatibleError(PeerError):
    """The peer's UCX or transports cannot work with ours."""

    code = "peer_incompatible"
    default_retryable = False


class TransferError(KVLinkError):
    """About one request."""

    code = "transfer"


class BusyError(TransferError):
    """No room now.

    Attributes:
        retry_after_seconds: the hint of whoever has no room.
        free_blocks: what is free there, one number a group, where it says so.
    """

    code = "busy"
    default_retryable = True
    free_blocks: tuple[int, ...] = ()

    def __init__(self, message: str, *, retry_after_seconds: float = 0.0, **where: str | None) -> None:
        super().__init__(message, request_id=where.get("request_id"), peer=where.get("peer"), stage=where.get("stage"))
        self.retry_after_seconds = retry_after_seconds


class TooLargeError(TransferError):
    """More is asked for than there is, however long one waits."""

    code = "too_large"


class ConflictError(TransferError):
    """The same request id with different content; both digests are named."""

    code = "conflict"


class UnknownRequestError(TransferError):
    """Nobody knows this key, or no longer."""

    code = "unknown_request"


class DeclinedError(TransferError):
    """The other side declined the request; the message carries its reason."""

    code = "declined"


class CancelledError(TransferError):
    """Cancelled, by either side; the message says which and why."""

    code = "cancelled"


class DeadlineError(TransferError):
    """The transfer's own clock ran out."""

    code = "deadline"
    default_retryable = True


class LeaseLapsedError(TransferError):
    """The source's lease lapsed while the target read; nothing was installed."""

    code = "lease_lapsed"
    default_retryable = True


class ExpiredError(TransferError):
    """A commit or claim came after its time to live; nothing was installed."""

    code = "expired"
    default_retryable = True


class IntegrityError(TransferError):
    """A chunk's digest differed on every try; nothing was installed."""

    code = "integrity"
    default_retryable = True


class IndeterminateError(TransferError):
    """It cannot be known whether the target installed; the request must not be sent to another target."""

    code = "indeterminate"


class TransportError(TransferError):
    """An operation failed in the transport; the message carries the transport's own word."""

    code = "transport"
    default_retryable = True
