"""Zeroes what a transfer does not cover: the slots past the last token, where the engine asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvlink.layout import CacheSpec, Group, Plane


def zero_uncovered(
    spec: CacheSpec, regions: Sequence[NDArray[np.uint8]], blocks: Sequence[Sequence[int]], tokens: int
) -> None:
    """Zero every slot from position ``tokens`` to the end of the last block that holds a token, in all planes.

    Args:
        spec: the rank's spec.
        regions: its regions' bytes, writable, in the spec's order.
        blocks: one list a group, entry i holding positions ``[i * block_size, (i + 1) * block_size)``.
        tokens: one past the last token.
    """
    for group, ids in zip(spec.groups, blocks, strict=True):
        used = tokens % group.block_size
        if used:
            for plane in group.planes:
                _zero_slots(group, plane, regions[plane.region], ids[tokens // group.block_size], used)


def _zero_slots(group: Group, plane: Plane, region: NDArray[np.uint8], block: int, first_slot: int) -> None:
    """Slots ``first_slot`` and on of one block: (slot, head) rows of ``row_bytes`` each."""
    start = plane.offset_bytes + block * plane.block_stride + first_slot * plane.slot_stride
    rows = np.lib.stride_tricks.as_strided(
        region[start:],
        shape=(group.block_size - first_slot, len(group.heads), group.row_bytes),
        strides=(plane.slot_stride, plane.head_stride, 1),
    )
    rows[...] = 0
