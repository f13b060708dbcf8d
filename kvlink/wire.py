"""Control messages, claims and rosters: typed MessagePack, versioned, bounded, never pickle.

Every message is a frozen struct with a tag; unknown fields and unknown tags are refused within a version.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvlink import limits
from kvlink.descriptor import KVDescriptor
from kvlink.layout import CacheSpec, GroupShare

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=limits.MAX_NAME_BYTES)]
Key = Annotated[str, msgspec.Meta(min_length=1, max_length=limits.MAX_KEY_BYTES)]
Text = Annotated[str, msgspec.Meta(max_length=limits.MAX_TEXT_BYTES)]
AttemptId = Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=86_400.0)]
Digest = Annotated[bytes, msgspec.Meta(min_length=8, max_length=8)]
Blob = Annotated[bytes, msgspec.Meta(max_length=64 * 1024)]


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag=True):
    """Base of all control messages."""


class ErrorInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An error on the wire: the ``code`` of its class in ``kvlink.errors``, its text, whether a retry may help."""

    code: Name
    message: Text
    retryable: bool = False
    retry_after_seconds: Seconds = 0.0


class Capacity(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Live capacity of the answering side."""

    leased_blocks: int
    active_legs: int
    max_legs: int


class WireKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A `kvlink.transports.base.RegionKey` on the wire."""

    region: int
    address: int
    length: int
    key: Blob


class TransportCard(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One transport a side offers, with its keys. Sent only after authentication."""

    name: Name
    version: Name
    origin: Text
    address: Blob
    keys: tuple[WireKey, ...]


class Introduce(Message):
    """First message after authentication, both ways."""

    spec: CacheSpec
    transports: tuple[TransportCard, ...]
    digest_scheme: Name
    lease_seconds: Seconds
    heartbeat_seconds: Seconds
    kvlink: Name


class Ask(Message):
    """Target -> source: lease this leg to this attempt. ``readers``: target ranks that will read this source rank."""

    key: Key
    attempt: AttemptId
    descriptor: KVDescriptor
    leg: tuple[GroupShare, ...]
    readers: int


class Lease(Message):
    """Source -> target: leased. ``total_bytes`` is the source's own count of the leg's wire bytes."""

    attempt: AttemptId
    lease_seconds: Seconds
    total_bytes: int
    capacity: Capacity


class Parked(Message):
    """Source -> target: the key is not known or not ready yet; the ask is kept this long."""

    attempt: AttemptId
    park_seconds: Seconds


class Refused(Message):
    """Source -> target: no lease, or no commit, for this attempt. Final for the attempt."""

    attempt: AttemptId
    error: ErrorInfo
    capacity: Capacity | None = None


class Prepared(Message):
    """Target -> source: all bytes of the leg have landed and are verified."""

    attempt: AttemptId
    root: Digest | None


class Commit(Message):
    """Source -> target: you may install within ``ttl_seconds`` of having first sent `Prepared`."""

    attempt: AttemptId
    ttl_seconds: Seconds
    root: Digest | None


class Installed(Message):
    """Target -> source: handed to the engine. Repeated until `Ack`."""

    attempt: AttemptId


class NotInstalled(Message):
    """Target -> source: cut off, and never will be. Repeated until `Ack`."""

    attempt: AttemptId
    error: ErrorInfo


class Ack(Message):
    """Source -> target: `Installed` or `NotInstalled` was recorded."""

    attempt: AttemptId


class Revoked(Message):
    """Source -> target: the lease of this attempt is over (cancelled, lapsed, closing). No commit will come."""

    attempt: AttemptId
    error: ErrorInfo


class Expect(Message):
    """Target -> source (push): room is reserved under this ticket; announce when the KV is sealed."""

    ticket: Annotated[bytes, msgspec.Meta(max_length=limits.MAX_CLAIM_BYTES)]


class Announce(Message):
    """Source -> target (push): the KV for this ticket is sealed; ask. Repeated until asked or ended."""

    key: Key
    descriptor: KVDescriptor


class Renew(Message):
    """Target -> source: these offers are queued here; keep their holds."""

    keys: Annotated[tuple[Key, ...], msgspec.Meta(max_length=4096)]


class Decline(Message):
    """Target -> source: this rank will not ask for ``key`` (``unread``: no rank reads you)."""

    key: Key
    why: Text
    unread: bool = False


class Withdrawn(Message):
    """Source -> target: ``key`` ended before it was asked for (cancelled, failed prefill)."""

    key: Key
    error: ErrorInfo


class Goodbye(Message):
    """Either way: closing on purpose."""

    why: Text


AnyMessage = (
    Introduce | Ask | Lease | Parked | Refused | Prepared | Commit | Installed | NotInstalled | Ack | Revoked
    | Expect | Announce | Renew | Decline | Withdrawn | Goodbye
)
