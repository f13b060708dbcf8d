"""A target that is lost after it installed: the source tells of it once, and says from where the request can go on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from random import Random

import pytest
from engines import Engine, source_engine, target_engine
from link_stories import BLOCKS, SHAPE, TOKENS
from virtual import VirtualNet, run

from kvlink import Part, ReplicaStage, Standing, State, limits
from kvlink.cli.bench.content import Prompt
from kvlink.errors import (
    CancelledError,
    ConfigError,
    ConflictError,
    IndeterminateError,
    KVLinkError,
    PeerLostError,
    SchemaError,
    UnknownRequestError,
)
from kvlink.observe import InstalledLost, PartEnded
from kvlink.protocol import Installation, Installations
from kvlink.transports.faults import DelayChunk, Fault
from kvlink.transports.loopback_fabric import LoopbackFabric

PROMPT = Prompt(seed=3, tokens=TOKENS)
FROM, INTO = (3, 5), (BLOCKS - 1, 7)
KEY, COPY = "i:r", "i:r#replica1"
SEEDS = 100


class World:
    """A prefill, a decode and a spare decode engine, in virtual time."""

    def __init__(self, net: VirtualNet, tp: int = 1, faults: Sequence[Fault] = ()) -> None:
        self.net = net
        self.fabric = LoopbackFabric(1, faults, clock=net.loop.time, chunks_per_poll=1)
        self.source = source_engine(self.fabric, **SHAPE)
        self.decode = target_engine(self.fabric, tp=tp, **SHAPE)
        self.spare = self.other("spare")

    def other(self, name: str) -> Engine:
        engine = target_engine(self.fabric, **SHAPE)
        engine.name = name
        return engine

    @property
    def link(self):
        return self.source.links[0]

    def publish(self, replicas: int = 0, ttl_seconds: float = 3.0) -> Part:
        self.source.fill(PROMPT, FROM)
        offer = self.source.offer(KEY, FROM, TOKENS, ttl_seconds=ttl_seconds)
        return self.link.publish(offer, replicas=replicas)

    async def fetch(self, engine: Engine, offer=None, into=INTO) -> None:
        offer = offer or self.source.offer(KEY, FROM, TOKENS, ttl_seconds=3.0)
        await asyncio.gather(*(link.fetch(offer, (into,), deadline_seconds=5) for link in engine.links))
        engine.assert_holds(PROMPT, into)
        await asyncio.sleep(0.5)  # the source has heard

    async def fetch_next(self, engine: Engine) -> None:
        """Another request: it brings a session up."""
        self.source.fill(PROMPT, (8, 9))
        offer = self.source.offer("i:next", (8, 9), TOKENS)
        self.link.publish(offer)
        await engine.links[0].fetch(offer, ((0, 1),), deadline_seconds=5)
        await asyncio.sleep(0.5)

    async def kill(self, engine: Engine, ranks: slice = slice(None)) -> None:
        for rank in engine.ranks[ranks]:
            place = rank.caches.spec.place
            self.net.kill(place)
            self.fabric.kill(str(place))
            for task in list(rank.link._driver._tasks._tasks):
                task.cancel()
        await asyncio.sleep(1.0)

    def lost(self) -> list[tuple[str, bool, bool]]:
        """What was told since it was last asked: key, proven, prefill again."""
        told = [event for event in self.link.events.take(limits.MAX_QUEUED_EVENTS) if isinstance(event, InstalledLost)]
        return [(event.key, event.proven, event.prefill_again) for event in told]


Story = Callable[[World], Awaitable[None]]


@pytest.fixture
def tell(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def told(story: Story, seed: int = 5, **fields) -> None:
        async def whole(net: VirtualNet) -> None:
            world = World(net, **fields)
            async with world.source, world.decode, world.spare:
                await story(world)
                await asyncio.sleep(60.0)
                world.source.assert_no_block_out()

        assert not run(seed, monkeypatch, whole).errors

    return told


def test_a_target_lost_after_install_is_told_once_with_what_recomputing_costs(tell) -> None:
    async def story(world: World) -> None:
        published = world.publish()
        await world.fetch(world.decode)
        moved = (await published.wait()).bytes
        assert world.link.recovery_point(KEY).standing is Standing.INSTALLED
        assert world.lost() == []
        await world.kill(world.decode)
        assert world.lost() == [(KEY, False, True)]
        point = world.link.recovery_point(KEY)
        assert (point.standing, point.replicas, point.prefill_again) == (Standing.LOST, (), True)
        assert point.target == f"decode@{world.decode.incarnation}"
        assert (point.tokens, point.recompute_tokens, point.recompute_bytes) == (TOKENS, TOKENS, moved)
        cached = world.link.recovery_point(KEY, cached_tokens=TOKENS // 4)
        assert (cached.recompute_tokens, cached.recompute_bytes) == (TOKENS * 3 // 4, moved * 3 // 4)
        assert world.link.recovery_point(KEY, cached_tokens=2 * TOKENS).recompute_bytes == 0
        with pytest.raises(ConfigError):
            world.link.recovery_point(KEY, cached_tokens=-1)
        assert world.link.stats().counters["installs_lost"] == 1

    tell(story)


def test_a_successor_that_authenticates_proves_the_death_and_a_released_request_is_nobodys_loss(tell) -> None:
    async def story(world: World) -> None:
        world.publish()
        await world.fetch(world.decode)
        over = world.source.offer("i:over", (1, 2), TOKENS)
        world.source.fill(PROMPT, (1, 2))
        world.link.publish(over)
        await world.fetch(world.spare, over)
        world.link.release("i:over")
        await world.kill(world.decode)
        await world.kill(world.spare)
        assert world.lost() == [(KEY, False, True)]
        successor = world.other("decode")
        async with successor:
            await world.fetch_next(successor)
            assert world.lost() == [(KEY, True, True)]
            assert world.link.recovery_point(KEY).standing is Standing.DEAD
            assert world.link.recovery_point("i:next").standing is Standing.INSTALLED
            world.link.release(KEY)
            for key in (KEY, "i:over", "never"):
                with pytest.raises(UnknownRequestError):
                    world.link.recovery_point(key)

    tell(story)


def test_the_same_incarnation_may_come_back_and_is_lost_anew(tell) -> None:
    async def story(world: World) -> None:
        world.publish()
        await world.fetch(world.decode)
        here, there = (str(engine.ranks[0].caches.spec.place) for engine in (world.source, world.decode))
        world.net.reset(here, there)
        await asyncio.sleep(1.0)
        assert world.lost() == [(KEY, False, True)]
        await world.fetch_next(world.decode)
        assert world.lost() == []
        assert world.link.recovery_point(KEY).standing is Standing.INSTALLED
        await world.kill(world.decode)
        assert sorted(world.lost()) == [("i:next", False, True), (KEY, False, True)]

    tell(story)


def test_a_connection_that_a_newer_one_replaces_is_no_loss(tell) -> None:
    """The target noticed that the old one broke, the source did not."""

    async def story(world: World) -> None:
        world.publish()
        await world.fetch(world.decode)
        place = str(world.source.ranks[0].caches.spec.place)
        (broken,) = (one for one in world.net.connections if one.peer == place)
        broken.other._end = lambda _error: True
        broken.fail(PeerLostError("reset", peer=place))
        await world.fetch_next(world.decode)
        assert world.link.stats().counters["peers_lost"] == 1
        assert world.lost() == []
        assert world.link.recovery_point(KEY).standing is Standing.INSTALLED

    tell(story)


def test_an_install_that_is_heard_of_late_has_a_recovery_point_from_then_on(tell) -> None:
    async def story(world: World) -> None:
        published = world.publish()
        here, there = (str(engine.ranks[0].caches.spec.place) for engine in (world.source, world.decode))
        fetched = world.decode.links[0].start_fetch(
            world.source.offer(KEY, FROM, TOKENS, ttl_seconds=3.0), (INTO,), deadline_seconds=5
        )
        fetched.when_ended(lambda _part: world.net.reset(here, there))
        listeners = dict(world.net.listeners)
        fetched.when_ended(lambda _part: world.net.listeners.clear())
        with pytest.raises(IndeterminateError):
            await published.wait()
        with pytest.raises(UnknownRequestError):
            world.link.recovery_point(KEY)
        assert fetched.state is State.DONE
        world.net.listeners.update(listeners)
        await world.fetch_next(world.decode)  # what brings a session up has the target's word repeated
        await asyncio.sleep(5.0)
        assert world.link.recovery_point(KEY).standing is Standing.INSTALLED

    tell(story)


def test_a_replica_that_is_on_its_way_counts_and_stands_in_once_it_has_arrived(tell) -> None:
    async def story(world: World) -> None:
        published = world.publish(replicas=1)
        await world.fetch(world.decode)
        moving = world.spare.links[0].start_fetch(published.replicas[0], (INTO,), deadline_seconds=60)
        await asyncio.sleep(0.5)
        assert moving.state is State.MOVING
        await world.kill(world.decode)
        assert world.lost() == [(KEY, False, False)]
        assert world.link.recovery_point(KEY).replicas[0].stage is ReplicaStage.MOVING
        await published.wait()
        assert world.link.recovery_point(KEY).replicas[0].stage is ReplicaStage.INSTALLED

    tell(story, faults=[DelayChunk(steps=3000, read=2)])


def test_a_connection_that_is_redialled_at_once_is_no_loss(tell) -> None:
    async def story(world: World) -> None:
        world.publish()
        await world.fetch(world.decode)
        here, there = (str(engine.ranks[0].caches.spec.place) for engine in (world.source, world.decode))
        world.net.reset(here, there)
        await world.fetch_next(world.decode)
        await asyncio.sleep(1.0)
        assert world.link.stats().counters["peers_lost"] == 1
        assert world.lost() == []

    tell(story)


def test_thousands_of_requests_that_are_lost_at_once_are_all_told_and_hold_up_nobody(tell) -> None:
    count = 40 * limits.LOSSES_TOLD_PER_TURN

    async def story(world: World) -> None:
        await world.fetch_next(world.decode)
        recovery = world.link._driver.source.recovery
        place = world.decode.ranks[0].caches.spec.place
        for number in range(count - 1):
            made = installed(f"i:{number}", (place.engine, place.incarnation))
            recovery._installed.add(made, (), world.net.loop.now)
        told_by_then: list[int] = []

        def look_aside(event: object) -> None:
            """What else waits in the loop has its turn soon."""
            if isinstance(event, InstalledLost) and event.key == "i:100":
                world.link.release("i:2000")
                world.net.loop.call_soon(lambda: told_by_then.append(recovery._counters.installs_lost))

        world.link.events.subscribe(look_aside)
        await world.kill(world.decode)
        assert len(world.lost()) == count - 1, "one was released while the others were told"
        assert told_by_then[0] <= 3 * limits.LOSSES_TOLD_PER_TURN

    tell(story)


def test_one_rank_of_several_that_is_lost_loses_the_request(tell) -> None:
    async def story(world: World) -> None:
        world.publish()
        await world.fetch(world.decode)
        await world.kill(world.decode, slice(1, 2))
        assert world.lost() == [(KEY, False, True)]
        await world.kill(world.decode, slice(0, 1))
        assert world.lost() == [], "it is lost already"

    tell(story, tp=2)


def test_a_replica_stands_in_for_a_lost_target_and_blocks_return_after_both(tell) -> None:
    async def story(world: World) -> None:
        published = world.publish(replicas=1)
        (offer,) = published.replicas
        assert offer.key == COPY
        await world.fetch(world.decode)
        assert world.link.recovery_point(KEY).replicas[0].stage is ReplicaStage.OFFERED
        assert not published.state.ended
        assert world.link.stats().memory.held == len(FROM)
        await world.fetch(world.spare, offer)
        assert (await published.wait()).state is State.DONE
        world.source.assert_no_block_out()
        await world.kill(world.decode)
        assert world.lost() == [(KEY, False, False)]
        (replica,) = world.link.recovery_point(KEY).replicas
        assert (replica.key, replica.stage, replica.offer) == (COPY, ReplicaStage.INSTALLED, None)
        assert replica.target == f"spare@{world.spare.incarnation}"
        await world.kill(world.spare)
        assert world.lost() == [(COPY, False, True)]
        assert world.link.recovery_point(KEY).prefill_again
        world.link.release(KEY)
        with pytest.raises(UnknownRequestError):
            world.link.recovery_point(COPY)

    tell(story)


def test_a_replica_that_nobody_has_fetched_yet_is_offered_to_another_target(tell) -> None:
    async def story(world: World) -> None:
        published = world.publish(replicas=1)
        await world.fetch(world.decode)
        await world.kill(world.decode)
        assert world.lost() == [(KEY, False, False)]
        (replica,) = world.link.recovery_point(KEY).replicas
        assert (replica.stage, replica.target) == (ReplicaStage.OFFERED, None)
        await world.fetch(world.spare, replica.offer)
        assert (await published.wait()).state is State.DONE
        assert world.link.recovery_point(KEY).replicas[0].stage is ReplicaStage.INSTALLED

    tell(story)


def test_a_replica_that_failed_is_none_and_the_request_is_done_all_the_same(tell) -> None:
    async def story(world: World) -> None:
        published = world.publish(replicas=2, ttl_seconds=4.0)
        await world.fetch(world.decode)
        world.spare.links[0].decline(published.replicas[0], "full")
        await asyncio.sleep(1.0)
        assert [one.key for one in world.link.recovery_point(KEY).replicas] == [published.replicas[1].key]
        result = await published.wait()
        assert result.state is State.DONE
        assert result.seconds >= 4.0, "the second replica's offer had to run out"
        ends = {e.key: e.end for e in world.link.events.take() if isinstance(e, PartEnded)}
        assert ends == {KEY: "done", COPY: "failed", f"{KEY}#replica2": "expired"}
        await world.kill(world.decode)
        assert world.lost() == [(KEY, False, True)]

    tell(story)


def test_a_request_and_its_replicas_are_cancelled_as_one(tell) -> None:
    async def story(world: World) -> None:
        published = world.publish(replicas=2)
        await world.fetch(world.spare, published.replicas[0])
        began = world.net.loop.now
        world.link.cancel(published, "not wanted")
        with pytest.raises(CancelledError):
            await published.wait()
        assert world.net.loop.now == began, "nobody reads, so no replica waits for its time to live"
        world.source.assert_no_block_out()
        with pytest.raises(KVLinkError):
            await world.fetch(world.decode, published.replicas[1])
        assert world.link.recovery_point(COPY).prefill_again, "that one had been installed before"

    tell(story)


def test_each_replica_is_for_one_target(tell) -> None:
    async def story(world: World) -> None:
        published = world.publish(replicas=1)
        await world.fetch(world.decode)
        await world.fetch(world.spare, published.replicas[0])
        third = world.other("third")
        async with third:
            for offer in (None, *published.replicas):
                with pytest.raises(ConflictError):
                    await world.fetch(third, offer)
            third.assert_untouched()

    tell(story)


@pytest.mark.parametrize("taken", [KEY, COPY])
def test_a_publish_that_is_refused_leaves_no_replica_behind(taken: str, tell) -> None:
    async def story(world: World) -> None:
        other = world.link.publish(world.source.offer(taken, (8, 9), TOKENS))
        with pytest.raises(ConflictError):
            world.publish(replicas=1)
        assert world.link.stats().memory.held == 2
        assert world.link.stats().parts_live == 1
        world.link.cancel(other, "enough")

    tell(story)


def test_a_bad_number_of_replicas_or_a_key_too_long_for_them_is_refused(tell) -> None:
    async def story(world: World) -> None:
        for replicas in (-1, limits.MAX_REPLICAS + 1):
            with pytest.raises(ConfigError):
                world.publish(replicas)
        long = world.source.offer("k" * limits.MAX_KEY_BYTES, FROM, TOKENS)
        with pytest.raises(SchemaError):
            world.link.publish(long, replicas=1)
        assert world.link.stats().parts_live == 0

    tell(story)


def test_replicas_are_signed_like_any_offer(tell) -> None:
    secret = b"s" * 32

    async def story(world: World) -> None:
        signing = source_engine(world.fabric, settings={"secret": secret}, **SHAPE)
        signing.name = "signing"
        async with signing:
            offer = signing.offer(KEY, FROM, TOKENS, ttl_seconds=1.0).sign(secret)
            (replica,) = signing.links[0].publish(offer, replicas=1).replicas
            replica.verify(secret)

    tell(story)


async def troubled(seed: int, world: World) -> None:
    """Two targets want whatever is offered, while one is killed, connections are reset, or the source cancels."""
    dice, net = Random(seed), world.net
    engines, dead = [world.decode, world.spare], set[str]()
    fetched: list[tuple[str, Engine, Part]] = []
    published = world.publish(replicas=dice.choice((1, 2)))
    offers = [world.source.offer(KEY, FROM, TOKENS, ttl_seconds=3.0), *published.replicas]

    async def want(engine: Engine, number: int) -> None:
        await asyncio.sleep(dice.random() * 2.0)
        if engine.name not in dead:
            into = (2 * number, 2 * number + 1)
            part = engine.links[0].start_fetch(offers[number], (into,), deadline_seconds=5)
            fetched.append((part.key, engine, part))

    async def strike() -> None:
        await asyncio.sleep(dice.random() * 2.5)
        engine = dice.choice(engines)
        match dice.choice(("kill", "reset", "reset", "cancel")):
            case "kill" if engine.name not in dead:
                dead.add(engine.name)
                await world.kill(engine)
            case "reset":
                net.reset(*(str(one.ranks[0].caches.spec.place) for one in (world.source, engine)))
            case "cancel":
                world.link.cancel(published, "by chance")

    wants = [want(engine, number) for engine in engines for number in range(len(offers))]
    await asyncio.gather(*wants, *(strike() for _ in range(dice.choice((0, 1, 2)))))
    await asyncio.sleep(120.0)
    assert published.state.ended
    ends = {event.key: event.end for event in world.link.events.take(1000) if isinstance(event, PartEnded)}
    assert set(ends) == {offer.key for offer in offers}
    for key, end in ends.items():
        done = [engine for one, engine, part in fetched if one == key and part.state is State.DONE]
        assert len(done) <= 1, "a key is one target's"
        if end == "done":
            assert world.link.recovery_point(key).target == f"{done[0].name}@{done[0].incarnation}"
        elif end != "indeterminate":
            assert all(engine.name in dead for engine in done), "else the source would have heard"


def test_whatever_befalls_them_each_key_is_one_targets_and_each_block_comes_back(tell) -> None:
    for seed in range(SEEDS):
        tell(partial(troubled, seed), seed=seed, faults=[DelayChunk(steps=400, read=1 + seed % 3)])


# --- what is remembered ---------------------------------------------------------------------------------------------

DECODE, SPARE = ("decode", "1"), ("spare", "1")
installed = partial(Installation, tokens=8)


def test_what_is_remembered_is_bounded_in_number_and_time() -> None:
    known = Installations(limit=3, horizon_seconds=10.0)
    for number in range(5):
        known.add(installed(f"{number}", DECODE), (), float(number))
    assert [key for key in map(str, range(5)) if known.look(key, 5.0)] == ["2", "3", "4"]
    assert known.look("2", 12.0) is None
    known.lost(DECODE, "rank")
    assert [one.key for one, _ in known.untold(DECODE, 13.5)] == ["4"]
    assert known.look("4", 14.0) is None
    assert (len(known), known._engines, known._forget_at) == (0, {}, {})


def test_a_loss_is_told_once_and_again_only_when_it_is_proven() -> None:
    known = Installations()
    known.add(installed("a", DECODE), (), 0.0)
    known.add(installed("b", SPARE), (), 0.0)
    assert known.untold(DECODE, 0.0) == []
    known.lost(DECODE, "rank")
    assert [(one.key, how) for one, how in known.untold(DECODE, 0.0)] == [("a", Standing.LOST)]
    assert known.untold(DECODE, 0.0) == []
    known.add(installed("late", DECODE), ("rank",), 0.0)
    assert [one.key for one, _ in known.untold(DECODE, 0.0)] == ["late"], "installed while a rank was away"
    known.dead(DECODE)
    assert [(one.key, how) for one, how in known.untold(DECODE, 0.0)] == [("a", Standing.DEAD), ("late", Standing.DEAD)]
    known.back(DECODE, "rank")
    assert known.untold(DECODE, 0.0) == []
    assert known.look("a", 0.0) == (installed("a", DECODE), Standing.DEAD), "the dead do not come back"
    assert known.look("b", 0.0) == (installed("b", SPARE), Standing.INSTALLED)


def test_a_connection_that_is_replaced_in_time_is_no_loss() -> None:
    known = Installations()
    known.add(installed("a", DECODE), (), 0.0)
    known.lost(DECODE, "rank")
    known.back(DECODE, "rank")
    assert known.untold(DECODE, 0.0) == []
