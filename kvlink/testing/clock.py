"""A clock that moves only when told to."""

from __future__ import annotations


class VirtualClock:
    """Seconds since an arbitrary start; give it wherever a clock is injected.

    >>> clock = VirtualClock()
    >>> clock.advance(2.5)
    >>> clock()
    2.5
    """

    def __init__(self, start_seconds: float = 0.0) -> None:
        self._now = start_seconds

    def __call__(self) -> float:
        """The time now, in seconds."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Let time pass.

        Raises:
            ValueError: ``seconds`` is negative.
        """
        if seconds < 0:
            raise ValueError(f"time does not go back by {-seconds} s")
        self._now += seconds
