"""The planners of one session: what a leg needs of the two specs is prepared at its first request only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvlink.layout import CacheSpec, GroupShare
from kvlink.plan import LegPlanner

_MAX_PLANNERS: Final = 8
"""A pair of ranks has one leg, and another when its engine's set of ranks is told; a peer may ask for any."""


class Planners:
    """Planners of one pair of ranks, by leg.

    Args:
        source: the source rank's spec.
        target: the target rank's spec.
    """

    def __init__(self, source: CacheSpec, target: CacheSpec) -> None:
        self._source, self._target = source, target
        self._by_leg: dict[tuple[GroupShare, ...], LegPlanner] = {}

    def of(self, leg_groups: Sequence[GroupShare]) -> LegPlanner:
        """The planner of a leg, made if need be.

        Raises:
            MismatchError, UnsupportedError: as `LegPlanner`.
        """
        leg = tuple(leg_groups)
        planner = self._by_leg.get(leg)
        if planner is None:
            planner = LegPlanner(self._source, self._target, leg)
            if len(self._by_leg) >= _MAX_PLANNERS:
                self._by_leg.clear()
            self._by_leg[leg] = planner
        return planner
