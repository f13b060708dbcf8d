"""Runs a plan on local memory.

`local` copies and digests natively, `fill` zeroes what a transfer leaves uncovered, `digest` defines the digest
scheme, `reference` is the slow walk that both are tested against.
"""

from kvlink.relayout.digest import SCHEME, leaf_count, leaf_digests, root_digest
from kvlink.relayout.fill import zero_uncovered
from kvlink.relayout.local import NativePlan, Side, digest_leaves, digest_root, move_local, native_plan

__all__ = [
    "SCHEME",
    "NativePlan",
    "Side",
    "digest_leaves",
    "digest_root",
    "leaf_count",
    "leaf_digests",
    "move_local",
    "native_plan",
    "root_digest",
    "zero_uncovered",
]
