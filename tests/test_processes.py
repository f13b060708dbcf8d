"""Ranks in processes of their own: killed, stopped and resumed, restarted, closed, with a held GIL.

The victim is a process (`rank_process`), the survivor an engine in this one. A transfer must last, so that what
happens to it happens in its middle: runs of one row, 64 bytes, take long for their size; long runs take a big cache.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import pytest
from engines import Engine, source_engine, target_engine, until
from rank_process import RankProcess

from kvlink import CacheSpec, Identity, Part, Standing, State
from kvlink.cli.bench.content import TARGET_CANARY, Prompt
from kvlink.errors import CancelledError, ExpiredError, KVLinkError, PeerError, PeerLostError, PeerRestartedError
from kvlink.observe import InstalledLost

IDENTITY = Identity(model="tiny", num_layers=2, num_kv_heads=8, head_dim=32)
SMALL = Prompt(seed=8, tokens=300)
FROM, INTO = tuple(range(61, 66)), tuple(range(1, 6))
"""Blocks of `SMALL`."""


@dataclass(frozen=True)
class Big:
    """A transfer that lasts: caches of ``blocks`` + 70 blocks of 64 slots, 128 KiB each."""

    blocks: int
    target_layout: str

    @property
    def shape(self) -> dict[str, Any]:
        return {"identity": IDENTITY, "block_size": 64, "num_blocks": self.blocks + 70}

    @property
    def prompt(self) -> Prompt:
        return Prompt(seed=7, tokens=self.blocks * 64)

    @property
    def source(self) -> tuple[int, ...]:
        return tuple(range(61, 61 + self.blocks))

    @property
    def into(self) -> tuple[int, ...]:
        return tuple(range(1, 1 + self.blocks))

    @property
    def others(self) -> tuple[int, ...]:
        """Target blocks that are not its."""
        return (0, *range(1 + self.blocks, self.blocks + 70))


SHORT_RUNS = Big(250, "hnd")
"""32 MB in runs of 64 bytes: small messages, copied."""
MORE_SHORT_RUNS = Big(1000, "hnd")
"""128 MB of them, for streams and packed chunks, which move them faster."""
MANY_SHORT_RUNS = Big(2500, "hnd")
"""320 MB of them, for memories, which move them faster than any network."""
LONG_RUNS = Big(2500, "nhd")
"""320 MB in runs of up to a chunk: written into place by the network."""
ENDS_WITHIN_SECONDS = 5.0
LOST_WITHIN_SECONDS = 3.0


@dataclass(frozen=True)
class Way:
    """What carries the bytes: settings of both ends, and a transfer that lasts so."""

    name: str
    settings: dict[str, Any]
    big: Big
    shareable: bool = False
    """Whether the target may map the source's memory."""

    def but(self, name: str = "", big: Big | None = None, **settings: object) -> Self:
        """The same, with other settings, or another transfer."""
        return replace(self, name=name or self.name, big=big or self.big, settings={**self.settings, **settings})


UCX = Way("ucx", {"transports": ("ucx",), "ucx_tls": None, "path": "direct"}, SHORT_RUNS)
TCP = Way("ucx-tcp", {"transports": ("ucx",), "ucx_tls": "tcp", "path": "direct"}, SHORT_RUNS)
PACKED = Way("ucx-packed", {"transports": ("ucx",), "ucx_tls": None, "path": "packed"}, MORE_SHORT_RUNS)
STREAM = Way("stream", {"transports": ("stream",)}, MORE_SHORT_RUNS)
RING = Way("ring", {"transports": ("shared",), "path": "ring"}, MANY_SHORT_RUNS)
MAPPED = Way("mapped", {"transports": ("shared",)}, MANY_SHORT_RUNS, shareable=True)
PULLED = Way("pulled", {"transports": ("shared",), "path": "pulled"}, MORE_SHORT_RUNS)
QUICK = {"lease_seconds": 1.2, "peer_lost_seconds": 1.2, "heartbeat_seconds": 0.2}
"""Silence is borne for less than by default, where a test need not see what the default is."""


