"""One leg's bytes as compact data, and the proof that none of them lies outside memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvlink import limits
from kvlink.errors import LayoutError
from kvlink.layout import DType

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Dim(NamedTuple):
    """One level of a segment's nest: ``count`` steps of ``source_stride`` and ``target_stride`` bytes.

    `kvlink.plan.plan_leg` makes counts of at least 2 and strides of at least 1.
    """

    count: int  # type: ignore[assignment]  # hides tuple.count, which a Dim has no use for
    source_stride: int
    target_stride: int


@dataclass(frozen=True, slots=True, eq=False)
class Conversion:
    """How a segment's elements change: ``value = source * source_scale``, then ``stored = value / target_scale``.

    Attributes:
        source: element type read.
        target: element type written.
        source_scales: float32 ``[P, S]``, P as in the segment's ``bases``; ``None`` for 1.
        target_scales: the same, for the target.
        scale_dim: index into ``nest`` of the dimension that walks the S columns (heads), which then has S steps;
            -1 where S is 1.
    """

    source: DType
    target: DType
    source_scales: NDArray[np.float32] | None = None
    target_scales: NDArray[np.float32] | None = None
    scale_dim: int = -1


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """``bases x pieces x nest x run_bytes``, walked outermost first; see docs/architecture.md, "Plan".

    Attributes:
        bases: int64 ``[P, 4]``, C-contiguous: source region, source offset, target region, target offset.
        pieces: int64 ``[N, 2]``, C-contiguous: source offset, target offset, added to every base.
        nest: dimensions, outermost first.
        run_bytes: bytes contiguous on both sides at the bottom. Where elements are converted, of the source.
        convert: how elements change; ``None``: bytes are copied.
    """

    bases: NDArray[np.int64]
    pieces: NDArray[np.int64]
    nest: tuple[Dim, ...]
    run_bytes: int
    convert: Conversion | None = None

    @property
    def target_run_bytes(self) -> int:
        """Bytes that a run takes at the target."""
        convert = self.convert
        return (
            self.run_bytes if convert is None else self.run_bytes // convert.source.itemsize * convert.target.itemsize
        )

    @property
    def run_count(self) -> int:
        """Runs of ``run_bytes``, before a walker merges those that touch because block ids are adjacent."""
        return len(self.bases) * len(self.pieces) * math.prod(dim.count for dim in self.nest)

    @property
    def total_bytes(self) -> int:
        """Payload bytes of this segment, as they lie at the source and on the wire."""
        return self.run_count * self.run_bytes


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class CopyPlan:
    """All bytes of one leg of one request, in wire order.

    Attributes:
        segments: in wire order.
        total_bytes: of payload.
        native: the native core's own copy, once somebody needed it (`kvlink.relayout.native_plan`).
    """

    segments: tuple[Segment, ...]
    total_bytes: int
    native: object = field(default=None, init=False, repr=False)

    @property
    def run_count(self) -> int:
        """Runs over all segments, before neighbouring blocks are merged."""
        return sum(segment.run_count for segment in self.segments)

    @property
    def converts(self) -> bool:
        """Whether any element changes on its way; else all bytes are copied as they are."""
        return any(segment.convert is not None for segment in self.segments)

    @property
    def nbytes(self) -> int:
        """Bytes of memory the plan's arrays take; an array that segments share counts once."""
        arrays: dict[int, int] = {}
        for segment in self.segments:
            convert = segment.convert
            scales = () if convert is None else (convert.source_scales, convert.target_scales)
            arrays.update(
                {id(array): array.nbytes for array in (segment.bases, segment.pieces, *scales) if array is not None}
            )
        return sum(arrays.values())


