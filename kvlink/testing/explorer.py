"""Visits every state that a model can reach, breadth first, and shows the shortest way to a broken one.

A model is pure: a first state, and for each state the moves out of it. States are hashable values. Nothing is
sampled: if `Exploration.complete`, what holds in every visited state holds in every interleaving of the model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

State = TypeVar("State", bound=Hashable)


class Move(NamedTuple):
    """One thing that may happen next.

    Attributes:
        label: what happens, for the trace.
        state: the state after it.
        fault: it need not happen: a state from which only faults lead on is at rest.
    """

    label: str
    state: Hashable
    fault: bool = False


class Model(Protocol[State]):
    """What the explorer explores."""

    def start(self) -> State:
        """The first state."""

    def pack(self, state: State) -> Hashable:
        """A small value that stands for the state and no other: what is remembered of it."""

    def unpack(self, packed: Hashable) -> State:
        """The state that it stands for."""

    def moves(self, state: State) -> Iterator[Move]:
        """Everything that may happen next."""

    def broken(self, state: State) -> str | None:
        """What must never be so and is, or ``None``."""

    def unsettled(self, state: State) -> str | None:
        """For a state at rest: what should have come to its end and has not, or ``None``."""


@dataclass(frozen=True, slots=True)
class Violation:
    """What broke, and the shortest way there."""

    what: str
    trace: tuple[str, ...]

    def __str__(self) -> str:
        steps = "\n".join(f"  {number:3}. {label}" for number, label in enumerate(self.trace, 1))
        return f"{self.what}\n{steps}"


@dataclass(frozen=True, slots=True)
class Exploration:
    """What was seen.

    Attributes:
        states: distinct states visited.
        transitions: moves taken.
        rests: states at rest.
        complete: every reachable state was visited.
        violation: the first found, with a shortest trace, or ``None``.
    """

    states: int
    transitions: int
    rests: int
    complete: bool
    violation: Violation | None

    def __str__(self) -> str:
        seen = f"{self.states} states, {self.transitions} transitions, {self.rests} at rest"
        if self.violation is not None:
            return f"{seen}\n{self.violation}"
        return seen if self.complete else f"{seen}; stopped at the limit"


def explore(model: Model[State], *, max_states: int = 1_000_000) -> Exploration:
    """Visit all states, stop at the first violation.

    Args:
        model: what to explore.
        max_states: where to stop; the result is then not ``complete``.
    """
    first = model.pack(model.start())
    came: dict[Hashable, tuple[Hashable, str] | None] = {first: None}
    queue: deque[Hashable] = deque([first])
    transitions = rests = 0
    while queue:
        packed = queue.popleft()
        state = model.unpack(packed)
        what = model.broken(state)
        at_rest = True
        for label, following, fault in model.moves(state) if what is None else ():
            transitions += 1
            at_rest = at_rest and fault
            follower = model.pack(following)  # type: ignore[arg-type]  # a model's moves lead to its own states
            if follower not in came:
                came[follower] = (packed, label)
                queue.append(follower)
        if what is None and at_rest:
            rests += 1
            what = model.unsettled(state)
        if what is not None:
            return Exploration(len(came), transitions, rests, False, Violation(what, _trace(came, packed)))
        if len(came) >= max_states:
            return Exploration(len(came), transitions, rests, False, None)
    return Exploration(len(came), transitions, rests, True, None)


def _trace(came: dict[Hashable, tuple[Hashable, str] | None], state: Hashable) -> tuple[str, ...]:
    labels: list[str] = []
    while (step := came[state]) is not None:
        state, label = step
        labels.append(label)
    return tuple(reversed(labels))