def told_of(*ways: Way) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("way", ways, ids=[way.name for way in ways])


OpenRank = Callable[..., Awaitable[RankProcess]]
spare: list[RankProcess] = []
"""Processes that outlived their test: starting one takes longer than most of what is tested."""
_serial = itertools.count(1)


@pytest.fixture(scope="module", autouse=True)
def _close_spare() -> Iterator[None]:
    yield
    while spare:
        spare.pop().close()


@pytest.fixture
async def open_rank() -> AsyncIterator[OpenRank]:
    """Opens the victims; a rank that is still well afterwards serves the next test."""
    opened: list[RankProcess] = []

    async def open_one(engine: str, way: Way = UCX, *, listen: str | None = None) -> RankProcess:
        rank = spare.pop() if spare else RankProcess()
        opened.append(rank)
        layout = "nhd" if engine == "prefill" else way.big.target_layout
        settings = way.settings if listen is None else {**way.settings, "listen": listen}
        incarnation = f"process{next(_serial)}"
        return await rank.open(engine, incarnation, layout=layout, shareable=way.shareable, **way.big.shape, **settings)

    yield open_one
    for rank in opened:
        if rank.process.poll() is None:
            rank.resume()
            spare.append(rank)
        else:
            rank.close()


def source_here(way: Way = UCX) -> Engine:
    return source_engine(None, layout="nhd", settings=way.settings, shareable=way.shareable, **way.big.shape)


def target_here(way: Way = UCX) -> Engine:
    return target_engine(None, layout=way.big.target_layout, settings=way.settings, **way.big.shape)


def arrived(spec: CacheSpec, regions: Sequence[np.ndarray], blocks: Sequence[int]) -> tuple[bool, bool]:
    """Whether the first and the last of what moves is there: a target's first and last plane, first and last block."""
    planes = spec.groups[0].planes
    found = []
    for plane, block in ((planes[0], blocks[0]), (planes[-1], blocks[-1])):
        start = plane.offset_bytes + block * plane.block_stride
        found.append(bool((regions[plane.region][start : start + 64] != TARGET_CANARY).any()))
    return found[0], found[1]


async def fetch_big(source: RankProcess, target: Engine, key: str, big: Big = SHORT_RUNS) -> Part:
    """A transfer from ``source`` in its middle."""
    source.content.fill(big.prompt, big.source)
    offer = source.offer(key, big.source, big.prompt.tokens)
    await source.publish(offer)
    caches = target.ranks[0].caches
    regions = [region.array for region in caches.regions]
    part = target.links[0].start_fetch(offer, (big.into,), deadline_seconds=60)
    await until(lambda: arrived(caches.spec, regions, big.into)[0])
    assert arrived(caches.spec, regions, big.into) == (True, False), "too short to be caught in its middle"
    return part


async def big_fetched(source: Engine, target: RankProcess, key: str, big: Big = SHORT_RUNS) -> Part:
    """A transfer to ``target`` in its middle; the source's part."""
    source.fill(big.prompt, big.source)
    offer = source.offer(key, big.source, big.prompt.tokens)
    part = source.links[0].publish(offer)
    await target.start_fetch(offer, big.into)
    await until(lambda: arrived(target.spec, target.regions, big.into)[0])
    assert arrived(target.spec, target.regions, big.into) == (True, False), "too short to be caught in its middle"
    return part


async def fails(
    part: Part, *why: type[KVLinkError], since: float = math.inf, within_seconds: float = ENDS_WITHIN_SECONDS
) -> None:
    """The part ends for one of these reasons, retryably, and no later than that after ``since``."""
    with pytest.raises(why) as caught:
        async with asyncio.timeout(20.0):
            await part.wait()
    assert caught.value.retryable
    assert time.monotonic() - since < within_seconds


