#!/usr/bin/env python3
"""What a saturated link costs a computation on the same cores, beyond the CPU time that it takes.

    benchmarks/beside.py [--transport stream|ucx|shared] [--memory engine|kvlink] [--seconds 1] [--rounds 9]
                         [--json FILE]

A process computes (small matrix products, one thread) and counts. By turns, others use the same cores:

- the source and the target of a link that moves one request after the other without a pause;
- plain *movers* that only copy memory, one for each thread of the link that worked, held to the share of a core that
  this thread has just used. What the computation does beside the link, over what it does beside these, is what the
  link's way of waiting costs (`ratio`): 1 is nothing.
- two movers that never pause. What the computation does beside the link, over what it does beside these, says whether
  a link takes more than two busy threads would (`ratio_busy`): 1 or more is no more.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import mmap
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from ends import Cache, Source, Told, add_link_options, config, count, duration, link_flags, open_target
from record import destination, taken_on, write

import kvlink

SCHEMA = "kvlink.beside/1"
CACHE = Cache(model="beside", layers=16, heads=4, slots=16, blocks=512)
BLOCKS = tuple(range(CACHE.blocks))
"""256 MiB, of which a request is all."""
MATRIX = 96
COPY_BYTES = 1 << 20
POOL_BYTES = 64 << 20
SLICE_SECONDS = 0.001
MOVERS = 6


def caches(options: argparse.Namespace, engine: str) -> kvlink.Caches:
    return CACHE.allocate(engine, shareable=options.memory == "kvlink")


# --- the processes ---------------------------------------------------------------------------------------------------


def compute(shared: mmap.mmap) -> None:
    """Counts products in the first word, for ever."""
    count = np.frombuffer(shared, np.uint64)
    left, right = np.ones((2, MATRIX, MATRIX), np.float32)
    out = np.empty_like(left)
    while True:
        np.matmul(left, right, out=out)
        count[0] += 1


def mover(shared: mmap.mmap, number: int) -> None:
    """Copies, for the share of a core that word ``1 + number`` says in millionths; nothing while it is 0."""
    wanted = np.frombuffer(shared, np.uint64)
    here, there = np.ones((2, POOL_BYTES), np.uint8)
    wanted[1 + MOVERS + number] = 1  # all memory is touched
    places = itertools.cycle(range(0, POOL_BYTES, COPY_BYTES))
    started, spent = time.monotonic(), time.process_time()
    share = 0.0
    while True:
        if share != (told := float(wanted[1 + number]) / 1e6):
            share, started, spent = told, time.monotonic(), time.process_time()
        used, elapsed = time.process_time() - spent, time.monotonic() - started
        if used >= share * elapsed:
            time.sleep(SLICE_SECONDS)
            continue
        at = next(places)
        there[at : at + COPY_BYTES] = here[at : at + COPY_BYTES]


async def serve(options: argparse.Namespace) -> None:
    """The source: each line asks for an offer of the whole cache."""
    async with kvlink.open_link(config(options), caches(options, "source")) as link:
        print("ready", flush=True)
        source = Source(link, CACHE.slots)
        loop = asyncio.get_running_loop()
        for number in itertools.count():
            if not await loop.run_in_executor(None, sys.stdin.readline):
                return
            offer, _ = source.publish(str(number), BLOCKS)
            print(json.dumps(offer.to_params()), flush=True)


async def read(options: argparse.Namespace) -> None:
    """The target: each line is an offer to fetch; answers with its bytes."""
    loop = asyncio.get_running_loop()
    async with open_target(options, caches(options, "target")) as link:
        print("ready", flush=True)
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            offer = kvlink.Offer.from_params(json.loads(line))
            result = await link.fetch(offer, (BLOCKS,), deadline_seconds=60)
            link.release(offer.key)
            print(result.bytes, flush=True)


class Child(Told):
    """One process of this program, and the CPU time that it has used."""

    def __init__(self, options: argparse.Namespace, role: str) -> None:
        told = ["--role", role, "--shared", options.shared, "--memory", options.memory, *link_flags(options)]
        one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        super().__init__([sys.executable, __file__, *told], os.environ | one_thread)

    def cpu_seconds(self) -> dict[int, float]:
        """Of each thread."""
        tasks = Path(f"/proc/{self.process.pid}/task").iterdir()
        return {int(task.name): int((task / "schedstat").read_text().split()[0]) / 1e9 for task in tasks}


def shares_of_a_core(before: dict[int, float], after: dict[int, float], elapsed: float) -> list[float]:
    """Of each thread that lives, the busiest first."""
    return sorted(((spent - before.get(thread, 0)) / elapsed for thread, spent in after.items()), reverse=True)


# --- turns -----------------------------------------------------------------------------------------------------------


class Turns:
    """The shared words: the computation's count, the shares that movers are to use, and whether they are ready."""

    def __init__(self, options: argparse.Namespace, shared: mmap.mmap) -> None:
        self.words = np.frombuffer(shared, np.uint64)
        self.seconds = options.seconds
        self.source = Child(options, "source")
        self.target = Child(options, "target")
        self.source.hear()
        self.target.hear()
        self.movers = [Child(options, f"mover{number}") for number in range(MOVERS)]
        self.compute = Child(options, "compute")
        while not all(self.words[1 + MOVERS : 1 + 2 * MOVERS]) or not self.words[0]:
            time.sleep(0.01)
        self.set_movers([])
        self.children = [self.source, self.target, *self.movers, self.compute]

    def beside_link(self) -> dict[str, float | list[float]]:
        """Requests one after the other until time is up; products a second, and the shares that both ends used."""
        ends = {"source": self.source, "target": self.target}
        before = {name: child.cpu_seconds() for name, child in ends.items()}
        count, start, moved = int(self.words[0]), time.monotonic(), 0
        offer = self.source.ask("next")
        while (elapsed := time.monotonic() - start) < self.seconds:
            moved += int(self.target.ask(offer))
            offer = self.source.ask("next")
        products = int(self.words[0]) - count
        shares = {name: shares_of_a_core(before[name], child.cpu_seconds(), elapsed) for name, child in ends.items()}
        return {"products": products / elapsed, "gb_s": moved / elapsed / 1e9, **shares}

    def beside_movers(self, shares: list[float]) -> dict[str, float | list[float]]:
        self.set_movers(shares)
        time.sleep(0.05)
        before = [child.cpu_seconds() for child in self.movers]
        count, start = int(self.words[0]), time.monotonic()
        time.sleep(self.seconds)
        elapsed, products = time.monotonic() - start, int(self.words[0]) - count
        used = [
            shares_of_a_core(spent, child.cpu_seconds(), elapsed)[0]
            for child, spent in zip(self.movers, before, strict=True)
        ]
        self.set_movers([])
        return {"products": products / elapsed, "movers": used[: len(shares)]}

    def set_movers(self, shares: list[float]) -> None:
        """Who has no share is stopped: a process that only slept between looks would still cost some of a core."""
        self.words[1 : 1 + MOVERS] = [round(share * 1e6) for share in [*shares, *[0] * (MOVERS - len(shares))]]
        for number, child in enumerate(self.movers):
            child.process.send_signal(signal.SIGCONT if number < len(shares) else signal.SIGSTOP)

    def alone(self) -> float:
        count, start = int(self.words[0]), time.monotonic()
        time.sleep(self.seconds)
        return (int(self.words[0]) - count) / (time.monotonic() - start)

    def close(self) -> None:
        for child in self.children:
            child.process.kill()
            child.process.wait()


