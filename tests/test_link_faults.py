"""The link when bytes arrive wrong, peers go away, and time runs out; over the seeded loopback."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from engines import Engine, source_engine, target_engine, until

from kvlink import State, limits
from kvlink.cli.bench.content import Prompt
from kvlink.errors import (
    CancelledError,
    DeadlineError,
    IntegrityError,
    KVLinkError,
    LeaseLapsedError,
    PeerLostError,
    TransportError,
)
from kvlink.transports.faults import DelayChunk, DropRenewals, FailRead, FlipByte
from kvlink.transports.loopback_fabric import LoopbackFabric

PROMPT = Prompt(seed=3, tokens=75)
SETTINGS = {"chunk_leaves": 1}  # several chunks, so that one of them can be named
BLOCKS, INTO = (9, 2, 17, 4, 11), (3, 8, 13, 18, 23)


async def publish_and_fetch(source: Engine, target: Engine, key: str = "i:r1") -> tuple[State, State]:
    source.fill(PROMPT, BLOCKS)
    offer = source.offer(key, BLOCKS, PROMPT.tokens, ttl_seconds=1.0)
    published = source.links[0].publish(offer)
    fetched = target.links[0].start_fetch(offer, (INTO,), deadline_seconds=10)
    for part in (fetched, published):
        with contextlib.suppress(KVLinkError):
            await part.wait()
    return published.state, fetched.state


async def test_a_byte_flipped_on_the_way_is_found_reread_and_installed_right() -> None:
    fabric = LoopbackFabric(seed=1, faults=[FlipByte(chunk=2, on_try=1)])
    async with source_engine(fabric, settings=SETTINGS) as source, target_engine(fabric, settings=SETTINGS) as target:
        source.fill(PROMPT, BLOCKS)
        offer = source.offer("i:flip", BLOCKS, PROMPT.tokens)
        source.links[0].publish(offer)
        result = await target.links[0].fetch(offer, (INTO,), deadline_seconds=10)
        assert result.rereads == 1
        assert target.links[0].stats().counters["chunks_reread"] == 1
        target.assert_holds(PROMPT, INTO)


async def test_e3_a_byte_flipped_on_every_try_is_named_never_installed_and_every_block_is_back() -> None:
    fabric = LoopbackFabric(seed=2, faults=[FlipByte(chunk=2)])
    settings = {**SETTINGS, "max_rereads_per_chunk": 2}
    async with source_engine(fabric, settings=settings) as source, target_engine(fabric, settings=settings) as target:
        source.fill(PROMPT, BLOCKS)
        offer = source.offer("i:flips", BLOCKS, PROMPT.tokens, ttl_seconds=1.0)
        published = source.links[0].publish(offer)
        named = r"leaf 2 \(wire bytes 32768 to 49152\).*on every of 3 tries"
        with pytest.raises(IntegrityError, match=named) as caught:
            await target.links[0].fetch(offer, (INTO,), deadline_seconds=10)
        assert caught.value.retryable
        assert target.links[0].stats().counters["parts_done"] == 0
        target.assert_no_block_out()
        # The lease is over, and the hold waits for a fresh attempt.
        await until(lambda: source.links[0].stats().memory.leased == 0)
        source.links[0].cancel(published, "the request is given up")
        with pytest.raises(CancelledError):
            await published.wait()
        source.assert_no_block_out()


async def test_a_failed_attempt_leaves_its_hold_for_a_fresh_one() -> None:
    fabric = LoopbackFabric(seed=3, faults=[FailRead(nth=1, after_chunks=1)])
    async with source_engine(fabric, settings=SETTINGS) as source, target_engine(fabric, settings=SETTINGS) as target:
        source.fill(PROMPT, BLOCKS)
        offer = source.offer("i:again", BLOCKS, PROMPT.tokens)
        published = source.links[0].publish(offer)
        with pytest.raises(TransportError):
            await target.links[0].fetch(offer, (INTO,), deadline_seconds=10)
        target.assert_no_block_out()
        fresh = tuple(block + 1 for block in INTO)
        await target.links[0].fetch(offer, (fresh,), deadline_seconds=10)
        assert (await published.wait()).attempts == 2
        assert target.ranks[0].content.check(PROMPT, fresh) is None


async def test_a6_a_lease_that_lapsed_while_the_target_read_is_never_committed() -> None:
    faults = [DropRenewals(end="decode/0/0@t"), DelayChunk(steps=2_000_000, chunk=1)]
    fabric = LoopbackFabric(seed=4, faults=faults)
    settings = {**SETTINGS, "lease_seconds": 0.3, "heartbeat_seconds": 0.1}
    async with (
        source_engine(fabric, settings=settings) as source,
        target_engine(fabric, settings=settings, incarnation="t") as target,
    ):
        source.fill(PROMPT, BLOCKS)
        offer = source.offer("i:lapse", BLOCKS, PROMPT.tokens, ttl_seconds=0.5)
        published = source.links[0].publish(offer)
        with pytest.raises(LeaseLapsedError):
            await target.links[0].fetch(offer, (INTO,), deadline_seconds=10)
        assert source.links[0].stats().counters["leases_lapsed"] == 1
        source.links[0].cancel(published, "the request is given up")
        with pytest.raises(CancelledError):
            await published.wait()
        source.assert_no_block_out()
        target.assert_no_block_out()


async def test_b1_a_source_that_dies_in_mid_transfer_is_lost_and_a_new_one_is_served() -> None:
    fabric = LoopbackFabric(seed=5, faults=[DelayChunk(steps=2_000_000, chunk=3, read=1)])
    async with target_engine(fabric, settings=SETTINGS) as target:
        async with source_engine(fabric, settings=SETTINGS) as source:
            source.fill(PROMPT, BLOCKS)
            offer = source.offer("i:dies", BLOCKS, PROMPT.tokens)
            source.links[0].publish(offer)
            part = target.links[0].start_fetch(offer, (INTO,), deadline_seconds=10)
            await until(lambda: part.state >= State.MOVING)
            fabric.kill(str(source.ranks[0].caches.spec.place))
            with pytest.raises(PeerLostError):
                async with asyncio.timeout(5):
                    await part.wait()
            target.assert_no_block_out()
        async with source_engine(fabric, settings=SETTINGS) as successor:
            assert await publish_and_fetch(successor, target, "i:next") == (State.DONE, State.DONE)
            target.assert_holds(PROMPT, INTO)


async def test_a_session_that_ends_before_the_first_ask_is_redialled_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fabric = LoopbackFabric(seed=4)
    async with source_engine(fabric) as source, target_engine(fabric) as target:
        half = target.links[0]._driver.target
        connect, ended = half._calls.connect, []

        async def connect_and_lose(*args: object) -> object:
            sessions = await connect(*args)
            if not ended:
                ended.extend(sessions)
                half.sessions._down(sessions[0], PeerLostError("lost as soon as it was up"))
            return sessions

        monkeypatch.setattr(half._calls, "connect", connect_and_lose)
        source.fill(PROMPT, BLOCKS)
        offer = source.offer("i:early", BLOCKS, PROMPT.tokens)
        source.links[0].publish(offer)
        await target.links[0].fetch(offer, (INTO,), deadline_seconds=10)
        assert ended
        target.assert_holds(PROMPT, INTO)


async def test_a_source_that_is_gone_before_the_first_ask_ends_a_request_long_before_its_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "REDIAL_SECONDS", 0.2)
    fabric = LoopbackFabric(seed=5)
    async with source_engine(fabric) as source, target_engine(fabric) as target:
        half = target.links[0]._driver.target
        connect = half._calls.connect

        async def connect_to_one_that_closes(*args: object) -> object:
            sessions = await connect(*args)
            await source.links[0].close(0)
            await until(lambda: all(session.ended for session in sessions))
            return sessions

        monkeypatch.setattr(half._calls, "connect", connect_to_one_that_closes)
        offer = source.offer("i:gone", BLOCKS, PROMPT.tokens)
        part = target.links[0].start_fetch(offer, (INTO,), deadline_seconds=60)
        with pytest.raises(PeerLostError):
            await asyncio.wait_for(part.wait(), 20)
        assert part.state is State.FAILED


async def test_closing_a_target_in_mid_transfer_reports_what_it_cut(caplog: pytest.LogCaptureFixture) -> None:
    fabric = LoopbackFabric(seed=6, faults=[DelayChunk(steps=2_000_000)])
    async with source_engine(fabric) as source, target_engine(fabric) as target:
        source.fill(PROMPT, BLOCKS)
        offer = source.offer("i:cut", BLOCKS, PROMPT.tokens, ttl_seconds=0.5)
        published = source.links[0].publish(offer)
        part = target.links[0].start_fetch(offer, (INTO,), deadline_seconds=10)
        await until(lambda: part.state >= State.MOVING)
        report = await target.links[0].close(0.1)
        assert report.cut == ("i:cut",)
        assert part.state is State.CANCELLED
        with pytest.raises(KVLinkError):
            await published.wait()
        source.assert_no_block_out()
    assert not [record for record in caplog.records if record.levelname in {"ERROR", "CRITICAL"}]


async def test_a_request_waits_for_a_place_before_it_asks_for_a_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """B5, B7: what waits to read holds no lease that nothing renews; its turn comes when another's read has ended."""
    monkeypatch.setattr(limits, "MAX_ACTIVE_READS", 1)
    fabric = LoopbackFabric(seed=21, faults=[DelayChunk(steps=10**9, read=1)])  # the first read never ends by itself
    async with source_engine(fabric) as source, target_engine(fabric) as target:
        offers = [source.offer(f"i:w{number}", BLOCKS, PROMPT.tokens) for number in range(2)]
        source.fill(PROMPT, BLOCKS)
        for offer in offers:
            source.links[0].publish(offer)
        rooms = (tuple(range(5)), tuple(range(10, 15)))
        first = target.links[0].start_fetch(offers[0], (rooms[0],), deadline_seconds=30)
        await until(lambda: first.state is State.MOVING)
        second = target.links[0].start_fetch(offers[1], (rooms[1],), deadline_seconds=30)
        third = target.links[0].start_fetch(offers[1], (rooms[1],), deadline_seconds=30)
        await asyncio.sleep(0.05)
        assert source.links[0].stats().counters["leases_granted"] == 1
        assert second.state is State.WAITING
        target.links[0].cancel(first, "make room")
        assert (await second.wait()).state is State.DONE
        assert (await third.wait()).state is State.DONE
        assert target.ranks[0].content.check(PROMPT, rooms[1]) is None
        assert target.links[0]._driver.target._reads._placed == 0


async def test_a_request_that_gets_no_place_in_its_time_fails_and_can_be_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "MAX_ACTIVE_READS", 1)
    fabric = LoopbackFabric(seed=22, faults=[DelayChunk(steps=10**9)])
    async with source_engine(fabric) as source, target_engine(fabric) as target:
        offers = [source.offer(f"i:w{number}", BLOCKS, PROMPT.tokens) for number in range(2)]
        for offer in offers:
            source.links[0].publish(offer)
        first = target.links[0].start_fetch(offers[0], (tuple(range(5)),), deadline_seconds=30)
        await until(lambda: first.state is State.MOVING)
        with pytest.raises(DeadlineError, match="other requests read") as caught:
            await target.links[0].fetch(offers[1], (tuple(range(10, 15)),), deadline_seconds=0.05)
        assert caught.value.retryable
        target.links[0].cancel(first, "over")
