"""One rank in a process of its own, to be killed, stopped and resumed: `RankProcess` here, `serve` there.

Calls are lines of JSON on its standard input, answers on its standard output, one at a time. Its cache lies in a file
(of memory, so that nothing is left on a disk) that both processes map: a test can judge the memory of a rank that is
stopped or dead.
"""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Self

import msgspec
import numpy as np
from child import Child, end_with, seal, take_standard_output

from kvlink import Caches, CacheSpec, Config, Identity, Link, Offer, Part, Place, Roster, open_link
from kvlink.cli.bench.content import SOURCE_CANARY, TARGET_CANARY, CacheContent
from kvlink.errors import KVLinkError
from kvlink.layout import DType, standard_spec
from kvlink.memory import Region
from kvlink.observe import Event, PeerDisconnected
from kvlink.transports.base import Backing

PAGE: Final = mmap.PAGESIZE
MAX_LINE: Final = 1 << 24
ANSWER_SECONDS: Final = 20.0
LOWEST_PRIORITY: Final = 19


class Call(msgspec.Struct):
    name: str
    arguments: dict[str, Any] = {}


class Answer(msgspec.Struct):
    value: Any = None
    error: str = ""


class Ended(msgspec.Struct):
    """A part's end, over there. ``at`` is the machine's monotonic clock, which all its processes share."""

    state: str
    at: float
    code: str = ""
    message: str = ""
    retryable: bool = False
    wire_seconds: float = 0.0
    """A target's: from the first get posted to the last one landed."""


class Hog(threading.Thread):
    """Pure Python that never lets go of the interpreter by itself. It takes the interpreter, and little of a core."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.enough = False

    def run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
        number = 0
        while not self.enough:
            number = number * 31 % 1_000_003 + 1


def map_regions(file: Path, lengths: Sequence[int]) -> list[np.ndarray]:
    """The regions of a cache in one shared mapping of ``file``, each on pages of its own."""
    starts = np.cumsum([0, *(-(-length // PAGE) * PAGE for length in lengths)])
    with file.open("r+b") as opened:
        os.ftruncate(opened.fileno(), int(starts[-1]))
        memory = np.frombuffer(mmap.mmap(opened.fileno(), int(starts[-1])), np.uint8)
    return [memory[start : start + length] for start, length in zip(starts, lengths, strict=False)]


def backed(file: Path, regions: Sequence[Region]) -> list[Region]:
    """The regions of `map_regions`, and the sealed file that they lie in; it stays open for the process's life."""
    descriptor = os.open(file, os.O_RDWR)
    seal(descriptor)
    start = regions[0].address
    return [replace(region, backing=Backing(descriptor, region.address - start)) for region in regions]


# --- here -----------------------------------------------------------------------------------------------------------


