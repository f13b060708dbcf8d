"""One GPU: its kernels made ready, and plans run on its memory. No CUDA is needed but the driver and, once, NVRTC."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from kvlink._native import _kvlink
from kvlink.errors import GpuError, LayoutError, UnavailableError
from kvlink.relayout import kernel_cache
from kvlink.relayout.gpu_order import event_handle, stream_handle

if TYPE_CHECKING:
    from kvlink.relayout.local import LocalRegion, NativePlan

LIBRARY: Final = "libcuda.so.1"
LIBRARY_VARIABLE: Final = "KVLINK_CUDA_LIBRARY"


class Gpu:
    """A GPU's primary context, held until this object goes, and the kernels loaded into it.

    The context is the one that torch and CuPy use, so their memory, streams and events are this object's to use too.
    Methods may be called by any thread; the thread's own current context stays as it was.

    Args:
        device: ``"cuda:0"``.
        library: of the driver, by path or by name; ``None`` for what ``KVLINK_CUDA_LIBRARY`` names, or libcuda.so.1.

    Raises:
        UnavailableError: there is no driver or no such GPU.
        GpuError: the driver does not let it be used.
    """

    def __init__(self, device: str = "cuda:0", library: str | None = None) -> None:
        ordinal = ordinal_of(device)
        with driver_errors():
            self.native: Final = _kvlink.CudaGpu(library or os.environ.get(LIBRARY_VARIABLE) or LIBRARY, ordinal)

    @property
    def name(self) -> str:
        """The driver's name for it."""
        return self.native.name

    @property
    def arch(self) -> str:
        """Its architecture, such as ``"sm_90"``."""
        return self.native.arch

    @property
    def stand_in(self) -> bool:
        """Whether the driver is a library for tests: what runs on it says nothing of a GPU."""
        return self.native.stand_in

    def prepare(self, plan: NativePlan) -> None:
        """Compile and load what a plan needs, if it is not. Takes some 0.5 s for each pair of types the first time.

        Raises:
            UnavailableError: NVRTC is missing, or cannot compile for this GPU.
            GpuError: the driver does not take them.
        """
        for types in _kvlink.kernel_types(plan):
            self.load(types)

    def load(self, types: tuple[str, str] | None) -> None:
        """The kernels of one conversion (source, target), or with ``None`` of plain copies. Raises as `prepare`."""
        if not self.native.loaded(types):
            image = kernel_cache.cubin(self.arch, *(types or ()))
            with driver_errors():
                self.native.load(types, image)

    def moment(self, event: object, stream: object, fd: int) -> Moment:
        """The moment when what ``event`` recorded, and what is queued on ``stream``, is done; either may be ``None``.

        Args:
            event: an event that was recorded, of torch, CuPy, or its handle.
            stream: a stream, likewise.
            fd: an eventfd that is signalled then, and that outlives the moment.

        Raises:
            LayoutError: it is no event, or no stream.
            GpuError: the driver's own word.
        """
        with driver_errors():
            return Moment(
                _kvlink.CudaMoment(
                    self.native,
                    None if event is None else event_handle(event),
                    None if stream is None else stream_handle(stream),
                    fd,
                )
            )

    def relayout(
        self,
        plan: NativePlan,
        source_regions: Sequence[LocalRegion],
        target_regions: Sequence[LocalRegion],
        *,
        stream: object = None,
        event: object = None,
    ) -> None:
        """Move a plan's bytes between regions of this GPU's memory, converting where the plan says so.

        Blocks until it is done. Whatever is launched after it has returned sees what it wrote.

        Args:
            plan: from `native_plan`.
            source_regions: the source's regions, read.
            target_regions: the target's, written inside the plan's runs only.
            stream: nothing is touched before what is queued on this stream now is done.
            event: nor before what this event recorded.

        Raises:
            LayoutError: the plan leaves a region, or its elements are not aligned to their size; nothing was moved.
            UnavailableError: see `prepare`; nothing was moved.
            GpuError: the driver's own word; the target's blocks hold anything.
        """
        self.prepare(plan)
        with driver_errors():
            own = _kvlink.CudaStream(self.native)
            if event is not None:
                own.wait_event(event_handle(event))
            if stream is not None:
                own.wait_stream(stream_handle(stream))
            try:
                ready = _kvlink.CudaPlan.relayout(own, plan, source_regions, target_regions)
            except ValueError as error:
                raise LayoutError(str(error), stage="copy") from error
            try:
                ready.launch(own, 0, plan.total_bytes)
            finally:
                own.synchronize()

    def zero(self, stretches: Iterable[tuple[int, int]]) -> None:
        """Zero stretches of this GPU's memory, (address, length in bytes) each.

        Blocks until it is done. Whatever is launched after it has returned sees zeros.

        Raises:
            GpuError: the driver's own word; the stretches hold anything.
        """
        with driver_errors():
            own = _kvlink.CudaStream(self.native)
            try:
                for address, length in stretches:
                    own.fill(address, 0, length)
            finally:
                own.synchronize()


class Moment:
    """A moment of an engine's GPU work, as it was when this was made. Dropping it waits for it."""

    def __init__(self, native: _kvlink.CudaMoment) -> None:
        self._native = native

    def passed(self) -> bool:
        """Whether it has come.

        Raises:
            GpuError: the engine's work failed.
        """
        with driver_errors():
            return self._native.passed()


def ordinal_of(device: str) -> int:
    """The number of ``"cuda:0"``.

    Raises:
        LayoutError: it names no GPU.
    """
    kind, _, number = device.partition(":")
    if kind != "cuda" or not number.isdecimal():
        raise LayoutError(f"{device!r} names no GPU; say cuda:0, with the number that the driver gives it")
    return int(number)


@contextmanager
def driver_errors() -> Iterator[None]:
    """What the native core says of the driver, as KVLink's errors."""
    try:
        yield
    except _kvlink.Unavailable as error:
        raise UnavailableError(str(error)) from error
    except _kvlink.CudaError as error:
        raise GpuError(str(error)) from error
