"""Push while it is computed: what is ready crosses while the rest is not, and nothing is installed before the seal."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from random import Random

import numpy as np
import pytest
from computing import Computing, stream, walk
from engines import source_engine, target_engine, until
from test_link_hybrid import assert_pools, drawn, expected_pools, has_window, opened

from kvlink import State, Ticket
from kvlink.cli.bench.content import Prompt
from kvlink.errors import (
    ClosedError,
    ConflictError,
    ExpiredError,
    KVLinkError,
    LayoutError,
    MismatchError,
    TransportError,
)
from kvlink.layout import Frontier
from kvlink.transports.faults import FailRead
from kvlink.transports.loopback_fabric import LoopbackFabric
from kvlink.wire import Advance

TOKENS = 150
PROMPT = Prompt(seed=5, tokens=TOKENS)
PROMPT_BYTES = TOKENS * 3 * 2 * 4 * 32 * 2
"""Layers, K and V, heads, channels, bytes of an element."""


def hybrid(case):
    return has_window(case) and case.request.tokens > 8


@pytest.mark.parametrize("case", drawn(4, hybrid), ids=lambda case: f"seed{case.seed}")
async def test_a_hybrid_stream_fills_whole_pools_as_plain_indexing_says_d1_d2_d5(case):
    """Windows, states and shared memory, TP and PP of any two engines, cut at random positions and layers."""
    request, random = case.request, np.random.default_rng(case.seed)
    async with AsyncExitStack() as stack:
        fabric = LoopbackFabric(seed=case.seed)
        source = await opened(stack, case.source, fabric, random)
        target = await opened(stack, case.target, fabric, random)
        expected = expected_pools(case, source, target)
        starts = tuple(request.starts)
        ticket = Ticket(key="1:r", roster=target.roster, blocks=(), tokens=request.tokens, group_first_tokens=starts)
        given = [link.announce("1:r", ttl_seconds=20, max_tokens=request.tokens) for link in source.links]
        taken = [
            link.expect(ticket, source.roster, request.target_blocks, deadline_seconds=20) for link in target.links
        ]
        await until(lambda: all(part.state is State.READY for part in taken))
        computing = [
            Computing(link._driver._rank.caches.spec, pools, request.source_blocks, starts, request.tokens)
            for link, pools in zip(source.links, source.pools, strict=True)
        ]
        words = list(walk(Random(case.seed), request.tokens, case.source.num_layers + 1))
        await asyncio.gather(
            *(stream(part, each, iter(words), starts=starts) for part, each in zip(given, computing, strict=True))
        )
        results = await asyncio.gather(*(part.wait() for part in (*given, *taken)))
        assert all("exposed" in result.phases for result in results)
        assert_pools(target, expected)
        for link in (*source.links, *target.links):
            memory = link.stats().memory
            assert (memory.held, memory.leased, memory.reserved, memory.draining) == (0, 0, 0, 0)


WAYS = {
    "ucx direct": ({"transports": ("ucx",), "path": "direct"}, False),
    "ucx packed": ({"transports": ("ucx",), "path": "packed"}, False),
    "stream": ({"transports": ("stream",)}, False),
    "shared mapped": ({"transports": ("shared",)}, True),
    "shared ring": ({"transports": ("shared",)}, False),
    "integrity off": ({"transports": ("stream",), "integrity": False}, False),
}


@pytest.mark.parametrize(("settings", "shareable"), WAYS.values(), ids=WAYS)
async def test_every_byte_crosses_while_the_rest_is_computed_d2_d3(settings, *, shareable: bool) -> None:
    """D2, D3: two ranks to four, blocks of 16 to 24, another layout; chunks that end in mid-block."""
    async with (
        source_engine(None, tp=2, settings=settings, shareable=shareable) as source,
        target_engine(None, tp=4, layout="hnd", block_size=24, settings=settings) as target,
    ):
        blocks, into = tuple(range(2, 12)), tuple(range(20, 13, -1))
        source.fill(PROMPT, blocks)
        computing = [
            Computing(rank.caches.spec, [region.array for region in rank.caches.regions], (blocks,), (0,), TOKENS)
            for rank in source.ranks
        ]
        given = [link.announce("i:1", ttl_seconds=20, max_tokens=TOKENS) for link in source.links]
        ticket = target.ticket("i:1", TOKENS + 10)
        taken = [link.expect(ticket, source.roster, (into,), deadline_seconds=20) for link in target.links]
        await until(lambda: all(part.state is State.READY for part in taken))
        words = list(walk(Random(3), TOKENS, 3))
        await asyncio.gather(
            *(stream(part, each, iter(words), pause=0.004) for part, each in zip(given, computing, strict=True))
        )
        results = await asyncio.gather(*(part.wait() for part in (*given, *taken)))
        assert {result.transport for result in results} == {settings["transports"][0]}
        target.assert_holds(PROMPT, into)
        source.assert_no_block_out()
        assert sum(link.stats().counters["attempts_started"] for link in target.links) == 4


class Push:
    """One request of which some is computed, over a fabric."""

    def __init__(self, source, target, *, ttl_seconds: float = 20) -> None:
        self.source, self.target = source, target
        self.blocks, self.into = tuple(range(2, 12)), tuple(range(20, 10, -1))
        source.fill(PROMPT, self.blocks)
        self.given = source.links[0].announce("i:1", ttl_seconds=ttl_seconds, max_tokens=TOKENS)
        self.taken = self.expect()

    def expect(self, into=None, deadline_seconds: float = 20):
        ticket = self.target.ticket("i:1", TOKENS)
        return self.target.links[0].expect(
            ticket, self.source.roster, (into or self.into,), deadline_seconds=deadline_seconds
        )

    def moved(self) -> int:
        return self.target.links[0].stats().counters["bytes_moved"]

    async def some(self, tokens: int = 64) -> int:
        """Have some of it computed, and wait until it is here."""
        await until(lambda: self.taken.state >= State.READY)
        before = self.moved()
        self.given.ready(blocks=(self.blocks,), tokens=tokens)
        await until(lambda: self.moved() > before)
        return self.moved()


async def test_what_is_ready_is_here_before_the_seal_and_installed_after_it() -> None:
    fabric = LoopbackFabric(seed=1)
    async with source_engine(fabric) as source, target_engine(fabric) as target:
        push = Push(source, target)
        first = await push.some(64)
        assert first == PROMPT_BYTES * 64 // TOKENS
        push.given.ready(tokens=100, layers=1)
        await until(lambda: push.moved() > first)
        assert (push.taken.state, push.given.state) == (State.MOVING, State.READY)
        assert target.links[0].stats().memory.reserved == len(push.into)
        push.given.ready(tokens=TOKENS)
        push.given.seal()
        result = await push.taken.wait()
        assert (result.bytes, result.tokens, result.integrity) == (PROMPT_BYTES, TOKENS, True)
        target.assert_holds(PROMPT, push.into)
        assert (await push.given.wait()).tokens == TOKENS
        source.assert_no_block_out()


async def test_a_push_that_is_sealed_before_the_announced_length_says_where() -> None:
    """An engine announces the most that may come; decode must learn how much came."""
    fabric = LoopbackFabric(seed=1)
    async with source_engine(fabric) as source, target_engine(fabric) as target:
        push = Push(source, target)
        await push.some(64)
        push.given.ready(tokens=97, layers=1)
        push.given.ready(tokens=97)
        push.given.seal()
        assert [(await part.wait()).tokens for part in (push.taken, push.given)] == [97, 97]


@pytest.mark.parametrize("side", ["source", "target"])
async def test_a_stream_that_is_cancelled_installs_nothing_and_frees_all_a2_b5(side: str) -> None:
    """A2, B5: in its middle; the blocks of either side come back, after the cut-off."""
    fabric = LoopbackFabric(seed=1)
    async with source_engine(fabric) as source, target_engine(fabric) as target:
        push = Push(source, target)
        await push.some()
        part, engine = (push.given, source) if side == "source" else (push.taken, target)
        engine.links[0].cancel(part, "preempted")
        for ended in (push.given, push.taken):
            with pytest.raises(KVLinkError):
                await ended.wait()
        assert (push.given.state, push.taken.state) == (State.CANCELLED, State.CANCELLED)
        source.assert_no_block_out()
        target.assert_no_block_out()


async def test_a_stream_quiesces_while_it_rests() -> None:
    """Preemption: when it returns, no part touches a block any more."""
    fabric = LoopbackFabric(seed=1)
    async with source_engine(fabric) as source, target_engine(fabric) as target:
        push = Push(source, target)
        await push.some()
        assert await source.links[0].quiesce([push.given], 5)
        assert push.given.state is State.CANCELLED
        await until(lambda: push.taken.state.ended)
        assert push.taken.state is State.CANCELLED


async def test_a_target_that_tries_again_reads_from_the_start_while_the_source_computes_on() -> None:
    """A fresh attempt into fresh blocks; what had become ready since crosses in one piece."""
    fabric = LoopbackFabric(seed=1, faults=[FailRead(nth=2)])
    async with source_engine(fabric) as source, target_engine(fabric) as target:
        push = Push(source, target)
        await push.some(32)
        push.given.ready(tokens=64)
        with pytest.raises(TransportError):
            await push.taken.wait()
        push.given.ready(tokens=100, layers=2)
        fresh = tuple(range(1, 11))
        again = push.expect(fresh)
        await until(lambda: again.state is State.MOVING)
        push.given.ready(tokens=TOKENS)
        push.given.seal()
        assert (await again.wait()).bytes == PROMPT_BYTES
        await push.given.wait()
        assert target.ranks[0].content.check(PROMPT, fresh) is None
        source.assert_no_block_out()


async def test_an_engine_that_forgets_to_seal_ends_its_part_b5() -> None:
    """B5: nothing more became ready for the hold's time to live."""
    fabric = LoopbackFabric(seed=1)
    async with source_engine(fabric) as source, target_engine(fabric) as target:
        push = Push(source, target, ttl_seconds=0.3)
        await push.some()
        with pytest.raises(ExpiredError, match="nothing more became ready"):
            await push.given.wait()
        with pytest.raises(ExpiredError):
            await push.taken.wait()
        source.assert_no_block_out()
        target.assert_no_block_out()


