"""KV moved between caches on GPUs, by the stand-in driver: whole, in order, and with the driver's calls failing."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import subprocess
import sys

import msgspec
import pytest
from engines import IDENTITY, _incarnations
from ml_dtypes import bfloat16

import kvlink
from kvlink import Config, Offer, Place, Roster, State, open_link
from kvlink.cli.bench.content import SOURCE_CANARY, TARGET_CANARY, CacheContent, Prompt
from kvlink.cli.bench.gpu_pool import GpuPool
from kvlink.errors import ConfigError, KVLinkError, LayoutError
from kvlink.layout import DType, standard_spec
from kvlink.relayout import Gpu, uncovered_stretches

PROMPT = Prompt(seed=7, tokens=75)
BLOCKS = 12
SHAPES = {"source": ("nhd", 16), "target": ("hnd", 48), "spare": ("hnd", 48)}


class Rank:
    """One rank on a GPU: its pool, its content, its link."""

    def __init__(self, side: str, dtype: DType = DType.BFLOAT16) -> None:
        layout, self.block_size = SHAPES[side]
        place = Place(engine=side, incarnation=f"g{next(_incarnations)}")
        spec = standard_spec(
            layout, identity=IDENTITY, place=place, layers=range(IDENTITY.num_layers), heads=range(4),
            block_size=self.block_size, num_blocks=BLOCKS, dtype=dtype,
        )  # fmt: skip
        self.pool = GpuPool(Gpu(), spec)
        canary = SOURCE_CANARY if side == "source" else TARGET_CANARY
        self.content = CacheContent(spec, [region.array for region in self.pool.mirror.regions], canary)
        self.blocks = tuple((3 + 5 * index) % BLOCKS for index in range(-(-PROMPT.tokens // self.block_size)))
        with self.pool.shown():
            self.content.wipe()

    async def __aenter__(self):
        self.link = await open_link(Config.load(), self.pool.caches)
        return self

    async def __aexit__(self, *_exc):
        await self.link.close(0.5)

    def offer(self, key):
        return Offer(key=key, roster=Roster.of([self.link.card]), blocks=(self.blocks,), tokens=PROMPT.tokens)

    def fill(self):
        with self.pool.shown():
            self.content.fill(PROMPT, self.blocks)

    def wrong(self):
        """The first fault of the whole cache, the prompt's blocks and all others; the content is gone afterwards."""
        with self.pool.shown():
            others = sorted(set(range(BLOCKS)) - set(self.blocks))
            return self.content.check(PROMPT, self.blocks) or self.content.check_wiped(others)


async def move(source, target, key="k", *, event=True, stream=True):
    offer = source.offer(key)
    with source.pool.written() as written:
        part = source.link.publish(offer, event=written if event else None)
    fetched = await target.link.fetch(
        offer, (target.blocks,), deadline_seconds=20, stream=target.pool.stream if stream else None
    )
    await part.wait()
    return fetched


async def test_kv_goes_from_gpu_to_gpu_by_the_packed_path(stand_in):
    """D4: shapes differ, whole pools are compared, and delays come before every step of every stream."""
    stand_in.delays(5, 500)
    async with Rank("source") as source, Rank("target") as target:
        source.fill()
        result = await move(source, target)
        assert target.wrong() is None
        assert (result.state, result.path, result.integrity) == (State.DONE, "packed", True)
        assert "kernels pack" in result.path_reason


async def test_elements_are_converted_on_the_way(stand_in):
    async with Rank("source") as source, Rank("target", DType.FLOAT32) as target:
        source.fill()
        await move(source, target)
        with source.pool.shown(), target.pool.shown():
            one, other = source.pool.mirror.regions[0].array, target.pool.mirror.regions[0].array
            plane, twin = (side.pool.caches.spec.groups[0].planes[0] for side in (source, target))
            row = one[plane.offset_bytes + source.blocks[0] * plane.block_stride :][:64].view(bfloat16)
            wide = other[twin.offset_bytes + target.blocks[0] * twin.block_stride :][:128].view("f4")
            assert (row.astype("f4").view("u4") & 0x7FFFFFFF).tolist() == (wide.view("u4") & 0x7FFFFFFF).tolist()


