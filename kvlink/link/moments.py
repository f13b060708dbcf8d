"""Waiting for an engine's own GPU work: nothing is read before it was produced, nothing overwritten while it is in use.

A moment is taken when the engine calls (`Moments.take`), on whatever thread; the loop learns through one descriptor
that it has come. So a request whose KV is late holds up no other, and what is exposed to a peer is complete.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import TYPE_CHECKING

from kvlink.errors import GpuError, LayoutError
from kvlink.relayout.gpu import Moment

if TYPE_CHECKING:
    from kvlink.relayout import Gpu


class Moments:
    """The moments that one link waits for.

    Args:
        gpu: where its cache lies; ``None`` for the host, which has no such work.
    """

    def __init__(self, gpu: Gpu | None) -> None:
        self._gpu = gpu
        self._waiting: dict[Moment, list[asyncio.Future[None]]] = {}
        self._loop = asyncio.get_running_loop()
        self._fd = -1
        if gpu is not None:
            self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._loop.add_reader(self._fd, self._look)

    def take(self, *, event: object = None, stream: object = None) -> Moment | None:
        """What is recorded in ``event``, and queued on ``stream``, now. Any thread; both may be reused afterwards.

        An event that is a moment already is the answer.

        Raises:
            LayoutError: they are no event and no stream, or the cache lies in host memory, which they do not order.
            GpuError: the driver refuses.
        """
        if event is None and stream is None:
            return None
        if isinstance(event, Moment):
            return event
        if self._gpu is None:
            raise LayoutError(
                "this cache lies in host memory: no CUDA event or stream orders it; call when it is written"
            )
        return self._gpu.moment(event, stream, self._fd)

    def passed(self, moment: Moment | None) -> asyncio.Future[None]:
        """Done once the moment has come; fails with `GpuError` where the engine's work did."""
        future: asyncio.Future[None] = self._loop.create_future()
        if moment is None:
            future.set_result(None)
        else:
            self._waiting.setdefault(moment, []).append(future)
            self._look()
        return future

    def close(self) -> None:
        """Forget them all. Blocks until what they wait for is done: the engine's own work."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            self._waiting.clear()
            os.close(self._fd)
            self._fd = -1

    def _look(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)
        for moment in list(self._waiting):
            try:
                if not moment.passed():
                    continue
                error = None
            except GpuError as told:
                error = told
            for future in self._waiting.pop(moment):
                if future.cancelled():
                    continue
                if error is None:
                    future.set_result(None)
                else:
                    future.set_exception(error)
