"""A campaign from its seed to its record."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from random import Random
from typing import Any

from campaign.lane import APART, SETTINGS, TOGETHER, Lane, Misfortune, Tally, draw
from campaign.life import begin_process
from kvlink.errors import UnavailableError
from kvlink.transports.ucx import UcxTransport
from kvlink.version import VERSION

LANES: dict[str, tuple[dict[str, Any], Mapping[str, Sequence[str]]]] = {
    "ucx": ({"transports": ("ucx",), "ucx_tls": None}, APART),
    "ucx-tcp": ({"transports": ("ucx",), "ucx_tls": "tcp"}, APART),
    "stream": ({"transports": ("stream",)}, APART),
    "together": ({"transports": ("stream",)}, TOGETHER),
}
"""By name: settings, and engines. A lane is three processes and their successors."""
SPARES = 2


class Spares:
    """Processes that wait for their opening, so that nobody has to wait for one to start."""

    def __init__(self) -> None:
        self._starting: list[asyncio.Task[asyncio.subprocess.Process]] = []

    async def next(self) -> asyncio.subprocess.Process:
        """One, and another is begun in its place."""
        while len(self._starting) <= SPARES:
            self._starting.append(asyncio.create_task(begin_process()))
        return await self._starting.pop(0)

    async def close(self) -> None:
        for process in await asyncio.gather(*self._starting):
            process.kill()
            await process.wait()


async def run(seed: int, kills: int, stops: int, lanes: Sequence[str], max_seconds: float) -> dict[str, Any]:
    """Kill and stop that often, spread over the lanes; the record.

    No misfortune begins after ``max_seconds``.
    """
    dice = Random(seed)
    kinds = ["kill"] * kills + ["stop"] * stops
    dice.shuffle(kinds)
    plans = {
        name: [draw(kind, dice, LANES[name][1]) for kind in kinds[number :: len(lanes)]]
        for number, name in enumerate(lanes)
    }
    tally, spares = Tally(), Spares()
    began = time.monotonic()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(spares.close)
        opened = []
        for name in lanes:
            lane = Lane(name, *LANES[name], seed, tally, spares.next)
            opened.append(await stack.enter_async_context(lane))
        until = time.monotonic() + max_seconds
        await asyncio.gather(*(_through(lane, plans[lane.name], until) for lane in opened))
        seconds = time.monotonic() - began
    return {
        "schema": "kvlink.campaign/1",
        "kvlink": VERSION,
        "environment": {"cpus": os.cpu_count(), "python": platform.python_version(), "ucx": _ucx_version()},
        "seed": seed,
        "lanes": list(lanes),
        "settings": SETTINGS,
        "seconds": round(seconds, 1),
        "kills": tally.falls["kill"],
        "stops": tally.falls["stop"],
        "moments": dict(sorted(tally.moments.items())),
        "requests": dict(sorted(tally.requests.items())),
        "parts": dict(sorted(tally.ends.items())),
        "installs": tally.installs,
        "checked_bytes": tally.checked_bytes,
        "slowest_end_seconds": round(tally.slowest_end_seconds, 2),
        "ucx_aborts": tally.ucx_aborts,
        "findings": tally.findings,
    }


async def _through(lane: Lane, plan: Sequence[Misfortune], until: float) -> None:
    for number, misfortune in enumerate(plan, 1):
        if time.monotonic() > until:
            lane.find(f"out of time, with {len(plan) - number + 1} misfortunes to come")
            return
        found = len(lane.tally.findings)
        await lane.round(misfortune)
        told = "".join(f"\n  {finding}" for finding in lane.tally.findings[found:])
        print(f"{lane.name} {number}/{len(plan)}: {misfortune.kind} {misfortune.seat} {misfortune.moment}{told}",
              file=sys.stderr, flush=True)  # fmt: skip


def _ucx_version() -> str:
    transport = UcxTransport()
    try:
        return transport.capabilities().version
    finally:
        transport.close()


def _summary(record: dict[str, Any]) -> str:
    return (
        f"{record['kills']} kills, {record['stops']} stops in {record['seconds']:.0f} s, "
        f"{record['installs']} installs, "
        f"{record['checked_bytes'] / 1e9:.1f} GB checked, slowest end {record['slowest_end_seconds']} s, "
        f"requests {record['requests']}, {len(record['ucx_aborts'])} processes ended by UCX, "
        f"{len(record['findings'])} findings"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 nothing found, 1 something found or not finished in time, 2 bad arguments, 3 no UCX here."""
    parser = argparse.ArgumentParser(prog="scripts/campaign", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kills", type=int, default=150, help="processes killed, at least")
    parser.add_argument("--stops", type=int, default=40, help="processes stopped for longer than their lease")
    parser.add_argument("--lanes", nargs="+", choices=LANES, default=list(LANES), metavar="LANE", help=", ".join(LANES))
    parser.add_argument("--max-seconds", type=float, default=600.0, help="of traffic")
    parser.add_argument("--json", metavar="FILE", help="write the record there; - is standard output")
    given = parser.parse_args(arguments)
    if min(given.kills, given.stops) < 0 or given.kills + given.stops == 0:
        parser.error("give a number of kills or stops above 0")
    try:
        record = asyncio.run(run(given.seed, given.kills, given.stops, given.lanes, given.max_seconds))
    except UnavailableError as error:
        print(error, file=sys.stderr)
        return 3
    text = json.dumps(record, indent=1)
    if given.json == "-":
        print(text)
    elif given.json:
        with open(given.json, "w", encoding="utf-8") as file:
            file.write(text + "\n")
    print(_summary(record), file=sys.stderr)
    return 1 if record["findings"] else 0
