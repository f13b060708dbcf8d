#!/usr/bin/env python3
"""What a saturated link costs a computation on the same cores, beyond the CPU time that it takes.

    benchmarks/beside.py [--transport stream|ucx|shared] [--seconds 1] [--rounds 9] [--json FILE]

A process computes (small matrix products, one thread) and counts. By turns, two others use the same cores: the source
and the target of a link that moves one request after the other without a pause; and two plain *movers* that only copy
memory, each held to the share of a core that its end of the link has just used. What the computation does beside the
link, over what it does beside the movers, is what the link's way of waiting costs: 1 is nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import itertools
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import kvlink
from kvlink.layout import standard_spec

SCHEMA = "kvlink.beside/1"
LAYERS, HEADS, CHANNELS, SLOTS, BLOCKS = 16, 4, 128, 16, 512
MATRIX = 96
COPY_BYTES = 1 << 20
POOL_BYTES = 128 << 20
SLICE_SECONDS = 0.001


def config(options: argparse.Namespace) -> kvlink.Config:
    return kvlink.Config(transports=(options.transport,), integrity=options.integrity == "on")


def caches(engine: str) -> kvlink.Caches:
    """256 MiB, of which a request is all."""
    spec = standard_spec(
        "nhd",
        identity=kvlink.Identity(model="beside", num_layers=LAYERS, num_kv_heads=HEADS, head_dim=CHANNELS),
        place=kvlink.Place(engine=engine, incarnation="1"),
        layers=range(LAYERS), heads=range(HEADS), block_size=SLOTS, num_blocks=BLOCKS, dtype=kvlink.DType.FLOAT16,
    )  # fmt: skip
    return kvlink.Caches.standard(spec)


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
    wanted[3 + number] = 1  # all memory is touched
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
    async with kvlink.open_link(config(options), caches("source")) as link:
        print(base64.b64encode(link.card).decode(), flush=True)
        roster = kvlink.Roster.of([link.card])
        loop = asyncio.get_running_loop()
        for number in itertools.count():
            if not await loop.run_in_executor(None, sys.stdin.readline):
                return
            offer = kvlink.Offer(
                key=kvlink.request_key("1", str(number)), roster=roster, blocks=(tuple(range(BLOCKS)),),
                tokens=BLOCKS * SLOTS,
            )  # fmt: skip
            link.publish(offer)
            print(json.dumps(offer.to_params()), flush=True)


async def read(options: argparse.Namespace) -> None:
    """The target: each line is an offer to fetch; answers with its bytes."""
    loop = asyncio.get_running_loop()
    async with kvlink.open_link(config(options), caches("target")) as link:
        link.set_siblings(kvlink.Roster.of([link.card]))
        print("ready", flush=True)
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            offer = kvlink.Offer.from_params(json.loads(line))
            result = await link.fetch(offer, (tuple(range(BLOCKS)),), deadline_seconds=60)
            link.release(offer.key)
            print(result.bytes, flush=True)


class Child:
    """One process of this program, and the CPU time that it has used."""

    def __init__(self, options: argparse.Namespace, role: str, *, talks: bool) -> None:
        command = [sys.executable, __file__, "--role", role, "--shared", options.shared,
                   "--transport", options.transport, "--integrity", options.integrity]  # fmt: skip
        pipe = subprocess.PIPE if talks else None
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )  # fmt: skip

    def ask(self, line: str) -> str:
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.hear()

    def hear(self) -> str:
        if not (line := self.process.stdout.readline()):
            raise SystemExit("a process ended; its own words are above")
        return line.strip()

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(") ", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# --- turns -----------------------------------------------------------------------------------------------------------


class Turns:
    """The shared words: the computation's count, the shares that movers are to use, and whether they are ready."""

    def __init__(self, options: argparse.Namespace, shared: mmap.mmap) -> None:
        self.words = np.frombuffer(shared, np.uint64)
        self.seconds = options.seconds
        self.source = Child(options, "source", talks=True)
        self.target = Child(options, "target", talks=True)
        self.source.hear()
        self.target.hear()
        self.movers = [Child(options, f"mover{number}", talks=False) for number in (0, 1)]
        self.compute = Child(options, "compute", talks=False)
        while not all(self.words[3:5]) or not self.words[0]:
            time.sleep(0.01)
        self.children = [self.source, self.target, *self.movers, self.compute]

    def beside_link(self) -> dict[str, float]:
        """Requests one after the other until time is up; products a second, and the shares both ends used."""
        before = [child.cpu_seconds() for child in (self.source, self.target)]
        count, start, moved = int(self.words[0]), time.monotonic(), 0
        offer = self.source.ask("next")
        while (elapsed := time.monotonic() - start) < self.seconds:
            moved += int(self.target.ask(offer))
            offer = self.source.ask("next")
        products = int(self.words[0]) - count
        shares = [
            (child.cpu_seconds() - spent) / elapsed
            for child, spent in zip((self.source, self.target), before, strict=True)
        ]
        return {"products": products / elapsed, "gb_s": moved / elapsed / 1e9, "source": shares[0], "target": shares[1]}

    def beside_movers(self, shares: tuple[float, float]) -> dict[str, float]:
        self.words[1:3] = [round(share * 1e6) for share in shares]
        time.sleep(0.05)
        before = [child.cpu_seconds() for child in self.movers]
        count, start = int(self.words[0]), time.monotonic()
        time.sleep(self.seconds)
        elapsed, products = time.monotonic() - start, int(self.words[0]) - count
        used = [(child.cpu_seconds() - spent) / elapsed for child, spent in zip(self.movers, before, strict=True)]
        self.words[1:3] = 0
        return {"products": products / elapsed, "source": used[0], "target": used[1]}

    def alone(self) -> float:
        count, start = int(self.words[0]), time.monotonic()
        time.sleep(self.seconds)
        return (int(self.words[0]) - count) / (time.monotonic() - start)

    def close(self) -> None:
        for child in self.children:
            child.process.kill()
            child.process.wait()