def check_plan(plan: CopyPlan, source_regions: Sequence[int], target_regions: Sequence[int]) -> None:
    """Prove that a plan touches nothing outside its regions, by its extremes: O(bases + pieces), never O(runs).

    Args:
        plan: any plan, wherever it came from.
        source_regions: length in bytes of each source region.
        target_regions: length in bytes of each target region. (A one-sided plan has target piece offsets of 0 and
            passes if its planes do.)

    Raises:
        LayoutError: shapes, dtypes, counts or totals are impossible, or a byte lies outside its region.
    """
    for index, segment in enumerate(plan.segments):
        where = f"plan.segments[{index}]"
        _check_shape(segment, where)
        for side, column, regions in (("source", 0, source_regions), ("target", 2, target_regions)):
            _check_extent(segment, where, side, column, np.asarray(regions, dtype=np.int64))
    total = sum(segment.total_bytes for segment in plan.segments)
    if total != plan.total_bytes:
        raise LayoutError(f"plan.total_bytes is {plan.total_bytes}, its segments move {total}; rebuild the plan")
    if total > limits.MAX_TRANSFER_BYTES:
        raise LayoutError(f"plan moves {total} bytes, over the bound of {limits.MAX_TRANSFER_BYTES}; split the request")


def _check_shape(segment: Segment, where: str) -> None:
    for name, array, columns in (("bases", segment.bases, 4), ("pieces", segment.pieces, 2)):
        if array.dtype != np.int64 or array.ndim != 2 or array.shape[1] != columns or not array.flags.c_contiguous:
            raise LayoutError(
                f"{where}.{name} is {array.dtype} {array.shape}; it must be C-contiguous int64 [n, {columns}]"
            )
        if len(array) == 0:
            raise LayoutError(f"{where}.{name} is empty; leave out a segment that moves nothing")
    if segment.run_bytes < 1 or any(dim.count < 1 for dim in segment.nest):
        raise LayoutError(f"{where} has runs of {segment.run_bytes} bytes under {segment.nest}; both must be positive")
    if segment.convert is not None:
        _check_conversion(segment, segment.convert, f"{where}.convert")


def _check_conversion(segment: Segment, convert: Conversion, where: str) -> None:
    if segment.run_bytes % convert.source.itemsize:
        raise LayoutError(f"{where}: runs of {segment.run_bytes} bytes hold no whole number of {convert.source.value}")
    if not -1 <= convert.scale_dim < len(segment.nest):
        raise LayoutError(f"{where}.scale_dim is {convert.scale_dim}; the nest has {len(segment.nest)} dimensions")
    columns = 1 if convert.scale_dim < 0 else segment.nest[convert.scale_dim].count
    for name, scales in (("source_scales", convert.source_scales), ("target_scales", convert.target_scales)):
        if scales is None:
            continue
        if scales.dtype != np.float32 or scales.shape != (len(segment.bases), columns) or not scales.flags.c_contiguous:
            raise LayoutError(
                f"{where}.{name} is {scales.dtype} {scales.shape}; it must be C-contiguous float32 "
                f"[{len(segment.bases)}, {columns}]"
            )
        if not (np.isfinite(scales) & (scales > 0)).all():
            raise LayoutError(f"{where}.{name} holds a scale that is not positive; state how values are stored")


def _check_extent(segment: Segment, where: str, side: str, column: int, lengths: NDArray[np.int64]) -> None:
    """Python's integers hold the sums, so that no stride can wrap an int64 into range."""
    strides = [dim[1 + column // 2] for dim in segment.nest]
    reaches = [(dim.count - 1) * stride for dim, stride in zip(segment.nest, strides, strict=True)]
    pieces = segment.pieces[:, column // 2]
    before = int(pieces.min()) + sum(min(0, reach) for reach in reaches)
    run_bytes = segment.run_bytes if column == 0 else segment.target_run_bytes
    after = int(pieces.max()) + sum(max(0, reach) for reach in reaches) + run_bytes
    regions, offsets = segment.bases[:, column], segment.bases[:, column + 1]
    if int(regions.min()) < 0 or int(regions.max()) >= len(lengths):
        raise LayoutError(f"{where} names {side} region {int(regions.max())}; the {side} has {len(lengths)} regions")
    for region in np.unique(regions):
        own = offsets[regions == region]
        low, high = int(own.min()) + before, int(own.max()) + after
        if low < 0 or high > int(lengths[region]):
            raise LayoutError(
                f"{where} reaches bytes {low} to {high} of {side} region {int(region)}, "
                f"which has {int(lengths[region])}; the plan and the cache do not belong together"
            )
