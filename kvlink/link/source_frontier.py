"""What an engine says of KV that it is still computing, checked, and what that makes of the request's descriptor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvlink import limits
from kvlink.descriptor import KVDescriptor, check_descriptor, check_group_first_tokens, descriptor_digest
from kvlink.errors import LayoutError
from kvlink.layout import Frontier, IndexedBy, fingerprint, starts_of_groups, touched_blocks
from kvlink.link.source_work import Draft

if TYPE_CHECKING:
    from kvlink.descriptor import BlockList, FirstTokens
    from kvlink.layout import CacheSpec
    from kvlink.link.part import Ready
    from kvlink.link.source_work import SourceWork

Told = tuple[Frontier, tuple["BlockList", ...] | None, "FirstTokens"]
"""Frontier, blocks so far, first positions a group."""


def frontier_after(work: SourceWork, ready: Ready, spec: CacheSpec) -> Told:
    """How far a request has come after an engine's word; changes nothing.

    Raises:
        LayoutError: it goes backwards or too far, or the blocks do not hold it.
    """
    try:
        return _frontier_after(work, ready, spec)
    except LayoutError as error:
        error.request_id = error.request_id or work.key
        raise


def _frontier_after(work: SourceWork, ready: Ready, spec: CacheSpec) -> Told:
    frontier = work.frontier.advance(ready.tokens, ready.layers, max_tokens=work.max_tokens, end_layer=work.end_layer)
    starts = work.group_first_tokens if ready.group_first_tokens is None else ready.group_first_tokens
    if starts != work.group_first_tokens and work.frontier.next_tokens:
        raise LayoutError(
            f"group_first_tokens turn from {work.group_first_tokens} to {starts} after positions were ready; state "
            "them with the first"
        )
    check_group_first_tokens("group_first_tokens", starts, spec, work.max_tokens)
    blocks = work.blocks if ready.blocks is None or ready.blocks == work.blocks else ready.blocks
    known = blocks is work.blocks and frontier.next_tokens == work.frontier.next_tokens
    if blocks is not None and not known:
        _check_blocks(work, blocks, frontier, starts, spec)
    return frontier, blocks, starts


def _check_blocks(
    work: SourceWork, blocks: tuple[BlockList, ...], frontier: Frontier, starts: FirstTokens, spec: CacheSpec
) -> None:
    if len(blocks) != len(spec.groups):
        raise LayoutError(
            f"{len(blocks)} block lists are given; {spec.place} has {len(spec.groups)} groups: one a group"
        )
    firsts = starts_of_groups(len(spec.groups), 0, starts)
    before = blocks if work.blocks is None else work.blocks
    for group, ids, first, known in zip(spec.groups, blocks, firsts, before, strict=True):
        where = f"source blocks of groups.{group.name}"
        if group.indexed_by is IndexedBy.ENTRY:
            end = len(known) if work.frontier.next_tokens == work.max_tokens else 0
            complete = end == 0 or len(ids) == end
        else:
            touched_blocks(group, ids, min(first, frontier.next_tokens), frontier.next_tokens, where)
            end, complete = -(-work.frontier.next_tokens // group.block_size), True
        if not complete or known[:end] != ids[:end]:
            raise LayoutError(
                f"{where}: the first {end} entries hold what was ready in other blocks; only append to them"
            )


def draft_seal(work: SourceWork, spec: CacheSpec, tokens: int, *, integrity: bool) -> Draft:
    """The descriptor of a request that ends at ``tokens``, kept for when it is sealed there.

    Raises:
        LayoutError: as `check_descriptor`.
    """
    if work.draft is None or not _covers(work.draft, work, tokens):
        blocks = () if work.blocks is None else work.blocks
        descriptor = descriptor_of(work, spec, tokens, blocks, integrity=integrity)
        check_descriptor(descriptor, spec)
        work.draft = Draft(descriptor, descriptor_digest(descriptor))
    return work.draft


def _covers(draft: Draft, work: SourceWork, tokens: int) -> bool:
    claim = draft.descriptor
    return (claim.tokens, claim.group_first_tokens) == (tokens, work.group_first_tokens) and (
        claim.blocks is work.blocks
    )


def final_draft(work: SourceWork, spec: CacheSpec, *, integrity: bool) -> Draft:
    """The descriptor of a request that is complete, with its digest.

    Raises:
        LayoutError: nothing is ready, or a chunk is under way that not all layers hold.
    """
    if work.blocks is None or not work.frontier.next_tokens:
        raise LayoutError("nothing was made ready before the seal; give blocks and tokens", request_id=work.key)
    if work.frontier != Frontier.whole(work.frontier.tokens):
        raise LayoutError(
            f"sealed in the middle of a chunk: positions up to {work.frontier.next_tokens} are ready in the layers "
            f"below {work.frontier.layers} only; call ready(tokens={work.frontier.next_tokens}) once all hold them",
            request_id=work.key,
        )
    return draft_seal(work, spec, work.frontier.tokens, integrity=integrity)


def descriptor_of(
    work: SourceWork, spec: CacheSpec, tokens: int, blocks: tuple[BlockList, ...], *, integrity: bool
) -> KVDescriptor:
    """What is claimed of an announced request."""
    return KVDescriptor(
        request_id=work.key,
        tokens=tokens,
        first_token=0,
        blocks=blocks,
        identity_fingerprint=fingerprint(spec.identity),
        digest_scheme=limits.DIGEST_SCHEME if integrity else None,
        facts=work.facts,
        deadline_seconds=limits.MAX_ATTEMPT_SECONDS,
        group_first_tokens=work.group_first_tokens,
    )
