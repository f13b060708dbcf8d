"""The digest scheme ``xxh3-64-leaf16k``, as its definition. Frozen: peers of different versions must agree on it.

- Leaf i is the XXH3-64 (seed 0) of wire bytes ``[16384 i, min(16384 (i+1), total))``.
- The root is the XXH3-64 of all leaf digests in order, 8 little-endian bytes each. No bytes have no leaves, and the
  root of zero bytes.

This is the scheme over wire bytes that lie in one buffer. The native core computes the same over a plan, where the
bytes are (`kvlink.relayout.local`). Test vectors: tests/vectors/digest.json.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvlink._native import _kvlink
from kvlink.limits import DIGEST_SCHEME, LEAF_BYTES

SCHEME: Final = DIGEST_SCHEME
"""The scheme's name in descriptors."""
DIGEST_BYTES: Final = 8

Hash = Callable[[bytes], int]
"""XXH3-64 with seed 0 of some bytes."""


def leaf_count(total_bytes: int) -> int:
    """How many leaves ``total_bytes`` of wire order have; the last may be short.

    >>> leaf_count(0), leaf_count(1), leaf_count(16384), leaf_count(16385)
    (0, 1, 1, 2)
    """
    return -(-total_bytes // LEAF_BYTES)


def leaf_digests(wire: bytes, xxh3_64: Hash = _kvlink.xxh3_64) -> bytes:
    """All leaf digests of a transfer's wire bytes, 8 little-endian bytes each.

    Args:
        wire: all bytes of the transfer, in wire order.
        xxh3_64: the hash; another implementation makes an independent check.
    """
    return b"".join(
        xxh3_64(wire[begin : begin + LEAF_BYTES]).to_bytes(DIGEST_BYTES, "little")
        for begin in range(0, len(wire), LEAF_BYTES)
    )


def root_digest(leaves: bytes, xxh3_64: Hash = _kvlink.xxh3_64) -> int:
    """Root over all leaf digests of a transfer, as made by `leaf_digests`."""
    return xxh3_64(leaves)
