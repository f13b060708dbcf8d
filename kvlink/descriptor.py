"""What one request's KV claims to be: complete, typed, versioned; checked field by field before a byte is read."""

from __future__ import annotations

import hashlib
import math
from typing import Annotated, Final

import msgspec

from kvlink import limits
from kvlink.errors import LayoutError, MismatchError, UnsupportedError
from kvlink.layout import CacheSpec, compare_stated, fingerprint, starts_of_groups, touched_ids

Token = Annotated[int, msgspec.Meta(ge=0, le=limits.MAX_TOKENS_PER_REQUEST)]
FirstTokens = Annotated[tuple[Token, ...], msgspec.Meta(max_length=limits.MAX_GROUPS)]
"""First positions, one a group, or none."""
BlockList = Annotated[tuple[int, ...], msgspec.Meta(max_length=limits.MAX_BLOCKS_PER_REQUEST)]

_CONTENT_DOMAIN: Final = b"kvlink.descriptor/1\0"
_COMPARED_FACTS: Final = ("prompt_digest", "adapter", "adapter_revision", "tenant")
"""The rest says how to treat a request, not whose KV it is."""


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
    ``[i * block_size, (i + 1) * block_size)`` of the group, or, where a group is not indexed by tokens, is the i-th of
    its entries. Positions ``[first_token, tokens)`` are moved; of a group, from its entry in ``group_first_tokens`` on:
    earlier ones have left its window, and its blocks there are null blocks. No entries: all groups are whole.
    """

    request_id: str
    tokens: int
    first_token: int
    blocks: tuple[BlockList, ...]
    identity_fingerprint: str
    digest_scheme: str | None
    facts: Facts
    deadline_seconds: float
    group_first_tokens: FirstTokens = ()

    def starts(self, first_token: int = 0, group_first_tokens: FirstTokens = ()) -> tuple[int, ...]:
        """First position that is moved, for each of the source's groups, given where a target begins."""
        first = max(self.first_token, first_token)
        return starts_of_groups(len(self.blocks), first, self.group_first_tokens, group_first_tokens)


def check_descriptor(descriptor: KVDescriptor, spec: CacheSpec, *, stream: bool = False) -> None:
    """Check what a descriptor claims against the source's own cache; touches no payload.

    Args:
        descriptor: from a peer or an offer.
        spec: the *source's* spec, whose blocks the descriptor lists.
        stream: it opens a stream: its block lists are empty, and its tokens the most that may come.

    Raises:
        LayoutError: the token range, the deadline, a text or a block list is impossible.
        MismatchError: it was made for another identity than the source's.
        UnsupportedError: its digest scheme is not known here.
    """
    _check_texts(descriptor)
    if not 0 <= descriptor.first_token <= descriptor.tokens <= limits.MAX_TOKENS_PER_REQUEST:
        raise LayoutError(
            f"descriptor: tokens [{descriptor.first_token}, {descriptor.tokens}) is impossible; first_token and tokens "
            f"ascend within [0, {limits.MAX_TOKENS_PER_REQUEST}]"
        )
    if not (math.isfinite(descriptor.deadline_seconds) and descriptor.deadline_seconds > 0):
        raise LayoutError(
            f"descriptor.deadline_seconds is {descriptor.deadline_seconds}; state the remaining time, above 0"
        )
    if descriptor.digest_scheme not in (None, limits.DIGEST_SCHEME):
        raise UnsupportedError(
            f"descriptor.digest_scheme is {descriptor.digest_scheme!r}; this side knows {limits.DIGEST_SCHEME!r} and "
            "None (integrity off)"
        )
    own = fingerprint(spec.identity)
    if descriptor.identity_fingerprint != own:
        raise MismatchError(
            "descriptor.identity_fingerprint", own, descriptor.identity_fingerprint, source=str(spec.place)
        )
    if len(descriptor.blocks) != len(spec.groups):
        raise LayoutError(
            f"descriptor.blocks has {len(descriptor.blocks)} lists; {spec.place} has {len(spec.groups)} groups: "
            "one list a group, in the source's order"
        )
    check_group_first_tokens("descriptor.group_first_tokens", descriptor.group_first_tokens, spec, descriptor.tokens)
    if stream:
        if any(descriptor.blocks):
            raise LayoutError("descriptor.blocks of a stream's beginning hold blocks; they come with its increments")
        return
    for group, blocks, first in zip(spec.groups, descriptor.blocks, descriptor.starts(), strict=True):
        touched_ids(group, blocks, first, descriptor.tokens, f"descriptor.blocks of groups.{group.name}")


def check_group_first_tokens(where: str, starts: FirstTokens, spec: CacheSpec, tokens: int) -> None:
    """Refuse first positions that are neither none nor one for each group of ``spec``, or lie past the last token.

    Raises:
        LayoutError: naming ``where``.
    """
    if starts and len(starts) != len(spec.groups):
        raise LayoutError(
            f"{where} has {len(starts)} entries for {len(spec.groups)} groups; state none, or one a group"
        )
    if starts and not 0 <= min(starts) <= max(starts) <= tokens:
        raise LayoutError(f"{where} is {starts}; each lies between 0 and the {tokens} tokens")


def compare_facts(source: Facts, target: Facts, *, source_peer: str = "source", target_peer: str = "target") -> None:
    """Refuse KV of another prompt, adapter, adapter revision or tenant.

    Raises:
        MismatchError: names the first of these that both sides state and state differently.
    """
    compare_stated(
        "facts", source, target, fields=_COMPARED_FACTS, source_peer=source_peer, target_peer=target_peer
    )  # fmt: skip


def descriptor_digest(descriptor: KVDescriptor) -> str:
    """Name of a descriptor's content: two requests of one id are the same request exactly if these are equal.

    Left out is what may change between repeats of one request: the remaining time, trace id and priority.

    Returns:
        64 hex digits: SHA-256 over the canonical MessagePack of the rest.
    """
    facts = msgspec.structs.replace(descriptor.facts, trace_id=None, priority=0)
    content = msgspec.structs.replace(descriptor, facts=facts, deadline_seconds=0.0)
    return hashlib.sha256(_CONTENT_DOMAIN + msgspec.msgpack.encode(content, order="deterministic")).hexdigest()


def _check_texts(descriptor: KVDescriptor) -> None:
    key = descriptor.request_id
    if not key.isprintable() or not 1 <= len(key.encode()) <= limits.MAX_KEY_BYTES:
        raise LayoutError(
            f"descriptor.request_id is {key[:64]!r}; it must be 1 to {limits.MAX_KEY_BYTES} bytes of printable text"
        )
    for name in (*_COMPARED_FACTS, "trace_id"):
        text = getattr(descriptor.facts, name)
        if text is not None and len(text.encode()) > limits.MAX_TEXT_BYTES:
            raise LayoutError(
                f"descriptor.facts.{name} has {len(text.encode())} bytes; state at most {limits.MAX_TEXT_BYTES}"
            )
    if len(descriptor.facts.opaque or b"") > limits.MAX_CLAIM_BYTES:
        raise LayoutError(
            f"descriptor.facts.opaque has {len(descriptor.facts.opaque or b'')} bytes; a claim takes at most "
            f"{limits.MAX_CLAIM_BYTES}"
        )
