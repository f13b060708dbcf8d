"""Slots past the last token of a request: zeroed where its target asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvlink import relayout

if TYPE_CHECKING:
    from kvlink.memory import Caches
    from kvlink.relayout import Gpu


def zero_uncovered(caches: Caches, gpu: Gpu | None, into: Sequence[Sequence[int]], tokens: int) -> None:
    """Zero what no read writes: so its turn is before anything is read, when an error is the request's alone.

    Args:
        caches: this rank's.
        gpu: where they lie, if not in host memory.
        into: the request's blocks, one list a group.
        tokens: one past the last position.
    """
    if gpu is None:
        relayout.zero_uncovered(caches.spec, [region.array for region in caches.regions], into, tokens)
        return
    stretches = relayout.uncovered_stretches(caches.spec, into, tokens)
    gpu.zero((caches.regions[region].address + offset, length) for region, offset, length in stretches)
