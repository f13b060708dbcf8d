"""How the thread of an engine waits: awake for a short while, then asleep, on the CPUs that it is kept to.

The peer is played by the test."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from shared_peer import FakeSource, Rig

from kvlink.transports.base import Outcome

CPU_WORD, ASLEEP_WORD = 4, 64  # native/src/shared_wire.hpp: Words


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.close()


def engine_threads() -> list[Path]:
    tasks = Path("/proc/self/task").iterdir()
    return [task for task in tasks if (task / "comm").read_text().startswith("kvlink")]


def waiter() -> int:
    """The thread that waits for peers: it is connected, so it has its name."""
    (task,) = (task for task in engine_threads() if (task / "comm").read_text() == "kvlink-shared\n")
    return int(task.name)


def cpu_seconds() -> float:
    """Of all of the engine's threads."""
    ticks = 0
    for task in engine_threads():
        fields = (task / "stat").read_text().rsplit(") ", 1)[1].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def fall_asleep(source: FakeSource) -> None:
    """Waits until the engine has said that it must be woken."""
    deadline = time.monotonic() + 5
    while not struct.unpack_from("<I", source.asks, ASLEEP_WORD)[0]:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def started(rig: Rig) -> tuple[int, FakeSource]:
    """A read whose first slot has come."""
    op = rig.read(mappable=False)
    source = FakeSource(rig)
    source.offer()
    source.answer()
    return op, source


def test_a_waiter_whose_peer_says_no_more_sleeps_and_burns_nothing(rig: Rig) -> None:
    op, source = started(rig)
    fall_asleep(source)
    before = cpu_seconds()
    time.sleep(0.5)
    assert cpu_seconds() - before < 0.1
    source.serve(op)
    assert rig.end_of(op).outcome is Outcome.OK


def test_a_waiter_that_is_pinned_beside_its_peer_stays_there_and_sleeps(rig: Rig) -> None:
    """Whoever pinned it has a reason; spinning would keep the peer from running."""
    cpu = min(os.sched_getaffinity(0))
    os.sched_setaffinity(waiter(), {cpu})
    op = rig.read(mappable=False)
    source = FakeSource(rig)
    struct.pack_into("<I", source.page, CPU_WORD, cpu)
    source.offer()
    source.answer()
    fall_asleep(source)
    source.serve(op)
    assert rig.end_of(op).outcome is Outcome.OK
    assert os.sched_getaffinity(waiter()) == {cpu}


def test_a_waiter_may_run_on_all_of_its_cpus_afterwards(rig: Rig) -> None:
    """It moves away from a peer on its own CPU by narrowing them for a moment."""
    before = os.sched_getaffinity(0)
    op = rig.read(mappable=False)
    source = FakeSource(rig)
    source.offer()
    while not any(completion.op == op for completion in rig.seen):
        rig.seen += rig.transport.poll()
        if source.asked() != source.answered:
            struct.pack_into("<I", source.page, CPU_WORD, source.answered % len(before))
            source.answer()
    assert rig.end_of(op).outcome is Outcome.OK
    assert os.sched_getaffinity(waiter()) == before
