"""Which bytes go where: legs between ranks, then one compact `CopyPlan` a leg. Pure, numpy only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from kvlink.layout import GroupShare

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Leg(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One (source rank, target rank) pair: what the target reads from the source.

    ``source`` and ``target`` are indices into the two sides' lists of `kvlink.layout.RankShare`.
    """

    source: int
    target: int
    groups: tuple[GroupShare, ...]


class Dim(NamedTuple):
    """One level of a segment's nest: ``count`` steps of ``source_stride`` and ``target_stride`` bytes."""

    count: int
    source_stride: int
    target_stride: int


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """``bases x pieces x nest x run_bytes``, walked outermost first; see docs/architecture.md, "Plan".

    Attributes:
        bases: int64 ``[P, 4]``: source region, source offset, target region, target offset.
        pieces: int64 ``[N, 2]``: source offset, target offset, added to every base.
        nest: dimensions, outermost first.
        run_bytes: bytes contiguous on both sides at the bottom.
    """

    bases: NDArray[np.int64]
    pieces: NDArray[np.int64]
    nest: tuple[Dim, ...]
    run_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class CopyPlan:
    """All bytes of one leg of one request, in wire order."""

    segments: tuple[Segment, ...]
    total_bytes: int
