"""What every side of the comparison has in common: memory, content, and a loop that does as it is told.

Only numpy is needed: each contender runs in the environment of its own library. One process is one side of one
library; it may offer several *modes* (operations, transports, settings) over the same memory. Commands are JSON lines
on standard input, answers JSON lines on standard output.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import resource
import sys
from dataclasses import dataclass

import numpy as np

HUGE = 2 * 1024 * 1024
CANARY = 0xEE
WORD = 8
GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Case:
    """A cache of ``planes`` planes (layers x K and V), each of ``blocks`` blocks, each a fragment in one piece."""

    side: str
    scene: str
    fragment_bytes: int
    planes: int
    blocks: int
    settings: dict[str, object]

    @property
    def plane_bytes(self) -> int:
        return self.fragment_bytes * self.blocks


class Memory:
    """The pool of one side, on huge pages: ``planes`` stretches, aligned, in one mapping."""

    def __init__(self, case: Case) -> None:
        self.case = case
        nbytes = case.planes * case.plane_bytes
        self._map = mmap.mmap(-1, nbytes + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._map.madvise(mmap.MADV_HUGEPAGE)
        whole = np.frombuffer(self._map, np.uint8)
        start = -whole.ctypes.data % HUGE
        self.whole = whole[start : start + nbytes]
        self.address = self.whole.ctypes.data
        self.planes = list(self.whole.reshape(case.planes, case.plane_bytes))

    def offsets(self, blocks: list[int]) -> np.ndarray:
        """Of the fragments of ``blocks``, plane by plane: the order in which every contender has them."""
        of_plane = np.array(blocks, np.int64) * self.case.fragment_bytes
        planes = np.arange(self.case.planes, dtype=np.int64) * self.case.plane_bytes
        return (planes[:, None] + of_plane[None, :]).ravel()


class Content:
    """What a source's fragments hold: a function of plane, block and position. A target holds a canary before."""

    def __init__(self, case: Case, planes: list[np.ndarray]) -> None:
        self._case = case
        self._planes = planes
        self._words = case.fragment_bytes // WORD

    def prepare(self) -> None:
        for number, plane in enumerate(self._planes):
            if self._case.side == "source":
                view = plane.view(np.uint64).reshape(self._case.blocks, self._words)
                for first in range(0, self._case.blocks, 64):
                    blocks = np.arange(first, min(first + 64, self._case.blocks))
                    view[blocks] = self._expected(number, blocks)
            else:
                plane[:] = CANARY

    def wrong(self, theirs: list[int], ours: list[int]) -> int:
        """Fragments of ``ours`` that do not hold the bytes of ``theirs``; all are set to the canary again."""
        wrong = 0
        source, target = np.array(theirs), np.array(ours)
        for number, plane in enumerate(self._planes):
            view = plane.view(np.uint64).reshape(self._case.blocks, self._words)
            for first in range(0, len(target), 64):
                part = slice(first, first + 64)
                same = view[target[part]] == self._expected(number, source[part])
                wrong += int((~same.all(axis=1)).sum())
            plane.reshape(self._case.blocks, -1)[target] = CANARY
        return wrong

    def touched(self) -> int:
        """Planes that hold anything but the canary once every fragment moved was checked."""
        return sum(not bool((plane.view(np.uint64) == np.uint64(0xEEEEEEEEEEEEEEEE)).all()) for plane in self._planes)

    def _expected(self, plane: int, blocks: np.ndarray) -> np.ndarray:
        first = (plane * self._case.blocks + blocks.astype(np.uint64)) * np.uint64(self._words)
        return (first[:, None] + np.arange(self._words, dtype=np.uint64)[None, :]) * GOLDEN


class Contender:
    """One side of one library. Subclasses move bytes; times are seconds around what a request costs its caller."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.memory = Memory(case)
        self.planes = self.memory.planes

    async def open(self) -> tuple[str, dict[str, str], dict[str, str]]:
        """Get ready. Returns what the other side must know, the modes with their words, and absent modes with why."""
        raise NotImplementedError

    async def meet(self, card: str) -> None:
        """Learn of the other side."""
        raise NotImplementedError

    async def offer(self, mode: str, turn: int, blocks: list[int]) -> str:
        """The side that is not told to move, not timed: what the mover needs for this turn beyond the block ids."""
        return ""

    async def move(self, mode: str, theirs: list[int], ours: list[int], offer: str) -> float:
        """Move, and return the seconds it took until every byte was there."""
        raise NotImplementedError

    async def finish(self, mode: str, turn: int) -> None:
        """Both sides, not timed: let go of the turn."""

    async def close(self) -> None:
        """End."""


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main(make: type[Contender]) -> None:
    """Serve one contender until the input ends. ``os._exit``: some libraries do not survive an orderly exit."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    code = 0
    try:
        asyncio.run(_serve(make, answers))
    except Exception as error:  # noqa: BLE001 - whatever a library raises is told to the conductor
        answers.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")
        answers.flush()
        code = 1
    os._exit(code)


async def _serve(make: type[Contender], answers) -> None:  # noqa: ANN001
    loop = asyncio.get_running_loop()
    contender = None
    begin = 0.0
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        command = json.loads(line)
        do, answer = command.pop("do"), {}
        if do == "open":
            contender = make(Case(**command))
            content = Content(contender.case, contender.planes)
            content.prepare()
            card, modes, absent = await contender.open()
            answer = {"card": card, "modes": modes, "absent": absent}
        elif do == "begin":
            begin = cpu_seconds()
        elif do == "end":
            answer = {"cpu_seconds": cpu_seconds() - begin}
        elif do == "check":
            answer = {"wrong": content.wrong(command["theirs"], command["ours"])}
        elif do == "sweep":
            answer = {"touched": content.touched()}
        elif do == "meet":
            await contender.meet(command["card"])
        elif do == "offer":
            answer = {"offer": await contender.offer(**command)}
        elif do == "move":
            answer = {"seconds": await contender.move(**command)}
        elif do == "finish":
            await contender.finish(**command)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    if contender is not None:
        await contender.close()
