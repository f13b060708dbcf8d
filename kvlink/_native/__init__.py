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
    raise UnavailableError(
        f"the native core of kvlink cannot be loaded ({error}); reinstall with `pip install .`, "
        "or build it in a source tree with scripts/build-native"
    ) from error

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["PlanLike", "SegmentLike", "native_plan"]


class SegmentLike(Protocol):
    """The shape of `kvlink.plan.Segment`, which lies above this package and is not imported."""

    @property
    def bases(self) -> NDArray[np.int64]: ...
    @property
    def pieces(self) -> NDArray[np.int64]: ...
    @property
    def nest(self) -> Sequence[tuple[int, int, int]]: ...
    @property
    def run_bytes(self) -> int: ...


class PlanLike(Protocol):
    """The shape of `kvlink.plan.CopyPlan`."""

    @property
    def segments(self) -> Sequence[SegmentLike]: ...


def native_plan(plan: PlanLike) -> _kvlink.Plan:
    """The native walker's own copy of a plan: proportional to its tables, not to its runs.

    Raises:
        LayoutError: a table has the wrong shape or a term is out of its bounds; the message names the segment.
    """
    try:
        return _kvlink.Plan(
            [
                (
                    np.ascontiguousarray(segment.bases, np.int64),
                    np.ascontiguousarray(segment.pieces, np.int64),
                    np.array(segment.nest, np.int64).reshape(-1, 3),
                    segment.run_bytes,
                )
                for segment in plan.segments
            ]
        )
    except (TypeError, ValueError, OverflowError) as error:
        raise LayoutError(f"not a plan the native core can walk: {error}") from error
