"""Where a plane's bytes lie: its axes, its rows, and whether two planes share a byte."""

from __future__ import annotations

from collections.abc import Sequence

from kvlink.layout.geometry import Group, Plane

Axis = tuple[int, int, str]
"""(count, stride in bytes, the field of `Plane` that states it)."""


def plane_axes(group: Group, plane: Plane) -> tuple[int, tuple[Axis, ...]]:
    """Bytes that lie together at the bottom of a plane, and the axes above them that are walked at all.

    The stride of a single step means nothing, so such an axis is left out. Contiguous channels are no axis: they are
    the bytes at the bottom; else that is one element.
    """
    row = group.row_of_plane(plane)
    spread = plane.channel_stride not in (0, row.dtype.itemsize) and row.channels > 1
    axes = (
        (group.tensor_blocks, plane.block_stride, "block_stride"),
        (group.tensor_slots, plane.slot_stride, "slot_stride"),
        (len(group.heads), plane.head_stride, "head_stride"),
        (row.channels if spread else 1, plane.channel_stride, "channel_stride"),
    )
    return row.dtype.itemsize if spread else row.nbytes, tuple(axis for axis in axes if axis[0] > 1)


def extent_bytes(group: Group, plane: Plane) -> int:
    """From a plane's first byte to one past its last."""
    length, axes = plane_axes(group, plane)
    return length + sum((count - 1) * stride for count, stride, _ in axes)


def rows_meet(distance: int, axes: Sequence[tuple[int, int, int]], length: int, other_length: int) -> bool:
    """Whether a plane and another of the same strides that starts ``distance`` bytes further on share a byte.

    Args:
        distance: may be negative.
        axes: (steps of the one, steps of the other, stride), longest stride first, each stepping over all that follow.
        length: bytes at the bottom of the one plane.
        other_length: bytes at the bottom of the other.
    """
    if not axes:
        return -other_length < distance < length
    (count, other_count, stride), inner = axes[0], axes[1:]
    # What lies inside one step is shorter than the step, so only the steps around the quotient can meet.
    steps = {max(-(other_count - 1), min(count - 1, distance // stride + extra)) for extra in (0, 1)}
    return any(rows_meet(distance - step * stride, inner, length, other_length) for step in steps)
