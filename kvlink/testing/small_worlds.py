"""``python -m kvlink.testing.small_worlds``: every interleaving of small worlds, and what was seen in them.

Each world is explored to the end: states, transitions, worlds at rest, violations and dead ends (a world at rest in
which somebody waits or something is not given back) are counted. Two kinds bound what is exhaustive:

- *free*: one source rank, one target rank; everything takes as long as it likes, which costs many states.
- *prompt*: two parts, and up to two faults of every kind at once. What is on its way arrives, in every order, before
  the clock moves on; that something is late is one of the faults, so at most two things are.

Nothing is sampled, and no state is left out by symmetry or by reordering; a step of a machine, being a function of its
arguments, is taken once and remembered.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from kvlink.testing.explorer import Exploration, explore
from kvlink.testing.protocol_model import ProtocolModel
from kvlink.testing.worlds import UNREPEATED, Scenario

ALL = frozenset({"lose", "duplicate", "fail", "lapse", "cancel", "crash", "silence", "elsewhere", "late"})
MAX_STATES = 20_000_000


def _free(*kinds: str, faults: int = 1) -> Scenario:
    return Scenario(kinds=frozenset(kinds), faults=faults)


FREE = {
    **{
        f"free: one {kind}": _free(kind)
        for kind in ("lose", "duplicate", "fail", "lapse", "cancel", "crash", "silence")
    },
    "free: two lost": _free("lose", faults=2),
    "free: turned elsewhere": Scenario(
        kinds=frozenset({"elsewhere"}), timing=UNREPEATED, deadline_seconds=4.0, ttl_seconds=4.0
    ),
}
PROMPT = {
    "two source ranks, two targets, two faults": Scenario(kinds=ALL, faults=2, prompt=True, sources=2),
    "two target ranks, two targets, two faults": Scenario(kinds=ALL, faults=2, prompt=True, readers=2),
    "two target ranks together, one fault": Scenario(kinds=ALL, faults=1, prompt=True, readers=2, together=True),
    "push, sealed late, two faults": Scenario(kinds=ALL, faults=2, prompt=True, push=True, sealed=False),
    "push, streamed, one fault": Scenario(kinds=ALL, faults=1, prompt=True, push=True, sealed=False, chunks=3),
    "push, streamed, fetched twice, one fault": Scenario(
        kinds=frozenset({"fail", "lapse", "late"}), prompt=True, push=True, sealed=False, chunks=2, fetches=2
    ),
    "push, two faults": Scenario(kinds=ALL, faults=2, prompt=True, push=True),
    "asked before the seal, two faults": Scenario(kinds=ALL, faults=2, prompt=True, sealed=False),
    "fetched twice, two faults": Scenario(kinds=ALL, faults=2, prompt=True, fetches=2),
}
WORLDS = {**PROMPT, **FREE}


@dataclass(frozen=True, slots=True)
class Seen:
    """One world, and what was seen in it."""

    name: str
    exploration: Exploration
    seconds: float

    def __str__(self) -> str:
        seen = self.exploration
        broken = 0 if seen.violation is None else 1
        dead = 1 if seen.violation is not None and seen.violation.what.startswith("5") else 0
        whole = "" if seen.complete else " NOT COMPLETE"
        return (
            f"{self.name:44} {seen.states:>9} states {seen.transitions:>9} transitions {seen.rests:>6} at rest "
            f"{broken} violations {dead} dead ends {self.seconds:6.1f} s{whole}"
        )


def see(name: str) -> Seen:
    """Explore one of `WORLDS`."""
    began = time.monotonic()
    exploration = explore(ProtocolModel(WORLDS[name]), max_states=MAX_STATES)
    return Seen(name, exploration, time.monotonic() - began)


def see_all(names: Iterable[str], workers: int = 2) -> Iterator[Seen]:
    """Explore worlds, one a process at a time, the first first; each as it is done, in their order."""
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(see, names)


def main(arguments: list[str] | None = None) -> int:
    """Explore all small worlds; ends with 1 if an invariant broke."""
    parser = argparse.ArgumentParser(prog="python -m kvlink.testing.small_worlds", description=main.__doc__)
    parser.add_argument("--workers", type=int, default=2, help="processes")
    parser.add_argument("worlds", nargs="*", metavar="WORLD", help="some of them, by the first words of their names")
    asked = parser.parse_args(arguments)
    names = [name for name in WORLDS if not asked.worlds or any(name.startswith(word) for word in asked.worlds)]
    states = transitions = wrong = 0
    for seen in see_all(names, asked.workers):
        print(seen, flush=True)  # noqa: T201 - a command's output
        states += seen.exploration.states
        transitions += seen.exploration.transitions
        if seen.exploration.violation is not None:
            print(seen.exploration.violation)  # noqa: T201 - as above
        wrong += seen.exploration.violation is not None or not seen.exploration.complete
    print(f"{len(names)} worlds, {states} states, {transitions} transitions, {wrong} violations")  # noqa: T201 - as above
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
