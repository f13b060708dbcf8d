"""`kvlink.convert` on a GPU, by the stand-in driver: right bytes, right order, and nothing lost when calls fail."""

import itertools

import numpy as np
import pytest
from geometries import identity_of, rank_spec, scattered
from stand_in import ILLEGAL_ADDRESS, OnDevice
from test_convert import filled, of_dtype

import kvlink
from kvlink._native import _kvlink
from kvlink.errors import GpuError, KVLinkError, LayoutError, UnavailableError, UnsupportedError
from kvlink.layout import STANDARD_LAYOUTS, DType
from kvlink.memory import Region
from kvlink.relayout import Gpu

TOKENS = 21


def pair(layouts=("nhd", "hnd"), dtypes=(DType.BFLOAT16, DType.BFLOAT16), blocks=(4, 5), scales=((), ())):
    sides = []
    for layout, dtype, block_size, engine, scale, seed in zip(
        layouts, dtypes, blocks, "pd", scales, (1, 2), strict=True
    ):
        base = rank_spec(layout, block_size=block_size, engine=engine, identity=identity_of(head_dim=8))
        sides.append(filled(of_dtype(base, dtype, layout, scale), seed))
    return sides


def ids_of(source, target):
    return {"source_blocks": [scattered(source.spec, TOKENS, 3)], "target_blocks": [scattered(target.spec, TOKENS, 4)]}


def on_cpu(source, target):
    """What `convert` makes of a copy of the target in host memory."""
    want = kvlink.Caches.standard(target.spec)
    for mine, theirs in zip(want.regions, target.regions, strict=True):
        mine.array[:] = theirs.array
    kvlink.convert(source, want, **ids_of(source, target), tokens=TOKENS)
    return [region.array for region in want.regions]


def same(got, want):
    return all(np.array_equal(one, other) for one, other in zip(got, want, strict=True))


@pytest.mark.parametrize("layouts", list(itertools.product(STANDARD_LAYOUTS, STANDARD_LAYOUTS)), ids="-".join)
def test_any_layout_becomes_any_other(stand_in, layouts):
    source, target = pair(layouts)
    gpu = Gpu()
    there, back = OnDevice(gpu, source), OnDevice(gpu, target)
    stand_in.delays(7, 300)
    kvlink.convert(there.caches, back.caches, **ids_of(source, target), tokens=TOKENS)
    assert same(back.read(), on_cpu(source, target))


@pytest.mark.parametrize(
    "dtypes",
    [(DType.BFLOAT16, DType.FLOAT8_E4M3), (DType.FLOAT8_E5M2, DType.FLOAT16), (DType.FLOAT32, DType.INT8)],
    ids=lambda pair: "-".join(dtype.value for dtype in pair),
)
def test_elements_are_converted_to_the_same_bits_as_on_the_cpu(stand_in, dtypes):
    """E2: scales are the kernels', too."""
    table = tuple(map(tuple, np.random.default_rng(5).uniform(0.1, 9, (4, 4)).astype(np.float32).tolist()))
    source, target = pair(dtypes=dtypes, scales=[table if dtype.quantised else () for dtype in dtypes])
    gpu = Gpu()
    there, back = OnDevice(gpu, source), OnDevice(gpu, target)
    kvlink.convert(there.caches, back.caches, **ids_of(source, target), tokens=TOKENS)
    assert same(back.read(), on_cpu(source, target))


class Stream:
    """As torch's."""

    def __init__(self, handle):
        self.cuda_stream = handle


def after_a_slow_writer(stand_in):
    """A source that its stream writes late, converted after that stream. Whether the target holds what was written."""
    source, target = pair()
    gpu = Gpu()
    there, back = OnDevice(gpu, source), OnDevice(gpu, target)
    there.stream.fill(there.memory[0].address, 0xDB, there.memory[0].nbytes)
    there.stream.synchronize()
    stand_in.stall(there.stream.handle, 60)
    there.write([region.array for region in source.regions])
    kvlink.convert(
        there.caches, back.caches, **ids_of(source, target), tokens=TOKENS, stream=Stream(there.stream.handle)
    )
    return same(back.read(), on_cpu(source, target))


def test_f1_what_is_queued_on_the_callers_stream_comes_first(stand_in):
    """F1."""
    assert after_a_slow_writer(stand_in)


def test_f1_without_the_wait_the_stand_in_shows_wrong_bytes(stand_in):
    """F1."""
    stand_in.skip("cuStreamWaitEvent")
    assert not after_a_slow_writer(stand_in)


