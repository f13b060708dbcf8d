"""Runs one of the protocol's machines: events in, actions out, one timer."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from kvlink.protocol import Action, Tick

State = TypeVar("State")
Event = TypeVar("Event")


class Machine(Generic[State, Event]):
    """A state, its step function, and the loop's clock.

    Events that an action gives rise to at once (a read that cannot start, an install that is done) wait their turn:
    a step is never taken inside another.

    Args:
        state: the first state.
        step, next_timer: the machine's.
        act: carries out one action.
        settle: is called after each step's actions, and after a step that has none.

    Attributes:
        state: the machine's state, replaced by each step.
    """

    def __init__(
        self,
        state: State,
        step: Callable[[State, Event | Tick, float], tuple[State, tuple[Action, ...]]],
        next_timer: Callable[[State], float | None],
        act: Callable[[Action], None],
        settle: Callable[[], None],
    ) -> None:
        self.state = state
        self._step = step
        self._next_timer = next_timer
        self._act = act
        self._settle = settle
        self._loop = asyncio.get_running_loop()
        self._events: deque[Event | Tick] = deque()
        self._stepping = False
        self._stopped = False
        self._timer: asyncio.TimerHandle | None = None

    def feed(self, event: Event) -> None:
        """Take one event."""
        self._events.append(event)
        self._run()

    def start(self, actions: tuple[Action, ...]) -> None:
        """Carry out the actions that came with the first state."""
        self._stepping = True
        try:
            for action in actions:
                self._act(action)
        finally:
            self._stepping = False
        self._run()

    def stop(self) -> None:
        """Take no more events, and stop the timer."""
        self._stopped = True
        self._events.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _run(self) -> None:
        if self._stepping or self._stopped:
            return
        self._stepping = True
        try:
            while self._events:
                self.state, actions = self._step(self.state, self._events.popleft(), self._loop.time())
                for action in actions:
                    self._act(action)
                self._settle()
        finally:
            self._stepping = False
        self._set_timer()

    def _set_timer(self) -> None:
        """A timer that rings too early stays, and is set anew when it rings: most requests end before that."""
        at = None if self._stopped else self._next_timer(self.state)
        if self._timer is not None:
            if at is not None and self._timer.when() <= at:
                return
            self._timer.cancel()
        self._timer = None if at is None else self._loop.call_at(at, self._ring)

    def _ring(self) -> None:
        self._timer = None
        at = self._next_timer(self.state)
        if at is not None and at <= self._loop.time():
            self._events.append(Tick())
        self._run()
