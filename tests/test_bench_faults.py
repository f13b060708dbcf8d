"""A bench must not pass what went wrong: bytes changed on the way, failed requests, blocks touched by others."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest

from kvlink.cli.bench import messages as m
from kvlink.cli.bench.case import Case, Side
from kvlink.cli.bench.conductor import Conductor, Engine
from kvlink.cli.bench.half import Access, Commons, Half
from kvlink.cli.bench.workers import LocalWorker
from kvlink.cli.models import Geometry
from kvlink.layout import DType
from kvlink.transports.faults import FailRead, FlipByte, RandomFaults
from kvlink.transports.loopback_fabric import LoopbackFabric


class Watcher:
    def __init__(self):
        self.faults = []

    def stage(self, doing, finished):
        pass

    def fault(self, words):
        self.faults.append(words)


class Meddler(LocalWorker):
    """A target worker in whose memory somebody else writes, right before the whole of it is checked."""

    async def call(self, command, reply):
        if isinstance(command, m.Sweep):
            self._half._opened.ranks[0].caches.regions[0].array[12_345] ^= 1
        return await super().call(command, reply)


async def bench(*faults, integrity=True, flow="fetch", target_worker=LocalWorker, tries=1, tp=(1, 1)):
    case = Case(
        geometry=Geometry(model="tiny", layers=2, kv_heads=2, head_dim=32, dtype=DType.BFLOAT16),
        source=Side(tp=tp[0], pp=1, block_size=16, layout="nhd"),
        target=Side(tp=tp[1], pp=1, block_size=32, layout="hnd"),
        prompts=(500, 500, 500),
        warmup=0,
        concurrency=1,
        flow=flow,
        transport="loopback",
        integrity=integrity,
        limit_check=False,
        ucx_tls=None,
        ucx_origin="auto",
        seed=0,
        tries=tries,
    )
    access = Access(host="127.0.0.1", secret="sixteen bytes at the least")
    watcher = Watcher()
    async with AsyncExitStack() as stack:
        commons = Commons(LoopbackFabric(0, faults))
        halves = [Half(access, commons) for _ in range(2)]
        for half in halves:
            stack.push_async_callback(half.aclose)
        source = Engine(case, "source", [LocalWorker(halves[0])])
        target = Engine(case, "target", [target_worker(halves[1])])
        report = await Conductor(case, [source], [target], watcher).run()
        assert source.pool.free == source.pool.num_blocks
        assert target.pool.free == target.pool.num_blocks
        assert halves[0].verified is halves[1].verified is report.verified
    return report, watcher.faults


@pytest.mark.parametrize("flow", ["fetch", "push"])
async def test_a_byte_flipped_once_is_mended_with_integrity_on(flow):
    report, faults = await bench(FlipByte(chunk=0, on_try=1, read=2), flow=flow)
    assert report.verified
    assert report.requests.completed == 3
    assert faults == []


async def test_a_byte_flipped_on_the_way_is_seen_with_integrity_off():
    report, faults = await bench(FlipByte(chunk=0, read=2), integrity=False)
    assert not report.verified
    assert (report.requests.completed, report.requests.failed) == (3, 0)
    assert len(faults) == 1
    assert "does not hold what its coordinates say" in faults[0]


@pytest.mark.parametrize("flow", ["fetch", "push"])
async def test_a_request_that_fails_is_counted_said_and_the_others_go_on(flow):
    """The byte is wrong on every try: nothing is installed, and all blocks are back on both sides."""
    report, faults = await bench(FlipByte(chunk=0, read=2), flow=flow)
    assert not report.verified
    assert (report.requests.completed, report.requests.failed) == (2, 1)
    assert len(faults) == 1
    assert "request 1 failed" in faults[0]


@pytest.mark.parametrize("flow", ["fetch", "push"])
async def test_a_request_that_fails_is_tried_again_whole_and_every_retry_is_counted(flow):
    """G2: on all ranks, into fresh blocks, though one of them had installed."""
    report, faults = await bench(FlipByte(chunk=0, read=2), FailRead(nth=5), flow=flow, tries=3, tp=(1, 2))
    assert report.verified, faults
    assert (report.requests.completed, report.requests.failed, report.requests.retried) == (3, 0, 2)


@pytest.mark.parametrize("flow", ["fetch", "push"])
async def test_chance_may_lose_alter_and_delay_chunks_and_every_byte_is_still_right(flow):
    chance = RandomFaults(drop=0.6, corrupt=0.3, delay=0.3, seed=1)
    report, faults = await bench(chance, flow=flow, tries=20)
    assert report.verified, faults
    assert report.requests.retried > 0


async def test_a_byte_written_where_nothing_was_moved_is_seen_at_the_end():
    report, faults = await bench(target_worker=Meddler)
    assert not report.verified
    assert report.requests.completed == 3
    assert "region 0 byte 12345" in faults[0]
