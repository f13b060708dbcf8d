"""A rank's cache on a GPU, and its mirror in host memory, where a bench fills and judges it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvlink.memory import Caches, Region
from kvlink.relayout import GpuMemory

if TYPE_CHECKING:
    from kvlink.layout import CacheSpec
    from kvlink.relayout import Gpu


class GpuPool:
    """``caches`` on the GPU, ``mirror`` on the host; `shown` brings one to the other and back.

    Raises:
        GpuError: the GPU has not that much memory left.
        UnavailableError: nor has the host.
    """

    def __init__(self, gpu: Gpu, spec: CacheSpec) -> None:
        self.mirror = Caches.standard(spec)
        self._memory = GpuMemory(gpu, spec.region_bytes)
        regions = tuple(
            Region(address, length, self._memory)
            for address, length in zip(self._memory.addresses, spec.region_bytes, strict=True)
        )
        self.caches = Caches(spec, regions, (self._memory,), self._memory.device)
        self._arrays = [region.array for region in self.mirror.regions]

    @property
    def stream(self) -> int:
        """Whose work comes first: what was written here may not be there yet."""
        return self._memory.stream

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Within the block the mirror holds what the cache did; afterwards it is on its way back, on `stream`."""
        self._memory.read(self._arrays)
        yield
        self._memory.write(self._arrays)

    @contextmanager
    def written(self) -> Iterator[int]:
        """An event after all that is on its way to the cache."""
        with self._memory.recorded() as event:
            yield event
