#!/usr/bin/env python3
"""The CPU kernels beside torch and memcpy, in one run.

    python benchmarks/relayout.py [--json FILE] [--mib N] [--repeats N] [--threads N ...]

A case is run by all three in turn, again and again; a ratio is the median of the turns' ratios, so that what else the
machine does falls on all of them. Torch gets what it can use: outputs and intermediates of its own that are allocated
once, on huge pages as ours, and elements of the cache's own type. Every result is compared with torch's. Bytes are
payload as read, 1 GB = 1e9 bytes. Exit code: 0 measured, 1 a result is wrong, 3 torch is missing.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import kvlink
from kvlink.layout import DType, Identity, Place, share_of, standard_spec
from kvlink.plan import assign_legs, plan_leg
from kvlink.relayout import (
    NativePlan,
    Side,
    digest_leaves,
    move_and_digest,
    move_local,
    move_variants,
    native_plan,
)

try:
    import torch
except ImportError:
    print("benchmarks/relayout.py compares with torch, which is not installed: pip install torch", file=sys.stderr)
    sys.exit(3)

from record import destination, write

HEADS, CHANNELS, SLOTS = 8, 128, 16
Scales = tuple[tuple[float, ...], ...]
Ids = np.ndarray[Any, np.dtype[np.int64]]
TOKEN_BYTES = 2 * HEADS * CHANNELS * 2
"""K and V of one token of one layer in bfloat16."""
E4M3_LARGEST = 448.0


@dataclass
class Case:
    """One comparison: what each contender runs, the payload, and what the project promises."""

    name: str
    payload_bytes: int
    kvlink: Callable[[int], object]
    torch: Callable[[], object] | None
    memcpy: Callable[[int], object]
    same: Callable[[], bool]
    promised: dict[str, float] = field(default_factory=dict)


def cache(
    layout: str, block_size: int, tokens: int, dtype: DType, scales: Scales | None = None
) -> tuple[kvlink.Caches, Ids]:
    """A pool with twice the room for ``tokens``, and a random list of its blocks."""
    spec = standard_spec(
        layout, identity=Identity(model="bench", num_layers=1, num_kv_heads=HEADS, head_dim=CHANNELS),
        place=Place(engine=layout, incarnation="1"), layers=[0], heads=range(HEADS), block_size=block_size,
        num_blocks=2 * tokens // block_size, dtype=dtype, scales=scales,
    )  # fmt: skip
    caches = kvlink.Caches.standard(spec)
    blocks = np.random.default_rng(block_size).permutation(2 * tokens // block_size)[: tokens // block_size]
    return caches, blocks.astype(np.int64)


def regions(caches: kvlink.Caches) -> list[tuple[int, int]]:
    return [(region.address, region.length) for region in caches.regions]


def planned(
    source: kvlink.Caches, source_blocks: Ids, target: kvlink.Caches, target_blocks: Ids, tokens: int
) -> NativePlan:
    (leg,) = assign_legs([share_of(source.spec)], [share_of(target.spec)])
    plan = plan_leg(source.spec, target.spec, leg.groups, source_blocks=[source_blocks],
                    target_blocks=[target_blocks], first_token=0, tokens=tokens)  # fmt: skip
    return native_plan(plan)


def tensors(caches: kvlink.Caches, dtype: torch.dtype, *shape: int) -> list[torch.Tensor]:
    return [torch.from_numpy(region.array).view(dtype).view(shape) for region in caches.regions]


def empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """A tensor on huge pages."""
    nbytes = int(np.prod(shape)) * dtype.itemsize
    pool = kvlink.memory.allocate_pool(nbytes)
    pool.array[:] = 0
    return torch.from_numpy(pool.array).view(dtype).view(shape)


def same_bytes(caches: kvlink.Caches, outs: list[torch.Tensor]) -> bool:
    """Whether each region begins with what torch wrote."""
    return all(
        bool((torch.from_numpy(region.array)[: out.nbytes] == out.view(torch.uint8).view(-1)).all())
        for region, out in zip(caches.regions, outs, strict=True)
    )


def fill(caches: kvlink.Caches) -> None:
    rng = np.random.default_rng(1)
    for region in caches.regions:
        values = torch.from_numpy(rng.standard_normal(1 << 20, dtype=np.float32)).to(torch.bfloat16)
        whole = torch.from_numpy(region.array).view(torch.bfloat16)
        for at in range(0, len(whole), 1 << 20):
            whole[at : at + (1 << 20)] = values[: len(whole) - at]


def memcpy(nbytes: int) -> Callable[[int], object]:
    """The C library's copy of as many bytes, between memory of the same kind, a stretch a thread."""
    source, target = (kvlink.memory.allocate_pool(nbytes) for _ in range(2))
    source.array[:] = 1
    target.array[:] = 0
    pool = ThreadPoolExecutor(max(1, os.cpu_count() or 1))

    def run(threads: int) -> None:
        step = -(-nbytes // threads)
        parts = [(at, min(step, nbytes - at)) for at in range(0, nbytes, step)]
        if threads == 1:
            ctypes.memmove(target.address, source.address, nbytes)
        else:
            list(pool.map(lambda part: ctypes.memmove(target.address + part[0], source.address + part[0], part[1]),
                          parts))  # fmt: skip

    return run


def permute_case(tokens: int) -> Case:
    """NHD with blocks of 16 to HND with blocks of 32: rows of 256 bytes."""
    source, from_blocks = cache("nhd", SLOTS, tokens, DType.BFLOAT16)
    target, to_blocks = cache("hnd", 2 * SLOTS, tokens, DType.BFLOAT16)
    fill(source)
    plan = planned(source, from_blocks, target, to_blocks, tokens)
    (nhd,) = tensors(source, torch.bfloat16, 2, -1, SLOTS, HEADS, CHANNELS)
    out = empty(torch.bfloat16, 2 * tokens // (2 * SLOTS), 2, HEADS, 2 * SLOTS, CHANNELS)
    pages = empty(torch.bfloat16, 2, tokens // SLOTS, SLOTS, HEADS, CHANNELS)
    turned = empty(torch.bfloat16, tokens // (2 * SLOTS), 2, HEADS, 2 * SLOTS, CHANNELS)
    read, written = torch.from_numpy(from_blocks), torch.from_numpy(to_blocks)

    def chain() -> None:
        torch.index_select(nhd, 1, read, out=pages)
        turned.copy_(pages.view(2, -1, 2 * SLOTS, HEADS, CHANNELS).permute(1, 0, 3, 2, 4))
        out.index_copy_(0, written, turned)

    return Case(
        "NHD/16 to HND/32", tokens * TOKEN_BYTES,
        lambda threads: move_local(plan, regions(source), regions(target), threads=threads), chain,
        memcpy(tokens * TOKEN_BYTES),
        lambda: same_bytes(target, [out]),
        {"torch": 2.5, "memcpy": 0.8},
    )  # fmt: skip


def page_case(tokens: int, gather: bool) -> Case:
    """Pages of 32 KiB from all over a pool into one stretch, or back."""
    pool, blocks = cache("apart", SLOTS, tokens, DType.BFLOAT16)
    flat, _ = cache("apart", SLOTS, tokens, DType.BFLOAT16)
    source, target = (pool, flat) if gather else (flat, pool)
    fill(source)
    in_order = np.arange(len(blocks))
    pair = (blocks, in_order) if gather else (in_order, blocks)
    plan = planned(source, pair[0], target, pair[1], tokens)
    pages = tensors(source, torch.bfloat16, -1, SLOTS, HEADS, CHANNELS)
    outs = [empty(torch.bfloat16, *one.shape) for one in pages]
    index = torch.from_numpy(blocks)

    def with_torch() -> None:
        for one, out in zip(pages, outs, strict=True):
            if gather:
                torch.index_select(one, 0, index, out=out[: len(index)])
            else:
                out.index_copy_(0, index, one[: len(index)])

    return Case(
        "gather 32 KiB pages" if gather else "scatter 32 KiB pages", tokens * TOKEN_BYTES,
        lambda threads: move_local(plan, regions(source), regions(target), threads=threads), with_torch,
        memcpy(tokens * TOKEN_BYTES), lambda: same_bytes(target, outs), {"torch": 1.0},
    )  # fmt: skip


def narrowing_case(tokens: int) -> Case:
    """bfloat16 to fp8 e4m3 with a scale a head, same layout, blocks in order: the conversion alone."""
    scales = tuple(float(np.float32(0.01 * (head + 1))) for head in range(HEADS))
    source, _ = cache("apart", SLOTS, tokens, DType.BFLOAT16)
    target, _ = cache("apart", SLOTS, tokens, DType.FLOAT8_E4M3, (scales,))
    fill(source)
    in_order = np.arange(tokens // SLOTS)
    plan = planned(source, in_order, target, in_order, tokens)
    values = [one[:tokens] for one in tensors(source, torch.bfloat16, -1, HEADS, CHANNELS)]
    outs = [empty(torch.float8_e4m3fn, *one.shape) for one in values]
    scaled = empty(torch.float32, *values[0].shape)
    inverse = (1 / torch.tensor(scales, dtype=torch.float32)).view(HEADS, 1)

    def with_torch() -> None:
        for one, out in zip(values, outs, strict=True):
            scaled.copy_(one)  # torch's fastest of several ways; a product of two types is a third as fast
            out.copy_(scaled.mul_(inverse).clamp_(-E4M3_LARGEST, E4M3_LARGEST))

    return Case(
        "bfloat16 to e4m3, a scale a head", tokens * TOKEN_BYTES,
        lambda threads: move_local(plan, regions(source), regions(target), threads=threads), with_torch,
        memcpy(tokens * TOKEN_BYTES), lambda: same_bytes(target, outs), {"torch": 2.0},
    )  # fmt: skip


def digest_case(tokens: int) -> Case:
    """A gather of pages with the digests of its leaves, against a plain copy; torch has no such thing."""
    pool, blocks = cache("apart", SLOTS, tokens, DType.BFLOAT16)
    flat, _ = cache("apart", SLOTS, tokens, DType.BFLOAT16)
    fill(pool)
    plan = planned(pool, blocks, flat, np.arange(len(blocks)), tokens)
    leaves = digest_leaves(plan, Side.SOURCE, regions(pool))
    return Case(
        "gather 32 KiB pages and digest", tokens * TOKEN_BYTES,
        lambda threads: move_and_digest(plan, regions(pool), regions(flat), threads=threads), None,
        memcpy(tokens * TOKEN_BYTES),
        lambda: move_and_digest(plan, regions(pool), regions(flat)) == leaves,
    )  # fmt: skip


REST_SECONDS = 0.05
"""Before each turn: torch's threads spin for some milliseconds after their work, on the cores of whoever is next."""


def seconds(work: Callable[[], object]) -> float:
    time.sleep(REST_SECONDS)
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(case: Case, threads: int, repeats: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    contenders = {"kvlink": lambda: case.kvlink(threads), "memcpy": lambda: case.memcpy(threads)}
    if case.torch is not None:
        contenders["torch"] = case.torch
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(repeats + 1):
        for name, work in contenders.items():
            spent = seconds(work)
            if turn:  # the first is for pages and caches
                taken[name].append(spent)
    speeds = {name: [case.payload_bytes / spent / 1e9 for spent in times] for name, times in taken.items()}
    ratios = {
        name: statistics.median(other / mine for mine, other in zip(taken["kvlink"], taken[name], strict=True))
        for name in contenders if name != "kvlink"
    }  # fmt: skip
    return {
        "case": case.name,
        "threads": threads,
        "payload_bytes": case.payload_bytes,
        "verified": case.same(),
        "gb_s": {name: {"median": statistics.median(all_), "min": min(all_), "max": max(all_)}
                 for name, all_ in speeds.items()},
        "times_as_fast_as": ratios,
        "promised": case.promised,
        "kept": all(ratios[name] >= least for name, least in case.promised.items()),
    }  # fmt: skip


def show(result: dict[str, Any]) -> None:
    speeds = "  ".join(f"{name} {speed['median']:5.1f}" for name, speed in result["gb_s"].items())
    ratios = "  ".join(
        f"{ratio:.2f} x {name}" + (f" (promised {result['promised'][name]})" if name in result["promised"] else "")
        for name, ratio in result["times_as_fast_as"].items()
    )
    verdict = "" if result["kept"] else "  NOT KEPT"
    print(f"{result['case']:34}{result['threads']} thr  GB/s {speeds}   {ratios}{verdict}", file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=destination, metavar="FILE", help="write the result there; - is standard output")
    parser.add_argument("--mib", type=int, default=256, help="payload of a case (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=9, help="turns (default: %(default)s)")
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, min(2, os.cpu_count() or 1)}))
    options = parser.parse_args()
    if min(options.mib, options.repeats, *options.threads) < 1:
        parser.error("sizes and counts are positive")
    tokens = max(1, options.mib * 2**20 // TOKEN_BYTES // (2 * SLOTS)) * 2 * SLOTS
    makers = (
        lambda: permute_case(tokens),
        lambda: page_case(tokens, gather=True),
        lambda: page_case(tokens, gather=False),
        lambda: narrowing_case(tokens),
        lambda: digest_case(tokens),
    )
    results = []
    for make in makers:
        case = make()
        for threads in options.threads:
            results.append(measure(case, threads, options.repeats))
            show(results[-1])
    report = {
        "schema": "kvlink.relayout/1",
        "kvlink": kvlink.__version__,
        "evidence_level": "measured_host",
        "environment": {
            "machine": platform.machine(), "cpus": os.cpu_count(), "python": platform.python_version(),
            "torch": torch.__version__, "load_average": os.getloadavg(), "variant": move_variants()[0],
        },
        "verified": all(result["verified"] for result in results),
        "cases": results,
    }  # fmt: skip
    if options.json:
        write(report, options.json)
    return 0 if report["verified"] else 1


if __name__ == "__main__":
    sys.exit(main())
