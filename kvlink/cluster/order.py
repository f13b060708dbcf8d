"""Who goes first: one rule for every queue of this room."""

from __future__ import annotations


def precedence(
    *, share: float, tenants: int, priority: int, deadline: float, arrival: int
) -> tuple[bool, int, float, int]:
    """Sort key; the smallest goes first.

    Tenants below their fair share (an equal part for each) before those at or above it, then the higher priority,
    then the earlier deadline, then who came first.

    Args:
        share: part of the room, 0 to 1, that the request's tenant holds.
        tenants: that hold or wait.
        priority: higher goes first.
        deadline: on the caller's clock.
        arrival: a number that rises.
    """
    return share >= 1 / tenants, -priority, deadline, arrival
