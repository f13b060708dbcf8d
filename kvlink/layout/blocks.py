"""Block lists: which of a group's blocks a request touches, and where its positions begin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from kvlink import limits
from kvlink.errors import LayoutError
from kvlink.layout.geometry import CacheSpec, Group, IndexedBy

if TYPE_CHECKING:
    from numpy.typing import NDArray


_FEW: Final = 16
"""So many ids are looked at sooner one by one than by numpy."""


def touched_blocks(
    group: Group, blocks: Sequence[int] | NDArray[np.int64], first_token: int, tokens: int, where: str
) -> NDArray[np.int64]:
    """The block ids that hold token positions ``[first_token, tokens)``, checked against the group.

    Entries outside that range may be anything (a null block, say) and are not looked at. All entries of a group that
    is not indexed by tokens are touched.

    Args:
        group: whose blocks they are.
        blocks: entry i holds positions ``[i * block_size, (i + 1) * block_size)``.
        first_token: first position.
        tokens: one past the last position.
        where: what to call the list in an error, such as ``target blocks of groups.full``.

    Returns:
        int64, entries ``first_token // block_size`` to ``ceil(tokens / block_size)``; empty for an empty range.

    Raises:
        LayoutError: the list is too short or too long, or an id is no integer or not below ``num_blocks``.
    """
    if group.indexed_by is IndexedBy.ENTRY:
        first_token, tokens = 0, len(blocks) * group.block_size
    needed = -(-tokens // group.block_size)
    if len(blocks) < needed:
        raise LayoutError(
            f"{where}: {len(blocks)} blocks of {group.block_size} slots hold fewer than {tokens} tokens; "
            f"pass at least {needed}"
        )
    if len(blocks) > limits.MAX_BLOCKS_PER_REQUEST:
        raise LayoutError(f"{where} has {len(blocks)} blocks; at most {limits.MAX_BLOCKS_PER_REQUEST} are accepted")
    start = first_token // group.block_size
    if first_token >= tokens:
        return np.empty(0, dtype=np.int64)
    few = blocks[start:needed]
    if len(few) <= _FEW and all(type(block) is int for block in few) and 0 <= min(few) <= max(few) < group.num_blocks:
        return np.array(few, dtype=np.int64)
    ids = np.asarray(few)
    if ids.dtype.kind not in "iu" or ids.ndim != 1:
        raise LayoutError(f"{where}: block ids must be integers below 2**63; got {ids.dtype} of shape {ids.shape}")
    low, high = int(np.minimum.reduce(ids)), int(np.maximum.reduce(ids))
    if low < 0 or high >= group.num_blocks:
        bad = low if low < 0 else high
        entry = start + int(np.flatnonzero(ids == bad)[0])
        raise LayoutError(f"{where}[{entry}] is block {bad}; the cache has blocks 0 to {group.num_blocks - 1}")
    return ids.astype(np.int64, copy=False)


def touched_ids(group: Group, blocks: Sequence[int], first_token: int, tokens: int, where: str) -> list[int]:
    """`touched_blocks` as plain numbers; few of them without a detour through numpy."""
    start, needed = first_token // group.block_size, -(-tokens // group.block_size)
    few = blocks[start:needed]
    simple = len(few) <= _FEW and group.indexed_by is IndexedBy.TOKEN and first_token < tokens
    whole = simple and needed <= len(blocks) <= limits.MAX_BLOCKS_PER_REQUEST
    if whole and all(type(block) is int for block in few) and 0 <= min(few) <= max(few) < group.num_blocks:
        return list(few)
    return [int(block) for block in touched_blocks(group, blocks, first_token, tokens, where)]


def payload_bytes(spec: CacheSpec, starts: Sequence[int], tokens: int) -> int:
    """Bytes that one request's positions take in this rank's cache, each counted once.

    Args:
        spec: the rank's.
        starts: first position, for each group.
        tokens: one past the last position. A group that is not indexed by tokens holds one entry, whatever the range.
    """
    total = 0
    for group, first in zip(spec.groups, starts, strict=True):
        slots = group.block_size if group.indexed_by is IndexedBy.ENTRY else max(0, tokens - first)
        rows = sum(group.row_of_plane(plane).nbytes for plane in group.planes)
        total += slots * len(group.heads) * rows
    return total


def starts_of_groups(num_groups: int, first_token: int, *group_first_tokens: Sequence[int]) -> tuple[int, ...]:
    """First position that is moved, for each group: the latest that anyone states.

    Args:
        num_groups: of the side in whose order the lists are.
        first_token: for all groups.
        group_first_tokens: any number of lists, each empty or one entry a group.
    """
    lists = [stated for stated in group_first_tokens if stated]
    return tuple(max([first_token, *(stated[index] for stated in lists)]) for index in range(num_groups))


def sample_capacity(spec: CacheSpec, owners: Sequence[int], step: int, *, default: int) -> int:
    """Tokens of one request whose blocks `sample_blocks` finds in an empty cache.

    Args:
        spec: the rank's.
        owners: for each group, which memory it shares (`alias_classes`); groups that share some share its blocks.
        step: as for `sample_blocks`.
        default: for a cache none of whose groups is indexed by tokens.
    """
    return min(
        (
            group.num_blocks // (step * owners.count(owner)) * group.block_size
            for group, owner in zip(spec.groups, owners, strict=True)
            if group.indexed_by is IndexedBy.TOKEN
        ),
        default=default,
    )


def sample_blocks(spec: CacheSpec, owners: Sequence[int], tokens: int, step: int) -> list[NDArray[np.int64]]:
    """Blocks that one request of ``tokens`` could have, a list a group: ascending, ``step`` apart, none of two groups.

    ``owners`` is as for `sample_capacity`. With a step of 2 no two blocks touch.
    """
    used: dict[int, int] = {}
    lists = []
    for group, owner in zip(spec.groups, owners, strict=True):
        first = used.get(owner, 0)
        count = 1 if group.indexed_by is IndexedBy.ENTRY else -(-tokens // group.block_size)
        used[owner] = first + step * count
        lists.append(np.arange(first, first + step * count, step, dtype=np.int64))
    return lists
