"""The real link, both halves of it, through seeded minutes of trouble; and every single operation made to fail once."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from functools import partial

import pytest
from engines import Engine, source_engine, target_engine
from link_stories import BLOCKS, SHAPE, TOKENS, Story
from virtual import VirtualLoop, VirtualNet, run

from kvlink import Part, State
from kvlink.cli.bench.content import Prompt
from kvlink.errors import KVLinkError, TransportError
from kvlink.link.sessions import Sessions
from kvlink.link.source_half import SourceHalf
from kvlink.link.target_half import TargetHalf
from kvlink.link.target_reads import Reads
from kvlink.memory import BlockLedger
from kvlink.protocol import CutOffDone
from kvlink.transports.faults import DelayChunk, FailConnect, FailRead, FailRegister, RefuseReads
from kvlink.transports.loopback_fabric import LoopbackFabric

SEEDS = 2_000


def told(seed: int, patch: pytest.MonkeyPatch) -> list[str]:
    """What is wrong with a seed's story."""
    stories: list[Story] = []

    async def story(net: VirtualNet) -> None:
        stories.append(Story(seed, net))
        await stories[0].tell()

    try:
        loop = run(seed, patch, story)
    except (KVLinkError, AssertionError, KeyError) as error:
        return [f"{type(error).__name__}: {error}"]
    return [*stories[0].findings, *loop.errors]