async def late_source(stand_in):
    """KV that is still on its way to the cache when it is published."""
    async with Rank("source") as source, Rank("target") as target:
        source.pool._memory._stream.synchronize()
        stand_in.stall(source.pool.stream, 400)
        source.content.fill(PROMPT, source.blocks)
        source.pool._memory.write(source.pool._arrays)
        await move(source, target)
        return target.wrong()


async def test_f1_nothing_is_read_before_the_producers_event(stand_in):
    """F1."""
    assert await late_source(stand_in) is None


async def test_f1_without_the_wait_the_stand_in_shows_wrong_bytes(stand_in):
    """F1."""
    stand_in.skip("cuStreamWaitEvent")
    assert await late_source(stand_in) is not None


async def test_f1_a_request_and_its_replicas_wait_for_one_event(stand_in):
    """F1."""
    async with Rank("source") as source, Rank("target") as target, Rank("spare") as spare:
        source.fill()
        source.pool._memory._stream.synchronize()
        stand_in.stall(source.pool.stream, 400)
        with source.pool.written() as written:
            part = source.link.publish(source.offer("k"), event=written, replicas=1)
        for rank, offer in ((target, source.offer("k")), (spare, *part.replicas)):
            await rank.link.fetch(offer, (rank.blocks,), deadline_seconds=20)
            assert rank.wrong() is None
        await part.wait()


async def late_consumer(stand_in):
    """Blocks that the consumer's stream is still writing when they are given to a fetch."""
    async with Rank("source") as source, Rank("target") as target:
        source.fill()
        target.pool._memory._stream.synchronize()
        stand_in.stall(target.pool.stream, 400)
        target.content.wipe()
        target.pool._memory.write(target.pool._arrays)
        await move(source, target)
        return target.wrong()


async def test_f4_nothing_is_written_while_the_consumers_stream_uses_the_blocks(stand_in):
    """F4."""
    assert await late_consumer(stand_in) is None


async def test_f4_without_the_wait_the_stand_in_shows_wrong_bytes(stand_in):
    """F4."""
    stand_in.skip("cuStreamWaitEvent")
    assert await late_consumer(stand_in) is not None


async def test_f2_a_slot_comes_back_when_its_event_has_passed(stand_in):
    """F2: taken for done too early, a slot is sent before it is packed, or taken back before it is scattered."""
    stand_in.delays(11, 3000)
    faults = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVLINK_INTEGRITY", "off")
        for skipped in (None, "cuEventQuery"):
            async with Rank("source") as source, Rank("target") as target:
                source.fill()
                source.pool._memory._stream.synchronize()
                if skipped is not None:
                    stand_in.skip(skipped)
                with contextlib.suppress(KVLinkError):
                    await move(source, target, event=False, stream=False)
                stand_in.skip("")
                faults.append(target.wrong())
    assert faults[0] is None
    assert faults[1] is not None


async def test_slots_past_the_last_token_are_zeroed_if_asked(stand_in):
    """After what the consumer's stream has queued, which here is the wiping of the whole cache."""
    stand_in.delays(5, 500)
    async with Rank("source") as source, Rank("target") as target:
        source.fill()
        with source.pool.written() as written:
            offer = source.offer("k")
            source.link.publish(offer, event=written)
        await target.link.fetch(
            offer, (target.blocks,), deadline_seconds=20, stream=target.pool.stream, uncovered="zero"
        )
        with target.pool.shown():
            arrays = [region.array for region in target.pool.mirror.regions]
            for region, offset, length in uncovered_stretches(target.pool.caches.spec, (target.blocks,), PROMPT.tokens):
                assert not arrays[region][offset : offset + length].any()
                arrays[region][offset : offset + length] = TARGET_CANARY
        assert target.wrong() is None


