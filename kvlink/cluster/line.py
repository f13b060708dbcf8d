"""Requests that wait for a place in a fleet: one line for all workers, in the order of `precedence`.

The head is found in the time of one look at each tenant, however long the line is. Nobody overtakes a head that does
not fit anywhere yet, so a large request is not starved by small ones.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from kvlink.cluster.order import precedence


class Line:
    """Who waits. Not thread-safe: one loop owns it."""

    def __init__(self) -> None:
        self._heaps: dict[str | None, list[tuple[int, float, int, str]]] = {}
        self._waiting: dict[str, tuple[str | None, int]] = {}
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, key: str) -> bool:
        return key in self._waiting

    def join(self, key: str, *, tenant: str | None = None, priority: int = 0, deadline: float = float("inf")) -> None:
        """Stand in line. ``key`` must not stand in it already."""
        assert key not in self._waiting, "the caller refuses a second request under one key"
        self._arrivals += 1
        self._waiting[key] = (tenant, self._arrivals)
        heapq.heappush(self._heaps.setdefault(tenant, []), (-priority, deadline, self._arrivals, key))

    def leave(self, key: str) -> bool:
        """Step out, admitted or given up; whether it stood in line."""
        return self._waiting.pop(key, None) is not None

    def head(self, share_of: Callable[[str | None], float]) -> str | None:
        """Whose turn it is.

        Args:
            share_of: part of the fleet's room, 0 to 1, that a tenant holds now.
        """
        first = None
        for tenant in list(self._heaps):
            heap = self._heaps[tenant]
            while heap and self._waiting.get(heap[0][3]) != (tenant, heap[0][2]):
                heapq.heappop(heap)  # left while it waited
            if not heap:
                del self._heaps[tenant]
                continue
            negative, deadline, arrival, key = heap[0]
            rank = precedence(
                share=share_of(tenant), tenants=len(self._heaps), priority=-negative, deadline=deadline, arrival=arrival
            )
            if first is None or rank < first[0]:
                first = rank, key
        return None if first is None else first[1]
