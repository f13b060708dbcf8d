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

from kvlink import limits
from kvlink.cli.bench import messages as m
from kvlink.cli.bench.half import DEADLINE_SECONDS, Half
from kvlink.errors import KVLinkError, PeerLostError, SchemaError
from kvlink.wire import info_to_error

WORKER_MODULE: Final = "kvlink.cli.bench.worker"
EXIT_GRACE_SECONDS: Final = 5.0
"""How long a child may take to end after its input has ended."""
CONTROL_SECONDS: Final = 30.0
"""How long a worker may take over a command that touches no KV: far above what a busy loop delays it."""
TRANSFER_SECONDS: Final = DEADLINE_SECONDS + 30.0
"""Over a move, which has a deadline of its own."""
SETTLE_SECONDS: Final = limits.RETIRE_SECONDS + 20.0
"""Over the end of a source's parts whose targets have ended or were abandoned: no part is kept longer than that."""
BULK_BASE_SECONDS: Final = 60.0
BULK_BYTES_PER_SECOND: Final = 10**8
"""Over one that may touch its whole pool: the base, and the pool at far less than any machine compares."""
_CONTROL: Final = (m.Begin, m.End, m.Meet, m.Provide, m.Abandon)


class Worker(ABC):
    """One process's ranks of one side, as the conductor sees them."""

    @abstractmethod
    async def call(self, command: m.AnyCommand, reply: type[m.ReplyT]) -> m.ReplyT:
        """Have ``command`` done. Cancelling leaves it running; its answer is dropped.

        Raises:
            KVLinkError: as the worker raised it.
            PeerLostError: the worker is gone, or did not answer in time (it may be stopped) and was ended by force.
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
        self._pool_bytes = 0
        self._listener = asyncio.create_task(self._listen())

    async def call(self, command: m.AnyCommand, reply: type[m.ReplyT]) -> m.ReplyT:
        """See `Worker.call`."""
        if self._end is not None:
            raise self._end
        if isinstance(command, m.Open):
            self._pool_bytes = _pool_bytes(command)
        bound = self._bound_seconds(command)
        number = next(self._ids)
        answer: asyncio.Future[m.AnyReply] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            async with asyncio.timeout(bound):
                self._writer.write(encode_line(m.Envelope(id=number, command=command)))
                with contextlib.suppress(ConnectionError):  # the listener sees the end too, and says it better
                    await self._writer.drain()
                got = await answer
        except TimeoutError:
            words = f"{self.name} did not answer {type(command).__name__} within {bound:g} s; it was ended"
            raise self._fail(PeerLostError(words, peer=self.name)) from None
        finally:
            self._waiting.pop(number, None)
        if not isinstance(got, reply):
            raise SchemaError(f"{self.name} answered {type(command).__name__} with {type(got).__name__}")
        return got

    async def aclose(self) -> None:
        """Close the stream; a worker ends when its input does. One that no longer reads does not hold it open."""
        self._writer.close()
        closed = asyncio.create_task(self._writer.wait_closed())
        await asyncio.wait({closed}, timeout=EXIT_GRACE_SECONDS)
        if not closed.done():
            self.abort()
        with contextlib.suppress(ConnectionError):
            await closed
        self._listener.cancel()
        await asyncio.gather(self._listener, return_exceptions=True)

    def abort(self) -> None:
        """End the worker by force, at once, what it has not read included."""
        self._writer.transport.abort()

    async def lost(self) -> PeerLostError:
        """Why the stream ended, once it has."""
        return PeerLostError(f"{self.name} ended in mid-bench; its own words are on standard error", peer=self.name)

    async def _listen(self) -> None:
        decoder = msgspec.json.Decoder(m.Answer)
        try:
            while line := await self._reader.readline():
                self._take(decoder.decode(line))
            end = await self.lost()
        except (ValueError, ConnectionError) as error:  # a line that is too long or is no answer, or a reset
            end = PeerLostError(f"{self.name} cannot be understood: {error}", peer=self.name)
        if self._end is None:
            self._refuse(end)

    def _fail(self, error: PeerLostError) -> KVLinkError:
        """End the worker for ``error``, unless it is lost already; why it is."""
        if self._end is None:
            self._refuse(error)
            self.abort()
        return self._end or error

    def _refuse(self, end: KVLinkError) -> None:
        """From here on every call, those under way included, ends with ``end``."""
        self._end = end
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(end)

    def _bound_seconds(self, command: m.AnyCommand) -> float:
        if isinstance(command, _CONTROL):
            return CONTROL_SECONDS
        if isinstance(command, m.Move):
            return TRANSFER_SECONDS
        if isinstance(command, m.Settle):
            return SETTLE_SECONDS
        return BULK_BASE_SECONDS + self._pool_bytes // BULK_BYTES_PER_SECOND

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

    def abort(self) -> None:
        """See `StreamWorker.abort`. A stopped process is killed too."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        super().abort()

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


def _pool_bytes(command: m.Open) -> int:
    """Bytes of the pool that a worker is told to open: an upper bound, that of all its side's ranks."""
    side = command.case.side(command.side)
    return command.num_blocks[command.side] * side.block_size * command.case.side_token_bytes(command.side)


def encode_line(message: object) -> bytes:
    """One message as a line."""
    return msgspec.json.encode(message) + b"\n"
