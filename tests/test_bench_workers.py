"""Workers answer in any order, say why they are gone, never outlive their parent, and serve only who proves itself."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from kvlink.cli.bench import messages as m
from kvlink.cli.bench.serve import Lender, borrow
from kvlink.cli.bench.workers import ChildWorker, own_environment
from kvlink.errors import AuthenticationError, ClosedError, PeerLostError, PeerUnreachableError, SchemaError

SECRET = b"a secret of sixteen bytes and more"


@contextlib.asynccontextmanager
async def child():
    worker = await ChildWorker.spawn("source process 0", "127.0.0.1", own_environment())
    try:
        yield worker
    finally:
        await worker.aclose()


@contextlib.asynccontextmanager
async def lender(secret: bytes | None, told: asyncio.Queue[str] | None = None):
    """A serving half on a free port; what it tells beyond that goes to ``told``."""
    told = told or asyncio.Queue()
    serving = asyncio.create_task(Lender(secret).serve("127.0.0.1", 0, told.put_nowait))
    try:
        yield int((await told.get()).split(" port ")[1].split(":")[0]), serving
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


def gone(pid: int, within_seconds: float = 10.0) -> bool:
    until = time.monotonic() + within_seconds
    while time.monotonic() < until:
        try:
            os.kill(pid, 0)
            if Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].startswith("Z"):
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.05)
    return False


async def test_a_child_answers_fails_typed_and_ends_with_its_input():
    async with child() as worker:
        assert await worker.call(m.Begin(), m.Done) == m.Done()
        spent, done = await asyncio.gather(worker.call(m.End(), m.Spent), worker.call(m.Begin(), m.Done))
        assert spent.cpu_seconds >= 0
        assert done == m.Done()
        with pytest.raises(ClosedError, match="before it was told to open"):
            await worker.call(m.Sweep(), m.Checked)
        with pytest.raises(SchemaError, match="Begin with Done"):
            await worker.call(m.Begin(), m.Spent)
        pid = worker.process.pid
    assert gone(pid, 0.5)


async def test_a_killed_child_ends_every_call_and_names_the_signal():
    async with child() as worker:
        await worker.call(m.Begin(), m.Done)
        worker.process.kill()
        with pytest.raises(PeerLostError, match="source process 0 was killed by signal 9"):
            await worker.call(m.End(), m.Spent)
        with pytest.raises(PeerLostError):
            await worker.call(m.End(), m.Spent)


async def test_a_child_that_is_stopped_is_ended_by_force(monkeypatch):
    monkeypatch.setattr("kvlink.cli.bench.workers.EXIT_GRACE_SECONDS", 0.2)
    async with child() as worker:
        await worker.call(m.Begin(), m.Done)
        pid = worker.process.pid
        os.kill(pid, signal.SIGSTOP)
    assert gone(pid, 0.5)


@pytest.mark.parametrize(
    ("bound", "command"),
    [
        ("CONTROL_SECONDS", m.Abandon(request=0, why="x")),
        ("SETTLE_SECONDS", m.Settle(request=0)),
        ("TRANSFER_SECONDS", m.Move(request=0, source_blocks=(), target_blocks=())),
        ("BULK_BASE_SECONDS", m.Sweep()),
    ],
)
async def test_a_child_that_is_stopped_ends_every_call_within_its_bound_and_is_killed(monkeypatch, bound, command):
    monkeypatch.setattr(f"kvlink.cli.bench.workers.{bound}", 0.3)
    async with child() as worker:
        pid = worker.process.pid
        os.kill(pid, signal.SIGSTOP)
        first = asyncio.create_task(worker.call(command, m.Done))
        await asyncio.sleep(0)
        other = asyncio.create_task(worker.call(m.Verify(request=0, blocks=()), m.Checked))
        words = f"source process 0 did not answer {type(command).__name__} within 0.3 s"
        with pytest.raises(PeerLostError, match=words):
            await asyncio.wait_for(first, 10)
        with pytest.raises(PeerLostError, match="did not answer"):
            await asyncio.wait_for(other, 10)
        with pytest.raises(PeerLostError, match="did not answer"):
            await worker.call(m.Begin(), m.Done)
        assert await asyncio.to_thread(gone, pid, 5.0)


async def test_a_stopped_child_that_has_left_its_input_unread_does_not_hold_up_the_end(monkeypatch):
    monkeypatch.setattr("kvlink.cli.bench.workers.EXIT_GRACE_SECONDS", 0.2)
    monkeypatch.setattr("kvlink.cli.bench.workers.CONTROL_SECONDS", 60.0)
    async with child() as worker:
        pid = worker.process.pid
        os.kill(pid, signal.SIGSTOP)
        stuck = asyncio.create_task(worker.call(m.Abandon(request=0, why="x" * 10**6), m.Done))
        await asyncio.sleep(0.1)
        stuck.cancel()
        await asyncio.wait_for(worker.aclose(), 10)
    assert gone(pid, 5.0)


async def test_no_worker_outlives_a_parent_that_was_killed():
    program = """
