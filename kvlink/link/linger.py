"""Waiting awake for answers that are on their way: a sleeper takes about as long to wake as they take to come.

It costs no turn that anybody else wants: other events of the loop are looked at between two bursts, the interpreter's
lock is free during one, the CPU is offered at every look, and nothing is waited for like this once somebody was seen to
compute on it, while many requests fly (something is always ready then), or when nothing is under way.
"""

from __future__ import annotations

import asyncio

from kvlink import limits
from kvlink.transports.awake import CROWDED, LATE, wait_awake


class Linger:
    """Keeps a loop awake for `limits.LINGER_SECONDS` after something was said that is answered soon.

    Args:
        enabled: whether at all; not on a loop that somebody runs a few turns at a time.
    """

    def __init__(self, *, enabled: bool = True) -> None:
        self._loop = asyncio.get_running_loop()
        self._awaited: dict[int, float] = {}
        self._looking = False
        self._enabled = enabled
        self._not_before = 0.0

    def on(self, descriptor: int) -> None:
        """The answer makes ``descriptor`` readable; negative: it has none."""
        if not self._enabled or descriptor < 0:
            return
        now = self._loop.time()
        self._awaited[descriptor] = now + limits.LINGER_SECONDS
        if not self._looking and now >= self._not_before:
            self._looking = True
            self._loop.call_soon(self._look)

    def forget(self, descriptor: int) -> None:
        """It will be closed."""
        self._awaited.pop(descriptor, None)

    def _look(self) -> None:
        """One burst. Whoever reads what has come has the loop's next turn."""
        self._looking = False
        awaited, now = self._awaited, self._loop.time()
        for descriptor in [descriptor for descriptor, until in awaited.items() if now >= until]:
            del awaited[descriptor]
        if not awaited or len(awaited) > limits.MAX_LINGERED:
            awaited.clear()
            return
        descriptors = list(awaited)
        found = wait_awake(descriptors, limits.LINGER_BURST_SECONDS)
        if found == CROWDED:
            awaited.clear()
            self._not_before = now + limits.LINGER_PAUSE_SECONDS
        elif found != LATE:
            awaited.pop(descriptors[found], None)
        if awaited:
            self._looking = True
            self._loop.call_soon(self._look)
