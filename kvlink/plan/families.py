"""A pair of groups as arrays: families of planes with equal strides, stretches of consecutive heads, and scales.

Everything here depends on two specs and a leg only, and is made once for all requests.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvlink.layout import DType, Group, Plane, PlaneKind
from kvlink.plan.match import GroupPair, has_inline_scales, kinds_of

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Steps(NamedTuple):
    """Strides of one plane, bytes."""

    block: int
    slot: int
    head: int
    channel: int


class Shape(NamedTuple):
    """What the planes of a family have in common. ``converts``: the kind's elements are of another dtype or scale."""

    source: Steps
    target: Steps
    channels: int
    source_dtype: DType
    target_dtype: DType
    converts: bool


@dataclass(frozen=True, slots=True)
class Family:
    """Planes of one shape.

    Attributes:
        shape: strides, channels and dtypes.
        cells: int64 ``[layers, kinds, 4]`` (or ``[planes, 1, 4]``), rows as in a segment's bases.
        source_scales: float32 ``[layers, kinds, heads]``, heads in the source rank's order; ``None`` for 1.
        target_scales: the same, in the target rank's order of heads.
    """

    shape: Shape
    cells: NDArray[np.int64]
    source_scales: NDArray[np.float32] | None
    target_scales: NDArray[np.float32] | None


@dataclass(frozen=True, slots=True)
class HeadStretches:
    """Stretches of equally many heads, each consecutive on both sides.

    ``starts``: int64 ``[n, 2]``, positions of each stretch's first head in the two ranks' own orders.
    """

    length: int
    starts: NDArray[np.int64]


class _Cell(NamedTuple):
    """One plane (or the part of its channels that lies in one plane of either side), matched."""

    place: tuple[int, int, int, int]
    """As in a segment's bases."""
    layer: int
    column: tuple[PlaneKind, int]
    """Kind and first channel."""
    planes: tuple[int, int]
    """Indices into the two groups' planes."""


def families_of(pair: GroupPair) -> list[Family]:
    """In the order of the source's memory, so that nothing depends on how the leg lists its layers."""
    members: dict[Shape, list[_Cell]] = defaultdict(list)
    scales = _Scales(pair)
    for shape, cell in sorted(_cells(pair, scales), key=lambda item: item[1]):
        members[shape].append(cell)
    return [_family(shape, cells, scales) for shape, cells in members.items()]


def stretches_of(pair: GroupPair) -> list[HeadStretches]:
    """The leg's heads, longer stretches first."""
    source_at = {head: position for position, head in enumerate(pair.source.heads)}
    target_at = {head: position for position, head in enumerate(pair.target.heads)}
    positions = sorted((source_at[head], target_at[head]) for head in pair.share.heads)
    breaks = [
        index
        for index, (one, other) in enumerate(pairwise(positions), start=1)
        if (other[0] - one[0], other[1] - one[1]) != (1, 1)
    ]
    starts: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for begin, end in pairwise([0, *breaks, len(positions)]):
        starts[end - begin].append(positions[begin])
    return [HeadStretches(length, np.array(starts[length], dtype=np.int64)) for length in sorted(starts, reverse=True)]


class _Scales:
    """Stated scales of both sides: float32 ``[planes, heads]``, ones where nothing is stated."""

    def __init__(self, pair: GroupPair) -> None:
        self.pair = pair
        self.tables = _scale_table(pair.source), _scale_table(pair.target)
        groups = pair.source, pair.target
        self._heads = tuple([group.heads.index(head) for head in pair.share.heads] for group in groups)

    def differ(self, source_plane: int, target_plane: int) -> bool:
        """Whether any head of the leg is scaled differently."""
        one, other = (
            table[plane, heads]
            for table, plane, heads in zip(self.tables, (source_plane, target_plane), self._heads, strict=True)
        )
        return not np.array_equal(one, other)


