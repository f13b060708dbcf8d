"""Room that KVLink gives out: lent blocks, whole requests, and engines that pass blocks of their own."""

from __future__ import annotations

import asyncio

import pytest
from engines import source_engine, target_engine, until

from kvlink import Facts, Link, Reservation, State
from kvlink.cli.bench.content import Prompt
from kvlink.errors import BusyError, CancelledError, ClosedError, ConflictError, LayoutError, TooLargeError
from kvlink.transports.faults import DelayChunk
from kvlink.transports.loopback_fabric import LoopbackFabric

PROMPT = Prompt(seed=9, tokens=75)  # five blocks of sixteen
FROM = (9, 2, 17, 4, 11)
LENT = (1, 3, 5, 7, 8, 13, 18, 23)


async def reserve(link: Link, key: str, tokens: int = PROMPT.tokens, **fields: object) -> Reservation:
    return await link.reserve(key, tokens=tokens, **fields)


def free(link: Link) -> int:
    (blocks,) = link.stats().room.free
    return blocks


async def test_h1_room_is_reserved_before_prefill_and_a_push_fills_it() -> None:
    # H1
    fabric = LoopbackFabric(seed=1)
    async with source_engine(fabric) as source, target_engine(fabric) as target:
        (link,) = target.links
        link.lend([LENT])
        room = await reserve(link, "i:p", growth_tokens=20)
        assert len(room.blocks[0]) == 6  # 95 tokens
        assert set(room.blocks[0]) <= set(LENT)
        assert (room.room.free, room.room.lent) == ((2,), (8,))
        expected = link.expect(target.ticket("i:p", room.tokens), source.roster, room.blocks, deadline_seconds=20)
        source.fill(PROMPT, FROM)
        (announced,) = [each.announce("i:p", ttl_seconds=10) for each in source.links]
        announced.ready(blocks=(FROM,), tokens=PROMPT.tokens)
        announced.seal()
        await expected.wait()
        target.assert_holds(PROMPT, room.blocks[0][:5])
        assert free(link) == 2  # the engine decodes in them
        link.release("i:p")
        assert free(link) == 8


async def test_h2_a_request_that_can_never_fit_is_refused_at_once_however_long_it_would_wait() -> None:
    # H2
    async with target_engine(LoopbackFabric(seed=2)) as target:
        (link,) = target.links
        link.lend([LENT])
        await reserve(link, "i:all", tokens=128)
        async with asyncio.timeout(1):
            with pytest.raises(TooLargeError, match=r"9 blocks of groups\.full.*8 are lent"):
                await reserve(link, "i:huge", tokens=128, growth_tokens=1, wait_seconds=60)
        assert link.stats().counters["demands_too_large"] == 1


async def test_busy_says_what_is_free_and_when_to_come_again() -> None:
    async with target_engine(LoopbackFabric(seed=3)) as target:
        (link,) = target.links
        link.lend([LENT])
        await reserve(link, "i:a", tokens=100)
        with pytest.raises(BusyError, match="free are 1 of 8 blocks") as busy:
            await reserve(link, "i:b", tokens=30)
        assert busy.value.free_blocks == (1,)
        assert busy.value.retry_after_seconds > 0
        assert busy.value.retryable


async def test_h3_a_tenant_that_fills_the_queue_does_not_keep_another_out() -> None:
    # H3
    async with target_engine(LoopbackFabric(seed=4)) as target:
        (link,) = target.links
        link.lend([LENT])
        order: list[str] = []

        async def served(key: str, tenant: str, priority: int = 0) -> None:
            await reserve(link, key, tokens=64, wait_seconds=5, facts=Facts(tenant=tenant, priority=priority))
            order.append(key)
            link.release(key)

        await reserve(link, "i:a0", tokens=64, facts=Facts(tenant="a"))
        await reserve(link, "i:a1", tokens=64, facts=Facts(tenant="a"))
        async with asyncio.TaskGroup() as group:
            for index in range(2, 8):
                group.create_task(served(f"i:a{index}", "a", priority=5))
            await asyncio.sleep(0)
            group.create_task(served("i:b", "b"))
            await until(lambda: link.stats().room.waiting == 7)
            link.release("i:a0")
        assert order[0] == "i:b"
        assert len(order) == 7


