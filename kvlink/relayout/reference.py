"""A plan walked by nothing but nested loops: slow, and plainly what docs/architecture.md says.

The native walker, the digests and the planner are tested against it. It merges nothing and checks nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvlink.relayout.local import Side

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvlink.plan import CopyPlan


class Fragment(NamedTuple):
    """One pass of the innermost loop: bytes contiguous on both sides, not merged with their neighbours."""

    source_region: int
    source_offset: int
    target_region: int
    target_offset: int
    nbytes: int


def walk(plan: CopyPlan) -> Iterator[Fragment]:
    """All fragments of a plan, in wire order."""
    for segment in plan.segments:
        for source_region, source_base, target_region, target_base in segment.bases.tolist():
            for source_piece, target_piece in segment.pieces.tolist():
                for index in product(*(range(count) for count, _, _ in segment.nest)):
                    source, target = source_base + source_piece, target_base + target_piece
                    for step, (_, source_stride, target_stride) in zip(index, segment.nest, strict=True):
                        source += step * source_stride
                        target += step * target_stride
                    yield Fragment(source_region, source, target_region, target, segment.run_bytes)


def gather(plan: CopyPlan, side: Side, regions: Sequence[NDArray[np.uint8]]) -> bytes:
    """The plan's wire bytes as they lie on one side. ``regions[r]`` holds region r's bytes."""
    wire = bytearray()
    for fragment in walk(plan):
        source = side is Side.SOURCE
        region = fragment.source_region if source else fragment.target_region
        offset = fragment.source_offset if source else fragment.target_offset
        wire += regions[region][offset : offset + fragment.nbytes].tobytes()
    return bytes(wire)


def copy(plan: CopyPlan, sources: Sequence[NDArray[np.uint8]], targets: Sequence[NDArray[np.uint8]]) -> None:
    """Copy the plan's bytes from ``sources`` to ``targets``, region by region id. For plans that convert nothing."""
    assert not plan.converts, "these loops copy; what conversions are is for ml_dtypes to say, in the tests"
    for source_region, source, target_region, target, nbytes in walk(plan):
        targets[target_region][target : target + nbytes] = sources[source_region][source : source + nbytes]
