"""Registers a cache's regions with a transport, all or none."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Final

from kvlink import limits

if TYPE_CHECKING:
    from kvlink.link.pump import Pump
    from kvlink.memory import Caches, Region

_log: Final = logging.getLogger("kvlink.link")


async def register_aside(pump: Pump, caches: Caches) -> None:
    """Register every region of the caches with a transport, one at a time, while the loop goes on.

    Memory is pinned page by page, for as long as that takes, and the loop may have other links, whose peers wait to
    hear from them. What takes long is told in the log. Cancelled, it returns once nothing is registered.

    Raises:
        TransportError: a registration failed; nothing stays registered.
    """
    told = time.monotonic()
    with _all_or_none(pump) as done:
        for index, region in enumerate(caches.regions):
            await _aside(partial(_register, pump, done, index, region), region.length)
            if time.monotonic() - told >= limits.PROGRESS_SECONDS:
                told = time.monotonic()
                _tell(pump, caches, index + 1)


def register_all(pump: Pump, caches: Caches) -> None:
    """The same in one call, for as long as it takes.

    Raises:
        TransportError: a registration failed; nothing stays registered.
    """
    with _all_or_none(pump) as done:
        for index, region in enumerate(caches.regions):
            _register(pump, done, index, region)


def unregister_all(pump: Pump) -> None:
    """Undo either. Only once nothing is read or exposed. Idempotent."""
    keys, pump.region_keys = pump.region_keys, ()
    for key in keys:
        pump.transport.unregister(key.region)


@contextmanager
def _all_or_none(pump: Pump) -> Iterator[list[int]]:
    """Whoever is inside adds what is registered; the pump has all keys afterwards, or nothing is registered."""
    done: list[int] = []
    try:
        yield done
        pump.region_keys = tuple(pump.transport.export_key(index) for index in done)
    except BaseException:
        for index in done:
            pump.transport.unregister(index)
        raise


def _register(pump: Pump, done: list[int], index: int, region: Region) -> None:
    pump.transport.register(index, region.address, region.length, region.backing)
    done.append(index)


async def _aside(register: Callable[[], None], length: int) -> None:
    """In a thread, if it is worth one. A call cannot be stopped: cancelled, this still waits for its end."""
    if length < limits.REGISTERED_ASIDE_BYTES:
        register()
        return
    call = asyncio.get_running_loop().run_in_executor(None, register)
    try:
        await asyncio.shield(call)
    except asyncio.CancelledError:
        while not call.done():
            try:
                await asyncio.wait([call])
            except asyncio.CancelledError:  # again: the memory is not to be left half registered
                continue
        call.exception()
        raise


def _tell(pump: Pump, caches: Caches, done: int) -> None:
    lengths = [region.length for region in caches.regions]
    _log.info(
        "%d of %d regions, %.1f of %.1f GiB, are registered with %s",
        done, len(lengths), sum(lengths[:done]) / 2**30, sum(lengths) / 2**30, pump.transport.capabilities().name,
    )  # fmt: skip
