"""Zeroes what a transfer does not cover: the slots past the last token, where the engine asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvlink.layout import IndexedBy, touched_blocks

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvlink.layout import CacheSpec, Group, Plane


class Stretch(NamedTuple):
    """``length_bytes`` from ``offset_bytes`` of a region on."""

    region: int
    offset_bytes: int
    length_bytes: int


def uncovered_stretches(spec: CacheSpec, blocks: Sequence[Sequence[int]], tokens: int) -> list[Stretch]:
    """Every slot from position ``tokens`` to the end of the last block that holds a token, in all planes.

    Groups that are not indexed by tokens are covered whole.

    Args:
        spec: the rank's spec.
        blocks: one list a group, entry i holding positions ``[i * block_size, (i + 1) * block_size)``.
        tokens: one past the last token.

    Returns:
        Stretches as long as memory allows, none touching another, by region and offset.

    Raises:
        LayoutError: a list is too short, or its last block is not one of the cache's.
    """
    found: list[Stretch] = []
    for group, ids in zip(spec.groups, blocks, strict=True):
        used = tokens % group.block_size
        if used and group.indexed_by is IndexedBy.TOKEN:
            (last,) = touched_blocks(group, ids, tokens - 1, tokens, f"blocks of groups.{group.name}").tolist()
            begun, slot = divmod(used, group.tensor_slots)
            whole = group.ratio - begun - 1
            first = last * group.ratio + begun
            for plane in group.planes:
                found += _slots_of(group, plane, (first, 1), (slot, group.tensor_slots - slot))
                if whole:
                    found += _slots_of(group, plane, (first + 1, whole), (0, group.tensor_slots))
    return _merged(found)


def zero_uncovered(
    spec: CacheSpec, regions: Sequence[NDArray[np.uint8]], blocks: Sequence[Sequence[int]], tokens: int
) -> None:
    """Zero `uncovered_stretches` in memory of the host.

    Args:
        spec: as there.
        regions: the spec's regions' bytes, writable, in its order.
        blocks: as there.
        tokens: as there.

    Raises:
        LayoutError: as there; nothing was zeroed.
    """
    for region, offset, length in uncovered_stretches(spec, blocks, tokens):
        regions[region][offset : offset + length] = 0


def _slots_of(group: Group, plane: Plane, blocks: tuple[int, int], slots: tuple[int, int]) -> list[Stretch]:
    """Slots of a plane; both tuples: the first, and how many. Blocks are the tensor's."""
    row = group.row_of_plane(plane)
    length = row.dtype.itemsize
    loops = [
        (blocks[1], plane.block_stride),
        (slots[1], plane.slot_stride),
        (len(group.heads), plane.head_stride),
        (row.channels, plane.channel_stride or length),
    ]
    starts = np.array([plane.offset_bytes + blocks[0] * plane.block_stride + slots[0] * plane.slot_stride])
    for count, stride in sorted((loop for loop in loops if loop[0] > 1), key=lambda loop: loop[1]):
        if stride == length and len(starts) == 1:
            length *= count
        else:
            starts = (starts + stride * np.arange(count)[:, None]).ravel()
    return [Stretch(plane.region, start, length) for start in starts.tolist()]


def _merged(stretches: list[Stretch]) -> list[Stretch]:
    """Sorted, and as one where they touch: K and V side by side, layers inside a block, groups that share memory."""
    merged: list[Stretch] = []
    for region, offset, length in sorted(stretches):
        end = offset + length
        if merged and merged[-1].region == region and offset <= (last := merged[-1]).offset_bytes + last.length_bytes:
            merged[-1] = last._replace(length_bytes=max(end - last.offset_bytes, last.length_bytes))
        else:
            merged.append(Stretch(region, offset, length))
    return merged
