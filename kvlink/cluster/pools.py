"""Pools of workers: which serve, in which order a new revision reaches them, and when one changes sides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvlink import limits


class PoolState(StrEnum):
    """Of a worker in its pool. Only *active* ones get new requests; *draining* ones finish what they have."""

    ACTIVE = "active"
    DRAINING = "draining"
    DRAINED = "drained"


def rollout_waves(pools: Sequence[Sequence[str]]) -> tuple[tuple[str, ...], ...]:
    """The order in which workers get a new revision: two waves, each with about half of every pool.

    While the first is away the rest still pairs prefill and decode of the old revision; then the first pairs with
    itself on the new one. A pool of one worker is in the first wave: there its requests wait until it is back.

    Args:
        pools: names of the workers of each pool.

    Returns:
        One or two waves of names; empty ones are left out.
    """
    halves = [(pool[: (len(pool) + 1) // 2], pool[(len(pool) + 1) // 2 :]) for pool in pools]
    waves = (tuple(name for half in halves for name in half[wave]) for wave in (0, 1))
    return tuple(wave for wave in waves if wave)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLoad:
    """One pool at a moment.

    Attributes:
        pressure: how busy it is: 1 is just enough; work that waits for more than the pool can do counts above it.
        active: names of its active workers, the least loaded first.
    """

    pressure: float
    active: tuple[str, ...]


def worker_to_move(
    prefill: PoolLoad,
    decode: PoolLoad,
    *,
    pressed: float = limits.POOL_PRESSED,
    idle: float = limits.POOL_IDLE,
) -> str | None:
    """Which worker should leave its pool for the other, or ``None``.

    A worker moves where one pool is at or above ``pressed`` and the other at or below ``idle``; the gap between the two
    bounds keeps it from moving back at once. The last active worker of a pool never leaves.
    """
    for needy, donor in ((prefill, decode), (decode, prefill)):
        if needy.pressure >= pressed and donor.pressure <= idle and len(donor.active) > 1:
            return donor.active[0]
    return None
