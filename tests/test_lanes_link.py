"""Whole requests over the transports with lanes, the stream and shared memory on each of its paths: links open the
lanes by themselves, over every kind of address; every byte is compared. Shared memory alone: test_shared_link.py."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from engines import source_engine, target_engine

from kvlink.cli.bench.content import Prompt

PROMPT = Prompt(seed=5, tokens=150)
BLOCKS = tuple(range(2, 12))


@dataclass(frozen=True)
class Way:
    """What carries the bytes."""

    transport: str
    path: str
    shareable: bool = False
    """Whether the source's memory may be mapped."""

    def settings(self, **others: object) -> dict[str, Any]:
        """The path is named where a transport would choose."""
        named = {"path": self.path} if self.transport == "shared" else {}
        return {"transports": (self.transport,), **named, **others}


STREAM, MAPPED = Way("stream", "stream"), Way("shared", "mapped", shareable=True)
PULLED, RING = Way("shared", "pulled"), Way("shared", "ring")
V4, V6, UNIX = "tcp://127.0.0.1:0", "tcp://[::1]:0", "unix://{path}"
FETCHES = [
    *itertools.product([STREAM], [V4, V6, UNIX], [(1, 3), (2, 2)]),
    *itertools.product([MAPPED, PULLED, RING], [V4, UNIX], [(1, 1)]),  # the lane is a Unix socket all the same
]


@pytest.mark.parametrize(
    ("way", "listen", "lanes"), FETCHES, ids=[f"{way.path}, {listen}, {lanes}" for way, listen, lanes in FETCHES]
)
async def test_a_fetch_installs_every_byte(way: Way, listen: str, lanes: tuple[int, int], tmp_path: Path) -> None:
    """J2: another layout there, every kind of address; the two ends take the smaller number of lanes."""
    settings = [
        way.settings(stream_lanes=count, listen=listen.format(path=tmp_path / name))
        for name, count in zip(("source", "target"), lanes, strict=True)
    ]
    async with (
        source_engine(None, settings=settings[0], shareable=way.shareable) as source,
        target_engine(None, settings=settings[1], layout="hnd") as target,
    ):
        source.fill(PROMPT, BLOCKS)
        offer = source.offer("i:1", BLOCKS, PROMPT.tokens)
        published = source.links[0].publish(offer)
        result = await target.links[0].fetch(offer, (BLOCKS[::-1],), deadline_seconds=20)
        await published.wait()
        assert (result.transport, result.path, result.integrity) == (way.transport, way.path, True)
        assert result.path_reason
        target.assert_holds(PROMPT, BLOCKS[::-1])
        source.assert_no_block_out()


@pytest.mark.parametrize("integrity", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("way", [STREAM, MAPPED, PULLED, RING], ids=lambda way: way.path)
async def test_many_fetches_run_side_by_side(way: Way, *, integrity: bool) -> None:
    """Several requests of several ranks over the lanes of each pair: each whole, none mixed up with another."""
    settings = way.settings(integrity=integrity)
    async with (
        source_engine(None, tp=2, num_blocks=64, settings=settings, shareable=way.shareable) as source,
        target_engine(None, num_blocks=64, settings=settings) as target,
    ):
        prompts = {index: Prompt(seed=index, tokens=120) for index in range(6)}
        rooms = {index: tuple(range(10 * index, 10 * index + 8)) for index in prompts}
        for index, prompt in prompts.items():
            source.fill(prompt, rooms[index])
        offers = {index: source.offer(f"i:{index}", rooms[index], 120) for index in prompts}
        for offer in offers.values():
            for link in source.links:
                link.publish(offer)
        await asyncio.gather(*(target.links[0].fetch(offers[i], (rooms[5 - i],), deadline_seconds=20) for i in prompts))
        for index, prompt in prompts.items():
            assert target.ranks[0].content.check(prompt, rooms[5 - index]) is None
