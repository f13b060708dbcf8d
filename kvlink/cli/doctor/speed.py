"""What this machine does with two processes: copies, sockets, UCX, and whether one may read the other's memory.

Short runs while the machine does whatever else it does: figures to see what is badly wrong, not to compare with.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from kvlink import limits
from kvlink.cli.doctor.containers import is_filtered, tracing_remedy
from kvlink.cli.doctor.findings import Finding
from kvlink.cli.doctor.libraries import ucx_remedy
from kvlink.cli.doctor.machine import read
from kvlink.cli.doctor.partner import COUNT, MEMORY_BYTES, Partner, Task, region_key
from kvlink.config import AUTO, Config
from kvlink.errors import KVLinkError
from kvlink.memory import Pool, allocate_pool
from kvlink.plan import CopyPlan
from kvlink.plan.copyplan import Segment
from kvlink.transports.base import RegionKey
from kvlink.transports.ucx import UcxProbe
from kvlink.transports.ucx_ping import UcxPing

_PARTNER_MODULE: Final = "kvlink.cli.doctor.partner"
_PARTNER_SECONDS: Final = 20.0
_REPEATS: Final = 5
_ROUND_TRIPS: Final = 500
_MESSAGE_BYTES: Final = 64
_GET_BYTES: Final = limits.DEFAULT_CHUNK_LEAVES * limits.LEAF_BYTES
_MOST: Final = 0.5
"""Of a pool on huge pages: less than this is told."""
GB: Final = 1e9


async def measure(config: Config) -> list[Finding]:
    """Measure with a second process, which is ended whatever happens.

    Args:
        config: says which UCX, and which of its transports.
    """
    with allocate_pool(MEMORY_BYTES) as here, allocate_pool(MEMORY_BYTES) as there:
        for pool in (here, there):
            pool.array[:] = 2  # every page is there
        findings, copies = [_pages(here)], _copies(here, there)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", _PARTNER_MODULE,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        try:
            partner = await asyncio.wait_for(_meet(process, here, config), _PARTNER_SECONDS)
            findings += await asyncio.to_thread(_with_partner, partner, here, config, copies)
        except (TimeoutError, OSError, msgspec.DecodeError) as error:
            text = f"the second process of these checks failed ({type(error).__name__}: {error})"
            remedy = f"run `{sys.executable} -m {_PARTNER_MODULE} </dev/null` to see its own words"
            findings.append(Finding(check="speed.partner", severity="fatal", text=text, remedy=remedy))
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()
        return findings


async def _meet(process: asyncio.subprocess.Process, pool: Pool, config: Config) -> Partner:
    assert process.stdin is not None, "its input was asked to be a pipe"
    assert process.stdout is not None, "so was its output"
    task = Task(pid=os.getpid(), address=pool.address, ucx_origin=config.ucx_origin, ucx_tls=config.ucx_tls)
    process.stdin.write(msgspec.json.encode(task) + b"\n")
    await process.stdin.drain()
    return msgspec.json.decode(await process.stdout.readline(), type=Partner)


def _no_loopback(error: OSError) -> Finding:
    text = f"two processes of this host do not reach each other at 127.0.0.1: {error.strerror}"
    remedy = "bring the loopback interface up (ip link set lo up), and let no firewall stand between"
    return Finding(check="speed.tcp", severity="fatal", text=text, remedy=remedy)


def _with_partner(partner: Partner, pool: Pool, config: Config, copies: Finding) -> list[Finding]:
    scope, status = read(Path("/proc/sys/kernel/yama/ptrace_scope")), read(Path("/proc/self/status"))
    return [
        judge_cross_read(partner, scope=scope, status=status),
        copies,
        *_sockets(partner.port, pool),
        *_ucx(partner, pool, config),
    ]


# --- in this process ------------------------------------------------------------------------------------------------


def _pages(pool: Pool) -> Finding:
    """Whether memory that asked for huge pages got them."""
    share = _huge_share(pool)
    facts = {"huge_share": share}
    if share is None:
        text = "the kernel does not say whether a pool got huge pages"
        return Finding(check="pages.granted", severity="note", text=text, facts=facts)
    text = f"{share:.0%} of a test pool lies on huge pages"
    if share >= _MOST:
        return Finding(check="pages.granted", severity="ok", text=text, facts=facts)
    remedy = "see pages.huge; or memory is fragmented: echo 1 > /proc/sys/vm/compact_memory (as root)"
    return Finding(check="pages.granted", severity="slow", text=text, remedy=remedy, facts=facts)


def _huge_share(pool: Pool) -> float | None:
    """Of the mapping that holds the pool, which the kernel may have joined with its neighbours."""
    inside = False
    present = huge = 0
    for line in read(Path("/proc/self/smaps")).splitlines():
        head, _, value = line.partition(" ")
        if not head.endswith(":"):
            first, _, last = head.partition("-")
            inside = int(first, 16) < pool.address + pool.nbytes and pool.address < int(last, 16)
        elif inside and head == "Rss:":
            present += int(value.split()[0])
        elif inside and head == "AnonHugePages:":
            huge += int(value.split()[0])
    return huge / present if present else None


def _copies(here: Pool, there: Pool) -> Finding:
    gb_s = _rate(lambda: np.copyto(there.array, here.array))
    text = f"one thread copies {gb_s:.1f} GB/s"
    return Finding(check="speed.memcpy", severity="ok", text=text, facts={"gb_s": gb_s})


# --- between two processes ------------------------------------------------------------------------------------------


def judge_cross_read(partner: Partner, *, scope: str, status: str) -> Finding:
    """Whether CMA works, the way of UCX and of `shared` (``pulled``) within a host, and what forbids it if not.

    Args:
        partner: what reading brought.
        scope: what ``/proc/sys/kernel/yama/ptrace_scope`` says.
        status: what ``/proc/self/status`` says.
    """
    filtered = is_filtered(status)
    nested = any(line.startswith("NSpid:") and len(line.split()) > 2 for line in status.splitlines())
    facts = {
        "ptrace_scope": int(scope) if scope.isdigit() else None,
        "seccomp_filter": filtered,
        "pid_namespace": nested,
    }
    if partner.cross_read.error == 0:
        gb_s = MEMORY_BYTES / partner.cross_read.seconds / GB
        text = (
            f"one process may read another's memory (CMA), {gb_s:.1f} GB/s: within a host `shared` pulls caches "
            "that an engine allocated, in one copy"
        )
        return Finding(check="cma.read", severity="ok", text=text, facts=facts | {"gb_s": gb_s})
    name = errno.errorcode.get(partner.cross_read.error, str(partner.cross_read.error))
    text = (
        f"one process may not read another's memory (CMA): {name}; within this host, caches that an engine allocated "
        "cross by `shared`'s ring, which copies twice, and UCX has no zero-copy"
    )
    return Finding(
        check="cma.read", severity="slow", text=text, remedy=tracing_remedy(scope, filtered=filtered), facts=facts
    )


def _sockets(port: int, pool: Pool) -> Iterator[Finding]:
    try:
        sock = socket.create_connection(("127.0.0.1", port))
    except OSError as error:
        yield _no_loopback(error)
        return
    with sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        gb_s = _rate(lambda: _ask(sock, pool, MEMORY_BYTES))
        yield Finding(
            check="speed.tcp", severity="ok", text=f"one TCP connection over loopback: {gb_s:.1f} GB/s",
            facts={"gb_s": gb_s},
        )  # fmt: skip
        trips = [_timed(lambda: _ask(sock, pool, _MESSAGE_BYTES)) for _ in range(_ROUND_TRIPS)]
        yield _round_trip("speed.tcp_round_trip", "TCP", trips)


def _ask(sock: socket.socket, pool: Pool, count: int) -> None:
    sock.sendall(COUNT.pack(count))
    memory = pool.array.data
    done = 0
    while done < count:
        got = sock.recv_into(memory[done:count], flags=socket.MSG_WAITALL)
        if got == 0:
            raise ConnectionResetError("the second process is gone")
        done += got


def _ucx(partner: Partner, pool: Pool, config: Config) -> Iterator[Finding]:
    if partner.get is None or partner.key is None or partner.ping is None:
        yield Finding(check="speed.ucx", severity="note", text=f"UCX was not measured: {partner.ucx_error}")
        return
    try:
        gb_s = _gets(partner.get, region_key(partner.key), pool, config)
        text = f"UCX gets of {_GET_BYTES >> 20} MiB between two processes: {gb_s:.1f} GB/s"
        yield Finding(check="speed.ucx", severity="ok", text=text, facts={"gb_s": gb_s})
        yield _round_trip("speed.ucx_round_trip", "UCX", _pings(partner.ping, config))
    except KVLinkError as error:
        # A link that offers it takes it for some transfers, which fail.
        offered = "ucx" in config.transports or AUTO in config.transports
        text = f"UCX failed between two processes: {error}"
        yield Finding(
            check="speed.ucx", severity="fatal" if offered else "note", text=text, remedy=ucx_remedy(config)
        )  # fmt: skip


def _gets(address: bytes, key: RegionKey, pool: Pool, config: Config) -> float:
    probe = UcxProbe(ucx_origin=config.ucx_origin, ucx_tls=config.ucx_tls)
    try:
        probe.register(0, pool.address, pool.nbytes)
        probe.connect(address)
        probe.import_key(key)
        plan = _whole(pool.nbytes)
        return _rate(lambda: probe.get(plan, max_run_bytes=_GET_BYTES))
    finally:
        probe.close()


def _pings(address: bytes, config: Config) -> list[float]:
    ping = UcxPing(ucx_origin=config.ucx_origin, ucx_tls=config.ucx_tls)
    try:
        ping.connect(address)
        return ping.round_trips(_ROUND_TRIPS)
    finally:
        ping.close()


def _whole(nbytes: int) -> CopyPlan:
    """One run from the start of region 0 to the start of region 0."""
    segment = Segment(np.zeros((1, 4), np.int64), np.zeros((1, 2), np.int64), (), nbytes)
    return CopyPlan((segment,), nbytes)


def _round_trip(check: str, name: str, seconds: list[float]) -> Finding:
    ordered = sorted(seconds)
    p50, p99 = ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100]
    text = f"{name} message there and back, both ends asleep: {p50 * 1e6:.0f} us p50, {p99 * 1e6:.0f} us p99"
    return Finding(check=check, severity="ok", text=text, facts={"p50_seconds": p50, "p99_seconds": p99})


def _rate(move: Callable[[], object]) -> float:
    """GB/s of the best of several moves of the whole memory, after one that does not count."""
    move()
    return MEMORY_BYTES / min(_timed(move) for _ in range(_REPEATS)) / GB


def _timed(act: Callable[[], object]) -> float:
    start = time.monotonic()
    act()
    return time.monotonic() - start
