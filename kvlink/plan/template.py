"""A segment without its pieces: bases, nest and run for pieces of so many slots. Made once, used for every request."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvlink.errors import LayoutError
from kvlink.plan.copyplan import Conversion, Dim, Segment
from kvlink.plan.families import Family, HeadStretches

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Template:
    """What a segment is but for its pieces.

    Attributes:
        bases: as in `Segment`; so are ``nest``, ``run_bytes`` and ``convert``.
        piece_bytes: source bytes of one piece over all bases.
        source_room: the largest offset of a piece that keeps every byte inside the source's regions.
        target_room: the same for the target.
    """

    bases: NDArray[np.int64]
    nest: tuple[Dim, ...]
    run_bytes: int
    convert: Conversion | None
    piece_bytes: int
    source_room: int
    target_room: int

    def segment(self, pieces: NDArray[np.int64]) -> Segment:
        """The segment over ``pieces``; raises LayoutError if one of them leaves a region."""
        source, target = (pieces[0] if len(pieces) == 1 else np.maximum.reduce(pieces)).tolist()
        if source > self.source_room or target > self.target_room:
            raise LayoutError(
                f"a piece at offset {source} (source) and {target} (target) leaves its region; spec and blocks do not "
                "belong together"
            )
        return Segment(self.bases, pieces, self.nest, self.run_bytes, self.convert)


def template_of(
    family: Family, heads: HeadStretches, slots: int, source_regions: Sequence[int], target_regions: Sequence[int]
) -> Template:
    """Fold one family and the stretches of one length; see docs/architecture.md, "Plan", for the rules.

    Args:
        family: planes of one shape.
        heads: stretches of equally many heads.
        slots: slots in a piece.
        source_regions: lengths in bytes.
        target_regions: lengths in bytes.
    """
    shape = family.shape
    grid = _Grid.of(family, heads)
    dims = [
        _Loop(Dim(shape.channels, shape.source.channel, shape.target.channel)),
        _Loop(Dim(slots, shape.source.slot, shape.target.slot)),
        _Loop(Dim(heads.length, shape.source.head, shape.target.head), grid.scales_vary(axis=3)),
    ]
    for axis in range(3):
        step = grid.uniform_step(axis, shape.source.block)
        if step is not None:
            dims.append(_Loop(step))
            grid = grid.first_of(axis)
    nest, run_bytes, scale_dim = _fold(dims, shape.source_dtype.itemsize, shape.target_dtype.itemsize)
    bases = np.ascontiguousarray(grid.cells.reshape(-1, 4))
    convert = None
    if shape.converts:
        source, target = (_columns(table, len(bases), varies=scale_dim >= 0) for table in (grid.source, grid.target))
        convert = Conversion(shape.source_dtype, shape.target_dtype, source, target, scale_dim)
    whole = Segment(bases, np.zeros((1, 2), dtype=np.int64), nest, run_bytes, convert)
    return Template(
        bases=bases,
        nest=nest,
        run_bytes=run_bytes,
        convert=convert,
        piece_bytes=len(bases) * math.prod(dim.count for dim in nest) * run_bytes,
        source_room=_room(bases[:, :2], source_regions, _reach(nest, 1) + run_bytes),
        target_room=_room(bases[:, 2:], target_regions, _reach(nest, 2) + whole.target_run_bytes),
    )


class _Loop(NamedTuple):
    """A dimension on its way into the nest. ``pinned``: scales walk it, so it must stay one of its own."""

    dim: Dim
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class _Grid:
    """``cells``: int64 ``[layers, kinds, stretches, 4]``; scales: float32 ``[layers, kinds, stretches, heads]``."""

    cells: NDArray[np.int64]
    source: NDArray[np.float32] | None
    target: NDArray[np.float32] | None

    @classmethod
    def of(cls, family: Family, heads: HeadStretches) -> _Grid:
        starts = np.zeros((len(heads.starts), 4), dtype=np.int64)
        starts[:, 1] = heads.starts[:, 0] * family.shape.source.head
        starts[:, 3] = heads.starts[:, 1] * family.shape.target.head
        tables = []
        for side, table in enumerate((family.source_scales, family.target_scales)):
            at = heads.starts[:, side, None] + np.arange(heads.length)
            tables.append(None if table is None or (table == 1).all() else table[..., at])
        return cls(family.cells[:, :, None] + starts, *tables)

    def scales_vary(self, axis: int) -> bool:
        """Whether scales differ along an axis, on either side."""
        tables = [table for table in (self.source, self.target) if table is not None]
        return any(bool((table != table.take([0], axis=axis)).any()) for table in tables)

    def uniform_step(self, axis: int, source_block_stride: int) -> Dim | None:
        """The axis as one dimension inside a block, or ``None`` if it is not uniform or does not lie inside a block."""
        count = self.cells.shape[axis]
        if count == 1 or self.scales_vary(axis):
            return None
        steps = np.diff(self.cells, axis=axis).reshape(-1, 4)
        if (steps != steps[0]).any():
            return None
        source_region, source_step, target_region, target_step = (int(value) for value in steps[0])
        if source_region or target_region or not 0 < source_step < source_block_stride or target_step <= 0:
            return None
        return Dim(count, source_step, target_step)

    def first_of(self, axis: int) -> _Grid:
        """The grid with only the first of an axis."""
        tables = (None if table is None else table.take([0], axis=axis) for table in (self.source, self.target))
        return _Grid(self.cells.take([0], axis=axis), *tables)


def _fold(loops: Sequence[_Loop], source_bytes: int, target_bytes: int) -> tuple[tuple[Dim, ...], int, int]:
    """Sort by source stride, then merge what is contiguous on both sides into the run or into one dimension.

    Returns:
        The nest, outermost first; source bytes of a run; the index of the pinned dimension, or -1.
    """
    nest: list[_Loop] = []
    run_elements = 1
    for loop in sorted((loop for loop in loops if loop.dim.count > 1), key=lambda loop: loop.dim.source_stride):
        dim, inner = loop.dim, nest[-1] if nest else None
        if inner is None and not loop.pinned:
            if dim[1:] == (run_elements * source_bytes, run_elements * target_bytes):
                run_elements *= dim.count
                continue
        elif inner is not None and not (loop.pinned or inner.pinned):
            count, *strides = inner.dim
            if list(dim[1:]) == [count * stride for stride in strides]:
                nest[-1] = _Loop(inner.dim._replace(count=count * dim.count))
                continue
        nest.append(loop)
    nest.reverse()
    pinned = [index for index, loop in enumerate(nest) if loop.pinned]
    return tuple(loop.dim for loop in nest), run_elements * source_bytes, pinned[0] if pinned else -1


def _columns(table: NDArray[np.float32] | None, rows: int, *, varies: bool) -> NDArray[np.float32] | None:
    if table is None:
        return None
    flat = table.reshape(rows, -1)
    return np.ascontiguousarray(flat if varies else flat[:, :1])


def _reach(nest: Sequence[Dim], column: int) -> int:
    return sum((dim.count - 1) * dim[column] for dim in nest)


def _room(bases: NDArray[np.int64], regions: Sequence[int], extent: int) -> int:
    """Of ``bases`` int64 ``[P, 2]``: region, offset. Offsets and strides of a checked spec are never negative."""
    lengths = np.asarray(regions, dtype=np.int64)[bases[:, 0]]
    return int((lengths - bases[:, 1]).min()) - extent
