"""Ranks in processes of their own, over UCX: killed, stopped and resumed, restarted, closed, with a held GIL.

The victim is a process (`rank_process`), the survivor an engine in this one. Runs of 64 bytes make the big transfer
last for seconds, so that what happens to it happens in its middle.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from engines import Engine, source_engine, target_engine, until
from rank_process import RankProcess

from kvlink import CacheSpec, Identity, Part, State
from kvlink.cli.bench.content import TARGET_CANARY, Prompt
from kvlink.errors import CancelledError, KVLinkError, PeerError, PeerLostError, PeerRestartedError

IDENTITY = Identity(model="tiny", num_layers=2, num_kv_heads=8, head_dim=32)
SHAPE: dict[str, Any] = {"identity": IDENTITY, "block_size": 64, "num_blocks": 320}
BIG, SMALL = Prompt(seed=7, tokens=16_000), Prompt(seed=8, tokens=300)
INTO = tuple(range(1, 251))
FROM = tuple(block + 60 for block in INTO)
ENDS_WITHIN_SECONDS = 5.0
LOST_WITHIN_SECONDS = 3.0
GATHERED = {"source": "nhd", "target": "hnd"}
"""Runs of one row, 64 bytes."""
TRANSPORTS = pytest.mark.parametrize("tls", [None, "tcp"])

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

    async def open_one(engine: str, *, incarnation: str = "", **fields: Any) -> RankProcess:
        rank = spare.pop() if spare else RankProcess()
        opened.append(rank)
        layout = GATHERED["source" if engine == "prefill" else "target"]
        incarnation = incarnation or f"process{next(_serial)}"
        return await rank.open(engine, incarnation, **{"layout": layout, **SHAPE, **fields})

    yield open_one
    for rank in opened:
        if rank.process.poll() is None:
            rank.resume()
            spare.append(rank)
        else:
            rank.close()


def source_here(tls: str | None = None, **settings: object) -> Engine:
    return source_engine(None, layout=GATHERED["source"], settings={"ucx_tls": tls, **settings}, **SHAPE)


def target_here(tls: str | None = None, **settings: object) -> Engine:
    return target_engine(None, layout=GATHERED["target"], settings={"ucx_tls": tls, **settings}, **SHAPE)


def arrived(spec: CacheSpec, regions: Sequence[np.ndarray], blocks: Sequence[int]) -> tuple[bool, bool]:
    """Whether the first and the last of what moves is there: a target's first and last plane, first and last block."""
    planes = spec.groups[0].planes
    found = []
    for plane, block in ((planes[0], blocks[0]), (planes[-1], blocks[-1])):
        start = plane.offset_bytes + block * plane.block_stride
        found.append(bool((regions[plane.region][start : start + 64] != TARGET_CANARY).any()))
    return found[0], found[1]


def arrived_here(target: Engine) -> tuple[bool, bool]:
    caches = target.ranks[0].caches
    return arrived(caches.spec, [region.array for region in caches.regions], INTO)


async def fetch_big(source: RankProcess, target: Engine, key: str) -> Part:
    """A transfer from ``source`` in its middle."""
    source.content.fill(BIG, FROM)
    offer = source.offer(key, FROM, BIG.tokens)
    await source.publish(offer)
    part = target.links[0].start_fetch(offer, (INTO,), deadline_seconds=60)
    await until(lambda: arrived_here(target)[0])
    assert arrived_here(target) == (True, False), "the transfer is too short to be caught in its middle"
    return part


async def big_fetched(source: Engine, target: RankProcess, key: str) -> Part:
    """A transfer to ``target`` in its middle; the source's part."""
    source.fill(BIG, FROM)
    offer = source.offer(key, FROM, BIG.tokens)
    part = source.links[0].publish(offer)
    await target.start_fetch(offer, INTO)
    await until(lambda: arrived(target.spec, target.regions, INTO)[0])
    assert arrived(target.spec, target.regions, INTO) == (True, False), "the transfer is too short"
    return part