def measure(options: argparse.Namespace, shared: mmap.mmap) -> dict[str, object]:
    turns = Turns(options, shared)
    try:
        turns.beside_link()  # connects, and touches all memory
        rounds = []
        for _ in range(options.rounds):
            link = turns.beside_link()
            movers = turns.beside_movers((link["source"], link["target"]))
            rounds.append({"link": link, "movers": movers, "ratio": link["products"] / movers["products"]})
        alone = turns.alone()
    finally:
        turns.close()
    ratios = sorted(turn["ratio"] for turn in rounds)
    return {
        "ratio": {"median": statistics.median(ratios), "min": ratios[0], "max": ratios[-1]},
        "products_alone": alone,
        "of_alone": {
            name: statistics.median(turn[name]["products"] for turn in rounds) / alone for name in ("link", "movers")
        },
        "shares_of_a_core": {
            name: [round(statistics.median(turn[name][side] for turn in rounds), 3) for side in ("source", "target")]
            for name in ("link", "movers")
        },
        "gb_s": statistics.median(turn["link"]["gb_s"] for turn in rounds),
        "rounds": rounds,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--transport", default="stream")
    parser.add_argument("--integrity", choices=("on", "off"), default="on")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each turn (%(default)s)")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", metavar="FILE", help="- is standard output")
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
    load = os.getloadavg()[0]
    record = {
        "schema": SCHEMA, "transport": options.transport, "integrity": options.integrity, "seconds": options.seconds,
        "cpus": os.cpu_count(), "load_before": round(load, 2), "date": time.strftime("%Y-%m-%d"),
        "result": measure(options, shared),
    }  # fmt: skip
    text = json.dumps(record, indent=1) + "\n"
    if options.json in (None, "-"):
        sys.stdout.write(text)
    else:
        Path(options.json).write_text(text)


if __name__ == "__main__":
    sys.exit(main())
