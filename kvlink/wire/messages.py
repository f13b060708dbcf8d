"""Control messages: frozen structs with a tag; unknown fields and unknown tags are refused within a version.

Every number has its range and every list its length here, so that a decoded message is bounded. What a message means
(does the spec lie inside its regions, are the blocks ours) is checked by the room that owns the meaning.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import msgspec

from kvlink import limits
from kvlink.descriptor import BlockList, FirstTokens, KVDescriptor, Token
from kvlink.layout import CacheSpec, Frontier, GroupShare

# Printable ASCII: characters are bytes, so the bound is exact, and a name cannot break a log line.
_PRINTABLE = r"\A[ -~]+\Z"

Name = Annotated[str, msgspec.Meta(max_length=limits.MAX_NAME_BYTES, pattern=_PRINTABLE)]
Key = Annotated[str, msgspec.Meta(max_length=limits.MAX_KEY_BYTES, pattern=_PRINTABLE)]
Text = Annotated[str, msgspec.Meta(max_length=limits.MAX_TEXT_BYTES)]
"""Free text in characters, a few bytes each: for people and logs, never parsed."""
Count = Annotated[int, msgspec.Meta(ge=0, le=limits.MAX_BLOCKS_PER_REQUEST)]
AttemptId = Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=86_400.0)]
Digest = Annotated[bytes, msgspec.Meta(min_length=8, max_length=8)]
Mac = Annotated[bytes, msgspec.Meta(min_length=limits.MAC_BYTES, max_length=limits.MAC_BYTES)]
Blob = Annotated[bytes, msgspec.Meta(max_length=limits.MAX_BLOB_BYTES)]


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag=True, gc=False):
    """Base of all control messages. Frozen, so none can come to hold itself: the collector need not look."""


class ErrorInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An error on the wire: the ``code`` of its class in ``kvlink.errors``, its text, whether a retry may help.

    ``retry_after_seconds`` is `BusyError`'s; ``field`` and the two values are `MismatchError`'s, the values as text.
    """

    code: Name
    message: Text
    retryable: bool = False
    retry_after_seconds: Seconds = 0.0
    field: Text | None = None
    source_value: Text | None = None
    target_value: Text | None = None


