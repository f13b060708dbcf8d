"""Host memory for caches: anonymous, private, on huge pages where the machine has them."""

from __future__ import annotations

import contextlib
import mmap
from types import TracebackType
from typing import TYPE_CHECKING, Self

import numpy as np

from kvlink import limits
from kvlink.errors import ClosedError, LayoutError, UnavailableError

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Pool:
    """A stretch of zeroed memory, aligned to a huge page. Its pages are taken when first touched.

    The memory is unmapped when the pool is closed *and* no array made from it is left: an array never dangles.
    """

    def __init__(self, nbytes: int) -> None:
        # Private, not shared: shared anonymous memory is shmem, which gets huge pages only by another setting.
        self._map = mmap.mmap(-1, nbytes + limits.HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without transparent huge pages: ordinary pages will do
            self._map.madvise(mmap.MADV_HUGEPAGE)
        whole = np.frombuffer(self._map, dtype=np.uint8)
        start = -int(whole.__array_interface__["data"][0]) % limits.HUGE_PAGE_BYTES
        self._array: NDArray[np.uint8] | None = whole[start : start + nbytes]

    @property
    def array(self) -> NDArray[np.uint8]:
        """The memory as bytes.

        Raises:
            ClosedError: the pool is closed.
        """
        if self._array is None:
            raise ClosedError("the pool is closed; take arrays from it before")
        return self._array

    @property
    def address(self) -> int:
        """Of the first byte; a multiple of the huge page size."""
        return int(self.array.__array_interface__["data"][0])

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return self.array.nbytes

    def close(self) -> None:
        """Let go of the memory. Idempotent. Unregister it from transports first: they do not keep it alive."""
        self._array = None
        with contextlib.suppress(BufferError):  # arrays are left: the last of them unmaps
            self._map.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def allocate_pool(nbytes: int) -> Pool:
    """Map ``nbytes`` of zeroed host memory on huge pages.

    Raises:
        LayoutError: the length is not positive, or beyond any machine.
        UnavailableError: the machine does not give that much.
    """
    if not 1 <= nbytes <= limits.MAX_OFFSET_BYTES:
        raise LayoutError(f"a pool of {nbytes} bytes is impossible; ask for 1 to {limits.MAX_OFFSET_BYTES}")
    try:
        return Pool(nbytes)
    except (OSError, MemoryError) as error:
        raise UnavailableError(f"no {nbytes} bytes of memory: {error}; use fewer blocks or a larger machine") from error
