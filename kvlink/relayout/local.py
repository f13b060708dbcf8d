"""A plan on this process's own memory, run by the native core: copies, conversions and digests.

A region is ``(address, length)`` in bytes; a side's regions are listed by region id. The caller keeps them mapped
until a call returns; every call checks first that its plan stays inside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING

from kvlink import _native
from kvlink._native import _kvlink
from kvlink.errors import LayoutError

if TYPE_CHECKING:
    from kvlink.plan import CopyPlan

NativePlan = _kvlink.Plan
"""A plan in the native walker's form: immutable, and usable from any thread."""
LocalRegion = tuple[int, int]
"""Address and length in bytes."""


class Side(IntEnum):
    """Which side of a plan is meant."""

    SOURCE = _kvlink.SOURCE
    TARGET = _kvlink.TARGET


def native_plan(plan: CopyPlan) -> NativePlan:
    """The native walker's form of ``plan``. Costs what the plan's tables cost, not what its runs would.

    Raises:
        LayoutError: a table has the wrong shape or a term is out of its bounds; the message names the segment.
    """
    return _native.native_plan(plan)


def digest_leaves(
    plan: NativePlan, side: Side, regions: Sequence[LocalRegion], first_leaf: int = 0, count: int | None = None
) -> bytes:
    """Leaf digests of the wire bytes as they lie on one side, 8 little-endian bytes each.

    The GIL is released. The bytes must be at rest; other threads may read them.

    Args:
        plan: from `native_plan`.
        side: whose bytes are read.
        regions: that side's regions.
        first_leaf: index of the first leaf wanted.
        count: leaves wanted; ``None`` for all from ``first_leaf``.

    Raises:
        LayoutError: the plan leaves a region, the leaves are outside the plan, or the target's are asked for of a plan
            that converts (the target does not hold the wire's bytes); nothing was read.
    """
    try:
        return _kvlink.digest_leaves(plan, side, regions, first_leaf, count)
    except ValueError as error:
        raise LayoutError(str(error), stage="digest") from error


def digest_root(leaves: bytes) -> int:
    """Root digest over all leaf digests of a transfer, in order.

    Raises:
        LayoutError: ``leaves`` is not a whole number of digests.
    """
    try:
        return _kvlink.digest_root(leaves)
    except ValueError as error:
        raise LayoutError(str(error), stage="digest") from error


def move_variants() -> tuple[str, ...]:
    """Instruction sets this CPU can move and convert with, fastest (the default) first. All write the same bytes."""
    return tuple(_kvlink.move_variants())


def move_local(  # noqa: PLR0913 - two sides, a range, and how
    plan: NativePlan,
    source_regions: Sequence[LocalRegion],
    target_regions: Sequence[LocalRegion],
    begin: int = 0,
    end: int | None = None,
    *,
    threads: int = 1,
    variant: str | None = None,
) -> None:
    """Move wire bytes ``[begin, end)`` from the source's regions to the target's, converting where the plan says so.

    The GIL is released. No run may overlap its own target. Not cancellable: bound ``end - begin`` where that matters.
    Where the range cuts an element that is converted, the element belongs to the range that has its first byte, so
    that ranges may be cut anywhere.

    Args:
        plan: from `native_plan`.
        source_regions: the source's regions, read.
        target_regions: the target's regions, written inside the plan's runs only.
        begin: first wire byte.
        end: wire byte after the last; ``None`` for the plan's end.
        threads: at most this many work on it, the caller's among them.
        variant: one of `move_variants`; ``None`` for the fastest.

    Raises:
        LayoutError: the plan leaves a region on either side, or the range the plan; nothing was moved.
    """
    try:
        _kvlink.move(plan, source_regions, target_regions, begin, end, threads, variant)
    except ValueError as error:
        raise LayoutError(str(error), stage="copy") from error


def move_and_digest(  # noqa: PLR0913 - two sides, a range, and how
    plan: NativePlan,
    source_regions: Sequence[LocalRegion],
    target_regions: Sequence[LocalRegion],
    first_leaf: int = 0,
    count: int | None = None,
    *,
    threads: int = 1,
    variant: str | None = None,
) -> bytes:
    """`move_local` of whole leaves that digests their wire bytes on the way: memory is read once.

    Args:
        plan: from `native_plan`.
        source_regions: the source's regions, read; at rest until the call returns.
        target_regions: the target's regions, written inside the plan's runs only.
        first_leaf: index of the first leaf.
        count: leaves; ``None`` for all from ``first_leaf``.
        threads: at most this many work on it, the caller's among them.
        variant: one of `move_variants`; ``None`` for the fastest.

    Returns:
        Digests of the leaves, of the source's bytes, 8 little-endian bytes each.

    Raises:
        LayoutError: the plan leaves a region on either side, or the leaves are outside the plan; nothing was moved.
    """
    try:
        return _kvlink.move_and_digest(plan, source_regions, target_regions, first_leaf, count, threads, variant)
    except ValueError as error:
        raise LayoutError(str(error), stage="copy") from error
