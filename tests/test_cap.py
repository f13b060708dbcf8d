"""A link's bandwidth cap: a transfer takes no less than its bytes need, over every transport, and ends when told."""

from __future__ import annotations

import asyncio
import time

import pytest
from engines import source_engine, target_engine

from kvlink.cli.bench.content import Prompt

WAYS = [
    ({"transports": ("stream",)}, False),
    ({"transports": ("shared",), "path": "ring"}, False),
    ({"transports": ("shared",), "path": "pulled"}, False),
    ({"transports": ("shared",)}, True),
    ({"transports": ("ucx",), "path": "direct"}, False),
    ({"transports": ("ucx",), "path": "packed"}, False),
]
NAMES = ["stream", "ring", "pulled", "mapped", "direct", "packed"]
BURST_SECONDS = 0.05
"""What may come at once, several times over."""


@pytest.mark.parametrize("integrity", [True, False])
@pytest.mark.parametrize(("settings", "shareable"), WAYS, ids=NAMES)
async def test_a_transfer_takes_no_less_than_its_bytes_need(settings, *, shareable: bool, integrity: bool) -> None:
    """Two requests at a time share the cap; every byte arrives."""
    cap = 1e6
    settings = {**settings, "integrity": integrity}
    capped = {**settings, "max_bytes_per_second": cap}
    async with (
        source_engine(None, num_blocks=128, settings=settings, shareable=shareable) as source,
        target_engine(None, num_blocks=128, settings=capped) as target,
    ):
        rooms = [tuple(range(20)), tuple(range(64, 84))]
        prompts = [Prompt(seed=seed, tokens=320) for seed in (1, 2)]
        offers = []
        for room, prompt in zip(rooms, prompts, strict=True):
            source.fill(prompt, room)
            offers.append(source.offer(f"i:{prompt.seed}", room, prompt.tokens))
            source.links[0].publish(offers[-1])
        began = time.monotonic()
        results = await asyncio.gather(
            *(
                target.links[0].fetch(offer, (room,), deadline_seconds=20)
                for offer, room in zip(offers, rooms, strict=True)
            )
        )
        seconds = time.monotonic() - began
        total = sum(result.bytes for result in results)
        assert total > 3 * BURST_SECONDS * cap, "too short to tell"
        assert seconds >= total / cap - BURST_SECONDS
        for room, prompt in zip(rooms, prompts, strict=True):
            assert target.ranks[0].content.check(prompt, room) is None


@pytest.mark.parametrize(("settings", "shareable"), WAYS, ids=NAMES)
async def test_a_capped_transfer_is_cancelled_at_once(settings, *, shareable: bool) -> None:
    """A2: a read that waits for its turn is cut off like any other, and its blocks come back."""
    slow = {**settings, "max_bytes_per_second": 1e6}
    async with (
        source_engine(None, num_blocks=512, settings=settings, shareable=shareable) as source,
        target_engine(None, num_blocks=512, settings=slow) as target,
    ):
        room = tuple(range(500))
        prompt = Prompt(seed=1, tokens=7900)
        source.fill(prompt, room)
        offer = source.offer("i:1", room, prompt.tokens)
        source.links[0].publish(offer)
        fetching = asyncio.create_task(target.links[0].fetch(offer, (room,), deadline_seconds=30))
        await asyncio.sleep(0.1)
        assert not fetching.done()
        began = time.monotonic()
        fetching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetching
        target.assert_no_block_out()
        assert time.monotonic() - began < 3.0
