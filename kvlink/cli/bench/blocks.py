"""The block allocators of a bench: what an engine's scheduler would be, choosing blocks at random."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kvlink import limits
from kvlink.cli.bench.case import Case, SideName
from kvlink.errors import ConfigError, UnavailableError

SPARE_SHARE: Final = 4
"""One block in this many stays free even when a round is at its fullest: canaries between the blocks in use."""
CACHE_FACTOR: Final = 4
"""A pool is at least this many times the last-level cache."""
_DEFAULT_CACHE_BYTES: Final = 64 * 1024 * 1024
_MEMORY_HEADROOM_BYTES: Final = 1024**3


class BlockPool:
    """Blocks of one engine, all free at first, handed out in random order."""

    def __init__(self, num_blocks: int, seed: int) -> None:
        self.num_blocks = num_blocks
        self._free = set(range(num_blocks))
        self._random = random.Random(seed)  # noqa: S311 - scatters blocks reproducibly; keeps no secret

    @property
    def free(self) -> int:
        """Blocks nobody owns."""
        return len(self._free)

    def take(self, count: int) -> tuple[int, ...]:
        """``count`` free blocks in random order. The pool was sized for the fullest round, so they are there."""
        taken = tuple(self._random.sample(sorted(self._free), count))
        self._free.difference_update(taken)
        return taken

    def give_back(self, blocks: Sequence[int]) -> None:
        """Free ``blocks``; giving back what is free is a fault of the caller."""
        if not self._free.isdisjoint(blocks):
            msg = "blocks given back twice"
            raise ValueError(msg)
        self._free.update(blocks)


def pool_blocks(case: Case, name: SideName) -> int:
    """Blocks the pool of one engine needs: its fullest round and spares, and more than the last-level cache.

    Raises:
        ConfigError: no pool may hold that many; says which flags to change.
    """
    side = case.side(name)
    fullest = max(sum(side.blocks_for(case.prompts[i]) for i in batch.requests) for batch in case.rounds())
    if fullest > limits.MAX_BLOCKS_PER_REQUEST:
        msg = (
            f"the requests in flight take {fullest} blocks of the {name} at once; a pool has at most "
            f"{limits.MAX_BLOCKS_PER_REQUEST}: raise --{name}-block-size, or lower --tokens (--trace) or --concurrency"
        )
        raise ConfigError(msg)
    block_bytes = side.block_size * case.side_token_bytes(name)
    past_cache = -(-CACHE_FACTOR * last_level_cache_bytes() // block_bytes)
    return min(max(fullest + fullest // SPARE_SHARE + 1, past_cache), limits.MAX_BLOCKS_PER_REQUEST)


def check_memory(case: Case, sides: Sequence[SideName]) -> None:
    """Refuse pools of ``sides`` that this machine's memory cannot hold, before anything is allocated.

    Raises:
        UnavailableError: too little memory is available; says how much is needed.
        ConfigError: a pool would be larger than any may be.
    """
    needed = _MEMORY_HEADROOM_BYTES
    stand_in = ("source",) if case.transport == "shared" and case.limit_check and "target" in sides else ()
    for name in (*sides, *stand_in):
        pool = pool_blocks(case, name) * case.side(name).block_size * case.side_token_bytes(name)
        needed += pool * case.engines_of(name)
    available = available_memory_bytes()
    if available is not None and needed > available:
        msg = (
            f"this bench needs {needed / 1e9:.1f} GB of memory and {available / 1e9:.1f} GB are available: "
            "lower --tokens, --layers, --concurrency or --topology"
        )
        raise UnavailableError(msg)


def available_memory_bytes() -> int | None:
    """Memory that new allocations may take, by the kernel's own estimate; ``None`` where it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in fields else None


def last_level_cache_bytes() -> int:
    """Size of the largest processor cache, or a guess that is large enough where the kernel does not say."""
    sizes = []
    for size in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = size.read_text(encoding="ascii").strip()
        unit = {"K": 1024, "M": 1024**2, "G": 1024**3}.get(text[-1:], 0)
        sizes.append(int(text[:-1]) * unit if unit else 0)
    return max(sizes, default=0) or _DEFAULT_CACHE_BYTES
