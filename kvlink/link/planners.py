"""The planners of one session: what a leg needs of the two specs is prepared at its first request only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeVar

from kvlink.layout import CacheSpec, GroupShare
from kvlink.plan import IncrementPlanner, LegPlanner

P = TypeVar("P")

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
        self._of_streams: dict[tuple[GroupShare, ...], IncrementPlanner] = {}

    @property
    def only(self) -> LegPlanner | None:
        """The planner of whole legs, if one leg was planned and no other."""
        return next(iter(self._by_leg.values())) if len(self._by_leg) == 1 else None

    def knows(self, leg_groups: Sequence[GroupShare]) -> bool:
        """Whether a leg was planned before: then the two specs agree, and what is left to refuse is little."""
        return tuple(leg_groups) in self._by_leg

    def of(self, leg_groups: Sequence[GroupShare]) -> LegPlanner:
        """The planner of a leg that is read at once, made if need be.

        Raises:
            MismatchError, UnsupportedError: as `LegPlanner`.
        """
        leg = tuple(leg_groups)
        planner = self._by_leg.get(leg)
        if planner is None:
            planner = LegPlanner(self._source, self._target, leg)
            _keep(self._by_leg, leg, planner)
        return planner

    def of_stream(self, leg_groups: Sequence[GroupShare]) -> IncrementPlanner:
        """The planner of a leg that is read increment by increment, made if need be.

        Raises:
            MismatchError, UnsupportedError: as `LegPlanner`.
        """
        leg = tuple(leg_groups)
        planner = self._of_streams.get(leg)
        if planner is None:
            self.of(leg)  # what is wrong with the leg is said before any increment
            planner = IncrementPlanner(self._source, self._target, leg)
            _keep(self._of_streams, leg, planner)
        return planner


def _keep(planners: dict[tuple[GroupShare, ...], P], leg: tuple[GroupShare, ...], planner: P) -> None:
    if len(planners) >= _MAX_PLANNERS:
        planners.clear()
    planners[leg] = planner