async def test_h4_an_engine_that_passes_its_own_blocks_is_never_queued() -> None:
    """H4: Not even where all that was lent is taken and others wait."""
    fabric = LoopbackFabric(seed=5)
    async with source_engine(fabric) as source, target_engine(fabric) as target:
        (link,) = target.links
        link.lend([LENT])
        await reserve(link, "i:all", tokens=128)
        waiting = asyncio.create_task(reserve(link, "i:waits", wait_seconds=30))
        await until(lambda: link.stats().room.waiting == 1)
        source.fill(PROMPT, FROM)
        offer = source.offer("i:own", FROM, PROMPT.tokens)
        source.links[0].publish(offer)
        own = (0, 2, 4, 6, 10)
        assert (await link.fetch(offer, (own,), deadline_seconds=20)).state is State.DONE
        target.assert_holds(PROMPT, own)
        assert link.stats().room.waiting == 1
        waiting.cancel()


async def test_lent_blocks_are_nobodys_without_a_reservation() -> None:
    fabric = LoopbackFabric(seed=6)
    async with source_engine(fabric) as source, target_engine(fabric) as target:
        (link,) = target.links
        link.lend([LENT])
        room = await reserve(link, "i:a")
        offer = source.offer("i:b", FROM, PROMPT.tokens)
        for into in (room.blocks, ((0, 2, 4, 6, min(set(LENT) - set(room.blocks[0]))),)):
            with pytest.raises(ConflictError, match="not reserved for this request"):
                link.start_fetch(offer, into, deadline_seconds=20)
        for twice in ([LENT[:1]], [(0, 0)]):
            with pytest.raises(LayoutError, match="lent twice"):
                link.lend(twice)
        assert free(link) == 3


async def test_a_reservation_comes_back_when_its_part_fails_and_only_after_the_cut_off() -> None:
    fabric = LoopbackFabric(seed=7, faults=[DelayChunk(steps=1_000_000)])
    async with source_engine(fabric) as source, target_engine(fabric) as target:
        (link,) = target.links
        link.lend([LENT])
        room = await reserve(link, "i:f")
        offer = source.offer("i:f", FROM, PROMPT.tokens)
        source.links[0].publish(offer)
        part = link.start_fetch(offer, room.blocks, deadline_seconds=20)
        await until(lambda: part.state is State.MOVING)
        link.release("i:f")  # too early: it is live
        assert free(link) == 3
        waiting = asyncio.create_task(reserve(link, "i:next", wait_seconds=10))
        link.cancel(part, "the client went away")
        assert part.state is State.DRAINING
        assert free(link) == 3
        with pytest.raises(CancelledError):
            await part.wait()
        assert len((await waiting).blocks[0]) == 5


async def test_an_unused_reservation_ends_by_itself() -> None:
    async with target_engine(LoopbackFabric(seed=8)) as target:
        (link,) = target.links
        link.lend([LENT])
        await reserve(link, "i:a", ttl_seconds=0.05)
        await reserve(link, "i:b", wait_seconds=5)
        assert link.stats().counters["reservations_expired"] == 1


async def test_whoever_stops_waiting_leaves_nothing_behind() -> None:
    async with target_engine(LoopbackFabric(seed=9)) as target:
        (link,) = target.links
        link.lend([LENT])
        await reserve(link, "i:a")
        cancelled = asyncio.create_task(reserve(link, "i:b", wait_seconds=30))
        released = asyncio.create_task(reserve(link, "i:c", wait_seconds=30))
        await until(lambda: link.stats().room.waiting == 2)
        with pytest.raises(ConflictError):
            await reserve(link, "i:b")
        cancelled.cancel()
        link.release("i:c")
        with pytest.raises(CancelledError):
            await released
        assert link.stats().room.waiting == 0
        link.release("i:a")
        assert free(link) == 8


async def test_closing_tells_those_who_wait() -> None:
    async with target_engine(LoopbackFabric(seed=10)) as target:
        (link,) = target.links
        link.lend([LENT])
        await reserve(link, "i:a")
        waiting = asyncio.create_task(reserve(link, "i:b", wait_seconds=30))
        await until(lambda: link.stats().room.waiting == 1)
        await link.close()
        with pytest.raises(ClosedError):
            await waiting
