"""Memory of a GPU that KVLink allocates itself, with a stream to copy through: for benches, checks and tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from kvlink._native import _kvlink
from kvlink.relayout.gpu import driver_errors

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvlink.relayout.gpu import Gpu


class GpuMemory:
    """Several stretches of a GPU's memory. Freed with the object, after what is queued on its stream.

    Args:
        gpu: whose memory.
        lengths: bytes of each stretch, each positive.

    Raises:
        GpuError: the driver has no more of it.
    """

    def __init__(self, gpu: Gpu, lengths: Sequence[int]) -> None:
        self.device: Final = f"cuda:{gpu.native.ordinal}"
        self._gpu = gpu.native
        with driver_errors():
            self._memory = [_kvlink.CudaMemory(gpu.native, length) for length in lengths]
            self._stream = _kvlink.CudaStream(gpu.native)

    @property
    def addresses(self) -> list[int]:
        """Where the stretches begin, on the device."""
        return [memory.address for memory in self._memory]

    @property
    def stream(self) -> int:
        """Handle of the stream that `write` and `read` use."""
        return self._stream.handle

    def write(self, contents: Sequence[NDArray[np.uint8]]) -> None:
        """Queue copies of whole stretches from the host, which may change once this has returned.

        Raises:
            GpuError: the driver's own word.
        """
        with driver_errors():
            for memory, content in zip(self._memory, contents, strict=True):
                self._stream.copy_to_device(memory.address, content)

    def read(self, into: Sequence[NDArray[np.uint8]]) -> None:
        """Copy whole stretches to the host, after what is queued; waits.

        Raises:
            GpuError: the driver's own word.
        """
        with driver_errors():
            for memory, content in zip(self._memory, into, strict=True):
                self._stream.copy_to_host(content, memory.address)
            self._stream.synchronize()

    @contextmanager
    def recorded(self) -> Iterator[int]:
        """Handle of an event that comes after all that is queued now; good within the block.

        Raises:
            GpuError: the driver's own word.
        """
        with driver_errors():
            event = _kvlink.CudaEvent(self._gpu)
            self._stream.record(event)
        yield event.handle
