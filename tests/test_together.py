"""Parts of several ranks become visible together, through the coordinator rank, or on none of them."""

from __future__ import annotations

import asyncio

import pytest
from engines import Engine, source_engine, target_engine, until
from msgspec.structs import replace
from test_link import PROMPT, blocks_for

from kvlink import State
from kvlink.errors import CancelledError, ConflictError, DeadlineError, KVLinkError
from kvlink.link import coordinator
from kvlink.link.target_siblings import Siblings
from kvlink.protocol import RetryPolicy, Send
from kvlink.transports.faults import DelayChunk, FailRead
from kvlink.transports.loopback_fabric import LoopbackFabric
from kvlink.wire import Stage, Stands, Verdict


def published(source: Engine, key: str = "i:t1", **fields: object):
    blocks = blocks_for(source)
    source.fill(PROMPT, blocks)
    offer = source.offer(key, blocks, PROMPT.tokens, **fields)
    return offer, [link.publish(offer) for link in source.links]


def fetching(target: Engine, offer, seconds: float = 20.0):
    into = (blocks_for(target),)
    return [link.start_fetch(offer, into, deadline_seconds=seconds, together=True) for link in target.links]


async def ends(parts) -> list[KVLinkError | None]:
    got = await asyncio.gather(*(part.wait() for part in parts), return_exceptions=True)
    return [result if isinstance(result, KVLinkError) else None for result in got]


async def assert_forgotten(target: Engine) -> None:
    drivers = [link._driver for link in target.links]
    await until(lambda: not any(len(driver.source.coordinator) or driver.target._works for driver in drivers))


