"""A worker process: commands on standard input, answers on standard output, until the input ends.

A thread reads the input, so its end is noticed even while the loop is stuck, and the process never outlives whoever
started it, however that one ended.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import threading
from typing import BinaryIO, Final

import msgspec

from kvlink.cli.bench import messages as m
from kvlink.cli.bench.half import Access, Half
from kvlink.cli.bench.workers import EXIT_GRACE_SECONDS, encode_line
from kvlink.errors import KVLinkError
from kvlink.wire import error_to_info

EXIT_FAILED: Final = 1


def main() -> int:
    """Serve until the conductor closes (0 if the bench was verified, else 1) or goes away (1)."""
    parser = argparse.ArgumentParser(prog="kvlink bench worker")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--open", action="store_true")
    arguments = parser.parse_args()
    # UCX logs to standard output: keep that for answers, and let all else that is written there go to standard error.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    access = Access(host=arguments.host, open_mode=arguments.open)
    return asyncio.run(_serve(Half(access), answers))


async def _serve(half: Half, answers: BinaryIO) -> int:
    lines: asyncio.Queue[bytes] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    threading.Thread(target=_read_input, args=(loop, lines), name="bench-input", daemon=True).start()
    decoder = msgspec.json.Decoder(m.Envelope)
    try:
        # A fault of our own ends the group, and so the process: the conductor must not wait for an answer for ever.
        async with asyncio.TaskGroup() as tasks:
            running: set[asyncio.Task[None]] = set()
            while line := await lines.get():
                task = tasks.create_task(_answer(half, decoder.decode(line), answers))
                running.add(task)
                task.add_done_callback(running.discard)
            for task in running:
                task.cancel()
    finally:
        await half.aclose()
    return 0 if half.verified else EXIT_FAILED


def _read_input(loop: asyncio.AbstractEventLoop, lines: asyncio.Queue[bytes]) -> None:
    with open(sys.stdin.fileno(), "rb", closefd=False) as source:
        while line := source.readline(m.MAX_LINE_BYTES):
            loop.call_soon_threadsafe(lines.put_nowait, line)
    loop.call_soon_threadsafe(lines.put_nowait, b"")
    threading.Event().wait(EXIT_GRACE_SECONDS)
    os._exit(EXIT_FAILED)


async def _answer(half: Half, envelope: m.Envelope, answers: BinaryIO) -> None:
    try:
        answer = m.Answer(id=envelope.id, reply=await half.answer(envelope.command))
    except KVLinkError as error:
        answer = m.Answer(id=envelope.id, error=error_to_info(error))
    answers.write(encode_line(answer))
    answers.flush()


if __name__ == "__main__":
    sys.exit(main())
