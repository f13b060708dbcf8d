"""Addresses, and who may touch which blocks: the only room that knows where a rank's cache lies.

`pools` allocates host memory, `caches` joins a spec to addresses, `ledger` counts blocks out and back in.
"""

from kvlink.memory.caches import Caches, PlaneKey, Region, Span
from kvlink.memory.ledger import BlockLedger, LedgerError, MemoryStats
from kvlink.memory.pools import Pool, allocate_pool

__all__ = [
    "BlockLedger",
    "Caches",
    "LedgerError",
    "MemoryStats",
    "PlaneKey",
    "Pool",
    "Region",
    "Span",
    "allocate_pool",
]
