"""What a core of this machine takes for a byte, a run and an operation: measured once a process, for the cost model.

A window of memory is moved by the code that transfers use, dropped from the caches before each time, as blocks are not
in them. It takes some 50 ms; steps that would begin after `limits.CALIBRATION_SECONDS` are left at what is typical
(`kvlink.plan.TYPICAL`), as on a machine that is overloaded. What it cannot know: the other host, and who else will use
the memory. Time is a thread's own, or the least of two where other threads are at work, since an engine's ranks start
together and measure beside each other. Nothing is sent anywhere but through this host's own loopback.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from operator import itemgetter
from typing import Final

import numpy as np

from kvlink import limits
from kvlink._native import _kvlink, native_plan
from kvlink.errors import KVLinkError
from kvlink.plan import TYPICAL, CopyPlan, Rate, Segment, Speeds
from kvlink.transports.ucx import UcxProbe

_log = logging.getLogger("kvlink.transports")

_WINDOW_BYTES: Final = 4 << 20
_LONG_BYTES: Final = 256 * 1024
_SHORT_BYTES: Final = 1024
"""Runs of both lengths give a straight line: what a byte costs, and what a run costs on top."""
_SHORT_GET_BYTES: Final = 8 * 1024
_GET_BYTES: Final = 1 << 20

_lock: Final = threading.Lock()
_known: Final[dict[tuple[str, str | None] | None, Speeds]] = {}


def calibrate(ucx: tuple[str, str | None] | None) -> Speeds:
    """The machine's speeds; measured at the first call, remembered for the process. Blocks for some 50 ms then.

    Args:
        ucx: origin and transports of the UCX whose gets are measured, as `UcxTransport` takes them, which is open
            already; ``None`` leaves gets at what is typical.

    Never fails: what cannot be measured stays typical.
    """
    with _lock:
        if ucx not in _known:
            began = time.monotonic()
            _known[ucx] = _measure(ucx, began + limits.CALIBRATION_SECONDS)
            _log.debug("calibrated in %.0f ms: %s", (time.monotonic() - began) * 1e3, _known[ucx])
        return _known[ucx]


def _measure(ucx: tuple[str, str | None] | None, until: float) -> Speeds:
    speeds = replace(TYPICAL, cpus=len(os.sched_getaffinity(0)), measured=True)
    steps = (_moves, _pulls, _sockets, *(() if ucx is None else (_gets(*ucx),)))
    try:
        memory = _Memory()
    except OSError as error:
        _log.info("no memory to calibrate with, so typical speeds stand in: %s", error)
        return replace(speeds, measured=False)
    for step in steps:
        if time.monotonic() > until:
            _log.info("calibration was cut short: this machine is busy; typical speeds stand in for the rest")
            break
        try:
            speeds = step(memory, speeds)
        except (KVLinkError, RuntimeError, OSError) as error:
            _log.info("a speed could not be measured, and a typical one stands in for it: %s", error)
    return speeds


class _Memory:
    """A window of memory a side, and a slot a side, which is hot."""

    def __init__(self) -> None:
        """Touch it throughout, so that no page is made while something is timed. On huge pages, if there are any."""
        nbytes = 2 * (_WINDOW_BYTES + limits.SLOT_BYTES) + limits.HUGE_PAGE_BYTES
        self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._array = np.frombuffer(self._map, np.uint8)
        self._array[:: mmap.PAGESIZE] = 1
        start = int(self._array.__array_interface__["data"][0])
        self.source = -(-start // limits.HUGE_PAGE_BYTES) * limits.HUGE_PAGE_BYTES
        self.target = self.source + _WINDOW_BYTES
        self.slot = self.target + _WINDOW_BYTES
        self.slot_bytes = memoryview(self._map)[self.slot + limits.SLOT_BYTES - start :][: limits.SLOT_BYTES]
        self.length = self.slot + 2 * limits.SLOT_BYTES - self.source

    @property
    def region(self) -> list[tuple[int, int]]:
        """All of it, as one region, of either side."""
        return [(self.source, self.length)]

    def plan(self, run_bytes: int, *, hot_source: bool = False, hot_target: bool = False) -> CopyPlan:
        """Runs all over the windows, in no order, which no cache holds any more.

        A hot side is its slot, over and over, in order.
        """
        runs = _WINDOW_BYTES // (run_bytes if run_bytes >= limits.LEAF_BYTES else 4 * run_bytes)
        steps = np.arange(runs, dtype=np.int64)
        cold = np.random.default_rng(runs).permutation(steps) * (_WINDOW_BYTES // runs)
        hot = self.slot - self.source + steps * run_bytes % limits.SLOT_BYTES
        pieces = np.stack(
            [hot if hot_source else cold, limits.SLOT_BYTES + hot if hot_target else _WINDOW_BYTES + cold], axis=1
        )
        _kvlink.evict(self.source, 2 * _WINDOW_BYTES)
        segment = Segment(np.zeros((1, 4), np.int64), np.ascontiguousarray(pieces), (), run_bytes)
        return CopyPlan((segment,), runs * run_bytes)


def _moves(memory: _Memory, speeds: Speeds) -> Speeds:
    """Slots are written by another thread, as a peer's are: so their bytes come from another core, if there is one."""
    region = memory.region

    def slots(plan: CopyPlan) -> Iterator[tuple[int, int]]:
        for begin in range(0, plan.total_bytes, limits.SLOT_BYTES):
            yield begin, min(begin + limits.SLOT_BYTES, plan.total_bytes)

    def gather(run_bytes: int) -> tuple[float, CopyPlan]:
        plan = memory.plan(run_bytes, hot_target=True)
        ready = native_plan(plan)
        return sum(_timed(_kvlink.move, ready, region, region, *slot) for slot in slots(plan)), plan

    def scatter(run_bytes: int) -> tuple[float, CopyPlan]:
        plan = memory.plan(run_bytes)
        ready, peers = native_plan(plan), native_plan(memory.plan(_LONG_BYTES, hot_target=True))
        seconds = 0.0
        for begin, end in slots(plan):
            peer.submit(_kvlink.move, peers, region, region, 0, limits.SLOT_BYTES).result()
            seconds += _timed(_kvlink.scatter, ready, memory.slot_bytes[: end - begin], region, begin)
        return seconds, plan

    def whole(call: Callable[[_kvlink.Plan], object]) -> Callable[[int], tuple[float, CopyPlan]]:
        def measure(run_bytes: int) -> tuple[float, CopyPlan]:
            plan = memory.plan(run_bytes)
            return _timed(call, native_plan(plan)), plan

        return measure

    def digest(plan: _kvlink.Plan) -> None:
        _kvlink.digest_leaves(plan, _kvlink.SOURCE, region)

    hot = memory.plan(_LONG_BYTES, hot_source=True)
    digest(native_plan(hot))
    with ThreadPoolExecutor(1, thread_name_prefix="kvlink-calibration") as peer:
        return replace(
            speeds,
            copy=_rate(whole(lambda plan: _kvlink.move(plan, region, region))),
            gather=_rate(gather),
            scatter=_rate(scatter),
            digest=_rate(whole(digest)),
            digest_byte_seconds=_timed(digest, native_plan(hot)) / hot.total_bytes,
        )


