"""Loader of the native core, and the one conversion into it that both `transports` and `relayout` need.

``_kvlink`` is the extension (native/src/module.cpp), ``_kvlink.pyi`` its generated stub (scripts/stubs).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from kvlink.errors import LayoutError, UnavailableError

try:
    from kvlink._native import _kvlink
except ImportError as error:
    why = f"{__path__[0]} has none" if error.name == __name__ else str(error)  # not there, or there and broken
    raise UnavailableError(
        f"the native core of kvlink cannot be loaded ({why}); install it with `pip install .` and leave the source "
        "tree, whose kvlink folder hides the installed one, or build it there with scripts/build-native"
    ) from error

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["ConversionLike", "PlanLike", "SegmentLike", "native_plan"]

ConversionTables = tuple[str, str, "NDArray[np.float32] | None", "NDArray[np.float32] | None", int, int]


class ConversionLike(Protocol):
    """The shape of `kvlink.plan.Conversion`, which lies above this package and is not imported."""

    @property
    def source(self) -> str: ...
    @property
    def target(self) -> str: ...
    @property
    def source_scales(self) -> NDArray[np.float32] | None: ...
    @property
    def target_scales(self) -> NDArray[np.float32] | None: ...
    @property
    def scale_dim(self) -> int: ...


class SegmentLike(Protocol):
    """The shape of `kvlink.plan.Segment`, likewise."""

    @property
    def bases(self) -> NDArray[np.int64]: ...
    @property
    def pieces(self) -> NDArray[np.int64]: ...
    @property
    def nest(self) -> Sequence[tuple[int, int, int]]: ...
    @property
    def run_bytes(self) -> int: ...
    @property
    def convert(self) -> ConversionLike | None: ...


class PlanLike(Protocol):
    """The shape of `kvlink.plan.CopyPlan`."""

    @property
    def segments(self) -> Sequence[SegmentLike]: ...


def native_plan(plan: PlanLike) -> _kvlink.Plan:
    """The native walker's own copy of a plan: proportional to its tables, not to its runs. Made once, kept with it.

    Raises:
        LayoutError: a table has the wrong shape or a term is out of its bounds; the message names the segment.
    """
    if isinstance(kept := getattr(plan, "native", None), _kvlink.Plan):
        return kept
    try:
        made = _kvlink.Plan(
            [
                (
                    np.ascontiguousarray(segment.bases, np.int64),
                    np.ascontiguousarray(segment.pieces, np.int64),
                    np.array(segment.nest, np.int64).reshape(-1, 3),
                    segment.run_bytes,
                    None if segment.convert is None else _conversion_tables(segment.convert, segment.nest),
                )
                for segment in plan.segments
            ]
        )
    except (TypeError, ValueError, OverflowError) as error:
        raise LayoutError(f"not a plan the native core can walk: {error}") from error
    if hasattr(plan, "native"):
        object.__setattr__(plan, "native", made)
    return made


def _conversion_tables(convert: ConversionLike, nest: Sequence[tuple[int, int, int]]) -> ConversionTables:
    """Scales as the kernels multiply by them: those of the target inverted, once, in float32."""
    source_scales, target_scales, factors = convert.source_scales, convert.target_scales, None
    if source_scales is not None:
        source_scales = np.ascontiguousarray(source_scales, np.float32)
    if target_scales is not None:
        with np.errstate(divide="ignore", over="ignore"):
            factors = np.ascontiguousarray(np.float32(1) / target_scales.astype(np.float32))
        if not np.isfinite(factors).all():
            raise ValueError("a target scale has no float32 inverse")
    columns = 1 if convert.scale_dim < 0 else nest[convert.scale_dim][0]
    return str(convert.source), str(convert.target), source_scales, factors, columns, convert.scale_dim
