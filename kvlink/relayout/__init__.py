"""Runs a plan on local memory.

`local` copies, converts and digests on the CPU, `gpu` on a GPU, for which `nvrtc` compiles the kernels (kept by
`kernel_cache`); `fill` zeroes what a transfer leaves
uncovered, `digest` defines the digest scheme, `reference` is the slow walk that copies and digests are tested against.
"""

from kvlink.relayout.digest import SCHEME, leaf_count, leaf_digests, root_digest
from kvlink.relayout.fill import uncovered_stretches, zero_uncovered
from kvlink.relayout.gpu import Gpu
from kvlink.relayout.gpu_memory import GpuMemory
from kvlink.relayout.local import (
    NativePlan,
    Side,
    digest_leaves,
    digest_root,
    move_and_digest,
    move_local,
    move_variants,
    native_plan,
)

__all__ = [
    "SCHEME",
    "Gpu",
    "GpuMemory",
    "NativePlan",
    "Side",
    "digest_leaves",
    "digest_root",
    "leaf_count",
    "leaf_digests",
    "move_and_digest",
    "move_local",
    "move_variants",
    "native_plan",
    "root_digest",
    "uncovered_stretches",
    "zero_uncovered",
]
