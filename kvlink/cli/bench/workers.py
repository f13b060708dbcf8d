"""How the conductor reaches a worker: in its own process, in a child, or over an authenticated connection."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import secrets
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Final, Self

import msgspec

from kvlink.cli.bench import messages as m
from kvlink.cli.bench.half import Half
from kvlink.errors import KVLinkError, PeerLostError, SchemaError
from kvlink.wire import info_to_error

WORKER_MODULE: Final = "kvlink.cli.bench.worker"
EXIT_GRACE_SECONDS: Final = 5.0
"""How long a child may take to end after its input has ended."""


class Worker(ABC):
    """One process's ranks of one side, as the conductor sees them."""

    @abstractmethod
    async def call(self, command: m.AnyCommand, reply: type[m.ReplyT]) -> m.ReplyT:
        """Have ``command`` done. Cancelling leaves it running; its answer is dropped.

        Raises:
            KVLinkError: as the worker raised it.
            PeerLostError: the worker is gone.
        """

    @abstractmethod
    async def aclose(self) -> None:
        """End the worker, whatever it does. Idempotent."""


class LocalWorker(Worker):
    """A half in this process, on this loop."""

    def __init__(self, half: Half) -> None:
        self._half = half

    async def call(self, command: m.AnyCommand, reply: type[m.ReplyT]) -> m.ReplyT:
        """See `Worker.call`."""
        got = await self._half.answer(command)
        if not isinstance(got, reply):
            raise SchemaError(f"answered {type(command).__name__} with {type(got).__name__}")
        return got

    async def aclose(self) -> None:
        """See `Worker.aclose`."""
        await self._half.aclose()


class StreamWorker(Worker):
    """A worker at the other end of a byte stream: one JSON line a message, answers in any order."""

    def __init__(self, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.name = name
        self._reader = reader
        self._writer = writer
        self._waiting: dict[int, asyncio.Future[m.AnyReply]] = {}
        self._ids = itertools.count(1)
        self._end: KVLinkError | None = None
        self._listener = asyncio.create_task(self._listen())

    async def call(self, command: m.AnyCommand, reply: type[m.ReplyT]) -> m.ReplyT:
        """See `Worker.call`."""
        if self._end is not None:
            raise self._end
        number = next(self._ids)
        answer: asyncio.Future[m.AnyReply] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            self._writer.write(encode_line(m.Envelope(id=number, command=command)))
            with contextlib.suppress(ConnectionError):  # the listener sees the end too, and says it better
                await self._writer.drain()
            got = await answer
        finally:
            self._waiting.pop(number, None)
        if not isinstance(got, reply):
            raise SchemaError(f"{self.name} answered {type(command).__name__} with {type(got).__name__}")
        return got

    async def aclose(self) -> None:
        """Close the stream; a worker ends when its input does."""
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()
        self._listener.cancel()
        await asyncio.gather(self._listener, return_exceptions=True)

    async def lost(self) -> PeerLostError:
        """Why the stream ended, once it has."""
        return PeerLostError(f"{self.name} ended in mid-bench; its own words are on standard error", peer=self.name)

    async def _listen(self) -> None:
        decoder = msgspec.json.Decoder(m.Answer)
        try:
            while line := await self._reader.readline():
                self._take(decoder.decode(line))
            self._end = await self.lost()
        except (ValueError, ConnectionError) as error:  # a line that is too long or is no answer, or a reset
            self._end = PeerLostError(f"{self.name} cannot be understood: {error}", peer=self.name)
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(self._end)

    def _take(self, answer: m.Answer) -> None:
        waiting = self._waiting.get(answer.id)
        if waiting is None or waiting.done():
            return
        if answer.error is not None:
            waiting.set_exception(info_to_error(answer.error, peer=self.name))
        elif answer.reply is not None:
            waiting.set_result(answer.reply)


class ChildWorker(StreamWorker):
    """A worker in a child process, on its standard input and output. It ends when its input does."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        if process.stdout is None or process.stdin is None:
            msg = "a worker's standard input and output must be pipes"
            raise ValueError(msg)
        super().__init__(name, process.stdout, process.stdin)
        self.process = process

    @classmethod
    async def spawn(cls, name: str, host: str, environment: Mapping[str, str], *, open_mode: bool = False) -> Self:
        """Start one. Its links listen on ``host``; its secret comes from ``environment``."""
        return cls(name, await spawn_worker(host, environment, open_mode=open_mode))

    async def aclose(self) -> None:
        """End the child: first by ending its input, then by force."""
        await super().aclose()
        await end_child(self.process)

    async def lost(self) -> PeerLostError:
        """Name the exit status: a child that was killed says nothing itself."""
        status = await self.process.wait()
        cause = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        return PeerLostError(f"{self.name} {cause} in mid-bench", peer=self.name)


async def spawn_worker(
    host: str, environment: Mapping[str, str], *, open_mode: bool = False
) -> asyncio.subprocess.Process:
    """Start a worker process. It has its own group, so that Ctrl-C reaches its parent only, which then ends it.

    ``-P``: the worker must be of the kvlink that runs, not of a folder named kvlink where the user happens to be.
    """
    return await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", WORKER_MODULE, "--host", host, *(["--open"] if open_mode else []),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env=environment,
        limit=m.MAX_LINE_BYTES, start_new_session=True,
    )  # fmt: skip


async def end_child(process: asyncio.subprocess.Process) -> int:
    """Wait for a child whose input has ended, then kill it; returns its exit status."""
    try:
        return await asyncio.wait_for(process.wait(), EXIT_GRACE_SECONDS)
    except TimeoutError:
        process.kill()
        return await process.wait()


def own_environment() -> dict[str, str]:
    """An environment for the workers of one bench: this process's, with a fresh secret that nobody else knows."""
    overruled = {"KVLINK_SECRET_FILE", "KVLINK_OPEN_MODE"}
    environment = {name: value for name, value in os.environ.items() if name not in overruled}
    environment["KVLINK_SECRET"] = secrets.token_hex(32)
    return environment


def encode_line(message: object) -> bytes:
    """One message as a line."""
    return msgspec.json.encode(message) + b"\n"