@pytest.mark.parametrize("tp", [2, 4])
async def test_all_ranks_become_visible_and_no_source_frees_before_all_are_installed(
    tp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A4: a rank that is slow to install keeps everything invisible, and every source block where it is."""
    kept: list[tuple[Siblings, object]] = []
    send = Siblings.send

    def slow(siblings: Siblings, action) -> None:
        if action.message.stage is Stage.INSTALLED and siblings._rank.caches.spec.place.tp_rank == 1 and not kept:
            kept.append((siblings, action))
        else:
            send(siblings, action)

    monkeypatch.setattr(Siblings, "send", slow)
    fabric = LoopbackFabric(seed=1)
    async with source_engine(fabric, tp=2) as source, target_engine(fabric, tp=tp, layout="hnd") as target:
        offer, held = published(source)
        parts = fetching(target, offer)
        await until(lambda: bool(kept))
        await asyncio.sleep(0.05)
        assert all(part.state < State.DONE for part in (*held, *parts))
        assert all(link.stats().memory.landed for link in target.links), "installed, and shown to nobody"
        assert not any(link.stats().memory.installed for link in target.links)
        send(*kept[0])
        assert await ends((*parts, *held)) == [None] * (tp + 2)
        target.assert_holds(PROMPT, blocks_for(target))
        source.assert_no_block_out()
        await assert_forgotten(target)


async def test_a_push_becomes_visible_together() -> None:
    fabric = LoopbackFabric(seed=2)
    async with source_engine(fabric) as source, target_engine(fabric, tp=2) as target:
        blocks, into = blocks_for(source), blocks_for(target)
        (announced,) = [link.announce("i:p1", ttl_seconds=10) for link in source.links]
        ticket = target.ticket("i:p1", PROMPT.tokens)
        parts = [
            link.expect(ticket, source.roster, (into,), deadline_seconds=20, together=True) for link in target.links
        ]
        source.fill(PROMPT, blocks)
        announced.ready(blocks=(blocks,), tokens=PROMPT.tokens)
        announced.seal()
        assert await ends((*parts, announced)) == [None] * 3
        target.assert_holds(PROMPT, into)


async def test_ranks_whose_sources_seal_at_different_positions_show_nothing() -> None:
    """A4: each rank's own share is whole, and together they are no request's; each reads one source rank only."""
    fabric = LoopbackFabric(seed=2)
    async with source_engine(fabric, tp=2) as source, target_engine(fabric, tp=2) as target:
        blocks, into = blocks_for(source), blocks_for(target)
        announced = [link.announce("i:p1", ttl_seconds=10, max_tokens=PROMPT.tokens) for link in source.links]
        ticket = target.ticket("i:p1", PROMPT.tokens)
        parts = [
            link.expect(ticket, source.roster, (into,), deadline_seconds=20, together=True) for link in target.links
        ]
        source.fill(PROMPT, blocks)
        for part, tokens in zip(announced, (PROMPT.tokens, PROMPT.tokens - 1), strict=True):
            part.ready(blocks=(blocks,), tokens=16)
            await until(lambda part=part: part.state is State.READY)
            part.ready(tokens=tokens)
            part.seal()
        errors = await ends(parts)
        assert [type(error) for error in errors] == [ConflictError, ConflictError]
        assert f"{PROMPT.tokens - 1}" in str(errors[0])
        await ends(announced)
        target.assert_no_block_out()
        await assert_forgotten(target)


async def test_cancelled_on_one_rank_is_cancelled_on_all() -> None:
    """C6: whichever rank it is, and every block comes back on both sides."""
    fabric = LoopbackFabric(seed=3)
    fabric.inject(DelayChunk(steps=10**9))
    async with source_engine(fabric) as source, target_engine(fabric, tp=2) as target:
        for rank in (0, 1):
            offer, held = published(source, f"i:c{rank}")
            parts = fetching(target, offer)
            await until(lambda parts=parts: any(part.state is State.MOVING for part in parts))
            target.links[rank].cancel(parts[rank], "the user left")
            assert [type(error) for error in await ends(parts)] == [CancelledError, CancelledError]
            assert "the user left" in str(parts[1 - rank].result.error)
            source.links[0].cancel(held[0], "over")
            await held[0].wait() if held[0].state is State.DONE else await ends(held)
        target.assert_no_block_out()
        source.assert_no_block_out()
        await assert_forgotten(target)


async def test_a_rank_that_never_begins_does_not_keep_its_siblings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A4, B3: the wait for the last rank has a bound of its own, however long the deadline."""
    monkeypatch.setattr(coordinator.group, "begin", _impatient(coordinator.group.begin))
    fabric = LoopbackFabric(seed=4)
    async with source_engine(fabric) as source, target_engine(fabric, tp=2) as target:
        offer, _ = published(source)
        into = (blocks_for(target),)
        part = target.links[1].start_fetch(offer, into, deadline_seconds=500, together=True)
        (error,) = await ends([part])
        assert isinstance(error, DeadlineError)
        assert "decode/0/0" in str(error)
        assert error.retryable
        await until(lambda: target.links[1].stats().memory.draining == 0)
        target.assert_no_block_out()


def _impatient(begin):
    def soon(*args, timing, **fields):
        return begin(*args, timing=type(timing)(gather_seconds=0.1), **fields)

    return soon


async def test_ranks_that_fetch_different_things_under_one_key_are_refused() -> None:
    fabric = LoopbackFabric(seed=5)
    async with source_engine(fabric) as source, target_engine(fabric, tp=2) as target:
        offer, _ = published(source)
        other = source.offer("i:t1", blocks_for(source), PROMPT.tokens - 1)
        into = (blocks_for(target),)
        parts = [
            link.start_fetch(one, into, deadline_seconds=20, together=True)
            for link, one in zip(target.links, (offer, other), strict=True)
        ]
        errors = await ends(parts)
        assert all(isinstance(error, ConflictError) for error in errors), errors
        await until(lambda: not any(link.stats().memory.draining for link in target.links))


async def test_a_coordinator_that_dies_takes_its_engine_along() -> None:
    """A4: the other rank ends, within the bound of a lost peer, and gives everything back."""
    fabric = LoopbackFabric(seed=6)
    fabric.inject(DelayChunk(steps=10**9))
    async with source_engine(fabric) as source, target_engine(fabric, tp=2) as target:
        offer, _ = published(source)
        parts = fetching(target, offer)
        await until(lambda: all(part.state is State.MOVING for part in parts))
        await target.links[0].close(timeout_seconds=0)
        (error,) = await ends(parts[1:])
        assert error is not None
        assert parts[1].state in (State.FAILED, State.CANCELLED)
        memory = target.links[1].stats().memory
        assert memory.reserved == memory.landed == memory.installed == 0


async def test_tries_of_all_ranks_fail_and_succeed_together() -> None:
    """G2: one rank's failure fails the try on both; both try again, and become visible together."""
    fabric = LoopbackFabric(seed=7, faults=[FailRead(nth=2)])
    async with source_engine(fabric) as source, target_engine(fabric, tp=2) as target:
        offer, held = published(source)
        given: dict[object, list] = {link: [] for link in target.links}

        async def run(link):
            tries = iter(((0, 1, 2, 3, 4), (10, 11, 12, 13, 14)))

            async def take(_offer):
                return (next(tries),)

            return await link.fetch_with_retries(
                offer,
                take,
                give_back=given[link].append,
                deadline_seconds=10,
                policy=RetryPolicy(first_pause_seconds=0.01),
                together=True,
            )

        results = await asyncio.gather(*map(run, target.links))
        assert [result.tries for result in results] == [2, 2]
        assert list(given.values()) == [[((0, 1, 2, 3, 4),)]] * 2
        assert await ends(held) == [None]
        for rank in target.ranks:
            assert rank.content.check(PROMPT, (10, 11, 12, 13, 14)) is None
        await assert_forgotten(target)


async def test_a_word_of_a_rank_that_is_none_of_the_engines_is_not_heard(caplog: pytest.LogCaptureFixture) -> None:
    """C3: of another engine, of no seat of this one, or of the coordinator's own; who does not decide says so."""
    fabric = LoopbackFabric(seed=9)
    async with target_engine(fabric, tp=2) as target:
        first, second = (link._driver.source.coordinator for link in target.links)
        own, other = (link._driver._rank.caches.spec.place for link in target.links)
        stands = Stands(key="i:t1", part=1, group=0, content="c", stage=Stage.JOINED)
        for place in (own, replace(other, engine="else"), replace(other, incarnation="old"), replace(other, tp_rank=7)):
            first.hears(place, stands)
        assert len(first) == 0
        assert len(caplog.records) == 4
        sent: list[Send] = []
        second._send = sent.append
        second.hears(own, stands)
        second.hears(own, replace(stands, stage=Stage.FAILED))
        assert [send.message.verdict for send in sent] == [Verdict.ABANDON]
        first.hears(other, stands)
        assert len(first) == 1


async def test_an_engine_of_one_rank_is_together_with_itself() -> None:
    fabric = LoopbackFabric(seed=8)
    async with source_engine(fabric, tp=2) as source, target_engine(fabric) as target:
        offer, held = published(source)
        assert await ends((*fetching(target, offer), *held)) == [None] * 3
        target.assert_holds(PROMPT, blocks_for(target))
        assert len(target.links[0]._driver.source.coordinator) == 0
