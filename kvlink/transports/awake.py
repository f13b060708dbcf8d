"""Waiting for descriptors without sleep, off the interpreter's lock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvlink._native import _kvlink

LATE: Final = -1
"""Nothing came in time."""
CROWDED: Final = -2
"""Somebody else computes on this CPU: sleep, and be woken when it is your turn."""


def wait_awake(descriptors: Sequence[int], seconds: float) -> int:
    """The place among ``descriptors`` of one that is readable, or `LATE`, or `CROWDED`.

    The interpreter's lock is free meanwhile, and the CPU is offered to whoever wants it at each look. A descriptor that
    is closed counts as readable.
    """
    return _kvlink.wait_awake(descriptors, seconds)
