"""Timed cases, each beside a device-to-device copy of as many bytes, by turns in the same run."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from cases import plan_of

from kvlink._native import _kvlink
from kvlink.layout import CacheSpec, DType, Identity, Place, standard_spec
from kvlink.relayout import Gpu, GpuMemory, leaf_count, native_plan

ROUNDS = 7
LLAMA_8B = Identity(model="llama-3-8b", num_layers=32, num_kv_heads=8, head_dim=128)


@dataclass(frozen=True)
class Shape:
    """A case: both sides' layout, block size and element type, and what of a copy's speed it must reach."""

    name: str
    layouts: tuple[str, str]
    blocks: tuple[int, int]
    dtypes: tuple[DType, DType]
    threshold: float


SHAPES = (
    Shape("pages", ("nhd", "nhd"), (16, 16), (DType.BFLOAT16, DType.BFLOAT16), 0.90),
    Shape("permute", ("nhd", "hnd"), (16, 32), (DType.BFLOAT16, DType.BFLOAT16), 0.85),
    Shape("fp8", ("nhd", "nhd"), (16, 16), (DType.BFLOAT16, DType.FLOAT8_E4M3), 0.75),
)


@dataclass(frozen=True)
class Timed:
    """One row: the fraction of a copy's speed, by bytes read and written, and the case's GB/s of payload."""

    name: str
    fraction: float
    gb_s: float
    threshold: float | None

    @property
    def fast_enough(self) -> bool:
        return self.threshold is None or self.fraction >= self.threshold


def measure(gpu: Gpu, shape: Shape, tokens: int, *, digest: bool) -> Timed:
    """Paired with copies that read and write as many bytes as the case; its threshold is for moves without digests."""
    source, target = (_spec(shape, side, tokens) for side in (0, 1))
    plan = native_plan(plan_of(source, target, tokens, random.Random(1)))
    gpu.prepare(plan)
    pools = [GpuMemory(gpu, spec.region_bytes) for spec in (source, target)]
    specs = zip(pools, (source, target), strict=True)
    regions = [list(zip(pool.addresses, spec.region_bytes, strict=True)) for pool, spec in specs]
    stream = _kvlink.CudaStream(gpu.native)
    leaves = _kvlink.CudaMemory(gpu.native, 8 * leaf_count(plan.total_bytes)) if digest else None
    ready = _kvlink.CudaPlan.relayout(stream, plan, *regions, digest)
    ratio = shape.dtypes[1].itemsize / shape.dtypes[0].itemsize
    nbytes = int(plan.total_bytes * (1 + ratio) / 2)
    copies = [_kvlink.CudaMemory(gpu.native, nbytes) for _ in range(2)]

    def move() -> None:
        ready.launch(stream, 0, plan.total_bytes, 0, 0 if leaves is None else leaves.address)

    def copy() -> None:
        stream.copy_on_device(copies[1].address, copies[0].address, nbytes)

    for work in (move, copy):
        _seconds(gpu, stream, work)  # warm
    pairs = [(_seconds(gpu, stream, copy), _seconds(gpu, stream, move)) for _ in range(ROUNDS)]
    fraction = statistics.median(copied / moved for copied, moved in pairs)
    seconds = statistics.median(moved for _, moved in pairs)
    name = shape.name + (" + digest" if digest else "")
    return Timed(name, fraction, plan.total_bytes / seconds / 1e9, None if digest else shape.threshold)


def _seconds(gpu: Gpu, stream: _kvlink.CudaStream, work: Callable[[], None]) -> float:
    start, end = (_kvlink.CudaEvent(gpu.native, True) for _ in range(2))
    stream.record(start)
    work()
    stream.record(end)
    end.synchronize()
    return max(end.seconds_since(start), 1e-9)


def _spec(shape: Shape, side: int, tokens: int) -> CacheSpec:
    block_size, dtype = shape.blocks[side], shape.dtypes[side]
    scales = ()
    if dtype.quantised:
        scales = tuple((0.5,) * LLAMA_8B.num_kv_heads for _ in range(2 * LLAMA_8B.num_layers))
    return standard_spec(
        shape.layouts[side], identity=LLAMA_8B, place=Place(engine="pd"[side], incarnation="1"),
        layers=range(LLAMA_8B.num_layers), heads=range(LLAMA_8B.num_kv_heads), block_size=block_size,
        num_blocks=-(-tokens // block_size), dtype=dtype, scales=scales,
    )  # fmt: skip