DROPPED = """
import ctypes, os, sys
from kvlink._native import _kvlink
from kvlink.relayout import Gpu, uncovered_stretches

driver, gpu = ctypes.CDLL(sys.argv[1]), Gpu(library=sys.argv[1])
stream = _kvlink.CudaStream(gpu.native)
called = []
callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(called.append)
driver.fakecuda_stall(ctypes.c_void_p(stream.handle), 100)
assert driver.cuLaunchHostFunc(ctypes.c_void_p(stream.handle), callback, None) == 0
moment = gpu.moment(None, stream, os.eventfd(0))
del moment
assert called
"""


def test_a_callback_of_the_engines_stream_may_need_the_interpreter_that_drops_a_moment(stand_in):
    """Dropping a moment waits for the stream: with the interpreter held, it would wait for ever."""
    subprocess.run([sys.executable, "-c", DROPPED, stand_in.library], check=True, timeout=60)


async def test_what_does_not_go_with_a_gpu_is_refused_by_name(stand_in, monkeypatch):
    async with Rank("source") as source:
        source.fill()
        offer = source.offer("k")
        source.link.publish(offer)
        with pytest.raises(LayoutError, match="no recorded CUDA event"):
            source.link.publish(source.offer("l"), event="soon")
    monkeypatch.setenv("KVLINK_TRANSPORTS", "stream")
    with pytest.raises(ConfigError, match="lies on cuda:0, which stream cannot reach"):
        await open_link(Config.load(), Rank("source").pool.caches)
    host = kvlink.Caches.standard(source.pool.caches.spec)
    monkeypatch.setenv("KVLINK_TRANSPORTS", "ucx")
    async with open_link(Config.load(), host) as link:
        offer = Offer(key="k", roster=Roster.of([link.card]), blocks=(source.blocks,), tokens=PROMPT.tokens)
        with pytest.raises(LayoutError, match="host memory: no CUDA event"):
            link.publish(offer, event=7)


async def test_a_host_reads_from_a_gpu_and_a_gpu_from_a_host(stand_in):
    async with Rank("source") as gpu_source, Rank("target") as gpu_target:
        gpu_source.fill()
        mirror = gpu_target.pool.mirror
        place = Place(engine="host", incarnation=f"g{next(_incarnations)}")
        spec = msgspec.structs.replace(mirror.spec, place=place)
        caches = kvlink.Caches.standard(spec)
        content = CacheContent(spec, [region.array for region in caches.regions], TARGET_CANARY)
        content.wipe()
        async with open_link(Config.load(), caches) as host:
            offer = gpu_source.offer("k")
            gpu_source.link.publish(offer)
            result = await host.fetch(offer, (gpu_target.blocks,), deadline_seconds=20)
            assert result.path == "packed"
            back = Offer(key="l", roster=Roster.of([host.card]), blocks=(gpu_target.blocks,), tokens=PROMPT.tokens)
            host.release("k")
            host.publish(back)
            await gpu_target.link.fetch(back, (gpu_target.blocks,), deadline_seconds=20)
        assert gpu_target.wrong() is None


async def one_run():
    async with Rank("source") as source, Rank("target") as target:
        source.fill()
        await asyncio.wait_for(move(source, target), 15)
        return target.wrong()


def worth_failing(calls):
    """The first and the last call of each entry, by number: the whole loop takes minutes."""
    first, last = {}, {}
    for nth, entry in enumerate(calls, 1):
        first.setdefault(entry, nth)
        last[entry] = nth
    return sorted({*first.values(), *last.values()})


async def test_every_call_of_the_driver_failed_in_turn_is_a_typed_error_and_leaves_nothing(stand_in):
    """A5, B8: what was taken is given back, whoever fails."""
    await one_run()
    stand_in.fail(0)
    assert await one_run() is None
    calls = stand_in.called()
    told = 0
    for nth in worth_failing(calls):
        stand_in.fail(nth)
        try:
            assert await one_run() is None  # where it only gives back, all was done before
        except KVLinkError:
            told += 1
        stand_in.fail(0)
        for _ in range(100):  # timers and threads let go of a link in their own time
            await asyncio.sleep(0.02)
            gc.collect()
            if not stand_in.held():
                break
        assert not stand_in.held(), f"call {nth}, {calls[nth - 1]}"
    assert told > 20