async def serves_here(source: RankProcess, target: Engine, key: str) -> None:
    """``target`` takes a small request from ``source``."""
    source.content.fill(SMALL, FROM)
    offer = source.offer(key, FROM, SMALL.tokens)
    await source.publish(offer)
    target.ranks[0].content.wipe()
    await target.links[0].fetch(offer, (INTO,), deadline_seconds=10)
    target.assert_holds(SMALL, INTO)
    assert (await source.end_of(key)).state == "DONE"


async def serves_there(source: Engine, target: RankProcess, key: str) -> None:
    """``source`` gives a small request to ``target``."""
    source.fill(SMALL, FROM)
    offer = source.offer(key, FROM, SMALL.tokens)
    part = source.links[0].publish(offer)
    target.content.wipe()
    await target.start_fetch(offer, INTO)
    assert (await target.end_of(key)).state == "DONE"
    await part.wait()
    assert target.content.check(SMALL, INTO) is None
    source.assert_no_block_out()


@told_of(
    UCX, TCP, PACKED, STREAM, MAPPED, MAPPED.but("mapped, unchecked", integrity=False),
    PULLED, PULLED.but("pulled, unchecked", integrity=False), RING, RING.but("ring, unchecked", integrity=False),
)  # fmt: skip
async def test_b1_c7_a_source_killed_in_mid_transfer_is_lost_and_a_new_one_is_served(
    way: Way, open_rank: OpenRank
) -> None:
    source = await open_rank("prefill", way)
    async with target_here(way) as target:
        part = await fetch_big(source, target, "i:killed", way.big)
        await fails(part, PeerLostError, since=source.kill())
        target.assert_no_block_out()
        assert target.ranks[0].content.check_wiped(way.big.others) is None
        await serves_here(await open_rank("prefill", way.but(big=SHORT_RUNS)), target, "i:next")


@told_of(UCX, TCP, PACKED, STREAM, RING)
async def test_b3_c7_a_target_killed_in_mid_transfer_frees_its_source_which_serves_a_new_one(
    way: Way, open_rank: OpenRank
) -> None:
    target = await open_rank("decode", way)
    async with source_here(way) as source:
        part = await big_fetched(source, target, "i:killed", way.big)
        await fails(part, PeerError, since=target.kill())
        source.assert_no_block_out()
        assert target.content.check_wiped(way.big.others) is None
        await serves_there(source, await open_rank("decode", way.but(big=SHORT_RUNS)), "i:next")


@told_of(UCX, STREAM)
async def test_a_target_killed_after_install_is_told_and_its_successor_proves_it(way: Way, open_rank: OpenRank) -> None:
    small = way.but(big=SHORT_RUNS)
    target = await open_rank("decode", small)
    async with source_here(small) as source:
        await serves_there(source, target, "i:installed")
        (link,) = source.links
        assert link.recovery_point("i:installed").standing is Standing.INSTALLED
        target.kill()
        await until(lambda: link.stats().counters["installs_lost"] == 1)
        assert link.recovery_point("i:installed").standing is Standing.LOST
        await serves_there(source, await open_rank("decode", small), "i:next")
        told = [event for event in link.events.take() if isinstance(event, InstalledLost)]
        assert [(event.key, event.proven) for event in told] == [("i:installed", False), ("i:installed", True)]
        assert link.recovery_point("i:installed").recompute_tokens == SMALL.tokens


async def reuse_and_resume(source: RankProcess, target: Engine) -> None:
    """The blocks are another request's now: nothing that the resumed source does may change a byte of them."""
    target.assert_no_block_out()
    regions = [region.array for region in target.ranks[0].caches.regions]
    for region in regions:
        region.fill(0x77)
    source.resume()
    await source.blocks_out()  # it answers again
    await asyncio.sleep(0.3)
    assert all((region == 0x77).all() for region in regions)