def test_convert_returns_when_the_bytes_are_there(stand_in):
    """Without the wait at the end, what is read next is not what will be there."""
    source, target = pair()
    gpu = Gpu()
    there, back = OnDevice(gpu, source), OnDevice(gpu, target)
    gpu.prepare(_kvlink.Plan([]))
    stand_in.delays(3, 40_000)
    stand_in.skip("cuStreamSynchronize", 1)
    plan = _kvlink.Plan(
        [(np.zeros((1, 4), np.int64), np.zeros((1, 2), np.int64), np.zeros((0, 3), np.int64), 64, None)]
    )
    before = bytes(source.regions[0].array[:64])
    stream, event = _kvlink.CudaStream(gpu.native), _kvlink.CudaEvent(gpu.native)
    regions = [[(side.memory[0].address, side.memory[0].nbytes)] for side in (there, back)]
    ready = _kvlink.CudaPlan.relayout(stream, plan, *regions)
    ready.launch(stream, 0, 64)
    stream.record(event)
    assert not event.done()
    event.synchronize()
    assert bytes(back.read()[0][:64]) == before


def error_of(*sides, **options):
    """What was raised; not the error itself, whose traceback would hold the GPU."""
    try:
        kvlink.convert(*sides, **options)
    except KVLinkError as error:
        return type(error), str(error)


def test_every_call_of_the_driver_failed_in_turn_is_a_typed_error_and_leaves_nothing(stand_in):
    source, target = pair()
    gpu = Gpu()
    there, back = OnDevice(gpu, source), OnDevice(gpu, target)
    want, sides = on_cpu(source, target), ids_of(source, target)
    holding = stand_in.held()
    kvlink.convert(there.caches, back.caches, **sides, tokens=TOKENS, stream=there.stream.handle)
    stand_in.fail(0)
    kvlink.convert(there.caches, back.caches, **sides, tokens=TOKENS, stream=there.stream.handle)
    calls = len(stand_in.called())
    assert calls > 30
    told = 0
    for nth in range(1, calls + 1):
        stand_in.fail(nth)
        error = error_of(there.caches, back.caches, **sides, tokens=TOKENS, stream=there.stream.handle)
        if error is not None:  # nothing is told of a call that gives something back: all was done before
            kind, text = error
            assert kind is GpuError
            assert "CUDA_ERROR_OUT_OF_MEMORY, status 2 of the stand-in" in text
            told += 1
        stand_in.fail(0)
        assert stand_in.held() == holding, f"call {nth}"
    assert told > calls / 2
    kvlink.convert(there.caches, back.caches, **sides, tokens=TOKENS)
    assert same(back.read(), want)


def test_a_kernel_that_leaves_its_memory_is_an_error_and_so_is_all_that_follows(stand_in):
    source, target = pair()
    gpu = Gpu()
    there, back = OnDevice(gpu, source), OnDevice(gpu, target)
    moved = [Region(region.address + (1 << 30), region.length) for region in back.caches.regions]
    lost = kvlink.Caches(target.spec, tuple(moved), (), "cuda:0")
    for caches in (lost, back.caches):
        with pytest.raises(GpuError, match="ILLEGAL_ADDRESS"):
            kvlink.convert(there.caches, caches, **ids_of(source, target), tokens=TOKENS)


def test_a_lost_context_gives_back_what_was_held(stand_in):
    source, target = pair()
    gpu = Gpu()
    there, back = OnDevice(gpu, source), OnDevice(gpu, target)
    stand_in.fail(12, ILLEGAL_ADDRESS)
    with pytest.raises(GpuError, match="ILLEGAL_ADDRESS"):
        kvlink.convert(there.caches, back.caches, **ids_of(source, target), tokens=TOKENS)


def test_one_device_converts(stand_in):
    source, target = pair()
    there = OnDevice(Gpu(), source)
    with pytest.raises(UnsupportedError, match="lie on cpu and cuda:0"):
        kvlink.convert(there.caches, target, **ids_of(source, target), tokens=TOKENS)


def test_a_machine_without_a_driver_or_that_gpu_is_told_what_it_lacks(stand_in, monkeypatch):
    with pytest.raises(UnavailableError, match="no GPU cuda:7: the CUDA driver sees 2"):
        Gpu("cuda:7")
    with pytest.raises(LayoutError, match="names no GPU"):
        Gpu("rocm:0")
    monkeypatch.setenv("KVLINK_CUDA_LIBRARY", "/nowhere/libcuda.so.1")
    with pytest.raises(UnavailableError, match=r"no CUDA driver: /nowhere.*install the NVIDIA driver"):
        Gpu()


def test_the_stand_in_is_known_for_what_it_is(stand_in):
    gpu = Gpu("cuda:1")
    assert gpu.stand_in
    assert (gpu.name, gpu.arch) == ("stand-in for a GPU", "sm_90")


def test_the_host_cannot_touch_device_memory(stand_in):
    """Else a wrong copy by the CPU would pass unseen."""
    gpu = Gpu()
    memory = _kvlink.CudaMemory(gpu.native, 4096)
    page = memory.address
    with open("/proc/self/maps") as maps:
        mine = [line for line in maps if int(line.split("-")[0], 16) <= page < int(line.split()[0].split("-")[1], 16)]
    assert [line.split()[1] for line in mine] == ["---s"]
    assert _kvlink.cuda_device_of(stand_in.library, page) == 0
    assert _kvlink.cuda_device_of(stand_in.library, np.zeros(8).ctypes.data) == -1