def wrong(seeds: range, caplog: pytest.LogCaptureFixture) -> tuple[int, list[str]] | None:
    """The first seed that goes wrong, and how."""
    for seed in seeds:
        with pytest.MonkeyPatch.context() as patch:
            findings = told(seed, patch)
        findings += [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
        if findings:
            return seed, findings
    return None


@pytest.mark.timeout(300)
@pytest.mark.parametrize("first", [0, SEEDS // 2])
def test_no_seed_breaks_the_link(first: int, caplog: pytest.LogCaptureFixture) -> None:
    """A1 A2 A6, B1 B3 B4, C1 C6, G1: resets, crashes, restarts, stops, cancels, retries."""
    caplog.set_level(logging.ERROR, "kvlink")
    found = wrong(range(first, first + SEEDS // 2), caplog)
    assert found is None, f"seed {found[0]}: {found[1]}"


def test_the_same_seed_is_the_same_story() -> None:
    def counts(seed: int) -> dict:
        loops: list[VirtualNet] = []

        async def story(net: VirtualNet) -> None:
            loops.append(net)
            await Story(seed, net).tell()

        with pytest.MonkeyPatch.context() as patch:
            run(seed, patch, story)
        return dict(loops[0].counts)

    assert counts(5) == counts(5)


# --- planted bugs -----------------------------------------------------------------------------------------------------


def never_forget(patch: pytest.MonkeyPatch) -> None:
    """What has ended is remembered."""
    patch.setattr(TargetHalf, "_settle", lambda _half, _work: None)


def end_before_the_cut_off(patch: pytest.MonkeyPatch) -> None:
    """The driver says that the cut-off is done as soon as it is asked for."""

    def cut_off(reads, work, leg):
        leg.cutting, leg.reading = True, False
        reads._feed(work, CutOffDone(leg.attempt))

    patch.setattr(Reads, "cut_off", cut_off)


def keep_the_lease(patch: pytest.MonkeyPatch) -> None:
    """Blocks stay leased when the exposure ends."""
    patch.setattr(BlockLedger, "end_lease", lambda _ledger, _attempt: None)


def deaf_to_loss(patch: pytest.MonkeyPatch) -> None:
    """A source that is never told of a lost peer keeps what it leased."""
    patch.setattr(SourceHalf, "lapsed", lambda *_args: None)
    patch.setattr(SourceHalf, "_on_down", lambda *_args: None)


def refuse_to_forget_sessions(patch: pytest.MonkeyPatch) -> None:
    """A session that has ended is taken for a live one."""
    patch.setattr(Sessions, "_forget", lambda _sessions, session: setattr(session, "ended", True))


PLANTED = [
    never_forget,
    end_before_the_cut_off,
    keep_the_lease,
    deaf_to_loss,
    refuse_to_forget_sessions,
]


@pytest.mark.parametrize("plant", PLANTED)
def test_a_bug_planted_in_the_halves_is_found(plant, monkeypatch, caplog: pytest.LogCaptureFixture) -> None:
    plant(monkeypatch)
    caplog.set_level(logging.ERROR, "kvlink")
    found = wrong(range(SEEDS), caplog)
    assert found is not None
    print(f"{plant.__name__}: seed {found[0]}: {found[1][0]}")


# --- every operation fails once ---------------------------------------------------------------------------------------


class Run:
    """One fetch and one push from two source ranks, a rest, and a later request."""

    def __init__(self, net: VirtualNet, *faults) -> None:
        self.net = net
        self.fabric = LoopbackFabric(1, faults, clock=net.loop.time, chunks_per_poll=1)
        self.states: list[State] = []
        self.counts: dict[str, int] = {}

    async def tell(self) -> None:
        source = source_engine(self.fabric, tp=2, **SHAPE)
        async with source, target_engine(self.fabric, **SHAPE) as target:
            await self.fetch(source, target, "i:fetch", 1)
            await self.push(source, target, "i:push", 2)
            await asyncio.sleep(60.0)  # what failed has its hold for a retry, and gives it back
            source.assert_no_block_out()
            target.assert_no_block_out()
            script = self.fabric.script
            self.counts = {**self.net.counts, "connect": script._connects, "read": script._reads}
            self.states.clear()
            await self.fetch(source, target, "i:later", 3)
            assert set(self.states) == {State.DONE}, "a later request works"

    async def fetch(self, source: Engine, target: Engine, key: str, number: int) -> None:
        blocks, into = self.blocks(number)
        prompt = Prompt(seed=number, tokens=TOKENS)
        source.fill(prompt, blocks)
        offer = source.offer(key, blocks, TOKENS, ttl_seconds=2.0)
        published = [link.publish(offer) for link in source.links]
        await self.ended(target, prompt, into, [target.links[0].start_fetch(offer, (into,), deadline_seconds=5)])
        await self.ended(source, prompt, blocks, published)

    async def push(self, source: Engine, target: Engine, key: str, number: int) -> None:
        blocks, into = self.blocks(number)
        prompt = Prompt(seed=number, tokens=TOKENS)
        source.fill(prompt, blocks)
        parts = [link.announce(key, ttl_seconds=2.0) for link in source.links]
        expected = target.links[0].expect(
            target.ticket(key, TOKENS, ttl_seconds=2.0), source.roster, (into,), deadline_seconds=5
        )
        for part in parts:
            part.ready(blocks=(blocks,), tokens=TOKENS)
            part.seal()
        await self.ended(target, prompt, into, [expected])
        await self.ended(source, prompt, blocks, parts)

    async def ended(self, engine: Engine, prompt: Prompt, blocks: tuple[int, ...], parts: list[Part]) -> None:
        """Each ends within a minute, done with its bytes right or with a typed error."""
        async with asyncio.timeout(60):
            for rank, part in zip(engine.ranks, parts, strict=True):
                with contextlib.suppress(KVLinkError):
                    await part.wait()
                self.states.append(part.state)
                if part.state is State.DONE:
                    assert rank.content.check(prompt, blocks) is None

    @staticmethod
    def blocks(number: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        first = 2 * number
        return (first, first + 1), (BLOCKS - 1 - first, BLOCKS - 2 - first)


def tell(patch: pytest.MonkeyPatch, *faults, failing: tuple[str, int] | None = None) -> Run:
    runs: list[Run] = []

    async def story(net: VirtualNet) -> None:
        net.failing = failing
        runs.append(Run(net, *faults))
        await runs[0].tell()

    loop: VirtualLoop = run(3, patch, story)
    assert not loop.errors
    return runs[0]


def test_any_one_send_or_dial_may_fail(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """By ordinal: the first, the second, ... every message and every dial of a whole run."""
    caplog.set_level(logging.ERROR, "kvlink")
    counts = tell(monkeypatch).counts
    assert counts["send"] > 20
    assert counts["dial"] >= 2
    for kind in ("send", "dial"):
        for number in range(1, counts[kind] + 1):
            tell(monkeypatch, failing=(kind, number))
    assert not caplog.records


@pytest.mark.parametrize(("fault", "kind"), [(FailConnect, "connect"), (FailRead, "read")])
def test_any_one_connect_or_read_may_fail(fault, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    count = tell(monkeypatch).counts[kind]
    assert count >= 4, "both ends of two sessions, and two legs of two requests"
    for number in range(1, count + 1):
        tell(monkeypatch, fault(nth=number))


def test_any_one_registration_may_fail_and_opening_again_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """A link whose memory cannot be registered is not opened: a typed error, and nothing stays behind."""
    regions = 3  # one a rank: two sources, one target

    async def story(number: int, net: VirtualNet) -> None:
        fabric = LoopbackFabric(1, [FailRegister(nth=number)], clock=net.loop.time)
        engines = [source_engine(fabric, tp=2, **SHAPE), target_engine(fabric, **SHAPE)]
        with pytest.raises(TransportError):
            await asyncio.gather(*(engine.__aenter__() for engine in engines))
        assert not any(one.accepted is None for one in net.listeners.values())
        again = Run(net)
        again.fabric = fabric
        await again.tell()

    for number in range(1, regions + 1):
        loop = run(number, monkeypatch, partial(story, number))
        assert not loop.errors


def test_a_waiting_read_that_cannot_start_makes_room_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for one read: the first is slow, the second's source dies while it waits, the third must not starve."""

    async def story(net: VirtualNet) -> None:
        slow = DelayChunk(steps=400, read=1)
        fabric = LoopbackFabric(1, [RefuseReads(active=1), slow], clock=net.loop.time, chunks_per_poll=1)
        other = Engine("other", fabric, **SHAPE)
        async with source_engine(fabric, **SHAPE) as source, other, target_engine(fabric, **SHAPE) as target:
            parts = []
            for number, engine in enumerate((source, other, source)):
                offer = engine.offer(f"i:{number}", Run.blocks(number)[0], TOKENS)
                engine.links[0].publish(offer)
                into = Run.blocks(number)[1]
                parts.append(target.links[0].start_fetch(offer, (into,), deadline_seconds=60))
                await asyncio.sleep(0.1)
            assert [part.state for part in parts] == [State.MOVING] * 3
            place = other.ranks[0].caches.spec.place
            net.kill(place)
            fabric.kill(str(place))
            await parts[0].wait()
            began = net.loop.now
            await parts[2].wait()
            assert net.loop.now - began < 1.0

    loop = run(1, monkeypatch, story)
    assert not loop.errors