@told_of(
    TCP.but("ucx-tcp, short runs"),
    TCP.but("ucx-tcp, long runs", LONG_RUNS, **QUICK),
    STREAM.but("stream, short runs"),
    STREAM.but("stream, long runs", LONG_RUNS, **QUICK),
    RING.but("ring, short runs", **QUICK),
)
async def test_a1_c7_a_source_stopped_in_mid_transfer_and_resumed_after_the_cut_off_changes_no_byte(
    way: Way, open_rank: OpenRank
) -> None:
    """A stopped source answers nothing: it is lost in time, and is served again when it is back."""
    source = await open_rank("prefill", way)
    async with target_here(way) as target:
        part = await fetch_big(source, target, "i:stopped", way.big)
        await fails(part, PeerLostError, since=source.stop(), within_seconds=LOST_WITHIN_SECONDS)
        await reuse_and_resume(source, target)
        assert (await source.end_of("i:stopped")).state in {"FAILED", "EXPIRED"}
        await serves_here(source, target, "i:next")


@told_of(
    UCX.but(commit_ttl_seconds=1.0), MAPPED.but("mapped, long runs", LONG_RUNS, commit_ttl_seconds=1.0),
    PULLED.but("pulled, long runs", LONG_RUNS, integrity=False, commit_ttl_seconds=1.0),
)  # fmt: skip
async def test_a1_c7_a_source_stopped_while_its_memory_can_still_be_read_never_commits(
    way: Way, open_rank: OpenRank
) -> None:
    """On one host reads need nobody over there; all may land, and still nothing is installed without a commit."""
    source = await open_rank("prefill", way)
    async with target_here(way) as target:
        part = await fetch_big(source, target, "i:stopped", way.big)
        await fails(part, ExpiredError, PeerLostError, since=source.stop())
        await reuse_and_resume(source, target)
        held = await source.ended("i:stopped")
        assert held is None or held.state != "DONE"  # it may wait for a fresh attempt
        await serves_here(source, target, "i:next")


async def test_a3_c7_a_target_stopped_past_its_lease_installs_nothing_when_resumed(open_rank: OpenRank) -> None:
    target = await open_rank("decode")
    async with source_here() as source:
        part = await big_fetched(source, target, "i:stopped")
        await fails(part, PeerError, since=target.stop())
        source.assert_no_block_out()
        source.ranks[0].content.wipe()  # the blocks are another request's now
        target.resume()
        over_there = await target.end_of("i:stopped")
        assert over_there.state in {"FAILED", "EXPIRED"}  # lost, or told first that its lease had lapsed
        assert over_there.retryable
        assert await target.blocks_out() == {}
        await serves_there(source, target, "i:next")


async def test_c1_a_source_restarted_on_its_port_is_another_peer(open_rank: OpenRank) -> None:
    source = await open_rank("prefill")
    async with target_here() as target:
        part = await fetch_big(source, target, "i:old")
        address = source.address
        kept = source.offer("i:kept", FROM, SMALL.tokens)
        killed = source.kill()
        successor = await open_rank("prefill", listen=address)
        assert successor.address == address
        await fails(part, PeerLostError, PeerRestartedError, since=killed)
        with pytest.raises(PeerRestartedError) as caught:
            await target.links[0].fetch(kept, (INTO,), deadline_seconds=10)
        assert caught.value.retryable
        target.assert_no_block_out()
        await serves_here(successor, target, "i:new")


@told_of(UCX.but(**QUICK), STREAM.but(**QUICK))
@pytest.mark.parametrize("holder", ["source", "target"])
async def test_b9_a_held_gil_is_neither_loss_nor_lapse(holder: str, way: Way, open_rank: OpenRank) -> None:
    held_seconds, big = 2.0, way.big
    if holder == "source":
        source = await open_rank("prefill", way)
        async with target_here(way) as target:
            part = await fetch_big(source, target, "i:held", big)
            await source.call("hold_gil", seconds=held_seconds)
            await part.wait()
            target.assert_holds(big.prompt, big.into)
            assert (await source.end_of("i:held")).state == "DONE"
            counters = target.links[0].stats().counters
    else:
        receiver = await open_rank("decode", way)
        async with source_here(way) as giver:
            part = await big_fetched(giver, receiver, "i:held", big)
            await receiver.call("hold_gil", seconds=held_seconds)
            await part.wait()
            assert (await receiver.end_of("i:held")).state == "DONE"
            assert receiver.content.check(big.prompt, big.into) is None
            counters = giver.links[0].stats().counters
    assert (counters["peers_lost"], counters["leases_lapsed"]) == (0, 0)