def _cells(pair: GroupPair, scales: _Scales) -> Iterator[tuple[Shape, _Cell]]:
    source_planes, target_planes = _planes_by_key(pair.source), _planes_by_key(pair.target)
    for kind in kinds_of(pair.source):
        dtypes = pair.source.row_of(kind).dtype, pair.target.row_of(kind).dtype
        by_scale = dtypes[0].quantised and not has_inline_scales(pair.source, kind)
        for layer in pair.share.layers:
            parts = source_planes[layer, kind], target_planes[layer, kind]
            for one, other, first, count in _common_channels(pair, *parts):
                source, target = pair.source.planes[one], pair.target.planes[other]
                steps = _steps(source, dtypes[0]), _steps(target, dtypes[1])
                place = (
                    source.region,
                    source.offset_bytes + (first - source.first_channel) * steps[0].channel,
                    target.region,
                    target.offset_bytes + (first - target.first_channel) * steps[1].channel,
                )
                converts = dtypes[0] != dtypes[1] or (by_scale and scales.differ(one, other))
                yield Shape(*steps, count, *dtypes, converts), _Cell(place, layer, (kind, first), (one, other))


def _common_channels(
    pair: GroupPair, source: Sequence[int], target: Sequence[int]
) -> Iterator[tuple[int, int, int, int]]:
    """(source plane, target plane, first channel, channels): channels cut at every border of either side's planes."""
    first = row = column = 0
    while row < len(source):
        one, other = source[row], target[column]
        ends = _channel_end(pair.source, one), _channel_end(pair.target, other)
        yield one, other, first, min(ends) - first
        first = min(ends)
        row, column = row + (ends[0] == first), column + (ends[1] == first)


def _channel_end(group: Group, index: int) -> int:
    plane = group.planes[index]
    return plane.first_channel + group.row_of_plane(plane).channels


def _family(shape: Shape, cells: Sequence[_Cell], scales: _Scales) -> Family:
    rows = [(*cell.place, *cell.planes) for cell in cells]
    layers = {layer: index for index, layer in enumerate(dict.fromkeys(cell.layer for cell in cells))}
    columns = {column: index for index, column in enumerate(dict.fromkeys(cell.column for cell in cells))}
    grid = np.array(rows, dtype=np.int64).reshape(-1, 1, 6)
    if len(layers) * len(columns) == len(rows):
        grid = np.empty((len(layers), len(columns), 6), dtype=np.int64)
        for cell, row in zip(cells, rows, strict=True):
            grid[layers[cell.layer], columns[cell.column]] = row
    places = np.ascontiguousarray(grid[..., :4])
    if not shape.converts:
        return Family(shape, places, None, None)
    source, target = (
        table[grid[..., 4 + side]] if dtype.quantised else None
        for side, (table, dtype) in enumerate(zip(scales.tables, (shape.source_dtype, shape.target_dtype), strict=True))
    )
    return Family(shape, places, source, target)


def _scale_table(group: Group) -> NDArray[np.float32]:
    """float32 ``[planes, heads]``, ones where nothing is stated."""
    stated = np.array(group.scales or ((1.0,),), dtype=np.float32)
    return np.broadcast_to(stated, (len(group.planes), len(group.heads)))


def _steps(plane: Plane, dtype: DType) -> Steps:
    return Steps(plane.block_stride, plane.slot_stride, plane.head_stride, plane.channel_stride or dtype.itemsize)


def _planes_by_key(group: Group) -> dict[tuple[int, PlaneKind], list[int]]:
    """Indices of a layer's planes of one kind, by first channel."""
    planes: dict[tuple[int, PlaneKind], list[int]] = defaultdict(list)
    for index, plane in enumerate(group.planes):
        planes[plane.layer, plane.kind].append(index)
    for parts in planes.values():
        if len(parts) > 1:
            parts.sort(key=lambda index: group.planes[index].first_channel)
    return planes