import asyncio
from kvlink.cli.bench import messages as m
from kvlink.cli.bench.workers import ChildWorker, own_environment

async def main():
    worker = await ChildWorker.spawn("w", "127.0.0.1", own_environment())
    await worker.call(m.Begin(), m.Done)
    print(worker.process.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE)
    pid = int(await parent.stdout.readline())
    parent.kill()
    await parent.wait()
    assert await asyncio.to_thread(gone, pid)


async def test_a_distant_worker_answers_and_the_lender_ends_with_it():
    async with lender(SECRET) as (port, serving):
        worker, own_host = await borrow("source process 0", "127.0.0.1", port, SECRET)
        assert own_host == "127.0.0.1"
        assert await worker.call(m.Begin(), m.Done) == m.Done()
        assert await worker.call(m.Close(verified=True), m.Done) == m.Done()
        await worker.aclose()
        assert await asyncio.wait_for(serving, 10) is True


async def test_a_bench_that_broke_off_is_no_success_for_the_lender():
    async with lender(None) as (port, serving):
        worker, _ = await borrow("source process 0", "127.0.0.1", port, None)
        await worker.call(m.Begin(), m.Done)
        await worker.aclose()
        assert await asyncio.wait_for(serving, 10) is False


@pytest.mark.parametrize("offered", [None, b"another secret of sixteen bytes"])
async def test_who_does_not_know_the_secret_gets_no_worker(offered):
    async with lender(SECRET) as (port, serving):
        with pytest.raises(AuthenticationError):
            await borrow("w", "127.0.0.1", port, offered)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b'{"id": 1, "command": {"type": "Begin"}}\n')
        assert b"Done" not in await asyncio.wait_for(reader.read(), 10)
        writer.close()
        assert not serving.done()


async def test_whom_a_lender_refuses_it_tells_in_a_line_each_but_a_flood_of_them_only_so_far():
    told: asyncio.Queue[str] = asyncio.Queue()
    async with lender(SECRET, told) as (port, _):
        for offered, why in ((b"another secret of sixteen bytes", "knows the secret"), (None, "the dialer is open")):
            with pytest.raises(AuthenticationError):
                await borrow("w", "127.0.0.1", port, offered)
            said = await asyncio.wait_for(told.get(), 10)
            assert re.match(r"refused 127\.0\.0\.1 port \d+: ", said)
            assert why in said
        for _ in range(20):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"\x1b[2J" * 8)
            assert b"expected" not in await asyncio.wait_for(reader.read(), 10)
            writer.close()
        lines = [told.get_nowait() for _ in range(told.qsize())]
        assert len(lines) == 8
        assert all(line.isprintable() for line in lines)
        assert "further refusals are not shown" in lines[-1]


async def test_a_lender_that_does_not_stay_refuses_another_bench_by_the_flag_even_while_the_first_still_ends():
    async with lender(None) as (port, serving):
        workers = [(await borrow(f"source process {rank}", "127.0.0.1", port, None))[0] for rank in range(2)]
        await workers[0].aclose()  # the bench has ended; the lender has not, as long as the other is there
        with pytest.raises(AuthenticationError, match="--stay"):
            await borrow("source process 0", "127.0.0.1", port, None)
        assert not serving.done()
        await workers[1].aclose()
        await asyncio.wait_for(serving, 20)


async def test_nobody_there_is_said_so():
    async with lender(None) as (port, _):
        pass
    with pytest.raises(PeerUnreachableError, match="start --serve"):
        await borrow("w", "127.0.0.1", port, None)