class RankProcess(Child):
    """A process that hosts one rank; `open` gives it a cache and a link, again and again if need be.

    Args:
        inside: a command that runs what follows it somewhere else, such as a network namespace, in its own place.
    """

    def __init__(self, inside: Sequence[str] = ()) -> None:
        self.process = subprocess.Popen(
            [*inside, sys.executable, __file__, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.spec: CacheSpec
        self.content: CacheContent
        self.regions: list[np.ndarray]
        self.roster: Roster
        self.address = ""
        self._file = os.memfd_create("rank")

    async def open(
        self,
        engine: str,
        incarnation: str,
        identity: Identity,
        *,
        layout: str = "nhd",
        block_size: int = 16,
        num_blocks: int = 32,
        shareable: bool = False,
        **settings: object,
    ) -> Self:
        """A new cache and a link over it, in place of those before. ``shareable``: peers may map it."""
        os.close(self._file)
        self._file = os.memfd_create("rank", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        place = Place(engine=engine, incarnation=incarnation, pp_rank=0, pp_size=1, tp_rank=0, tp_size=1)
        self.spec = standard_spec(
            layout,
            identity=identity,
            place=place,
            layers=tuple(range(identity.num_layers)),
            heads=tuple(range(identity.num_kv_heads)),
            block_size=block_size,
            num_blocks=num_blocks,
            dtype=DType.BFLOAT16,
        )
        file = Path(f"/proc/{os.getpid()}/fd/{self._file}")
        self.regions = map_regions(file, self.spec.region_bytes)
        canary = SOURCE_CANARY if engine == "prefill" else TARGET_CANARY
        self.content = CacheContent(self.spec, self.regions, canary)
        self.content.wipe()
        spec = msgspec.to_builtins(self.spec)
        opened = await self.call("open", file=str(file), spec=spec, settings=settings, shareable=shareable)
        self.address = opened["address"]
        self.roster = Roster.of([bytes.fromhex(opened["card"])])
        return self

    def offer(self, key: str, blocks: Sequence[int], tokens: int, **fields: Any) -> Offer:
        return Offer(key=key, roster=self.roster, blocks=(tuple(blocks),), tokens=tokens, **fields)

    async def publish(self, offer: Offer) -> None:
        await self.call("publish", params=offer.to_params())

    async def start_fetch(self, offer: Offer, into: Sequence[int], deadline_seconds: float = 60.0) -> None:
        arguments = {"into": list(into), "deadline_seconds": deadline_seconds}
        await self.call("start_fetch", params=offer.to_params(), **arguments)

    async def ended(self, key: str) -> Ended | None:
        return msgspec.convert(await self.call("ended", key=key), Ended | None)

    async def end_of(self, key: str, timeout_seconds: float = 10.0) -> Ended:
        """Wait for a part's end."""
        async with asyncio.timeout(timeout_seconds):
            while (ended := await self.ended(key)) is None:
                await asyncio.sleep(0.02)
        return ended

    async def lost_at(self) -> list[float]:
        """When it noticed that a peer was gone, each time, by the monotonic clock."""
        return await self.call("lost_at")

    async def blocks_out(self) -> dict[str, int]:
        """`MemoryStats` over there, without what the engine has been handed, and zeros left out."""
        memory = await self.call("memory")
        return {state: count for state, count in memory.items() if count and state != "installed"}

    async def call(self, name: str, **arguments: object) -> Any:
        """Call, in a thread: the loop of the test goes on."""
        return await asyncio.to_thread(self.exchange, name, arguments)

    def exchange(self, name: str, arguments: dict[str, object]) -> Any:
        self.send(name, arguments)
        return self.answer()

    def send(self, name: str, arguments: dict[str, object]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(Call(name, arguments)) + b"\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], ANSWER_SECONDS)[0]:
            raise TimeoutError("the rank's process does not answer")
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the rank's process died: {self.process.wait()}")
        answer = msgspec.json.decode(line, type=Answer)
        if answer.error:
            raise RuntimeError(answer.error)
        return answer.value

    def close(self) -> None:
        self.kill()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()
        os.close(self._file)


# --- there ----------------------------------------------------------------------------------------------------------


class Served:
    """What a rank's process answers; each public method is a call."""

    def __init__(self) -> None:
        self._link: Link | None = None
        self._parts: dict[str, Part] = {}
        self._ended: dict[str, Ended] = {}
        self._lost_at: list[float] = []
        self._hog: Hog | None = None

    async def open(
        self, file: str, spec: dict[str, Any], settings: dict[str, Any], *, shareable: bool
    ) -> dict[str, str]:
        if self._link is not None:
            await self._link.close(0)
        self._parts.clear()
        self._ended.clear()
        self._lost_at.clear()
        cache = msgspec.convert(spec, CacheSpec)
        arrays = map_regions(Path(file), cache.region_bytes)
        regions = [Region(array.ctypes.data, array.size, array) for array in arrays]
        if shareable:
            regions = backed(Path(file), regions)
        self._link = await open_link(Config(**settings), Caches(cache, tuple(regions)))
        self._link.events.subscribe(self._on_event)
        return {"card": self._link.card.hex(), "address": self._link.address}

    def publish(self, params: dict[str, Any]) -> None:
        assert self._link is not None
        self._keep(self._link.publish(Offer.from_params(params)))

    def start_fetch(self, params: dict[str, Any], into: list[int], deadline_seconds: float) -> None:
        assert self._link is not None
        self._keep(self._link.start_fetch(Offer.from_params(params), (into,), deadline_seconds=deadline_seconds))

    def cancel(self, key: str, why: str) -> None:
        assert self._link is not None
        self._link.cancel(self._parts[key], why)

    def ended(self, key: str) -> Ended | None:
        return self._ended.get(key)

    def lost_at(self) -> list[float]:
        return self._lost_at

    def memory(self) -> dict[str, int]:
        assert self._link is not None
        return msgspec.to_builtins(self._link.stats().memory)

    async def close(self, timeout_seconds: float) -> list[str]:
        assert self._link is not None
        return list((await self._link.close(timeout_seconds)).cut)

    def hold_gil(self, seconds: float) -> None:
        """Sleep as badly behaved extension code does: no other Python thread of the process runs."""
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))

    def hog(self, on: bool) -> None:
        """Have a thread of pure Python run, or stop it."""
        if self._hog is not None:
            self._hog.enough = True
            self._hog.join()
        self._hog = None
        if on:
            self._hog = Hog()
            self._hog.start()

    def lapsed(self) -> int:
        assert self._link is not None
        return self._link.stats().counters["leases_lapsed"]

    def release(self, key: str) -> None:
        assert self._link is not None
        self._link.release(key)

    def _keep(self, part: Part) -> None:
        self._parts[part.key] = part
        part.when_ended(self._on_end)

    def _on_event(self, event: Event) -> None:
        if isinstance(event, PeerDisconnected):
            self._lost_at.append(event.at_seconds)

    def _on_end(self, part: Part) -> None:
        assert part.result is not None
        error = part.result.error
        wire_seconds = part.result.phases.get("wire", 0.0)
        ended = Ended(state=part.state.name, at=time.monotonic(), wire_seconds=wire_seconds)
        if error is not None:
            ended = Ended(ended.state, ended.at, error.code, str(error), error.retryable)
        self._ended[part.key] = ended


async def serve(answers: int) -> None:
    calls = asyncio.StreamReader(limit=MAX_LINE)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(calls), sys.stdin)
    served = Served()
    while line := await calls.readline():
        call = msgspec.json.decode(line, type=Call)
        try:
            value = getattr(served, call.name)(**call.arguments)
            answer = Answer(await value if asyncio.iscoroutine(value) else value)
        except KVLinkError as error:
            answer = Answer(error=f"{type(error).__name__}: {error}")
        os.write(answers, msgspec.json.encode(answer) + b"\n")


if __name__ == "__main__":
    end_with(int(sys.argv[1]))
    asyncio.run(serve(take_standard_output()))
