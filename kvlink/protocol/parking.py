"""Asks that came before their source could answer: bounded in number and time, per link. No I/O, no clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from kvlink import limits

Ask = TypeVar("Ask")


@dataclass(frozen=True, slots=True)
class _Spot(Generic[Ask]):
    attempt: int
    until: float
    ask: Ask


class ParkingLot(Generic[Ask]):
    """Parked asks by request key and target rank; the youngest attempt of a rank takes the place of its elder.

    Args:
        limit: asks kept at a time.
    """

    def __init__(self, limit: int = limits.MAX_PARKED_ASKS) -> None:
        self._limit = limit
        self._spots: dict[str, dict[str, _Spot[Ask]]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def park(self, key: str, peer: str, attempt: int, ask: Ask, until: float) -> bool:
        """Keep an ask, or go on keeping it: a repeat does not restart its time. ``False`` if the lot is full."""
        spots = self._spots.get(key, {})
        old = spots.get(peer)
        if old is not None and old.attempt >= attempt:
            return True
        if old is None and self._count >= self._limit:
            return False
        self._spots.setdefault(key, spots)[peer] = _Spot(attempt, until, ask)
        self._count += old is None
        return True

    def take(self, key: str) -> list[Ask]:
        """Remove and return the asks for ``key``: it can be answered now."""
        spots = self._spots.pop(key, {})
        self._count -= len(spots)
        return [spot.ask for spot in spots.values()]

    def drop(self, key: str, peer: str, attempt: int) -> None:
        """Its target said that this attempt is over."""
        spot = self._spots.get(key, {}).get(peer)
        if spot is not None and spot.attempt == attempt:
            self._remove(key, peer)

    def forget(self, peer: str) -> None:
        """The peer is lost: nobody waits any more."""
        for key in [key for key, spots in self._spots.items() if peer in spots]:
            self._remove(key, peer)

    def expire(self, now: float) -> list[Ask]:
        """Remove and return the asks whose time is over: refuse them as unknown."""
        late = [(key, peer) for key, spots in self._spots.items() for peer in spots if now >= spots[peer].until]
        return [self._remove(key, peer) for key, peer in late]

    def next_timer(self) -> float | None:
        """When `expire` will have something to do, or ``None``."""
        return min((spot.until for spots in self._spots.values() for spot in spots.values()), default=None)

    def _remove(self, key: str, peer: str) -> Ask:
        spots = self._spots[key]
        spot = spots.pop(peer)
        self._count -= 1
        if not spots:
            del self._spots[key]
        return spot.ask
