"""Virtual time: an agenda of what happens next, processes with clocks of their own, and what runs a machine in one."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any, Generic, TypeVar

from kvlink.protocol import Tick

State = TypeVar("State")
Doing = Callable[..., Any]


class InvariantError(AssertionError):
    """What must never be so, and is. The text begins with the invariant's number in docs/protocol.md."""


class Agenda:
    """Everything that is going to happen, in the order of true time, which no process knows."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._heap: list[tuple[float, int, Process | None, Doing, tuple[Any, ...]]] = []
        self._serial = itertools.count()

    def after(self, seconds: float, process: Process | None, do: Doing, *args: object) -> None:
        """Have ``process`` (``None``: the world itself) do something, unless it is dead by then."""
        heappush(self._heap, (self.now + seconds, next(self._serial), process, do, args))

    def run(self, until: float) -> bool:
        """Let things happen until ``until`` or until nothing is left to happen; whether the latter."""
        heap = self._heap
        while heap and heap[0][0] <= until:
            self.now, _, process, do, args = heappop(heap)
            self.events += 1
            if process is None or process.takes(do, args):
                do(*args)
        return not heap


class Process:
    """A process: its clock drifts, it may be stopped and resumed, and it may die.

    Attributes:
        name: of this incarnation.
        alive: it has not died.
        stopped: it is stopped: what happens to it waits until it is resumed, in any order.
    """

    def __init__(self, agenda: Agenda, name: str, rate: float, offset: float) -> None:
        self.agenda = agenda
        self.name = name
        self.rate = rate
        self.alive = True
        self.stopped = False
        self._offset = offset
        self._floor = 0.0
        self._stopped_at = 0.0
        self._stopped_seconds = 0.0
        self._backlog: list[tuple[Doing, tuple[Any, ...]]] = []

    @property
    def running(self) -> bool:
        """It lives and is not stopped."""
        return self.alive and not self.stopped

    def clock(self) -> float:
        """Its own monotonic clock."""
        self._floor = max(self._floor, self._offset + self.rate * self.agenda.now)
        return self._floor

    def running_clock(self) -> float:
        """As `clock`, less the time that it was stopped: what a bound on its own work may be held against."""
        return self.clock() - self._stopped_seconds

    def post(self, seconds: float, do: Doing, *args: object) -> None:
        """Have it do something after ``seconds`` of true time."""
        self.agenda.after(seconds, self, do, *args)

    def wake_at(self, local: float, do: Callable[[float], None]) -> None:
        """Call ``do(local)`` when its own clock says ``local``."""
        self.post(max(0.0, (local - self.clock()) / self.rate), do, local)

    def reach(self, local: float) -> None:
        """Its clock has come to ``local``, whatever the last bit of a float says."""
        self._floor = max(self._floor, local)

    def takes(self, do: Doing, args: tuple[Any, ...]) -> bool:
        """Whether it can do something now; if it is stopped, that waits."""
        if self.stopped and self.alive:
            self._backlog.append((do, args))
        return self.running

    def stop(self) -> None:
        """SIGSTOP."""
        self.stopped, self._stopped_at = True, self.agenda.now

    def resume(self, shuffle: Callable[[list[Any]], None]) -> None:
        """SIGCONT: what waited happens at once, in any order."""
        self.stopped = False
        self._stopped_seconds += (self.agenda.now - self._stopped_at) * self.rate
        backlog, self._backlog = self._backlog, []
        shuffle(backlog)
        for do, args in backlog:
            self.post(0.0, do, *args)

    def crash(self) -> None:
        """SIGKILL."""
        self.alive = False
        self._backlog.clear()


class Runner(Generic[State]):
    """Runs one of the protocol's machines in a process: as `kvlink.link.machine.Machine`, on virtual time.

    Args:
        process: where it runs.
        machine: ``kvlink.protocol.source`` or ``target``.
        state: its first state.
        act: carries out one action.
        watch: is shown each step before its actions are carried out.
        settle: is called after them: a closed machine is forgotten there.
    """

    def __init__(
        self,
        process: Process,
        machine: Any,  # noqa: ANN401 - a module: looked up at each step, so that tests can change it
        state: State,
        act: Callable[[Any], None],
        watch: Callable[[Any, State, tuple[Any, ...]], None],
        settle: Callable[[], None],
    ) -> None:
        self.state = state
        self._process = process
        self._machine = machine
        self._act = act
        self._watch = watch
        self._settle = settle
        self._events: deque[Any] = deque()
        self._stepping = False
        self._stopped = False
        self._timer_at: float | None = None

    def start(self, actions: tuple[Any, ...]) -> None:
        """Carry out what came with the first state."""
        self._stepping = True
        for action in actions:
            self._act(action)
        self._stepping = False
        self._run()

    def feed(self, event: object) -> None:
        """Take one event; a step is never taken inside another."""
        self._events.append(event)
        self._run()

    def stop(self) -> None:
        """The machine is closed."""
        self._stopped = True

    def _run(self) -> None:
        if self._stepping or self._stopped:
            return
        self._stepping = True
        while self._events and not self._stopped:
            event = self._events.popleft()
            self.state, actions = self._machine.step(self.state, event, self._process.clock())
            self._watch(event, self.state, actions)
            for action in actions:
                self._act(action)
            self._settle()
        self._stepping = False
        self._set_timer()

    def _set_timer(self) -> None:
        at = None if self._stopped else self._machine.next_timer(self.state)
        if at != self._timer_at:
            self._timer_at = at
            if at is not None:
                self._process.wake_at(at, self._tick)

    def _tick(self, at: float) -> None:
        if self._timer_at != at or self._stopped:
            return
        self._timer_at = None
        self._process.reach(at)
        self.feed(Tick())
        if self._timer_at is not None and self._timer_at <= at:
            raise InvariantError(f"5: the timer of {at:g} at {self._process.name} is due, and nothing comes of it")
