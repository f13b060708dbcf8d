#!/usr/bin/env python3
"""What a request costs when its bytes do not: latency of one, cost of many, fairness between sources, an idle link.

    benchmarks/requests.py latency|steady|fair|idle [--transport stream] [--loop asyncio|uvloop] [--json FILE]

Sources live in child processes, the target in this one; host memory, small caches, the public API. Every request is one
block of one rank (``--heads`` KV heads of 128 channels, 32 layers, 16 tokens, 16 bit). What is measured, in its mode:

- ``latency``: one request at a time, offer in hand, from `Link.start_fetch` to the installed result, beside the round
  trip of a UCX message of which either end sleeps until it comes, by turns; and how often either event loop was woken
  (what a loop takes in while it waits awake is no wake-up; uvloop's are not counted).
  Twice, by turns: ``apart``, each process on a core of its own, as on two machines; and ``free``, where the kernel
  wakes whoever is written to on the writer's own core, so that no end of a mere ping-pong ever sleeps deeply.
- ``steady``: ``--requests`` with ``--in-flight``, and what the first and the last thousand cost; memory of both sides.
- ``fair``: ``--sources`` links all read by one, equally deep in flight; requests that each has done when time is up.
- ``idle``: a connected pair that does nothing; CPU time of both sides.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import resource
import selectors
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

from ends import Cache, Source, Told, add_link_options, config, count, duration, link_flags, open_target
from record import destination, taken_on, write

import kvlink
from kvlink.transports.ucx_ping import UcxPing

try:
    import uvloop
except ImportError:
    uvloop = None

SCHEMA = "kvlink.requests/1"
LAYERS, SLOTS = 32, 16
LATENCY_BATCH = 200
THOUSAND = 1000
LINKS_A_PROCESS = 16
UVLOOP = "uvloop"
CORES = os.sched_getaffinity(0)


class Wakings:
    """How often a loop was woken, which not every loop tells."""

    woken: int | None = None


class Counting(selectors.EpollSelector, Wakings):
    """Counts how often a loop is woken by anything but its own timers."""

    woken = 0

    def select(self, timeout: float | None = None) -> list:
        got = super().select(timeout)
        self.woken += bool(got)
        return got


def run(loop: str, work: Callable[[Wakings], Coroutine[Any, Any, Any]]) -> Any:  # noqa: ANN401
    """Run ``work`` on a loop of that name, of asyncio's own with its wake-ups counted."""
    wakings = Wakings() if loop == UVLOOP else Counting()
    factory = uvloop.new_event_loop if loop == UVLOOP else partial(asyncio.SelectorEventLoop, wakings)
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(work(wakings))


def cache(options: argparse.Namespace) -> Cache:
    return Cache(model="requests", layers=LAYERS, heads=options.heads, slots=SLOTS, blocks=options.blocks)


def usage(wakings: Wakings) -> dict[str, Any]:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    spent = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "woken": wakings.woken,
        "cpu_seconds": spent.ru_utime + spent.ru_stime,
        "resident_bytes": pages * os.sysconf("SC_PAGE_SIZE"),
        "sleeps": spent.ru_nvcsw,
    }


def stay_on(core: int | None) -> None:
    """Keep all threads of this process on one core; ``None``: on any."""
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), CORES if core is None else {core})


# --- the sources' process -------------------------------------------------------------------------------------------