async def test_a_target_rests_past_its_deadline_while_the_source_computes_b7() -> None:
    """B7: the transfer's clock stands still while there is nothing to transfer."""
    fabric = LoopbackFabric(seed=1)
    async with source_engine(fabric) as source, target_engine(fabric) as target:
        push = Push(source, target)
        await until(lambda: push.taken.state is State.READY)
        target.links[0].cancel(push.taken, "for another with a short deadline")
        await until(lambda: push.taken.state.ended)
        push.taken = push.expect(deadline_seconds=0.3)
        await push.some()
        await asyncio.sleep(0.5)
        assert push.taken.state is State.MOVING
        push.given.ready(tokens=TOKENS)
        push.given.seal()
        await push.taken.wait()
        target.assert_holds(PROMPT, push.into)


async def test_an_interpreter_that_is_held_between_two_increments_costs_no_attempt() -> None:
    """For longer than a lease: only a read renews it, and the next one waits for the interpreter."""
    settings = {"transports": ("stream",), "lease_seconds": 0.4, "heartbeat_seconds": 0.1}
    async with source_engine(None, settings=settings) as source, target_engine(None, settings=settings) as target:
        push = Push(source, target)
        await push.some()
        push.given.ready(tokens=100)
        await asyncio.sleep(0)  # it is told, and not heard
        time.sleep(0.8)  # noqa: ASYNC251 - so that nobody hears
        push.given.ready(tokens=TOKENS)
        push.given.seal()
        assert (await push.taken.wait()).attempts == 1
        target.assert_holds(PROMPT, push.into)