class Capacity(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Live capacity of the answering side."""

    leased_blocks: Annotated[int, msgspec.Meta(ge=0)]
    active_legs: Count
    max_legs: Count


class WireKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A `kvlink.transports.base.RegionKey` on the wire."""

    region: Annotated[int, msgspec.Meta(ge=0, lt=limits.MAX_REGIONS)]
    address: Annotated[int, msgspec.Meta(ge=0)]
    length: Annotated[int, msgspec.Meta(ge=1, le=limits.MAX_OFFSET_BYTES)]
    key: Blob


class TransportCard(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One transport a side offers, with its keys. Sent only after authentication."""

    name: Name
    version: Name
    origin: Text
    address: Blob
    keys: Annotated[tuple[WireKey, ...], msgspec.Meta(max_length=limits.MAX_REGIONS)]


class Introduce(Message, frozen=True):
    """First message after authentication, both ways."""

    spec: CacheSpec
    transports: Annotated[tuple[TransportCard, ...], msgspec.Meta(max_length=limits.MAX_TRANSPORTS)]
    digest_scheme: Name
    lease_seconds: Seconds
    heartbeat_seconds: Seconds
    kvlink: Name


class Chosen(Message, frozen=True):
    """Target -> source, second message: by which transport it reads; and why, for the source's own reports."""

    transport: Name
    reason: Text


class Ask(Message, frozen=True):
    """Target -> source: lease this leg to this attempt.

    ``descriptor`` is the source's own claim, word for word. ``first_token`` is where this target begins: no less than
    the descriptor's, and more where it has a prefix already; ``group_first_tokens`` says so a group, in the *source's*
    order, or is empty. ``integrity``: digests are wanted. ``readers``: target
    ranks that will read this source rank.
    """

    key: Key
    attempt: AttemptId
    descriptor: KVDescriptor
    first_token: Annotated[int, msgspec.Meta(ge=0, le=limits.MAX_TOKENS_PER_REQUEST)]
    integrity: bool
    leg: Annotated[tuple[GroupShare, ...], msgspec.Meta(max_length=limits.MAX_GROUPS)]
    readers: Annotated[int, msgspec.Meta(ge=1, le=limits.MAX_WORLD_RANKS)]
    group_first_tokens: FirstTokens = ()


class Lease(Message, frozen=True):
    """Source -> target: leased. ``total_bytes`` is the source's own count of the leg's wire bytes; 0 for a stream."""

    attempt: AttemptId
    lease_seconds: Seconds
    total_bytes: Annotated[int, msgspec.Meta(ge=0, le=limits.MAX_TRANSFER_BYTES)]
    capacity: Capacity


class Parked(Message, frozen=True):
    """Source -> target: the key is not known or not ready yet; the ask is kept this long. Or: the stream goes on."""

    attempt: AttemptId
    park_seconds: Seconds


class Refused(Message, frozen=True):
    """Source -> target: no lease, or no commit, for this attempt. Final for the attempt."""

    attempt: AttemptId
    error: ErrorInfo
    capacity: Capacity | None = None


class Advance(Message, frozen=True):
    """Source -> target, while it streams: one more increment may be read. Sent again for a `Landed` that repeats.

    ``frontier`` is how far the increments up to this one go; ``blocks`` are to be appended to those told before, one
    list a group, and ``total_bytes`` is the source's own count of this increment's wire bytes. ``sealed``, with the
    last: `descriptor_digest` of the descriptor that all of it amounts to.
    """

    attempt: AttemptId
    number: Annotated[int, msgspec.Meta(ge=1, le=limits.MAX_INCREMENTS)]
    frontier: Frontier
    blocks: Annotated[tuple[BlockList, ...], msgspec.Meta(max_length=limits.MAX_GROUPS)]
    total_bytes: Annotated[int, msgspec.Meta(ge=0, le=limits.MAX_TRANSFER_BYTES)]
    sealed: Text | None = None


class Landed(Message, frozen=True):
    """Target -> source: the first ``increments`` of a stream are here and verified. Repeated while nothing follows."""

    attempt: AttemptId
    increments: Annotated[int, msgspec.Meta(ge=0, le=limits.MAX_INCREMENTS)]


class Prepared(Message, frozen=True):
    """Target -> source: all bytes of the leg have landed and are verified.

    Of a stream, ``increments`` counts them, ``root`` is over them all, and ``content`` repeats what the last said.
    """

    attempt: AttemptId
    root: Digest | None
    increments: Annotated[int, msgspec.Meta(ge=0, le=limits.MAX_INCREMENTS)] = 0
    content: Text | None = None


class Commit(Message, frozen=True):
    """Source -> target: you may install within ``ttl_seconds`` of having first sent `Prepared`."""

    attempt: AttemptId
    ttl_seconds: Seconds
    root: Digest | None


class Installed(Message, frozen=True):
    """Target -> source: handed to the engine. Repeated until `Ack`."""

    attempt: AttemptId


class NotInstalled(Message, frozen=True):
    """Target -> source: cut off, and never will be. Repeated until `Ack`."""

    attempt: AttemptId
    error: ErrorInfo


class Ack(Message, frozen=True):
    """Source -> target: `Installed` or `NotInstalled` was recorded."""

    attempt: AttemptId


class Revoked(Message, frozen=True):
    """Source -> target: the lease of this attempt is over (cancelled, lapsed, closing). No commit will come."""

    attempt: AttemptId
    error: ErrorInfo


class Expect(Message, frozen=True):
    """Target -> source (push): room is reserved under this ticket; announce when the KV is sealed."""

    ticket: Annotated[bytes, msgspec.Meta(max_length=limits.MAX_CLAIM_BYTES)]


class Announce(Message, frozen=True):
    """Source -> target (push): the KV for this ticket is sealed; ask. Repeated until asked or ended.

    With ``stream`` some of it is ready and more will be: ``descriptor`` has no blocks yet, and the most tokens it may
    come to have.
    """

    key: Key
    descriptor: KVDescriptor
    stream: bool = False


class Renew(Message, frozen=True):
    """Target -> source: these offers are queued here; keep their holds."""

    keys: Annotated[tuple[Key, ...], msgspec.Meta(max_length=limits.MAX_RENEWED_KEYS)]


class Decline(Message, frozen=True):
    """Target -> source: this rank will not ask for ``key`` (``unread``: no rank reads you)."""

    key: Key
    why: Text
    unread: bool = False


class Withdrawn(Message, frozen=True):
    """Source -> target: ``key`` ended before it was asked for (cancelled, failed prefill)."""

    key: Key
    error: ErrorInfo


class Stage(Enum):
    """Where one rank's part of a request stands whose parts become visible together."""

    JOINED = "joined"
    LANDED = "landed"
    """All its legs are read and verified."""
    INSTALLED = "installed"
    """Time cannot take it away any more; it is not visible, and its coordinator can still abandon it."""
    LEAVING = "leaving"
    """As installed, and this rank was asked to cancel; the coordinator's word decides."""
    REVEALED = "revealed"
    FAILED = "failed"
    """It is not visible, and never will be."""


class Stands(Message, frozen=True):
    """Target rank -> coordinator: where this rank's part stands. Repeated until the verdict that it waits for.

    ``part`` numbers the parts of one incarnation, and rises. ``group`` is what `Decided` called the gathering, 0 before
    that said to proceed. ``content`` names source and descriptor: all parts must have the same. ``tokens``: one past
    the last position, once that is known: the same of all that have landed. ``error``: why it failed or leaves.
    """

    key: Key
    part: AttemptId
    group: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    content: Text
    stage: Stage
    tokens: Token | None = None
    error: ErrorInfo | None = None


class Verdict(Enum):
    """What a coordinator decides."""

    PROCEED = "proceed"
    """All parts have landed: have them committed, and install, invisibly."""
    REVEAL = "reveal"
    """All parts are installed: make yours visible."""
    ABANDON = "abandon"
    NOTED = "noted"
    """*Revealed* or *failed* was recorded."""


class Decided(Message, frozen=True):
    """Coordinator -> target rank: where all parts stand. ``error``: why they are abandoned."""

    key: Key
    part: AttemptId
    group: AttemptId
    verdict: Verdict
    error: ErrorInfo | None = None


class Goodbye(Message, frozen=True):
    """Either way: closing on purpose."""

    why: Text


AnyMessage = (
    Introduce
    | Chosen
    | Ask
    | Lease
    | Parked
    | Refused
    | Advance
    | Landed
    | Prepared
    | Commit
    | Installed
    | NotInstalled
    | Ack
    | Revoked
    | Expect
    | Announce
    | Renew
    | Decline
    | Withdrawn
    | Stands
    | Decided
    | Goodbye
)