async def end_of(part: Part, timeout_seconds: float = 20.0) -> tuple[KVLinkError, float]:
    """The error a part ends with, and when."""
    with pytest.raises(KVLinkError) as caught:
        async with asyncio.timeout(timeout_seconds):
            await part.wait()
    return caught.value, time.monotonic()


async def serves_here(source: RankProcess, target: Engine, key: str) -> None:
    """``target`` takes a small request from ``source``."""
    source.content.fill(SMALL, FROM[:5])
    offer = source.offer(key, FROM[:5], SMALL.tokens)
    await source.publish(offer)
    target.ranks[0].content.wipe()
    await target.links[0].fetch(offer, (INTO[:5],), deadline_seconds=10)
    target.assert_holds(SMALL, INTO[:5])
    assert (await source.end_of(key)).state == "DONE"


async def serves_there(source: Engine, target: RankProcess, key: str) -> None:
    """``source`` gives a small request to ``target``."""
    source.fill(SMALL, FROM[:5])
    offer = source.offer(key, FROM[:5], SMALL.tokens)
    part = source.links[0].publish(offer)
    target.content.wipe()
    await target.start_fetch(offer, INTO[:5])
    assert (await target.end_of(key)).state == "DONE"
    await part.wait()
    assert target.content.check(SMALL, INTO[:5]) is None
    source.assert_no_block_out()


OTHERS = tuple(sorted({*range(320)} - {*INTO}))


@TRANSPORTS
async def test_b1_c7_a_source_killed_in_mid_transfer_is_lost_and_a_new_one_is_served(
    tls: str | None, open_rank: OpenRank
) -> None:
    source = await open_rank("prefill", ucx_tls=tls)
    async with target_here(tls) as target:
        part = await fetch_big(source, target, "i:killed")
        killed = source.kill()
        error, ended = await end_of(part)
        assert isinstance(error, PeerLostError)
        assert error.retryable
        assert ended - killed < ENDS_WITHIN_SECONDS
        target.assert_no_block_out()
        assert target.ranks[0].content.check_wiped(OTHERS) is None
        await serves_here(await open_rank("prefill", ucx_tls=tls), target, "i:next")


@TRANSPORTS
async def test_b3_c7_a_target_killed_in_mid_transfer_frees_its_source_which_serves_a_new_one(
    tls: str | None, open_rank: OpenRank
) -> None:
    target = await open_rank("decode", ucx_tls=tls)
    async with source_here(tls) as source:
        part = await big_fetched(source, target, "i:killed")
        killed = target.kill()
        error, ended = await end_of(part)
        assert isinstance(error, PeerError)
        assert error.retryable
        assert ended - killed < ENDS_WITHIN_SECONDS
        source.assert_no_block_out()
        assert target.content.check_wiped(OTHERS) is None
        await serves_there(source, await open_rank("decode", ucx_tls=tls), "i:next")


async def test_a1_c7_a_source_stopped_in_mid_transfer_and_resumed_after_the_cut_off_changes_no_byte(
    open_rank: OpenRank,
) -> None:
    source = await open_rank("prefill", ucx_tls="tcp")
    async with target_here("tcp") as target:
        part = await fetch_big(source, target, "i:stopped")
        stopped = source.stop()
        error, ended = await end_of(part)
        assert isinstance(error, PeerLostError)
        assert error.retryable
        assert ended - stopped < LOST_WITHIN_SECONDS
        target.assert_no_block_out()
        regions = [region.array for region in target.ranks[0].caches.regions]
        for region in regions:
            region.fill(0x77)  # the blocks are another request's now
        source.resume()
        assert (await source.end_of("i:stopped")).state in {"FAILED", "EXPIRED"}
        await asyncio.sleep(0.3)
        assert all((region == 0x77).all() for region in regions)
        await serves_here(source, target, "i:next")


async def test_a3_c7_a_target_stopped_past_its_lease_installs_nothing_when_resumed(open_rank: OpenRank) -> None:
    target = await open_rank("decode")
    async with source_here() as source:
        part = await big_fetched(source, target, "i:stopped")
        stopped = target.stop()
        error, ended = await end_of(part)
        assert isinstance(error, PeerError)
        assert error.retryable
        assert ended - stopped < ENDS_WITHIN_SECONDS
        source.assert_no_block_out()
        source.ranks[0].content.wipe()  # the blocks are another request's now
        target.resume()
        over_there = await target.end_of("i:stopped")
        assert (over_there.state, over_there.retryable) == ("FAILED", True)
        assert await target.blocks_out() == {}
        await serves_there(source, target, "i:next")


