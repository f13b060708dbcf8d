"""How a plan's bytes best cross: one get a run, or gathered into chunks, by how long its runs are."""

from __future__ import annotations

from collections.abc import Collection

from kvlink import limits
from kvlink.plan.copyplan import CopyPlan

DIRECT = "direct"
"""Gets from source blocks into target blocks: where runs are long and nothing is converted."""
PACKED = "packed"
"""Short runs gathered into chunks by the source, scattered by the target."""


def choose_path(plan: CopyPlan, offered: Collection[str]) -> tuple[str | None, str]:
    """Choose among the paths that a transport offers.

    Args:
        plan: of one leg.
        offered: names of paths, such as ``{"direct"}``.

    Returns:
        The path, or ``None`` if none can move the plan; and why, in words.
    """
    if plan.converts:
        if PACKED in offered:
            return PACKED, "elements are converted on their way"
        return None, "elements must be converted, and a direct get moves bytes as they are"
    if plan.run_count == 0:
        return DIRECT, "nothing is moved"
    run_bytes = plan.total_bytes // plan.run_count
    long_runs = run_bytes >= limits.DIRECT_RUN_BYTES
    stated = f"runs of {_bytes(run_bytes)} {'reach' if long_runs else 'are below'} {_bytes(limits.DIRECT_RUN_BYTES)}"
    if long_runs and DIRECT in offered:
        return DIRECT, stated
    if PACKED in offered:
        return PACKED, stated
    return DIRECT, f"{stated}; gathered chunks would suit, and no transport offers them"


def _bytes(count: int) -> str:
    return f"{count} B" if count < 1024 else f"{count / 1024:.4g} KiB"
