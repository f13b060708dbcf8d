"""Engines that compute while KVLink reads: what is not ready yet is noise, so that whoever reads too early is found."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from random import Random

import numpy as np

from kvlink import Part
from kvlink.layout import NOTHING, CacheSpec, Frontier, share_of
from kvlink.plan import IncrementPlanner
from kvlink.relayout import move_local, native_plan

Words = tuple[Frontier, dict[str, int]]
"""How far an engine has come, and how it says so."""


class Computing:
    """One request of a source rank: what the pools hold now becomes noise, and comes back as it is computed."""

    def __init__(
        self, spec: CacheSpec, pools: Sequence[np.ndarray], blocks: Sequence[Sequence[int]], starts: Sequence[int],
        max_tokens: int,
    ) -> None:  # fmt: skip
        self.pools, self.blocks, self.starts, self.max_tokens = pools, blocks, starts, max_tokens
        self.block_sizes = [group.block_size for group in spec.groups]
        self._full = [pool.copy() for pool in pools]
        self._planner = IncrementPlanner(spec, spec, share_of(spec).groups)
        self._done = NOTHING
        for pool in pools:
            pool[:] = np.random.default_rng(7).integers(0, 256, pool.size, dtype=np.uint8)

    def come_to(self, frontier: Frontier, *, sealed: bool = False) -> None:
        """Compute on, up to here."""
        plan = self._planner.plan(
            self.blocks, self.blocks, self._done, frontier, starts=self.starts, max_tokens=self.max_tokens,
            sealed=sealed,
        )  # fmt: skip
        sides = (self._full, self.pools)
        regions = [[(pool.__array_interface__["data"][0], pool.size) for pool in side] for side in sides]
        move_local(native_plan(plan), *regions)
        self._done = frontier

    def blocks_of(self, tokens: int) -> tuple[tuple[int, ...], ...]:
        """Those that so many positions need; all of them with the last."""
        if tokens == self.max_tokens:
            return tuple(map(tuple, self.blocks))
        sized = zip(self.blocks, self.block_sizes, strict=True)
        return tuple(tuple(ids[: -(-tokens // size)]) for ids, size in sized)


def walk(draw: Random, tokens: int, layers: int) -> Iterator[Words]:
    """Chunks of any size, also in mid-block, each whole or layer by layer, some layers at a time."""
    done = 0
    while done < tokens:
        chunk = min(tokens, done + draw.randrange(1, max(2, tokens // 2 + 2)))
        for layer in sorted(draw.sample(range(1, layers), draw.randrange(layers))):
            yield Frontier(done, layer, chunk), {"tokens": chunk, "layers": layer}
        yield Frontier.whole(chunk), {"tokens": chunk}
        done = chunk


async def stream(
    part: Part, computing: Computing, words: Iterator[Words], *, starts: tuple[int, ...] | None = None, pause: float = 0
) -> None:
    """Say of a part what becomes ready, as an engine does: blocks as chunks need them, first positions at first."""
    first = {} if starts is None else {"group_first_tokens": starts}
    for frontier, ready in words:
        computing.come_to(frontier)
        part.ready(blocks=computing.blocks_of(ready["tokens"]), **ready, **first)
        first = {}
        await asyncio.sleep(pause)
    part.seal()
