"""Groups that share memory: a hybrid model's groups take their blocks from one pool, so block ids must not meet.

Which planes can meet at all depends on the spec alone and is found once; whether two block lists do is then a merge of
sorted intervals.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvlink.layout.extent import Axis, extent_bytes, plane_axes, rows_meet
from kvlink.layout.geometry import CacheSpec, Group, Plane

if TYPE_CHECKING:
    from numpy.typing import NDArray


class _Footprint(NamedTuple):
    """Where the blocks of a plane lie: ``stride`` apart, ``extent`` bytes from first to last byte of each."""

    stride: int
    extent: int


@dataclass(frozen=True, slots=True)
class Alias:
    """Two groups with planes that may share bytes, the second's starting ``distance`` bytes after the first's.

    ``groups`` are indices into the spec. Planes that lie to each other as these do are not listed again.
    """

    groups: tuple[int, int]
    distance: int
    one: _Footprint
    other: _Footprint

    def shared(self, blocks: NDArray[np.int64], other_blocks: NDArray[np.int64]) -> tuple[int, int] | None:
        """A tensor block of the first group and one of the second that share bytes, or ``None``.

        Exact where no axis lies outside the blocks; else blocks of which it cannot be told count as sharing.
        """
        if len(blocks) == 0 or len(other_blocks) == 0:
            return None
        order = np.argsort(other_blocks, kind="stable")
        begins = other_blocks[order] * self.other.stride + self.distance
        starts = blocks * self.one.stride
        before = np.searchsorted(begins, starts + self.one.extent) - 1
        meets = (before >= 0) & (begins[before] + self.other.extent > starts)
        if not meets.any():
            return None
        index = int(meets.argmax())
        return int(blocks[index]), int(other_blocks[order[before[index]]])


def aliases(spec: CacheSpec) -> tuple[Alias, ...]:
    """All ways in which two groups of a spec may share bytes; empty for most caches."""
    found: dict[Alias, None] = {}
    for first, one in enumerate(spec.groups):
        for second in range(first + 1, len(spec.groups)):
            for alias in _between(one, spec.groups[second], (first, second)):
                found[alias] = None
    return tuple(found)


def alias_classes(spec: CacheSpec) -> tuple[int, ...]:
    """For each group, the first group whose block b begins where its own block b does; mostly itself.

    Groups whose planes overlap in another way keep names of their own; a request's plan still tells their blocks apart.
    """
    classes = list(range(len(spec.groups)))
    for alias in aliases(spec):
        one, other = (spec.groups[index] for index in alias.groups)
        same_step = alias.one.stride == alias.other.stride and one.ratio == other.ratio
        if same_step and alias.distance == 0:
            low, high = sorted(classes[index] for index in alias.groups)
            classes = [low if member == high else member for member in classes]
    return tuple(classes)


def _between(one: Group, other: Group, groups: tuple[int, int]) -> Iterator[Alias]:
    if not (one.planes and other.planes):
        return
    ends = np.array([(p.region, p.offset_bytes, extent_bytes(one, p)) for p in one.planes], dtype=np.int64)
    others = np.array([(p.region, p.offset_bytes, extent_bytes(other, p)) for p in other.planes], dtype=np.int64)
    distance = others[None, :, 1] - ends[:, None, 1]
    near = (ends[:, None, 0] == others[None, :, 0]) & (distance < ends[:, None, 2]) & (-distance < others[None, :, 2])
    seen: set[tuple[object, ...]] = set()
    for row, column in np.argwhere(near):
        plane, other_plane = one.planes[row], other.planes[column]
        apart = other_plane.offset_bytes - plane.offset_bytes
        shape = apart, plane_axes(one, plane), plane_axes(other, other_plane)
        if shape in seen:
            continue
        seen.add(shape)
        if _can_meet(one, plane, other, other_plane):
            mine, theirs = _footprint(one, plane, other, other_plane), _footprint(other, other_plane, one, plane)
            yield Alias(groups, apart, mine, theirs)


def _can_meet(one: Group, plane: Plane, other: Group, other_plane: Plane) -> bool:
    """Exact for planes of equal strides (parts of one row in groups of their own never meet).

    Else only the outer axes that both have are told apart, and all that lies inside counts as one solid stretch.
    """
    (length, axes), (other_length, other_axes) = plane_axes(one, plane), plane_axes(other, other_plane)
    mine, theirs = ({axis[2]: axis for axis in side} for side in (axes, other_axes))
    strides = {axis[2]: axis[1] for axis in (*axes, *other_axes)}
    common: list[tuple[int, int, int]] = []
    for name in sorted(strides, key=strides.__getitem__, reverse=True):
        steps = [side.get(name, (1, strides[name], name)) for side in (mine, theirs)]
        inside = [[axis for axis in side.values() if axis[2] != name] for side in (mine, theirs)]
        solid = _solid(length, inside[0]), _solid(other_length, inside[1])
        if steps[0][1] != steps[1][1] or max(solid) > strides[name]:
            break
        common.append((steps[0][0], steps[1][0], strides[name]))
        mine, theirs = ({axis[2]: axis for axis in side} for side in inside)
    solid = _solid(length, mine.values()), _solid(other_length, theirs.values())
    return rows_meet(other_plane.offset_bytes - plane.offset_bytes, common, *solid)


def _solid(length: int, axes: Iterable[Axis]) -> int:
    return length + sum((count - 1) * stride for count, stride, _ in axes)


def _footprint(group: Group, plane: Plane, against: Group, other: Plane) -> _Footprint:
    """An axis outside the blocks (heads of a pool in HND order) is left out where both planes have the same."""
    length, axes = plane_axes(group, plane)
    outside = [axis for axis in axes if axis[1] > plane.block_stride and group.tensor_blocks > 1]
    theirs = [axis for axis in plane_axes(against, other)[1] if axis[1] > other.block_stride]
    left_out = outside if outside == theirs and plane.offset_bytes == other.offset_bytes else []
    inside = [axis for axis in axes if axis[2] != "block_stride" and axis not in left_out]
    return _Footprint(plane.block_stride, _solid(length, inside))
