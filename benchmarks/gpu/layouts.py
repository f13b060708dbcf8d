"""Random layouts on the GPU against the CPU, over whole pools: moved, moved and digested, packed and unpacked."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
from cases import Case, draw

from kvlink._native import _kvlink
from kvlink.relayout import Gpu, GpuMemory, NativePlan, leaf_count, move_and_digest, native_plan

FORMS = ("move", "digest", "packed")


def expected(case: Case, plan: NativePlan) -> tuple[list[np.ndarray], bytes]:
    """The target's pool and the digests, by the CPU's own kernels."""
    source, target = case.pool(case.source), case.pool(case.target)
    regions = [[(region.ctypes.data, region.nbytes) for region in side] for side in (source, target)]
    return target, move_and_digest(plan, *regions)


def on_gpu(gpu: Gpu, case: Case, plan: NativePlan, form: str) -> tuple[list[np.ndarray], bytes | None]:
    """The same by the GPU's; digests where the form has them."""
    source, target = (GpuMemory(gpu, spec.region_bytes) for spec in (case.source, case.target))
    source.write(case.pool(case.source))
    target.write(case.pool(case.target))
    out = [np.empty(length, np.uint8) for length in case.target.region_bytes]
    source.read([np.empty(length, np.uint8) for length in case.source.region_bytes])  # both are in place
    target.read(out)
    pools = ((source, case.source), (target, case.target))
    sides = [list(zip(pool.addresses, spec.region_bytes, strict=True)) for pool, spec in pools]
    gpu.prepare(plan)
    stream = _kvlink.CudaStream(gpu.native)
    leaves = _kvlink.CudaHostMemory(gpu.native, max(8, 8 * leaf_count(plan.total_bytes)))
    digests = None
    if form == "packed":
        slot = _kvlink.CudaMemory(gpu.native, plan.total_bytes)
        gather = _kvlink.CudaPlan.packed(stream, plan, _kvlink.SOURCE, sides[0])
        scatter = _kvlink.CudaPlan.packed(stream, plan, _kvlink.TARGET, sides[1])
        gather.launch(stream, 0, plan.total_bytes, slot.address)
        scatter.launch(stream, 0, plan.total_bytes, slot.address, leaves.address)
    else:
        ready = _kvlink.CudaPlan.relayout(stream, plan, *sides, form == "digest")
        ready.launch(stream, 0, plan.total_bytes, 0, leaves.address if form == "digest" else 0)
    stream.synchronize()
    if form != "move":
        digests = ctypes.string_at(leaves.address, 8 * leaf_count(plan.total_bytes))
    target.read(out)
    return out, digests


def faults(gpu: Gpu, count: int, first_seed: int = 1) -> Iterator[str]:
    """What differs, in words; the seed makes it again."""
    for seed in range(first_seed, first_seed + count):
        case = draw(seed)
        plan = native_plan(case.plan)
        want, digests = expected(case, plan)
        form = FORMS[seed % len(FORMS)]
        got, told = on_gpu(gpu, case, plan, form)
        if any(not np.array_equal(one, other) for one, other in zip(got, want, strict=True)):
            yield f"seed {seed} ({form}): the target's pool differs"
        elif told is not None and told != digests:
            yield f"seed {seed} ({form}): digests differ"