def one_each(link: dict[str, Any]) -> list[float]:
    """The shares of the busiest threads of both ends, and what all others used together."""
    shares = sorted(link["source"] + link["target"], reverse=True)
    return [*shares[: MOVERS - 1], sum(shares[MOVERS - 1 :])]


def measure(options: argparse.Namespace, shared: mmap.mmap) -> dict[str, object]:
    turns = Turns(options, shared)
    try:
        turns.beside_link()  # connects, and touches all memory
        rounds = []
        for _ in range(options.rounds):
            link = turns.beside_link()
            rounds.append({
                "link": link, "movers": turns.beside_movers(one_each(link)), "busy": turns.beside_movers([1, 1]),
            })  # fmt: skip
        alone = turns.alone()
    finally:
        turns.close()
    return summary(rounds, alone)


def summary(rounds: list[dict[str, Any]], alone: float) -> dict[str, object]:
    def beside_link_over(other: str) -> dict[str, float]:
        ratios = sorted(turn["link"]["products"] / turn[other]["products"] for turn in rounds)
        return {"median": statistics.median(ratios), "min": ratios[0], "max": ratios[-1]}

    def median_of(name: str, value: Callable[[dict[str, Any]], float]) -> float:
        return round(statistics.median(value(turn[name]) for turn in rounds), 3)

    return {
        "ratio": beside_link_over("movers"),
        "ratio_busy": beside_link_over("busy"),
        "products_alone": alone,
        "of_alone": {
            name: median_of(name, lambda turn: turn["products"] / alone) for name in ("link", "movers", "busy")
        },
        "cores": {
            "link": median_of("link", lambda turn: sum(turn["source"] + turn["target"])),
            **{name: median_of(name, lambda turn: sum(turn["movers"])) for name in ("movers", "busy")},
        },
        "gb_s": median_of("link", lambda turn: turn["gb_s"]),
        "rounds": rounds,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add_link_options(parser)
    parser.add_argument(
        "--memory", choices=("engine", "kvlink"), default="engine",
        help="whose the caches are: over shared, an engine's go through a ring and KVLink's are mapped (%(default)s)",
    )  # fmt: skip
    parser.add_argument("--seconds", type=duration, default=1.0, help="of each turn (%(default)s)")
    parser.add_argument("--rounds", type=count, default=9)
    parser.add_argument("--json", type=destination, metavar="FILE", default="-", help="- is standard output")
    parser.add_argument("--role", help=argparse.SUPPRESS)
    parser.add_argument("--shared", help=argparse.SUPPRESS)
    options = parser.parse_args()
    with tempfile.NamedTemporaryFile() as file:
        options.shared = options.shared or file.name
        with open(options.shared, "r+b") as memory:
            if options.role is None:
                memory.truncate(mmap.PAGESIZE)
            shared = mmap.mmap(memory.fileno(), mmap.PAGESIZE)
        match options.role:
            case "compute":
                compute(shared)
            case "source":
                asyncio.run(serve(options))
            case "target":
                asyncio.run(read(options))
            case str(role):
                mover(shared, int(role[-1]))
            case None:
                report(options, shared)
    return 0


def report(options: argparse.Namespace, shared: mmap.mmap) -> None:
    record = {
        "schema": SCHEMA, "transport": options.transport, "memory": options.memory, "integrity": options.integrity,
        "seconds": options.seconds, **taken_on(),
    }  # fmt: skip
    write(record | {"result": measure(options, shared)}, options.json)


if __name__ == "__main__":
    sys.exit(main())
