"""Whole requests over the stream: links that open their own lanes, over every kind of address; every byte compared."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from engines import source_engine, target_engine

from kvlink.cli.bench.content import Prompt

PROMPT = Prompt(seed=5, tokens=150)
BLOCKS = tuple(range(2, 12))


@pytest.mark.parametrize("listen", ["tcp://127.0.0.1:0", "tcp://[::1]:0", "unix://{path}"], ids=["v4", "v6", "unix"])
@pytest.mark.parametrize("lanes", [(1, 3), (2, 2)])
async def test_a_fetch_installs_every_byte(listen: str, lanes: tuple[int, int], tmp_path: Path) -> None:
    """J2: two heads a rank to one, another layout; the two ends take the smaller number of lanes."""
    settings = [
        {"transports": ("stream",), "stream_lanes": count, "listen": listen.format(path=tmp_path / name)}
        for name, count in zip(("source", "target"), lanes, strict=True)
    ]
    async with (
        source_engine(None, settings=settings[0]) as source,
        target_engine(None, settings=settings[1], layout="hnd") as target,
    ):
        source.fill(PROMPT, BLOCKS)
        offer = source.offer("i:1", BLOCKS, PROMPT.tokens)
        published = source.links[0].publish(offer)
        result = await target.links[0].fetch(offer, (BLOCKS[::-1],), deadline_seconds=20)
        await published.wait()
        assert (result.transport, result.path, result.integrity) == ("stream", "stream", True)
        target.assert_holds(PROMPT, BLOCKS[::-1])
        source.assert_no_block_out()


async def test_many_fetches_run_side_by_side() -> None:
    """Several requests of several ranks over the lanes of each pair: each whole, none mixed up with another."""
    settings = {"transports": ("stream",)}
    async with (
        source_engine(None, tp=2, num_blocks=64, settings=settings) as source,
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