async def test_c1_a_source_restarted_on_its_port_is_another_peer(open_rank: OpenRank) -> None:
    source = await open_rank("prefill")
    async with target_here() as target:
        part = await fetch_big(source, target, "i:old")
        address = source.address
        kept = source.offer("i:kept", FROM[:5], SMALL.tokens)
        killed = source.kill()
        successor = await open_rank("prefill", listen=address)
        assert successor.address == address
        error, ended = await end_of(part)
        assert isinstance(error, PeerLostError | PeerRestartedError)
        assert error.retryable
        assert ended - killed < ENDS_WITHIN_SECONDS
        with pytest.raises(PeerRestartedError) as caught:
            await target.links[0].fetch(kept, (INTO,), deadline_seconds=10)
        assert caught.value.retryable
        target.assert_no_block_out()
        await serves_here(successor, target, "i:new")


@pytest.mark.parametrize("holder", ["source", "target"])
async def test_b9_a_held_gil_is_neither_loss_nor_lapse(holder: str, open_rank: OpenRank) -> None:
    quick = {"lease_seconds": 1.2, "peer_lost_seconds": 1.2, "heartbeat_seconds": 0.2}
    held_seconds = 2.5
    if holder == "source":
        source = await open_rank("prefill", **quick)
        async with target_here(**quick) as target:
            part = await fetch_big(source, target, "i:held")
            await source.call("hold_gil", seconds=held_seconds)
            await part.wait()
            target.assert_holds(BIG, INTO)
            assert (await source.end_of("i:held")).state == "DONE"
            counters = target.links[0].stats().counters
    else:
        receiver = await open_rank("decode", **quick)
        async with source_here(**quick) as giver:
            part = await big_fetched(giver, receiver, "i:held")
            await receiver.call("hold_gil", seconds=held_seconds)
            await part.wait()
            assert (await receiver.end_of("i:held")).state == "DONE"
            assert receiver.content.check(BIG, INTO) is None
            counters = giver.links[0].stats().counters
    assert (counters["peers_lost"], counters["leases_lapsed"]) == (0, 0)


async def test_a7_a_source_that_closes_while_it_is_read_lets_the_reader_finish(open_rank: OpenRank) -> None:
    source = await open_rank("prefill")
    async with target_here() as target:
        part = await fetch_big(source, target, "i:drained")
        assert await source.call("close", timeout_seconds=15.0) == []
        await part.wait()
        target.assert_holds(BIG, INTO)


async def test_a7_a_source_that_closes_past_its_bound_says_what_it_cut(open_rank: OpenRank) -> None:
    source = await open_rank("prefill")
    async with target_here() as target:
        part = await fetch_big(source, target, "i:cut")
        assert await source.call("close", timeout_seconds=0.1) == ["i:cut"]
        error, _ = await end_of(part)
        assert isinstance(error, CancelledError | PeerLostError)
        target.assert_no_block_out()
        assert (await source.ended("i:cut")).state == "CANCELLED"
        await serves_here(await open_rank("prefill"), target, "i:next")


@TRANSPORTS
async def test_a7_a_target_that_closes_past_its_bound_says_what_it_cut_and_is_written_no_more(
    tls: str | None, open_rank: OpenRank
) -> None:
    source = await open_rank("prefill", ucx_tls=tls)
    async with target_here(tls) as target:
        part = await fetch_big(source, target, "i:cut")
        report = await target.links[0].close(0.1)
        assert report.cut == ("i:cut",)
        assert part.state is State.CANCELLED
        target.ranks[0].content.wipe()
        await asyncio.sleep(0.2)
        target.assert_untouched()
    assert (await source.end_of("i:cut")).state == "CANCELLED"
    async with target_here(tls) as successor:
        await serves_here(source, successor, "i:next")
