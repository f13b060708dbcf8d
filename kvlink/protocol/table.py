"""State changes as data: a table gives every pair of phase and event its edges.

An edge names the phase it leads to, the guard under which it is taken, and the effect that makes the new state and
the actions. The first edge whose guard holds is taken. Since phases are named in the edges and nowhere else, the
diagrams in docs/protocol.md and the tests of totality read the very table that runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import msgspec

from kvlink.protocol.vocabulary import Timing


class Moment(NamedTuple):
    """When a step is taken, and by which clocks."""

    now: float
    timing: Timing


class Phased(Protocol):
    """A frozen state with a phase."""

    @property
    def phase(self) -> Any:  # noqa: ANN401 - each machine has its own enum
        """Where the state stands."""


State = TypeVar("State", bound=Phased)
Event = TypeVar("Event")
Event_contra = TypeVar("Event_contra", contravariant=True)

Guard = Callable[[State, Event_contra, Moment], bool]
Effect = Callable[[State, Event_contra, Moment], tuple[State, tuple[Any, ...]]]


@dataclass(frozen=True, slots=True)
class Edge(Generic[State, Event_contra]):
    """Where an event leads: ``to`` (``None``: the phase stays), if ``when`` holds, doing ``do``."""

    to: Enum | None = None
    do: Effect[State, Event_contra] | None = None
    when: Guard[State, Event_contra] | None = None


Edges = tuple[Edge[Any, Any], ...]
Row = Mapping[type, Edges]
Table = Mapping[Any, Row]

INERT: Edges = (Edge(),)
"""The event is known and changes nothing here."""


def on(event: type[Event], *edges: Edge[Any, Event]) -> Row:
    """One cell: what ``event`` does; a last edge without a guard is implied to be inert."""
    if not edges or edges[-1].when is not None:
        edges = (*edges, Edge())
    return {event: edges}


def inert(*events: type) -> Row:
    """Cells of events that change nothing in this phase."""
    return dict.fromkeys(events, INERT)


def row(*cells: Row) -> Row:
    """One phase's row. Raises ``ValueError`` if an event is given twice."""
    merged: dict[type, Edges] = {}
    for cell in cells:
        if twice := merged.keys() & cell.keys():
            raise ValueError(f"cells given twice: {sorted(event.__name__ for event in twice)}")
        merged |= cell
    return merged


def total(phases: type[Enum], events: tuple[type, ...], rows: Mapping[Any, Row]) -> Table:
    """Check at import that every pair of phase and event has its cell, and nothing else has.

    Raises:
        ValueError: a pair is missing or unknown; the message lists them.
    """
    for phase in phases:
        cells = rows.get(phase, {})
        missing = [event.__name__ for event in events if event not in cells]
        unknown = [event.__name__ for event in cells if event not in events]
        if missing or unknown:
            raise ValueError(f"{phase}: no cell for {missing}, no such event {unknown}")
    return rows


def fire(table: Table, state: State, event: object, moment: Moment) -> tuple[State, tuple[Any, ...]]:
    """Take the first edge whose guard holds."""
    for edge in table[state.phase][type(event)]:
        if edge.when is None or edge.when(state, event, moment):
            break
    actions: tuple[Any, ...] = ()
    if edge.do is not None:
        state, actions = edge.do(state, event, moment)
    if edge.to is not None:
        state = msgspec.structs.replace(state, phase=edge.to)  # type: ignore[type-var]  # all states are Structs
    return state, actions


def fire_each(
    table: Table, legs: tuple[State, ...], event: object, moment: Moment, concerned: Callable[[State], bool]
) -> tuple[tuple[State, ...], tuple[Any, ...]]:
    """Put an event to the legs it concerns; the very tuple comes back if none changed."""
    if len(legs) == 1:  # as most requests have
        if not concerned(legs[0]):
            return legs, ()
        only, actions = fire(table, legs[0], event, moment)
        return (legs if only is legs[0] else (only,)), actions
    changed: list[State] = []
    actions = ()
    for leg in legs:
        after, more = fire(table, leg, event, moment) if concerned(leg) else (leg, ())
        changed.append(after)
        actions += more
    if all(after is leg for after, leg in zip(changed, legs, strict=True)):
        return legs, actions
    return tuple(changed), actions


def settle(
    table: Table,
    events: tuple[type, ...],
    state: State,
    actions: tuple[Any, ...],
    signal: Callable[[State], object | None],
    moment: Moment,
) -> tuple[State, tuple[Any, ...]]:
    """Take what the legs say to their part, and what they together come to, until nothing is left to be said.

    Args:
        table: the part's.
        events: what among ``actions`` is an event of the part; the rest is for the driver.
        state: the part.
        actions: what its legs did.
        signal: what the legs together say now, or ``None``.
        moment: when.

    Returns:
        The part, and the driver's actions in order.
    """
    done: list[Any] = []
    while True:
        if actions:
            action, actions = actions[0], actions[1:]
        elif (action := signal(state)) is None:
            return state, tuple(done)
        if type(action) in events:
            state, more = fire(table, state, action, moment)
            actions = more + actions
        else:
            done.append(action)