async def serve(options: argparse.Namespace, wakings: Wakings) -> None:
    """Commands on standard input, one JSON line each on standard output: ``publish LINK COUNT``, ``usage``, ``cores``
    with ``apart`` or ``free``.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    loop = asyncio.get_running_loop()
    first, count = options.serve
    sources = [
        Source(await kvlink.open_link(config(options), cache(options).allocate(f"source{number}")), SLOTS)
        for number in range(first, first + count)
    ]
    ping = UcxPing()
    ping.serve()
    numbers = itertools.count()

    def say(answer: object) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    say({"ping": ping.address().hex()})
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        command, *arguments = line.split()
        if command == "usage":
            say(usage(wakings))
            continue
        if command == "cores":
            stay_on(max(CORES) if arguments == ["apart"] else None)
            say(None)
            continue
        which, wanted = map(int, arguments)
        offers = []
        for number in itertools.islice(numbers, wanted):
            offer, part = sources[which].publish(f"{first + which}-{number}", (number % options.blocks,))
            part.when_ended(lambda ended, link=sources[which].link: link.release(ended.key))
            offers.append(offer)
        say([offer.to_params() for offer in offers])
    for source in sources:
        await source.link.close()
    ping.close()


class Sources:
    """One child with several links."""

    def __init__(self, options: argparse.Namespace, first: int, count: int) -> None:
        flags = [options.mode, "--serve", str(first), str(count), "--heads", str(options.heads)]
        flags += ["--blocks", str(options.blocks), "--loop", options.loop, *link_flags(options)]
        self._child = Told([sys.executable, __file__, *flags])
        self.count = count
        self._turn = asyncio.Lock()

    async def hello(self) -> dict:
        return json.loads(await asyncio.to_thread(self._child.hear))

    async def ask(self, command: str) -> dict | list:
        async with self._turn:
            return json.loads(await asyncio.to_thread(self._child.ask, command))

    async def offers(self, link: int, count: int) -> list[kvlink.Offer]:
        return [kvlink.Offer.from_params(params) for params in await self.ask(f"publish {link} {count}")]

    def close(self) -> None:
        process = self._child.process
        process.stdin.close()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


# --- modes -----------------------------------------------------------------------------------------------------------


async def fetch(link: kvlink.Link, offer: kvlink.Offer, block: int) -> float:
    start = time.monotonic()
    await link.start_fetch(offer, ((block,),), deadline_seconds=60).wait()
    seconds = time.monotonic() - start
    link.release(offer.key)
    return seconds


async def latency(options, wakings, link, sources, hello) -> dict:  # noqa: ANN001
    ping = UcxPing()
    ping.connect(bytes.fromhex(hello["ping"]))
    seen = {cores: Seen() for cores in (("apart", "free") if len(CORES) > 1 else ("free",))}
    size = min(LATENCY_BATCH, options.requests)
    for number, cores in enumerate(["free", *list(seen) * (options.requests // size)]):
        one = seen[cores] if number else Seen()  # the first round connects, and loads what is loaded at first use
        stay_on(min(CORES) if cores == "apart" else None)
        await sources.ask(f"cores {cores}")
        offers = await sources.offers(0, size)
        marks = [(await sources.ask("usage"), usage(wakings))]
        one.seconds += [await fetch(link, offer, 0) for offer in offers]
        marks.append((usage(wakings), await sources.ask("usage"))[::-1])
        trips = await asyncio.to_thread(ping.round_trips, size)
        marks.append((await sources.ask("usage"), usage(wakings)))
        one.trips += trips
        one.count("woken", marks[0], marks[1], of_commands=2)
        one.count("sleeps", marks[1], marks[2], of_commands=0)
    stay_on(None)
    ping.close()
    return {cores: one.result() for cores, one in seen.items()}


class Seen:
    """What was measured in one place of the two processes."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.trips: list[float] = []
        self._counts: dict[str, dict[str, int]] = {}

    def count(self, name: str, before: tuple[dict, dict], after: tuple[dict, dict], *, of_commands: int) -> None:
        """Add what a count grew by at either end; a count that a loop does not tell stays unknown."""
        if None in (before[0][name], before[1][name]):
            return
        counts = self._counts.setdefault(name, {"source": 0, "target": 0})
        for number, side in enumerate(counts):
            counts[side] += after[number][name] - before[number][name]
        counts["source"] -= of_commands  # on its standard input

    def result(self) -> dict:
        woken = self._each("woken", len(self.seconds))
        return {
            "latency_s": quantiles(self.seconds),
            "ucx_round_trip_s": quantiles(self.trips),
            "ucx_sleeps_per_round_trip": self._each("sleeps", len(self.trips)),
            "p50_in_round_trips": round(statistics.median(self.seconds) / statistics.median(self.trips), 2),
            "python_wake_ups": woken and woken | {"both": round(sum(woken.values()), 2)},
        }

    def _each(self, name: str, times: int) -> dict[str, float] | None:
        counts = self._counts.get(name)
        return counts and {side: round(count / times, 2) for side, count in counts.items()}


