"""The doctor's second process: reads the first one's memory, answers on a socket, and serves UCX.

It says one JSON line on standard output, what it found and where it serves, and ends when its input does.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import sys
import threading
import time
from typing import Annotated, Final

import msgspec

from kvlink.errors import KVLinkError
from kvlink.memory import Pool, allocate_pool
from kvlink.transports.base import RegionKey
from kvlink.transports.ucx import UcxProbe
from kvlink.transports.ucx_ping import UcxPing
from kvlink.wire import WireKey

MEMORY_BYTES: Final = 64 * 1024 * 1024
"""What is moved at a time. It may stay in a cache: this is a check, not a benchmark."""
COUNT: Final = struct.Struct("<Q")
"""What is asked for on the socket: that many bytes, at most `MEMORY_BYTES`."""
_REPEATS: Final = 3


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of the first process to read, and the UCX to serve with."""

    pid: int
    address: int
    ucx_origin: str
    ucx_tls: str | None


class CrossRead(msgspec.Struct, frozen=True, kw_only=True):
    """How reading the other process's memory went: ``error`` is an errno, 0 if it was read and right."""

    error: int
    seconds: float = 0.0


class Partner(msgspec.Struct, frozen=True, kw_only=True):
    """What the partner found, and where it serves. ``get`` and ``ping`` are addresses, absent where there is no UCX."""

    cross_read: CrossRead
    port: int
    get: bytes | None = None
    key: WireKey | None = None
    ping: bytes | None = None
    ucx_error: Annotated[str, msgspec.Meta(max_length=4096)] = ""


def region_key(key: WireKey) -> RegionKey:
    """The key as a probe takes it."""
    return RegionKey(region=key.region, address=key.address, length=key.length, key=key.key)


def main() -> None:
    """Do all there is to do, then wait for the end of the input."""
    sys.stdout.flush()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # UCX logs to standard output
    task = msgspec.json.decode(sys.stdin.buffer.readline(), type=Task)
    pool = allocate_pool(MEMORY_BYTES)
    pool.array[:] = 1
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_serve, args=(listener, pool), daemon=True).start()
    partner = Partner(cross_read=_read(task, pool), port=listener.getsockname()[1])
    ends: list[UcxProbe | UcxPing] = []
    try:
        partner = _serve_ucx(task, pool, partner, ends)
    except KVLinkError as error:
        partner = msgspec.structs.replace(partner, ucx_error=str(error)[:1000])
    answers.write(msgspec.json.encode(partner) + b"\n")
    answers.flush()
    sys.stdin.buffer.read()
    for end in ends:
        end.close()


def _serve_ucx(task: Task, pool: Pool, partner: Partner, ends: list[UcxProbe | UcxPing]) -> Partner:
    probe = UcxProbe(ucx_origin=task.ucx_origin, ucx_tls=task.ucx_tls)
    ends.append(probe)
    probe.register(0, pool.address, pool.nbytes)
    probe.serve()
    ping = UcxPing(ucx_origin=task.ucx_origin, ucx_tls=task.ucx_tls)
    ends.append(ping)
    ping.serve()
    key = probe.export_key(0)
    return msgspec.structs.replace(
        partner,
        get=probe.address(),
        key=WireKey(region=key.region, address=key.address, length=key.length, key=key.key),
        ping=ping.address(),
    )


class _IoVec(ctypes.Structure):
    """``struct iovec``."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _read(task: Task, pool: Pool) -> CrossRead:
    """Read the first process's memory as CMA does. That process is no child of this one, as peers are not."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    local, remote = _IoVec(pool.address, pool.nbytes), _IoVec(task.address, pool.nbytes)
    best = float("inf")
    for _ in range(_REPEATS):
        start = time.monotonic()
        count = libc.process_vm_readv(task.pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
        if count < 0:
            return CrossRead(error=ctypes.get_errno())
        best = min(best, time.monotonic() - start)
    return CrossRead(error=0, seconds=best)


def _serve(listener: socket.socket, pool: Pool) -> None:
    """Serve one connection: as many bytes as it asks for, each time."""
    connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    memory = pool.array.data
    while len(asked := connection.recv(COUNT.size, socket.MSG_WAITALL)) == COUNT.size:
        connection.sendall(memory[: COUNT.unpack(asked)[0]])


if __name__ == "__main__":
    main()