def _pulls(memory: _Memory, speeds: Speeds) -> Speeds:
    """Of this process's own memory, which it may always read; whether a peer's may be is seen with the peer."""

    def pull(run_bytes: int) -> tuple[float, CopyPlan]:
        plan = memory.plan(run_bytes)
        return _timed(_kvlink.pull, native_plan(plan), memory.region, memory.region), plan

    rate = _line(pull(_LONG_BYTES), pull(_SHORT_GET_BYTES), _LONG_BYTES, _SHORT_GET_BYTES)
    return replace(speeds, pull=rate)


def _sockets(memory: _Memory, speeds: Speeds) -> Speeds:
    def cost(run_bytes: int) -> tuple[tuple[float, float], CopyPlan]:
        plan = memory.plan(run_bytes)
        return _kvlink.socket_cost(native_plan(plan), memory.region, memory.region), plan

    cost(_LONG_BYTES)  # the first of a socket's buffers are made
    (long, long_plan), (short, short_plan) = cost(_LONG_BYTES), cost(_SHORT_BYTES)
    send, receive = (
        _line((long[side], long_plan), (short[side], short_plan), _LONG_BYTES, _SHORT_BYTES) for side in (0, 1)
    )
    return replace(speeds, send=send, receive=receive)


def _gets(origin: str, tls: str | None) -> Callable[[_Memory, Speeds], Speeds]:
    def measure(memory: _Memory, speeds: Speeds) -> Speeds:
        server = UcxProbe(ucx_origin=origin, ucx_tls=tls)
        reader = UcxProbe(ucx_origin=origin, ucx_tls=tls)
        try:
            server.register(0, memory.source, memory.length)
            reader.register(0, memory.source, memory.length)
            server.serve()
            reader.connect(server.address())
            reader.import_key(server.export_key(0))

            def once(run_bytes: int, *, hot: bool) -> tuple[float, CopyPlan]:
                plan = memory.plan(run_bytes, hot_source=hot, hot_target=hot)
                return reader.get(plan, max_run_bytes=run_bytes), plan

            def get(run_bytes: int, *, hot: bool = False) -> tuple[float, CopyPlan]:
                return min((once(run_bytes, hot=hot) for _ in range(2)), key=itemgetter(0))

            once(_GET_BYTES, hot=False)  # the endpoint is wired up by its first get
            rate = _line(get(_GET_BYTES), get(_SHORT_GET_BYTES), _GET_BYTES, _SHORT_GET_BYTES)
            slot_seconds, slots = get(limits.SLOT_BYTES, hot=True)
            return replace(speeds, get=rate, slot_get_byte_seconds=slot_seconds / slots.total_bytes)
        finally:
            reader.close()
            server.close()

    return measure


def _rate(measure: Callable[[int], tuple[float, CopyPlan]]) -> Rate:
    return _line(measure(_LONG_BYTES), measure(_SHORT_BYTES), _LONG_BYTES, _SHORT_BYTES)


def _line(long: tuple[float, CopyPlan], short: tuple[float, CopyPlan], long_bytes: int, short_bytes: int) -> Rate:
    """The straight line through what a byte took in long runs and in short ones; neither part below nothing."""
    at_long, at_short = (seconds / plan.total_bytes for seconds, plan in (long, short))
    run_seconds = max(0.0, (at_short - at_long) / (1 / short_bytes - 1 / long_bytes))
    return Rate(max(at_long - run_seconds / long_bytes, at_long / 10), run_seconds)


def _timed(call: Callable[..., object], *arguments: object) -> float:
    began = time.thread_time()
    call(*arguments)
    return time.thread_time() - began