async def test_a7_a_source_that_closes_while_it_is_read_lets_the_reader_finish(open_rank: OpenRank) -> None:
    source = await open_rank("prefill")
    async with target_here() as target:
        part = await fetch_big(source, target, "i:drained")
        assert await source.call("close", timeout_seconds=15.0) == []
        await part.wait()
        target.assert_holds(SHORT_RUNS.prompt, SHORT_RUNS.into)


async def test_a7_a_source_that_closes_past_its_bound_says_what_it_cut(open_rank: OpenRank) -> None:
    source = await open_rank("prefill")
    async with target_here() as target:
        part = await fetch_big(source, target, "i:cut")
        assert await source.call("close", timeout_seconds=0.1) == ["i:cut"]
        with pytest.raises((CancelledError, PeerLostError)):
            await part.wait()
        target.assert_no_block_out()
        assert (await source.ended("i:cut")).state == "CANCELLED"
        await serves_here(await open_rank("prefill"), target, "i:next")


@told_of(UCX, TCP, PACKED, STREAM, MAPPED, RING)
async def test_a7_a_target_that_closes_past_its_bound_says_what_it_cut_and_is_written_no_more(
    way: Way, open_rank: OpenRank
) -> None:
    source = await open_rank("prefill", way)
    async with target_here(way) as target:
        part = await fetch_big(source, target, "i:cut", way.big)
        report = await target.links[0].close(0.0)
        assert report.cut == ("i:cut",)
        assert part.state is State.CANCELLED
        target.ranks[0].content.wipe()
        await asyncio.sleep(0.2)
        target.assert_untouched()
    assert (await source.end_of("i:cut")).state == "CANCELLED"
    async with target_here(way.but(big=SHORT_RUNS)) as successor:
        await serves_here(source, successor, "i:next")


async def test_c2_a_source_that_stops_in_the_handshake_fails_retryably_and_is_served_when_it_is_back(
    open_rank: OpenRank,
) -> None:
    source = await open_rank("prefill")
    async with target_here(UCX.but(handshake_seconds=0.5)) as target:
        source.content.fill(SMALL, FROM)
        offer = source.offer("i:asleep", FROM, SMALL.tokens)
        await source.publish(offer)
        source.stop()
        await fails(target.links[0].start_fetch(offer, (INTO,), deadline_seconds=10), PeerError)
        target.assert_no_block_out()
        assert target.links[0].stats().sessions == 0
        source.resume()
        await target.links[0].fetch(offer, (INTO,), deadline_seconds=10)
        target.assert_holds(SMALL, INTO)


@pytest.mark.parametrize("how", ["killed", "stopped"])
async def test_b1_a_source_that_goes_before_a_byte_has_moved_gives_the_reservations_back(
    how: str, open_rank: OpenRank
) -> None:
    source = await open_rank("prefill")
    async with target_here() as target:
        (link,) = target.links
        offer = source.offer("i:parked", FROM, SMALL.tokens)  # never published: the ask is parked
        parked = link.start_fetch(offer, (INTO,), deadline_seconds=60)
        ticket = target.ticket("i:pushed", SMALL.tokens)  # never announced
        room = tuple(block + 100 for block in INTO)
        expected = link.expect(ticket, source.roster, (room,), deadline_seconds=60)
        await until(lambda: expected.state is State.READY)
        await asyncio.sleep(0.1)
        gone = source.kill() if how == "killed" else source.stop()
        for part in (parked, expected):
            await fails(part, PeerError, since=gone)
        target.assert_no_block_out()
