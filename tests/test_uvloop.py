"""On uvloop, which vLLM and SGLang run their servers on: the link keeps sockets and descriptors of its own in the loop,
and must not lean on what asyncio's own loop alone does with them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

import pytest
import uvloop
from engines import source_engine, target_engine

from kvlink import State
from kvlink.cli.bench.content import Prompt
from kvlink.errors import KVLinkError

PROMPT = Prompt(seed=11, tokens=100)
BLOCKS = tuple(range(3, 12))


def on_uvloop(story: Coroutine[None, None, None]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert isinstance(runner.get_loop(), uvloop.Loop)
        runner.run(story)


@pytest.mark.parametrize("transport", ["stream", "shared", "ucx"])
def test_requests_one_after_the_other_and_side_by_side_install_every_byte(transport: str) -> None:
    async def story() -> None:
        settings = {"transports": (transport,)}
        async with (
            source_engine(None, tp=2, num_blocks=32, settings=settings) as source,
            target_engine(None, num_blocks=32, layout="hnd", settings=settings) as target,
        ):
            source.fill(PROMPT, BLOCKS)
            for turn in range(3):
                offers = [source.offer(f"i:{turn}-{index}", BLOCKS, PROMPT.tokens) for index in range(1 + turn // 2)]
                published = [link.publish(offer) for offer in offers for link in source.links]
                rooms = [tuple(range(1 + 10 * index, 10 + 10 * index)) for index in range(len(offers))]
                await asyncio.gather(
                    *(
                        target.links[0].fetch(offer, (room,), deadline_seconds=20)
                        for offer, room in zip(offers, rooms, strict=True)
                    )
                )
                await asyncio.gather(*(part.wait() for part in published))
                assert [target.ranks[0].content.check(PROMPT, room) for room in rooms] == [None] * len(rooms)
                for offer in offers:
                    target.links[0].release(offer.key)
            source.assert_no_block_out()
            target.assert_no_block_out()

    on_uvloop(story())


def test_a_peer_that_closes_in_mid_request_ends_it_and_gives_every_block_back() -> None:
    async def story() -> None:
        settings = {"transports": ("stream",)}
        async with source_engine(None, settings=settings) as source, target_engine(None, settings=settings) as target:
            source.fill(PROMPT, BLOCKS)
            first, late = (source.offer(key, BLOCKS, PROMPT.tokens) for key in ("i:first", "i:late"))
            source.links[0].publish(first)
            await target.links[0].fetch(first, (BLOCKS,), deadline_seconds=20)
            target.links[0].release(first.key)
            fetching = target.links[0].start_fetch(late, (BLOCKS,), deadline_seconds=20)  # nobody publishes it
            await source.links[0].close()
            with pytest.raises(KVLinkError):
                await fetching.wait()
            assert fetching.state is not State.DONE
            target.assert_no_block_out()

    on_uvloop(story())
