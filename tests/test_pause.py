"""Sleep mode and changed weights: memory is let go of, peers hear of it, and what wakes up is not taken for the old."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import astuple

import msgspec
import pytest
from engines import Engine, Rank, source_engine, target_engine, until

from kvlink import Bridge, Caches, Config, Offer, State
from kvlink.cli.bench.content import CacheContent, Prompt
from kvlink.errors import (
    ClosedError,
    ConfigError,
    KVLinkError,
    MismatchError,
    PeerError,
    PeerRestartedError,
    TransportError,
)
from kvlink.transports.faults import DelayChunk, FailRegister
from kvlink.transports.loopback import LoopbackTransport
from kvlink.transports.loopback_fabric import LoopbackFabric
from kvlink.wire import Installed

PROMPT = Prompt(seed=13, tokens=75)
FROM, INTO = (9, 2, 17, 4, 11), (3, 8, 13, 18, 23)
TRANSPORTS = [pytest.param(lambda: LoopbackFabric(seed=1), id="loopback"), pytest.param(lambda: None, id="auto")]


async def moved(source: Engine, target: Engine, key: str) -> None:
    source.fill(PROMPT, FROM)
    offer = source.offer(key, FROM, PROMPT.tokens)
    parts = [link.publish(offer) for link in source.links]
    parts += [link.start_fetch(offer, (INTO,), deadline_seconds=20) for link in target.links]
    await asyncio.gather(*(part.wait() for part in parts))
    target.assert_holds(PROMPT, INTO)


def again(rank: Rank, canary: int, **changes: object) -> Caches:
    """A cache elsewhere in memory for the same rank; its place and identity with ``changes``."""
    spec = rank.caches.spec
    place = msgspec.structs.replace(spec.place, incarnation=changes.pop("incarnation", spec.place.incarnation))
    identity = msgspec.structs.replace(spec.identity, **changes)
    caches = Caches.standard(msgspec.structs.replace(spec, place=place, identity=identity))
    rank.caches, rank.content = caches, CacheContent(caches.spec, [region.array for region in caches.regions], canary)
    rank.content.wipe()
    return caches


@pytest.mark.parametrize("fabric", TRANSPORTS)
@pytest.mark.parametrize("side", ["source", "target"])
async def test_a_link_wakes_up_over_other_memory_and_moves_again(
    fabric: Callable[[], LoopbackFabric | None], side: str
) -> None:
    shared = fabric()
    async with source_engine(shared) as source, target_engine(shared) as target:
        await moved(source, target, "i:1")
        asleep = source if side == "source" else target
        (link,), (rank,) = asleep.links, asleep.ranks
        assert (await link.pause(5)).cut == ()
        assert link.stats().sessions == 0
        address = link.address
        link.resume(again(rank, asleep.canary))
        assert link.address == address
        target.links[0].release("i:1")
        for each in (*source.ranks, *target.ranks):
            each.content.wipe()
        await moved(source, target, "i:2")
        source.assert_no_block_out()


@pytest.mark.parametrize("side", ["source", "target"])
async def test_a7_a_transfer_that_runs_is_cut_and_nothing_is_unregistered_before(side: str) -> None:
    """A7: when pause has returned, nothing can be read or land, and both ends know."""
    fabric = LoopbackFabric(seed=2, faults=[DelayChunk(steps=1_000_000)])
    async with source_engine(fabric) as source, target_engine(fabric) as target:
        source.fill(PROMPT, FROM)
        offer = source.offer("i:r", FROM, PROMPT.tokens)
        published = source.links[0].publish(offer)
        fetched = target.links[0].start_fetch(offer, (INTO,), deadline_seconds=60)
        await until(lambda: fetched.state is State.MOVING)
        asleep = source if side == "source" else target
        report = await asleep.links[0].pause(0.1)
        assert report.cut == ("i:r",)
        assert (published if side == "source" else fetched).state is State.CANCELLED
        assert not any(astuple(asleep.links[0].stats().memory))
        with pytest.raises(KVLinkError):
            await fetched.wait()
        target.assert_no_block_out()


async def test_a_transfer_that_ends_in_time_is_not_cut() -> None:
    fabric = LoopbackFabric(seed=3, faults=[DelayChunk(steps=20)])
    async with source_engine(fabric) as source, target_engine(fabric) as target:
        source.fill(PROMPT, FROM)
        offer = source.offer("i:r", FROM, PROMPT.tokens)
        published = source.links[0].publish(offer)
        fetched = target.links[0].start_fetch(offer, (INTO,), deadline_seconds=60)
        assert (await target.links[0].pause(10)).cut == ()
        assert fetched.state is State.DONE
        assert (await published.wait()).state is State.DONE  # it was told before the target fell asleep


async def test_verbs_say_that_the_link_sleeps_and_peers_are_turned_away_at_once() -> None:
    fabric = LoopbackFabric(seed=4)
    async with source_engine(fabric) as source, target_engine(fabric) as target:
        await source.links[0].pause(1)
        await source.links[0].pause(1)  # again: nothing happens
        offer = source.offer("i:r", FROM, PROMPT.tokens)
        for verb in (lambda: source.links[0].publish(offer), lambda: source.links[0].announce("i:a", ttl_seconds=1)):
            with pytest.raises(ClosedError, match="paused"):
                verb()
        async with asyncio.timeout(2):
            with pytest.raises(PeerError):
                await target.links[0].fetch(offer, (INTO,), deadline_seconds=20)
        assert source.links[0].stats().refused["paused"] >= 1
        target.assert_no_block_out()


async def test_k4_new_weights_are_a_new_incarnation_or_no_resume_at_all() -> None:
    """K4: a target of the new weights refuses KV of the old ones, and one of the old finds its source dead."""
    fabric = LoopbackFabric(seed=5)
    async with source_engine(fabric) as source, target_engine(fabric) as target:
        await moved(source, target, "i:1")
        target.links[0].release("i:1")
        (link,), (rank,) = source.links, source.ranks
        old = source.offer("i:2", FROM, PROMPT.tokens)
        before = rank.caches
        await link.pause(1)
        with pytest.raises(ConfigError, match=r"identity changed.*new one"):
            link.resume(again(rank, source.canary, weights_revision="r2"))
        rank.caches = before
        link.resume(again(rank, source.canary, incarnation="woken", weights_revision="r2"))
        with pytest.raises(PeerRestartedError):
            await target.links[0].fetch(old, (INTO,), deadline_seconds=20)
        new = source.offer("i:3", FROM, PROMPT.tokens)
        with pytest.raises(MismatchError, match="weights_revision"):
            target.links[0].start_fetch(new, (INTO,), deadline_seconds=20)


@pytest.mark.parametrize("side", ["source", "target"])
async def test_k4_weights_that_change_in_flight_end_what_moves_and_nothing_old_is_installed(side: str) -> None:
    """K4, A7: the pause cuts the transfer, the new incarnation knows nothing of it, and its memory is as it was."""
    fabric = LoopbackFabric(seed=15, faults=[DelayChunk(steps=10**9, read=1)])
    async with source_engine(fabric) as source, target_engine(fabric) as target:
        source.fill(PROMPT, FROM)
        offer = source.offer("i:1", FROM, PROMPT.tokens)
        given = source.links[0].publish(offer)
        taken = target.links[0].start_fetch(offer, (INTO,), deadline_seconds=20)
        await until(lambda: taken.state is State.MOVING)
        engine = source if side == "source" else target
        (link,), (rank,) = engine.links, engine.ranks
        report = await link.pause(0)
        assert report.cut == ("i:1",)
        for part in (given, taken):
            with pytest.raises(KVLinkError):
                await part.wait()
            assert part.state in (State.FAILED, State.CANCELLED, State.EXPIRED)
        link.resume(again(rank, engine.canary, incarnation="woken", weights_revision="r2"))
        target.assert_untouched()
        assert target.links[0].stats().memory.installed == 0
        if side == "target":  # the old KV may still be offered; nobody of the new weights takes it
            with pytest.raises(MismatchError, match="weights_revision"):
                link.start_fetch(offer, (INTO,), deadline_seconds=20)
        else:
            with pytest.raises(PeerRestartedError):
                await target.links[0].fetch(offer, (INTO,), deadline_seconds=20)
        target.assert_untouched()


async def test_what_was_installed_before_the_sleep_is_never_answered_after_it() -> None:
    """G5: its memory is gone, so its outcome is."""
    fabric = LoopbackFabric(seed=6)
    async with source_engine(fabric) as source, target_engine(fabric) as target:
        await moved(source, target, "i:1")
        (link,), (rank,) = target.links, target.ranks
        await link.pause(1)
        assert link.stats().memory.installed == 0
        link.resume(again(rank, target.canary))
        await moved(source, target, "i:1")  # the same key: a new transfer
        assert link.stats().counters["attempts_started"] == 2


async def test_lent_blocks_go_with_the_memory_and_who_waits_is_told() -> None:
    async with target_engine(LoopbackFabric(seed=7)) as target:
        (link,), (rank,) = target.links, target.ranks
        link.lend([range(4)])
        await link.reserve("i:a", tokens=64)
        waiting = asyncio.create_task(link.reserve("i:b", tokens=16, wait_seconds=30))
        await until(lambda: link.stats().room.waiting == 1)
        await link.pause(1)
        with pytest.raises(ClosedError, match="paused"):
            await waiting
        link.resume(again(rank, target.canary))
        assert link.stats().room.lent == (0,)
        link.lend([range(4)])
        assert len((await link.reserve("i:b", tokens=64)).blocks[0]) == 4


async def test_memory_that_cannot_be_registered_leaves_the_link_paused() -> None:
    fabric = LoopbackFabric(seed=8)
    async with source_engine(fabric) as source:
        (link,), (rank,) = source.links, source.ranks
        with pytest.raises(ConfigError, match="follows a pause"):
            link.resume(rank.caches)
        await link.pause(1)
        fabric.inject(FailRegister(nth=len(rank.caches.regions) + 1))
        with pytest.raises(TransportError):
            link.resume(rank.caches)
        with pytest.raises(ClosedError):
            link.publish(source.offer("i:r", FROM, PROMPT.tokens))
        link.resume(rank.caches)
        link.cancel(link.publish(source.offer("i:r", FROM, PROMPT.tokens)), "enough")


async def test_a_dial_under_way_does_not_come_up_in_a_link_that_fell_asleep() -> None:
    """Wherever it is: between any two of its steps the link may fall asleep."""
    fabric = LoopbackFabric(seed=9)
    async with target_engine(fabric) as target:
        (link,), (rank,) = target.links, target.ranks
        ups = 0
        for turns in range(0, 40, 2):
            async with source_engine(fabric) as source:
                offer = source.offer(f"i:r{turns}", FROM, PROMPT.tokens)
                part = link.start_fetch(offer, (INTO,), deadline_seconds=20)
                for _ in range(turns):
                    await asyncio.sleep(0)
                ups += link.stats().sessions
                await link.pause(0)
                await asyncio.sleep(0.01)
                assert part.state.ended
                assert link.stats().sessions == 0
                link.resume(rank.caches)
        assert ups, "no dial came to its end before the pause: give it more turns"


@pytest.mark.parametrize("side", ["source", "target"])
async def test_c1_a_connection_that_was_made_across_a_sleep_does_not_come_up_with_old_keys(side: str) -> None:
    """C1: at whichever step it fell asleep and woke, the next request reads the memory that is there now."""
    for turns in range(0, 40, 3):
        fabric = LoopbackFabric(seed=turns)
        async with source_engine(fabric) as source, target_engine(fabric) as target:
            asleep = source if side == "source" else target
            (link,), (rank,) = asleep.links, asleep.ranks
            early = target.links[0].start_fetch(source.offer("i:e", FROM, 75), ((0, 1, 2, 4, 5),), deadline_seconds=20)
            for _ in range(turns):
                await asyncio.sleep(0)
            told = link._driver._rank.introduce()
            await link.pause(0)
            link.resume(again(rank, asleep.canary))
            assert not link._driver._rank.stands_by(told)
            target.links[0].cancel(early, "only its connection matters")
            source.fill(PROMPT, FROM)
            offer = source.offer("i:r", FROM, PROMPT.tokens)
            source.links[0].publish(offer)

            async def take(_offer: Offer) -> tuple[tuple[int, ...]]:
                return (INTO,)

            result = await target.links[0].fetch_with_retries(
                offer, take, give_back=lambda _blocks: None, deadline_seconds=20
            )  # the first try may have waited for that connection
            assert result.tries <= 2
            target.assert_holds(PROMPT, INTO)


async def test_a_source_hears_the_end_before_its_target_falls_asleep(monkeypatch) -> None:
    """G3: the first word is lost; a pause waits for the repeat, so that the source need not call it indeterminate."""
    fabric = LoopbackFabric(seed=11)
    async with source_engine(fabric) as source, target_engine(fabric) as target:
        (link,) = target.links
        sessions, lost = link._driver.target.sessions, []
        send = sessions.send

        def lossy(peer: str, message: object) -> bool:
            if isinstance(message, Installed) and not lost:
                lost.append(message)
                return True
            return send(peer, message)

        monkeypatch.setattr(sessions, "send", lossy)
        source.fill(PROMPT, FROM)
        offer = source.offer("i:r", FROM, PROMPT.tokens)
        published = source.links[0].publish(offer)
        await link.fetch(offer, (INTO,), deadline_seconds=20)
        await link.pause(1)
        assert lost
        assert (await published.wait()).state is State.DONE


def test_a_bridge_sleeps_and_wakes() -> None:
    fabric = LoopbackFabric(seed=10)
    engine = Engine("decode", fabric)
    caches = asyncio.run(_caches(engine))
    bridge = Bridge.open(Config(), caches, pump="caller", transports=[LoopbackTransport(fabric, "decode")])
    try:
        assert bridge.pause(1).cut == ()
        bridge.announce("i:a", ttl_seconds=1)
        (part,) = bridge.poll()
        assert isinstance(part.result.error, ClosedError)
        bridge.resume(caches)
        live = bridge.announce("i:b", ttl_seconds=5)
        bridge.poll()
        assert live.state is State.WAITING
    finally:
        bridge.close(0.1)


async def _caches(engine: Engine) -> Caches:
    async with engine:
        return engine.ranks[0].caches
