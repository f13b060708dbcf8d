"""Zeroes what a transfer does not cover: the slots past the last token, where the engine asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvlink.layout import IndexedBy, touched_blocks

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvlink.layout import CacheSpec, Group, Plane


def zero_uncovered(
    spec: CacheSpec, regions: Sequence[NDArray[np.uint8]], blocks: Sequence[Sequence[int]], tokens: int
) -> None:
    """Zero every slot from position ``tokens`` to the end of the last block that holds a token, in all planes.

    Groups that are not indexed by tokens are covered whole.

    Args:
        spec: the rank's spec.
        regions: its regions' bytes, writable, in the spec's order.
        blocks: one list a group, entry i holding positions ``[i * block_size, (i + 1) * block_size)``.
        tokens: one past the last token.

    Raises:
        LayoutError: a list is too short, or its last block is not one of the cache's; that group is left as it is.
    """
    for group, ids in zip(spec.groups, blocks, strict=True):
        used = tokens % group.block_size
        if used and group.indexed_by is IndexedBy.TOKEN:
            (last,) = touched_blocks(group, ids, tokens - 1, tokens, f"blocks of groups.{group.name}").tolist()
            for plane in group.planes:
                view = _view(group, plane, regions[plane.region])
                block, slot = divmod(used, group.tensor_slots)
                first = last * group.ratio
                view[first + block, slot:] = 0
                view[first + block + 1 : first + group.ratio] = 0


def _view(group: Group, plane: Plane, region: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """A plane in place, as bytes ``[tensor block, slot, head, channel, byte]``."""
    row = group.row_of_plane(plane)
    item = row.dtype.itemsize
    return np.lib.stride_tricks.as_strided(
        region[plane.offset_bytes :],
        shape=(group.tensor_blocks, group.tensor_slots, len(group.heads), row.channels, item),
        strides=(plane.block_stride, plane.slot_stride, plane.head_stride, plane.channel_stride or item, 1),
    )
