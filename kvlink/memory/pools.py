"""Host memory for caches: anonymous or shareable, on huge pages where the machine has them."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

import numpy as np

from kvlink import limits
from kvlink.errors import ClosedError, LayoutError, UnavailableError
from kvlink.transports.base import Backing

if TYPE_CHECKING:
    from numpy.typing import NDArray

_F_SEAL_FUTURE_WRITE: Final = 0x0010
"""Linux 5.1; Python has no name for it yet."""
_SEALS: Final = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE
_THP: Final = Path("/sys/kernel/mm/transparent_hugepage")


class Pool:
    """A stretch of zeroed memory, aligned to a huge page. Its pages are taken when first touched.

    The memory is unmapped when the pool is closed *and* no array made from it is left: an array never dangles.

    Attributes:
        pages: what kind of pages were to be had: ``huge`` (reserved), ``transparent huge``, or ``ordinary``.
    """

    def __init__(self, memory: mmap.mmap, nbytes: int, pages: str, descriptor: int | None = None) -> None:
        self.pages = pages
        self._map = memory
        self._descriptor = descriptor
        whole = np.frombuffer(memory, dtype=np.uint8)
        self._start = -int(whole.__array_interface__["data"][0]) % limits.HUGE_PAGE_BYTES
        self._array: NDArray[np.uint8] | None = whole[self._start : self._start + nbytes]

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

    def backing(self, address: int, length: int) -> Backing | None:
        """The file that ``length`` bytes at ``address`` lie in, if the pool is shareable and they lie in it."""
        start = address - self.address
        if self._descriptor is None or start < 0 or start + length > self.nbytes:
            return None
        return Backing(self._descriptor, self._start + start)

    def close(self) -> None:
        """Let go of the memory. Idempotent. Unregister it from transports first: they do not keep it alive."""
        self._array = None
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)
        with contextlib.suppress(BufferError):  # arrays are left: the last of them unmaps
            self._map.close()

    def __del__(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def allocate_pool(nbytes: int, *, shareable: bool = False) -> Pool:
    """Map ``nbytes`` of zeroed host memory on huge pages.

    Args:
        nbytes: how much.
        shareable: in a sealed file, so that other ranks of this host can map it, read-only, and copy straight from it
            (the shared transport's *mapped* path). Such memory gets huge pages from another place: those reserved in
            ``vm.nr_hugepages``, or else transparent ones where ``transparent_hugepage/shmem_enabled`` is ``advise`` or
            more. With neither it lies on ordinary pages, and `Pool.pages` says so.

    Raises:
        LayoutError: the length is not positive, or beyond any machine.
        UnavailableError: the machine does not give that much, or cannot seal a file (Linux before 5.1).
    """
    if not 1 <= nbytes <= limits.MAX_OFFSET_BYTES:
        raise LayoutError(f"a pool of {nbytes} bytes is impossible; ask for 1 to {limits.MAX_OFFSET_BYTES}")
    try:
        return _shareable(nbytes) if shareable else _private(nbytes)
    except (OSError, MemoryError) as error:
        raise UnavailableError(f"no {nbytes} bytes of memory: {error}; use fewer blocks or a larger machine") from error


def _private(nbytes: int) -> Pool:
    # Private, not shared: shared anonymous memory is shmem, which gets huge pages only by another setting.
    memory = mmap.mmap(-1, nbytes + limits.HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return Pool(memory, nbytes, _transparent(memory, "enabled"))


def _shareable(nbytes: int) -> Pool:
    with contextlib.suppress(OSError):  # none are reserved, or too few
        descriptor, memory = _sealed(-(-nbytes // limits.HUGE_PAGE_BYTES) * limits.HUGE_PAGE_BYTES, os.MFD_HUGETLB)
        return Pool(memory, nbytes, "huge", descriptor)
    descriptor, memory = _sealed(nbytes + limits.HUGE_PAGE_BYTES)
    return Pool(memory, nbytes, _transparent(memory, "shmem_enabled"), descriptor)


def _sealed(nbytes: int, flags: int = 0) -> tuple[int, mmap.mmap]:
    """A file of our own, mapped writable, and then sealed: later descriptors and mappings of it only read."""
    descriptor = os.memfd_create("kvlink-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
    try:
        os.ftruncate(descriptor, nbytes)
        memory = mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, memory


def _transparent(memory: mmap.mmap, setting: str) -> str:
    """Ask for transparent huge pages; what will come."""
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
        chosen = (_THP / setting).read_text("ascii")
    except OSError:  # a kernel without them: ordinary pages will do
        return "ordinary"
    return "ordinary" if "[never]" in chosen or "[deny]" in chosen else "transparent huge"
