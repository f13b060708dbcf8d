"""The link end to end: both flows, over the loopback and over UCX, between engines of different shapes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import msgspec
import pytest
from engines import IDENTITY, Engine, source_engine, target_engine, until

from kvlink import Facts, State
from kvlink.cli.bench.content import Prompt
from kvlink.errors import (
    CancelledError,
    ConflictError,
    DeadlineError,
    DeclinedError,
    ExpiredError,
    MismatchError,
    PeerUnreachableError,
    UnknownRequestError,
)
from kvlink.transports.faults import DelayChunk
from kvlink.transports.loopback_fabric import LoopbackFabric
from kvlink.wire import Announce, Withdrawn, error_to_info

PROMPT = Prompt(seed=7, tokens=75)


def blocks_for(engine: Engine, tokens: int = PROMPT.tokens) -> tuple[int, ...]:
    """Scattered blocks that hold the prompt."""
    count = -(-tokens // engine.block_size)
    return tuple((3 + 5 * index) % engine.num_blocks for index in range(count))


async def fetch_all(source: Engine, target: Engine, key: str = "i:r1", **fields: object) -> list[State]:
    """Fill, publish on every source rank, fetch on every target rank; the ends of all parts, sources first."""
    source_blocks, target_blocks = blocks_for(source), blocks_for(target)
    source.fill(PROMPT, source_blocks)
    offer = source.offer(key, source_blocks, PROMPT.tokens)
    published = [link.publish(offer) for link in source.links]
    fetches = [link.start_fetch(offer, (target_blocks,), deadline_seconds=20, **fields) for link in target.links]
    await asyncio.gather(*(part.wait() for part in (*fetches, *published)))
    return [part.state for part in (*published, *fetches)]


SHAPES = [
    ({"tp": 1}, {"tp": 1}),
    ({"tp": 2, "layout": "nhd"}, {"tp": 4, "layout": "hnd", "block_size": 48}),
    ({"tp": 4, "layout": "fused", "block_size": 64}, {"tp": 2, "layout": "apart"}),
    ({"tp": 1, "pp": 3, "layout": "blockmajor"}, {"tp": 2, "block_size": 5, "num_blocks": 64}),
]


@pytest.mark.parametrize(("source_shape", "target_shape"), SHAPES)
async def test_a_fetch_installs_every_byte_and_nothing_else(source_shape: dict, target_shape: dict) -> None:
    fabric = LoopbackFabric(seed=1)
    async with source_engine(fabric, **source_shape) as source, target_engine(fabric, **target_shape) as target:
        states = await fetch_all(source, target)
        assert set(states) == {State.DONE}
        target.assert_holds(PROMPT, blocks_for(target))
        source.assert_no_block_out()
        target.assert_no_block_out()


@pytest.mark.parametrize("transport", ["loopback", "stream"])
async def test_c6_a_target_that_closes_right_after_its_install_has_told_its_source(transport: str) -> None:
    """C6: the goodbye is the last word, whatever else was still to leave, and what came before it is heard."""
    fabric = LoopbackFabric(seed=2) if transport == "loopback" else None
    settings = {} if fabric else {"transports": (transport,)}
    async with source_engine(fabric, settings=settings) as source:
        async with target_engine(fabric, tp=2, settings=settings) as target:
            offer = source.offer("i:r1", blocks_for(source), PROMPT.tokens)
            published = source.links[0].publish(offer)
            into = (blocks_for(target),)
            await asyncio.gather(*(link.fetch(offer, into, deadline_seconds=20) for link in target.links))
        async with asyncio.timeout(2):
            await published.wait()
        assert published.state is State.DONE


async def test_a_push_installs_every_byte() -> None:
    fabric = LoopbackFabric(seed=2)
    async with source_engine(fabric, tp=4) as source, target_engine(fabric, tp=2, layout="hnd") as target:
        blocks, into = blocks_for(source), blocks_for(target)
        announced = [link.announce("i:p1", ttl_seconds=10) for link in source.links]
        ticket = target.ticket("i:p1", PROMPT.tokens + 20)
        room = (*into, *range(20, 22))
        expected = [link.expect(ticket, source.roster, (room,), deadline_seconds=20) for link in target.links]
        await asyncio.sleep(0.05)
        assert all(part.state < State.DONE for part in (*announced, *expected))
        source.fill(PROMPT, blocks)
        for part in announced:
            part.ready(blocks=(blocks,), tokens=PROMPT.tokens)
            part.seal()
        await asyncio.gather(*(part.wait() for part in (*announced, *expected)))
        target.assert_holds(PROMPT, into)
        source.assert_no_block_out()


async def test_a_ticket_may_come_before_its_announcement() -> None:
    fabric = LoopbackFabric(seed=3)
    async with source_engine(fabric) as source, target_engine(fabric) as target:
        blocks, into = blocks_for(source), blocks_for(target)
        (expected,) = [
            link.expect(target.ticket("i:p2", PROMPT.tokens), source.roster, (into,), deadline_seconds=20)
            for link in target.links
        ]
        await asyncio.sleep(0.05)
        part = source.links[0].announce("i:p2", ttl_seconds=10)
        source.fill(PROMPT, blocks)
        part.ready(blocks=(blocks,), tokens=PROMPT.tokens)
        part.seal()
        result = await expected.wait()
        assert result.integrity
        target.assert_holds(PROMPT, into)


async def test_whoever_is_not_the_source_can_neither_announce_nor_withdraw() -> None:
    """C3: a peer that knows the key, and is authenticated, is still not one of those that the request is read from."""
    fabric = LoopbackFabric(seed=3)
    async with source_engine(fabric) as source, target_engine(fabric) as target:
        ticket = target.ticket("i:p3", PROMPT.tokens)
        expected = target.links[0].expect(ticket, source.roster, (blocks_for(target),), deadline_seconds=20)
        await until(lambda: expected.state is State.READY)
        half, other = target.links[0]._driver.target, SimpleNamespace(peer="other/0/0@1")
        other_offer = source.offer("i:p3", blocks_for(source)[:1], 3)
        half._on_message(other, Withdrawn(key="i:p3", error=error_to_info(CancelledError("not yours to say"))))
        half._on_message(other, Announce(key="i:p3", descriptor=other_offer.descriptor(9.0)))
        part = source.links[0].announce("i:p3", ttl_seconds=10)
        source.fill(PROMPT, blocks_for(source))
        part.ready(blocks=(blocks_for(source),), tokens=PROMPT.tokens)
        part.seal()
        await expected.wait()
        target.assert_holds(PROMPT, blocks_for(target))


async def test_a_push_hears_only_the_sources_that_its_rank_reads() -> None:
    """C3: a rank that comes to know its siblings' source (it renews there, say) is not told that source's end."""
    fabric = LoopbackFabric(seed=3)
    async with source_engine(fabric, tp=2) as source, target_engine(fabric, tp=2) as target:
        into = blocks_for(target)
        expected = [
            link.expect(target.ticket("i:p4", PROMPT.tokens), source.roster, (into,), deadline_seconds=20)
            for link in target.links
        ]
        source.fill(PROMPT, blocks_for(source))
        announced = [link.announce("i:p4", ttl_seconds=10) for link in source.links]
        for link, push, part in zip(source.links, announced, expected, strict=True):
            push.ready(blocks=(blocks_for(source),), tokens=PROMPT.tokens)
            push.seal()
            await part.wait()
            await push.wait()
            if link is source.links[0]:
                target.links[1].renew([source.offer("i:p4", blocks_for(source), PROMPT.tokens)])
                await until(lambda: source.links[0].stats().counters["peers_connected"] == 2)
                await asyncio.sleep(0.05)
        target.assert_holds(PROMPT, into)


async def test_an_early_ask_is_parked_until_the_offer_is_published() -> None:
    fabric = LoopbackFabric(seed=4)
    async with source_engine(fabric) as source, target_engine(fabric) as target:
        blocks, into = blocks_for(source), blocks_for(target)
        source.fill(PROMPT, blocks)
        offer = source.offer("i:r2", blocks, PROMPT.tokens)
        part = target.links[0].start_fetch(offer, (into,), deadline_seconds=20)
        await asyncio.sleep(0.1)
        assert source.links[0].stats().counters["asks_parked"] == 1
        source.links[0].publish(offer)
        await part.wait()
        target.assert_holds(PROMPT, into)


async def test_an_ask_that_stays_unknown_is_refused_and_its_blocks_are_back() -> None:
    fabric = LoopbackFabric(seed=5)
    settings = {"park_seconds": 0.2}
    async with (
        source_engine(fabric, settings=settings) as source,
        target_engine(fabric) as target,
    ):
        offer = source.offer("i:nobody", blocks_for(source), PROMPT.tokens)
        with pytest.raises(UnknownRequestError):
            await target.links[0].fetch(offer, (blocks_for(target),), deadline_seconds=20)
        target.assert_untouched()
        target.assert_no_block_out()


async def test_g1_a_repeated_fetch_joins_the_live_one_and_then_gets_its_outcome() -> None:
    fabric = LoopbackFabric(seed=6)
    async with source_engine(fabric) as source, target_engine(fabric) as target:
        blocks, into = blocks_for(source), blocks_for(target)
        source.fill(PROMPT, blocks)
        offer = source.offer("i:r3", blocks, PROMPT.tokens)
        source.links[0].publish(offer)
        link = target.links[0]
        first, second = (link.start_fetch(offer, (into,), deadline_seconds=20) for _ in range(2))
        await asyncio.gather(first.wait(), second.wait())
        assert link.stats().counters["attempts_started"] == 1
        third = await link.fetch(offer, (into,), deadline_seconds=20)
        assert third.state is State.DONE
        assert link.stats().counters["attempts_started"] == 1
        link.release(offer.key)


async def test_g4_the_same_key_with_another_prompt_is_a_conflict_that_names_both() -> None:
    fabric = LoopbackFabric(seed=7)
    async with source_engine(fabric) as source, target_engine(fabric) as target:
        blocks, into = blocks_for(source), blocks_for(target)
        source.fill(PROMPT, blocks)
        held = source.offer("i:r4", blocks, PROMPT.tokens, facts=Facts(prompt_digest="aa"))
        source.links[0].publish(held)
        other = source.offer("i:r4", blocks, PROMPT.tokens, facts=Facts(prompt_digest="bb"))
        with pytest.raises(ConflictError, match=r"(?s)content [0-9a-f]{64}.*[0-9a-f]{64}"):
            await target.links[0].fetch(other, (into,), deadline_seconds=20)
        target.assert_untouched()
        await target.links[0].fetch(held, (into,), deadline_seconds=20)


async def test_a_request_that_is_over_is_forgotten_on_both_sides() -> None:
    """A link that serves for days holds what lives, not what it has served (its ledger is bounded)."""
    fabric = LoopbackFabric(seed=6)
    async with source_engine(fabric) as source, target_engine(fabric) as target:
        for number in range(3):
            await fetch_all(source, target, f"i:{number}")
            target.links[0].release(f"i:{number}")
        given, taken = source.links[0]._driver.source, target.links[0]._driver.target
        await until(lambda: not (given._works or len(given._leases) or taken._works or taken._of_attempt))
        assert given._leases.capacity.active_legs == 0


async def test_another_prompt_than_the_targets_own_is_refused_before_anything_moves() -> None:
    fabric = LoopbackFabric(seed=8)
    async with source_engine(fabric) as source, target_engine(fabric) as target:
        offer = source.offer("i:r5", blocks_for(source), PROMPT.tokens, facts=Facts(prompt_digest="aa"))
        with pytest.raises(MismatchError, match=r"prompt_digest"):
            await target.links[0].fetch(
                offer, (blocks_for(target),), deadline_seconds=20, facts=Facts(prompt_digest="bb")
            )
        target.assert_no_block_out()


async def test_g5_released_blocks_make_the_key_a_new_request() -> None:
    fabric = LoopbackFabric(seed=9)
    async with source_engine(fabric) as source, target_engine(fabric) as target:
        await fetch_all(source, target, "i:r6")
        target.links[0].release("i:r6")
        offer = source.offer("i:r6", blocks_for(source), PROMPT.tokens)
        with pytest.raises(ConflictError):  # the source has recorded its end: never the old outcome for new blocks
            await target.links[0].fetch(offer, (blocks_for(target),), deadline_seconds=20)
        target.assert_no_block_out()


@pytest.mark.parametrize("side", ["source", "target"])
async def test_a2_a_cancel_from_either_side_ends_both_and_returns_every_block(side: str) -> None:
    fabric = LoopbackFabric(seed=10, faults=[DelayChunk(steps=1_000_000)])  # nothing ever lands
    async with source_engine(fabric) as source, target_engine(fabric) as target:
        blocks, into = blocks_for(source), blocks_for(target)
        source.fill(PROMPT, blocks)
        offer = source.offer("i:r7", blocks, PROMPT.tokens)
        published = source.links[0].publish(offer)
        fetched = target.links[0].start_fetch(offer, (into,), deadline_seconds=20)
        await until(lambda: fetched.state >= State.MOVING)
        if side == "source":
            source.links[0].cancel(published, "prefill aborted")
        else:
            target.links[0].cancel(fetched, "the client went away")
        with pytest.raises(CancelledError, match="prefill aborted" if side == "source" else "the client went away"):
            await fetched.wait()
        if side == "target":
            source.links[0].cancel(published, "no longer needed")
        with pytest.raises(CancelledError):
            await published.wait()
        source.assert_no_block_out()
        target.assert_no_block_out()


async def test_a_cancelled_wait_leaves_no_byte_in_flight() -> None:
    fabric = LoopbackFabric(seed=11)
    async with source_engine(fabric) as source, target_engine(fabric) as target:
        offer = source.offer("i:r8", blocks_for(source), PROMPT.tokens)
        task = asyncio.create_task(target.links[0].fetch(offer, (blocks_for(target),), deadline_seconds=20))
        await asyncio.sleep(0.1)  # parked: nothing is published
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        target.assert_no_block_out()
        target.assert_untouched()


async def test_the_transfers_own_deadline_ends_it() -> None:
    fabric = LoopbackFabric(seed=12, faults=[DelayChunk(steps=1_000_000)])
    async with source_engine(fabric) as source, target_engine(fabric) as target:
        blocks = blocks_for(source)
        offer = source.offer("i:r9", blocks, PROMPT.tokens)
        source.links[0].publish(offer)
        with pytest.raises(DeadlineError, match="moving"):
            await target.links[0].fetch(offer, (blocks_for(target),), deadline_seconds=0.3)
        target.assert_no_block_out()


async def test_an_offer_that_nobody_asks_for_expires_and_frees_its_blocks() -> None:
    fabric = LoopbackFabric(seed=13)
    async with source_engine(fabric) as source:
        part = source.links[0].publish(source.offer("i:r10", blocks_for(source), PROMPT.tokens, ttl_seconds=0.1))
        assert source.links[0].stats().memory.held > 0
        with pytest.raises(ExpiredError):
            await part.wait()
        source.assert_no_block_out()


async def test_b2_a_declined_offer_frees_its_source_at_once() -> None:
    fabric = LoopbackFabric(seed=14)
    async with source_engine(fabric) as source, target_engine(fabric) as target:
        offer = source.offer("i:r11", blocks_for(source), PROMPT.tokens)
        part = source.links[0].publish(offer)
        target.links[0].decline(offer, "the whole prompt is cached here")
        with pytest.raises(DeclinedError, match="cached here"):
            await part.wait()
        source.assert_no_block_out()


async def test_b2_a_decline_that_comes_before_the_kv_is_heard() -> None:
    """An engine publishes in its next step, and its target may have lost interest by then."""
    fabric = LoopbackFabric(seed=18)
    async with source_engine(fabric) as source, target_engine(fabric) as target:
        offer = source.offer("i:r18", blocks_for(source), PROMPT.tokens)
        target.links[0].decline(offer, "aborted in the queue")
        early = source.links[0]._driver.source.early
        while not len(early.declines):
            await asyncio.sleep(0.001)
        part = source.links[0].publish(offer)
        with pytest.raises(DeclinedError, match="aborted in the queue"):
            await part.wait()
        assert len(early.declines) == 0
        source.assert_no_block_out()


async def test_d7_sources_that_nobody_reads_are_told_so() -> None:
    fabric = LoopbackFabric(seed=15)
    async with source_engine(fabric, tp=8) as source, target_engine(fabric, tp=4) as target:  # 4 heads: 2 replicas
        assert set(await fetch_all(source, target)) == {State.DONE}
        target.assert_holds(PROMPT, blocks_for(target))
        source.assert_no_block_out()


async def test_uncovered_slots_are_zeroed_if_asked() -> None:
    fabric = LoopbackFabric(seed=16)
    async with source_engine(fabric) as source, target_engine(fabric) as target:
        await fetch_all(source, target, uncovered="zero")
        assert_rest_is_zero(target)


@pytest.mark.parametrize("streamed", [False, True])
async def test_uncovered_slots_of_a_push_are_zeroed_if_asked(streamed: bool) -> None:
    """Which those are, only the seal tells: the ticket has room for more."""
    fabric = LoopbackFabric(seed=17)
    async with source_engine(fabric) as source, target_engine(fabric) as target:
        source.fill(PROMPT, blocks_for(source))
        room = (*blocks_for(target), 20, 21)
        ticket = target.ticket("i:p5", PROMPT.tokens + 2 * target.block_size)
        expected = target.links[0].expect(ticket, source.roster, (room,), deadline_seconds=20, uncovered="zero")
        part = source.links[0].announce("i:p5", ttl_seconds=10)
        if streamed:
            part.ready(blocks=(blocks_for(source),), tokens=40)
            await until(lambda: target.links[0].stats().counters["bytes_moved"] > 0)
        part.ready(blocks=(blocks_for(source),), tokens=PROMPT.tokens)
        part.seal()
        result = await expected.wait()
        assert (result.streamed_bytes > 0) == streamed
        assert_rest_is_zero(target)


def assert_rest_is_zero(target: Engine) -> None:
    (rank,) = target.ranks
    last, used = blocks_for(target)[-1], PROMPT.tokens % target.block_size
    group = rank.caches.spec.groups[0]
    for plane in group.planes:
        region = rank.caches.regions[plane.region].array
        for slot in range(group.block_size):
            start = plane.offset_bytes + last * plane.block_stride + slot * plane.slot_stride
            row = region[start : start + group.row_bytes]
            assert row.any() == (slot < used)


async def test_a_prefix_that_is_there_already_is_not_moved() -> None:
    fabric = LoopbackFabric(seed=17)
    async with source_engine(fabric) as source, target_engine(fabric) as target:
        await fetch_all(source, target, first_token=48)
        into = blocks_for(target)
        for rank in target.ranks:
            assert rank.content.check_wiped(into[:3]) is None
            assert rank.content.check_wiped(into[3:]) is not None


@pytest.mark.parametrize("first_token", [0, 48])
async def test_an_offer_that_was_planned_before_it_was_asked_for_is_read_from_wherever_its_target_begins(
    first_token: int,
) -> None:
    fabric = LoopbackFabric(seed=17)
    async with source_engine(fabric) as source, target_engine(fabric) as target:
        await fetch_all(source, target)  # from now on it is clear who reads, and what
        into = blocks_for(target)
        for link, rank in zip(target.links, target.ranks, strict=True):
            link.release("i:r1")
            rank.content.wipe()
        source.fill(PROMPT, blocks_for(source))
        offer = source.offer("i:r2", blocks_for(source), PROMPT.tokens)
        published = source.links[0].publish(offer)
        await asyncio.sleep(0.01)
        parts = [
            link.start_fetch(offer, (into,), deadline_seconds=20, first_token=first_token) for link in target.links
        ]
        await asyncio.gather(*(part.wait() for part in (*parts, published)))
        skipped = first_token // target.block_size
        for rank in target.ranks:
            assert rank.content.check_wiped(into[:skipped]) is None
            assert rank.content.check_wiped(into[skipped:]) is not None
        if not skipped:
            target.assert_holds(PROMPT, into)


async def test_another_model_is_refused_in_the_handshake_by_field_and_both_values() -> None:
    fabric = LoopbackFabric(seed=18)
    other = msgspec.structs.replace(IDENTITY, weights_revision="r2")
    async with source_engine(fabric) as source, target_engine(fabric, identity=other) as target:
        offer = source.offer("i:r12", blocks_for(source), PROMPT.tokens)
        with pytest.raises(MismatchError, match=r"(?s)weights_revision.*'r1'.*'r2'"):
            await target.links[0].fetch(offer, (blocks_for(target),), deadline_seconds=20)


async def test_a_source_that_is_gone_is_unreachable_and_retryable() -> None:
    fabric = LoopbackFabric(seed=19)
    async with target_engine(fabric) as target:
        async with source_engine(fabric) as source:
            offer = source.offer("i:r13", blocks_for(source), PROMPT.tokens)
        with pytest.raises(PeerUnreachableError) as caught:
            await target.links[0].fetch(offer, (blocks_for(target),), deadline_seconds=20)
        assert caught.value.retryable
        target.assert_no_block_out()


@pytest.mark.parametrize("tls", [None, "tcp"])
async def test_over_ucx_a_fetch_installs_every_byte(tls: str | None) -> None:
    settings = {"transports": ("ucx",), "ucx_tls": tls}
    shape = {"tp": 2, "settings": settings}
    async with source_engine(None, **shape) as source, target_engine(None, layout="hnd", **shape) as target:
        assert set(await fetch_all(source, target)) == {State.DONE}
        target.assert_holds(PROMPT, blocks_for(target))
        source.assert_no_block_out()
        target.assert_no_block_out()