async def steady(options, wakings, link, sources, hello) -> dict:  # noqa: ANN001
    free = list(range(options.blocks))
    thousands: list[dict[str, float]] = []
    failed = 0

    async def one(offer: kvlink.Offer) -> None:
        nonlocal failed
        block = free.pop()
        try:
            await fetch(link, offer, block)
        except kvlink.KVLinkError:
            failed += 1
        free.append(block)

    size = min(THOUSAND, options.requests // 2)
    for number in range(options.requests // size + 1):  # the first warms up
        offers = await sources.offers(0, size)
        before, start = usage(wakings), time.monotonic()
        source_before = await sources.ask("usage")
        waiting = iter(offers)
        await asyncio.gather(*(drain(waiting, one) for _ in range(options.in_flight)))
        wall = time.monotonic() - start
        after, source_after = usage(wakings), await sources.ask("usage")
        if number:
            thousands.append({
                "wall_us": wall / size * 1e6,
                "target_cpu_us": (after["cpu_seconds"] - before["cpu_seconds"]) / size * 1e6,
                "source_cpu_us": (source_after["cpu_seconds"] - source_before["cpu_seconds"]) / size * 1e6,
                "target_resident_bytes": after["resident_bytes"],
                "source_resident_bytes": source_after["resident_bytes"],
            })  # fmt: skip
    first, last = thousands[0], thousands[-1]
    return {
        "failed": failed, "first_thousand": first, "last_thousand": last,
        "last_over_first": {name: round(last[name] / first[name], 3) for name in first}, "thousands": thousands,
    }  # fmt: skip


def middle_of(rounds: list[dict]) -> dict:
    """Of several rounds of `steady`, each with links of its own: thousands differ by a tenth among themselves."""

    def medians(which: str) -> dict[str, float]:
        return {name: round(statistics.median(r[which][name] for r in rounds), 3) for name in rounds[0][which]}

    return {
        "failed": sum(r["failed"] for r in rounds),
        **{which: medians(which) for which in ("first_thousand", "last_thousand", "last_over_first")},
        "rounds": rounds,
    }


async def drain(waiting, one) -> None:  # noqa: ANN001
    for offer in waiting:
        await one(offer)


async def fair(options, link, groups) -> dict:  # noqa: ANN001
    depth = max(1, options.in_flight // options.sources)
    each = options.requests // options.sources
    places = [(group, which) for group in groups for which in range(group.count)]
    offers = [await group.offers(which, each + 1) for group, which in places]
    for first, *_ in offers:  # connecting is not what is compared
        await fetch(link, first, 0)
    free = list(range(options.blocks))
    done = [0] * options.sources
    end = time.monotonic() + options.seconds

    async def one(source: int, offer: kvlink.Offer) -> None:
        if time.monotonic() < end:
            block = free.pop()
            await fetch(link, offer, block)
            free.append(block)
            done[source] += 1

    waiting = [iter(own[1:]) for own in offers]
    await asyncio.gather(*(
        drain(waiting[source], partial(one, source)) for source in range(options.sources) for _ in range(depth)
    ))  # fmt: skip
    middle = statistics.median(done)
    return {
        "sources": options.sources, "requests_done": {"min": min(done), "median": middle, "max": max(done)},
        "furthest_from_median": round(max(abs(count - middle) for count in done) / middle, 3),
    }  # fmt: skip


async def idle(options, wakings, link, sources, hello) -> dict:  # noqa: ANN001
    (offer,) = await sources.offers(0, 1)
    await fetch(link, offer, 0)
    before = {"source": await sources.ask("usage"), "target": usage(wakings)}
    await asyncio.sleep(options.seconds)
    after = {"target": usage(wakings), "source": await sources.ask("usage")}
    shares = {s: (after[s]["cpu_seconds"] - before[s]["cpu_seconds"]) / options.seconds for s in ("source", "target")}
    return {"seconds": options.seconds, "share_of_a_core": {side: round(share, 5) for side, share in shares.items()}}


def quantiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {f"p{q}": round(ordered[min(len(ordered) * q // 100, len(ordered) - 1)], 7) for q in (50, 95, 99)}


# --- the target's process ---------------------------------------------------------------------------------------------


async def measure(options: argparse.Namespace, wakings: Wakings) -> dict:
    counts = [1]
    if options.mode == "fair":
        counts = [min(LINKS_A_PROCESS, options.sources - at) for at in range(0, options.sources, LINKS_A_PROCESS)]
    groups = [Sources(options, sum(counts[:index]), count) for index, count in enumerate(counts)]
    try:
        hellos = [await group.hello() for group in groups]
        async with open_target(options, cache(options).allocate("target")) as link:
            if options.mode == "fair":
                return await fair(options, link, groups)
            return await MODES[options.mode](options, wakings, link, groups[0], hellos[0])
    finally:
        for group in groups:
            group.close()


MODES = {"latency": latency, "steady": steady, "fair": fair, "idle": idle}


def at_odds(options: argparse.Namespace) -> str | None:
    """What of the arguments, each fine by itself, a mode cannot do; ``None``: nothing."""
    least = {"steady": 2, "fair": options.sources}.get(options.mode, 1)
    if options.requests < least:
        return f"--requests {options.requests}: {options.mode} takes {least} or more here"
    at_once = {"steady": options.in_flight, "fair": max(options.in_flight, options.sources)}.get(options.mode, 1)
    if at_once > options.blocks:
        return f"--blocks {options.blocks}: each request in flight has a block of its own, so give {at_once} or more"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("mode", choices=MODES)
    add_link_options(parser)
    parser.add_argument("--loop", choices=("asyncio", UVLOOP), default="asyncio", help="of both ends (%(default)s)")
    parser.add_argument("--requests", type=count, default=10_000)
    parser.add_argument("--in-flight", type=count, default=256)
    parser.add_argument("--sources", type=count, default=64)
    parser.add_argument("--rounds", type=count, default=9, help="of steady, of which the medians count (%(default)s)")
    parser.add_argument("--seconds", type=duration, default=5.0, help="of fair and idle")
    parser.add_argument("--heads", type=count, default=1)
    parser.add_argument("--blocks", type=count, default=512, help="of each cache")
    parser.add_argument("--json", type=destination, metavar="FILE", default="-", help="- is standard output")
    parser.add_argument("--serve", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.loop == UVLOOP and uvloop is None:
        parser.error("--loop uvloop: uvloop is not installed in this environment; pip install uvloop")
    if options.serve:
        run(options.loop, lambda wakings: serve(options, wakings))
        return 0
    if trouble := at_odds(options):
        parser.error(trouble)
    record = {
        "schema": SCHEMA, "mode": options.mode, "transport": options.transport, "integrity": options.integrity,
        "loop": options.loop,
        "bytes_per_request": cache(options).block_bytes, "requests": options.requests,
        "in_flight": options.in_flight if options.mode in {"steady", "fair"} else 1, **taken_on(),
    }  # fmt: skip
    rounds = options.rounds if options.mode == "steady" else 1
    results = [run(options.loop, lambda wakings: measure(options, wakings)) for _ in range(rounds)]
    write(record | {"result": middle_of(results) if options.mode == "steady" else results[0]}, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
