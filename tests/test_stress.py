"""Many requests at once between engines of several ranks, cancelled at random from every side, over UCX."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter

import pytest
from engines import Engine, Rank, source_engine, target_engine

from kvlink import Part, State
from kvlink.cli.bench.content import Prompt
from kvlink.errors import CancelledError

REQUESTS, CONCURRENCY = 60, 8
MAX_TOKENS = 1500
SOURCE_BLOCKS, TARGET_BLOCKS = 100, 40
"""Blocks of one request in flight: enough for `MAX_TOKENS` of 16 and of 48 slots."""


class Request:
    """One request: its parts on all ranks of both sides, and the engine's rule that one failed part fails it whole."""

    def __init__(self, source: Engine, target: Engine, number: int, lane: int, random_: random.Random) -> None:
        self.source, self.target = source, target
        self.key = f"i:stress{number}"
        self.prompt = Prompt(seed=number, tokens=random_.randint(1, MAX_TOKENS))
        self.blocks = tuple(lane * SOURCE_BLOCKS + block for block in random_.sample(range(SOURCE_BLOCKS), 94))
        self.into = tuple(lane * TARGET_BLOCKS + block for block in random_.sample(range(TARGET_BLOCKS), 32))
        self.parts: list[tuple[Rank, Part]] = []

    async def run(self, cancel_after: float | None, victim: int) -> list[State]:
        """All parts' ends, sources first; ``victim`` is cancelled after that many seconds."""
        self.source.fill(self.prompt, self.blocks)
        for rank in self.target.ranks:
            rank.content.wipe_blocks(self.into)
        offer = self.source.offer(self.key, self.blocks, self.prompt.tokens)
        starts = [(rank, rank.link.publish(offer)) for rank in self.source.ranks]
        starts += [
            (rank, rank.link.start_fetch(offer, (self.into,), deadline_seconds=30)) for rank in self.target.ranks
        ]
        self.parts = starts
        for _, part in self.parts:
            part.when_ended(self._one_ended)
        if cancel_after is not None:
            await asyncio.sleep(cancel_after)
            rank, part = self.parts[victim]
            rank.link.cancel(part, "at random")
        for _, part in self.parts:
            with contextlib.suppress(CancelledError):
                await part.wait()
        return [part.state for _, part in self.parts]

    def verify(self, states: list[State]) -> None:
        """What is done is all there; then every rank's blocks are given back."""
        for rank, state in zip(self.target.ranks, states[len(self.source.ranks) :], strict=True):
            if state is State.DONE:
                assert rank.content.check(self.prompt, self.into) is None
            rank.link.release(self.key)

    def _one_ended(self, ended: Part) -> None:
        if ended.state is not State.DONE:
            for rank, part in self.parts:
                rank.link.cancel(part, f"another part of it is {ended.state.name}")


@pytest.mark.parametrize(("tls", "seed"), [(None, 1), (None, 2), ("tcp", 3)])
async def test_cancels_from_every_side_among_many_requests(tls: str | None, seed: int) -> None:
    random_ = random.Random(seed)
    lanes: asyncio.Queue[int] = asyncio.Queue()
    for lane in range(CONCURRENCY):
        lanes.put_nowait(lane)
    ends: Counter[frozenset[State]] = Counter()
    settings = {"ucx_tls": tls}
    async with (
        source_engine(None, tp=2, num_blocks=CONCURRENCY * SOURCE_BLOCKS, settings=settings) as source,
        target_engine(
            None, tp=2, layout="hnd", block_size=48, num_blocks=CONCURRENCY * TARGET_BLOCKS, settings=settings
        ) as target,
    ):

        async def one(number: int) -> None:
            lane = await lanes.get()
            request = Request(source, target, number, lane, random_)
            cancel_after = random_.choice([None, random_.uniform(0, 0.02)])
            states = await request.run(cancel_after, victim=random_.randrange(4))
            request.verify(states)
            ends[frozenset(states)] += 1
            lanes.put_nowait(lane)

        async with asyncio.timeout(60):
            await asyncio.gather(*(one(number) for number in range(REQUESTS)))
        assert ends[frozenset({State.DONE})] >= REQUESTS / 4
        assert ends[frozenset({State.CANCELLED})] >= 5
        assert {state for states in ends for state in states} <= {State.DONE, State.CANCELLED}
        for engine in (source, target):
            engine.assert_no_block_out()
            for rank in engine.ranks:
                assert rank.link.stats().parts_live == 0
                assert rank.link.stats().memory.installed == 0
