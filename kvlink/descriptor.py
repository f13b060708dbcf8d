"""What one request's KV claims to be: complete, typed, versioned; checked field by field before a byte is read."""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvlink import limits

BlockList = Annotated[tuple[int, ...], msgspec.Meta(max_length=limits.MAX_BLOCKS_PER_REQUEST)]


class Facts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Per request, each stated or explicitly absent (``None``); compared where both sides state it."""

    prompt_digest: str | None = None
    adapter: str | None = None
    adapter_revision: str | None = None
    tenant: str | None = None
    trace_id: str | None = None
    priority: int = 0
    opaque: bytes | None = None


class KVDescriptor(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One request's KV, as claimed by whoever sends it.

    ``blocks`` are the *source's* block ids, one list a group; entry i holds token positions
    ``[i * block_size, (i + 1) * block_size)`` of the group. Positions ``[first_token, tokens)`` are moved.
    """

    request_id: str
    tokens: int
    first_token: int
    blocks: tuple[BlockList, ...]
    identity_fingerprint: str
    digest_scheme: str | None
    facts: Facts
    deadline_seconds: float