async def test_what_an_engine_may_not_say_is_refused_and_changes_nothing() -> None:
    fabric = LoopbackFabric(seed=1)
    async with source_engine(fabric) as source, target_engine(fabric) as target:
        push = Push(source, target)
        await push.some(64)
        for wrong, why in (
            ({"tokens": 63}, "backwards"),
            ({"tokens": TOKENS + 1}, "announced"),
            ({"tokens": 100, "blocks": (push.blocks[:6],)}, "hold fewer than"),
            ({"blocks": ((9, *push.blocks[1:]),)}, "only append"),
            ({"blocks": ()}, "one a group"),
            ({"group_first_tokens": (3,)}, "state them with the first"),
        ):
            with pytest.raises(LayoutError, match=why):
                push.given.ready(**wrong)
        push.given.ready(tokens=TOKENS, layers=2)
        with pytest.raises(LayoutError, match="in the middle of a chunk"):
            push.given.seal()
        push.given.ready(layers=3)
        push.given.seal()
        with pytest.raises(ClosedError):
            push.given.ready(tokens=TOKENS)
        await push.taken.wait()
        target.assert_holds(PROMPT, push.into)


WORDS = {
    "backwards": {"frontier": Frontier.whole(8)},
    "past the room": {"frontier": Frontier.whole(TOKENS + 1)},
    "blocks of other groups": {"blocks": ((), ())},
    "blocks outside of the cache": {"blocks": ((4096,),)},
    "bytes counted otherwise": {"total_bytes": 1},
    "a seal of something else": {"sealed": "of something else"},
}


@pytest.mark.parametrize("changed", WORDS.values(), ids=WORDS)
async def test_a_source_that_makes_up_an_increment_has_nothing_read_and_nothing_installed(changed) -> None:
    """Whatever a source says of its next increment, its target ends the part with a typed error, and frees it."""
    fabric = LoopbackFabric(seed=1)
    async with source_engine(fabric) as source, target_engine(fabric) as target:
        push = Push(source, target)
        moved = await push.some(64)
        half = target.links[0]._driver.target
        (attempt,) = half._of_attempt
        told = {"frontier": Frontier.whole(100), "blocks": ((5, 6, 7),), "total_bytes": 0, "sealed": None} | changed
        half._on_message(half.sessions.get(str(source.roster.place(0))), Advance(attempt=attempt, number=2, **told))
        with pytest.raises(KVLinkError) as ended:
            await push.taken.wait()
        assert isinstance(ended.value, LayoutError | MismatchError | ConflictError)
        assert push.moved() == moved
        target.assert_no_block_out()
