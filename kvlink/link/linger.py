"""Waiting awake for answers that are on their way: a sleeper takes about as long to wake as they take to come.

It costs no turn that anybody else wants: other events of the loop are looked at between two bursts, the interpreter's
lock is free during one, the CPU is offered at every look, and nothing is waited for like this once somebody was seen to
compute on it, while many requests fly (something is always ready then), or when nothing is under way.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from kvlink import limits
from kvlink.transports.awake import CROWDED, LATE, wait_awake


class Awaited(Protocol):
    """Where an answer comes in."""

    @property
    def descriptor(self) -> int:
        """Readable when it is there; negative: none."""

    def readable(self) -> None:
        """Take in what is there; nothing happens if that is nothing."""


class Linger:
    """Keeps a loop awake for `limits.LINGER_SECONDS` after something was said that is answered soon.

    Args:
        enabled: whether at all; not on a loop that somebody runs a few turns at a time.
    """

    def __init__(self, *, enabled: bool = True) -> None:
        self._loop = asyncio.get_running_loop()
        self._until: dict[Awaited, float] = {}
        self._looking = False
        self._enabled = enabled
        self._not_before = 0.0

    def on(self, awaited: Awaited) -> None:
        """An answer will come in there."""
        if not self._enabled or awaited.descriptor < 0:
            return
        now = self._loop.time()
        if now < self._not_before:
            return
        self._until[awaited] = now + limits.LINGER_SECONDS
        self._look_soon()

    def forget(self, awaited: Awaited) -> None:
        """It will be closed."""
        self._until.pop(awaited, None)

    def _look_soon(self) -> None:
        if not self._looking:
            self._looking = True
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        """One burst. What has come is taken in at once, not in the loop's next turn."""
        self._looking = False
        until, now = self._until, self._loop.time()
        waiting = [awaited for awaited, end in until.items() if now < end]
        if len(waiting) < len(until):
            self._until = until = {awaited: until[awaited] for awaited in waiting}
        if not 0 < len(waiting) <= limits.MAX_LINGERED:
            until.clear()
            return
        self._look_soon()
        found = wait_awake([awaited.descriptor for awaited in waiting], limits.LINGER_BURST_SECONDS)
        if found == CROWDED:
            until.clear()
            self._not_before = now + limits.LINGER_PAUSE_SECONDS
        elif found != LATE:
            del until[waiting[found]]
            waiting[found].readable()
