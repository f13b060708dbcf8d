"""The memories of the emulated device. Every access is checked as no device checks it."""

from __future__ import annotations

import numpy as np
from ptx_program import PtxError

GLOBAL_BASE = 0x7F00_0000_0000
GUARD_BYTES = 256
NOBODY = -1
SEVERAL = -2


class GlobalMemory:
    """Allocations with a gap between them that nothing may touch."""

    def __init__(self) -> None:
        self._bytes = np.zeros(0, np.uint8)
        self._allocated = np.zeros(0, bool)
        self._writer = np.zeros(0, np.int64)

    def allocate(self, data: np.ndarray | bytes, offset: int = 0) -> int:
        """A copy of ``data``, ``offset`` past a multiple of 256; its address."""
        data = np.frombuffer(bytes(data), np.uint8)
        start = -(-(len(self._bytes) + GUARD_BYTES) // 256) * 256 + offset
        grown = start + len(data) - len(self._bytes)
        self._bytes = np.concatenate([self._bytes, np.zeros(grown, np.uint8)])
        self._allocated = np.concatenate([self._allocated, np.zeros(grown, bool)])
        self._writer = np.concatenate([self._writer, np.full(grown, NOBODY)])
        self._bytes[start:] = data
        self._allocated[start:] = True
        return GLOBAL_BASE + start

    def read(self, address: int, nbytes: int) -> np.ndarray:
        """For the host."""
        start = address - GLOBAL_BASE
        return self._bytes[start : start + nbytes].copy()

    def begin_kernel(self) -> None:
        """Launches are ordered: what an earlier one wrote, a later one may write again."""
        self._writer[:] = NOBODY

    def load(self, addresses: np.ndarray, width: int, lanes: np.ndarray) -> np.ndarray:
        """``[lanes, width]`` bytes."""
        return self._bytes[self._where(addresses, width)]

    def store(self, addresses: np.ndarray, values: np.ndarray, lanes: np.ndarray) -> None:
        """``values``: ``[lanes, width]`` bytes. Two threads may not write different bytes to one address."""
        at = self._where(addresses, values.shape[1])
        others = (self._writer[at] != NOBODY) & (self._writer[at] != lanes[:, None])
        if (others & (self._bytes[at] != values)).any() or len(np.unique(at)) != at.size:
            raise PtxError("two threads write one address")
        self._bytes[at] = values
        self._writer[at] = lanes[:, None]

    def _where(self, addresses: np.ndarray, width: int) -> np.ndarray:
        start = addresses.astype(np.int64) - GLOBAL_BASE
        check_alignment(start, width)
        at = start[:, None] + np.arange(width)
        if ((at < 0) | (at >= len(self._bytes))).any() or not self._allocated[at].all():
            raise PtxError("an access outside all allocations")
        return at


class SharedMemory:
    """One stretch a block, poisoned. Threads that share bytes need a barrier between them."""

    def __init__(self, blocks: int, nbytes: int, block_of_lane: np.ndarray) -> None:
        self._nbytes = nbytes
        self._block_of_lane = block_of_lane
        self._bytes = np.full(blocks * nbytes, 0xEE, np.uint8)
        self._writer = np.full(blocks * nbytes, NOBODY)
        self._reader = np.full(blocks * nbytes, NOBODY)

    def barrier(self, block: int) -> None:
        """All of a block's threads have met: what lies behind them is settled."""
        mine = slice(block * self._nbytes, (block + 1) * self._nbytes)
        self._writer[mine] = NOBODY
        self._reader[mine] = NOBODY

    def load(self, addresses: np.ndarray, width: int, lanes: np.ndarray) -> np.ndarray:
        """``[lanes, width]`` bytes."""
        at = self._where(addresses, width, lanes)
        self._check_others(self._writer[at], lanes)
        reader = self._reader[at]
        self._reader[at] = np.where((reader == NOBODY) | (reader == lanes[:, None]), lanes[:, None], SEVERAL)
        return self._bytes[at]

    def store(self, addresses: np.ndarray, values: np.ndarray, lanes: np.ndarray) -> None:
        """``values``: ``[lanes, width]`` bytes."""
        at = self._where(addresses, values.shape[1], lanes)
        self._check_others(self._writer[at], lanes)
        self._check_others(self._reader[at], lanes)
        if len(np.unique(at)) != at.size:
            raise PtxError("two threads write one address of shared memory")
        self._bytes[at] = values
        self._writer[at] = lanes[:, None]

    def _check_others(self, who: np.ndarray, lanes: np.ndarray) -> None:
        if ((who != NOBODY) & (who != lanes[:, None])).any():
            raise PtxError("a race in shared memory: no barrier between the accesses of two threads")

    def _where(self, addresses: np.ndarray, width: int, lanes: np.ndarray) -> np.ndarray:
        start = addresses.astype(np.int64)
        check_alignment(start, width)
        if ((start < 0) | (start + width > self._nbytes)).any():
            raise PtxError("an access outside shared memory")
        return (self._block_of_lane[lanes] * self._nbytes + start)[:, None] + np.arange(width)


class ReadOnlyMemory:
    """Parameters, or constants: the same for all threads."""

    def __init__(self, data: bytes) -> None:
        self._bytes = np.frombuffer(data, np.uint8)

    def load(self, addresses: np.ndarray, width: int, lanes: np.ndarray) -> np.ndarray:
        """``[lanes, width]`` bytes."""
        start = addresses.astype(np.int64)
        check_alignment(start, width)
        if ((start < 0) | (start + width > len(self._bytes))).any():
            raise PtxError("an access outside parameters or constants")
        return self._bytes[start[:, None] + np.arange(width)]


def check_alignment(start: np.ndarray, width: int) -> None:
    if (start % width).any():
        raise PtxError(f"a misaligned access of {width} bytes")
