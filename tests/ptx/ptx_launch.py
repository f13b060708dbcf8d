"""A plan launched on the emulated device as it would be on a real one: tables uploaded, a kernel launch a job."""

from __future__ import annotations

import struct
from functools import cache

import numpy as np
from ptx_machine import run
from ptx_memory import GlobalMemory
from ptx_program import Kernel, kernels_of

from kvlink._native import _kvlink
from kvlink.relayout import native_plan
from kvlink.relayout.digest import leaf_count
from kvlink.relayout.nvrtc import compile_kernels

ARCHS = ("sm_80", "sm_90", "sm_100")


@cache
def ptx_of(arch: str, conversion: tuple[str, str] | None) -> str:
    return compile_kernels(arch, *(conversion or ())).decode()


@cache
def module_of(arch: str, conversion: tuple[str, str] | None) -> dict[str, Kernel]:
    return kernels_of(ptx_of(arch, conversion))


class Device:
    """Both sides' regions in the memory of one device."""

    def __init__(self, sources, targets, offset=0):
        self.memory = GlobalMemory()
        self.sources = [self.memory.allocate(region, offset) for region in sources]
        self.targets = [self.memory.allocate(region, offset) for region in targets]
        self.target_bytes = [len(region) for region in targets]

    def results(self):
        return [self.memory.read(*place) for place in zip(self.targets, self.target_bytes, strict=True)]

    def move(self, plan, module_for, blocks=2, threads=64, max_items=None):
        """Every segment by ``kvlink_move_N``; returns the widths N used."""
        widths = []
        for segment, elements, jobs in self._jobs(plan, digest=False, max_items=max_items):
            widths.append(elements)
            kernel = module_for(conversion_of(segment))[f"kvlink_move_{elements}"]
            for job in jobs:
                run(kernel, self.memory, job, blocks, threads)
        return widths

    def digest(self, plan, module_for, moves, blocks=2, threads=64):
        """All leaves of a plan of one conversion, moved too or not; their digests as bytes."""
        parts = list(self._jobs(plan, digest=True))
        elements = min(elements for _, elements, _ in parts)
        jobs = b"".join(b"".join(jobs) for *_, jobs in self._jobs(plan, digest=True, elements=elements))
        leaves = leaf_count(plan.total_bytes)
        digests = self.memory.allocate(bytes(8 * leaves))
        work = struct.pack(
            "<QQqqqIIII", self.memory.allocate(jobs), digests, plan.total_bytes, 0, 0,
            len(jobs) // _kvlink.JOB_BYTES, 0, leaves, elements,
        )  # fmt: skip
        name = "kvlink_move_and_digest" if moves else "kvlink_digest"
        run(module_for(conversion_of(plan.segments[0]))[name], self.memory, work, blocks, threads)
        return self.memory.read(digests, 8 * leaves).tobytes()

    def _jobs(self, plan, digest, max_items=None, elements=None):
        bounds = {} if max_items is None else {"max_items": max_items}
        if elements is not None:
            bounds["elements"] = elements
        parts = _kvlink.kernel_jobs(native_plan(plan), self.sources, self.targets, digest, **bounds)
        for segment, (width, part) in zip(plan.segments, parts, strict=True):
            tables = part.bases, part.pieces, part.source_scales, part.target_factors
            placed = part.place(*[self.memory.allocate(table) if table else 0 for table in tables])
            step = _kvlink.JOB_BYTES
            yield segment, width, [placed[at : at + step] for at in range(0, len(placed), step)]


def conversion_of(segment):
    return None if segment.convert is None else (segment.convert.source.value, segment.convert.target.value)


def random_bytes(rng, nbytes):
    return rng.integers(0, 256, nbytes, np.uint8)
