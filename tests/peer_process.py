"""A native transport in a process of its own, driven from a test: `PeerProcess` here, `serve` there.

Calls go over a socket pair, one at a time, as MessagePack; descriptors travel beside them. The memory of its region is
a file both processes map, so that a test sees it while its owner is stopped or dead.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
from child import Child, seal

from kvlink.errors import KVLinkError, TransportError
from kvlink.plan import CopyPlan, Dim, Segment
from kvlink.testing.harness import MEMORY_BYTES, REGION
from kvlink.transports.base import Backing, Completion, Exposure, LeaseReport, Read, RegionKey
from kvlink.transports.shared import SharedTransport
from kvlink.transports.stream import StreamTransport
from kvlink.transports.ucx import UcxProbe, UcxTransport

MAX_MESSAGE = 1 << 20
MAX_SOCKETS = 16
PR_SET_DUMPABLE, CAPABILITY_VERSION_3, CAP_SYS_PTRACE = 4, 0x20080522, 19
AnyTransport = UcxTransport | StreamTransport | SharedTransport
KINDS: dict[str, Callable[..., AnyTransport]] = {
    "ucx": UcxTransport, "stream": StreamTransport, "shared": SharedTransport,
}  # fmt: skip


class Call(msgspec.Struct, array_like=True):
    name: str
    arguments: dict[str, Any]


class Answer(msgspec.Struct, array_like=True):
    value: Any = None
    error: str = ""


def pack_plan(plan: CopyPlan) -> list[Any]:
    return [[s.bases.tolist(), s.pieces.tolist(), [list(d) for d in s.nest], s.run_bytes] for s in plan.segments]


def unpack_plan(packed: list[Any]) -> CopyPlan:
    segments = tuple(
        Segment(
            bases=np.array(bases, np.int64).reshape(-1, 4),
            pieces=np.array(pieces, np.int64).reshape(-1, 2),
            nest=tuple(Dim(*dim) for dim in nest),
            run_bytes=run_bytes,
        )
        for bases, pieces, nest, run_bytes in packed
    )
    total = sum(
        len(s.bases) * len(s.pieces) * int(np.prod([d.count for d in s.nest], dtype=np.int64)) * s.run_bytes
        for s in segments
    )
    return CopyPlan(segments=segments, total_bytes=total)


def map_memory(descriptor: int, length: int) -> np.ndarray:
    return np.frombuffer(mmap.mmap(descriptor, length), np.uint8)


# --- here -----------------------------------------------------------------------------------------------------------


class PeerProcess(Child):
    """A process with one transport, whose region `REGION` is ``memory``, and perhaps a probe."""

    def __init__(
        self,
        *,
        kind: str = "ucx",
        length: int = MEMORY_BYTES,
        environment: dict[str, str] | None = None,
        **settings: object,
    ) -> None:
        descriptor = os.memfd_create("peer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, length)
        self.memory = map_memory(descriptor, length)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(20)
        # A test's own settings of UCX must not leak in by the environment.
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno()), str(descriptor), str(length)],
            pass_fds=(theirs.fileno(), descriptor),
            env={**inherited, **(environment or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        theirs.close()
        os.close(descriptor)
        try:
            self.open(kind=kind, **settings)
        except BaseException:
            self.close()
            raise

    def open(self, *, kind: str = "ucx", **settings: object) -> None:
        """A new transport in place of the one before, and zeros in the memory."""
        self.address: bytes = self.call("open", kind=kind, settings=settings)
        self.memory[:] = 0

    def call(self, name: str, *descriptors: int, **arguments: object) -> Any:
        message = msgspec.msgpack.encode(Call(name, arguments))
        socket.send_fds(self._socket, [message], descriptors)
        return self.answer()

    def send(self, name: str, **arguments: object) -> None:
        """Call, and leave its `answer` for later."""
        self._socket.send(msgspec.msgpack.encode(Call(name, arguments)))

    def answer(self) -> Any:
        try:
            received = self._socket.recv(MAX_MESSAGE)
        except ConnectionResetError:
            received = b""
        if not received:
            raise RuntimeError(f"the peer process died ({self.process.wait(5)}): {self.output()}")
        answer = msgspec.msgpack.decode(received, type=Answer)
        if answer.error:
            raise TransportError(answer.error)
        return answer.value

    def output(self) -> str:
        """All it printed; ends it."""
        self.kill()
        assert self.process.stdout is not None
        return self.process.stdout.read().decode()

    def connect(
        self, peer: str, address: bytes, channel: socket.socket, *lanes: socket.socket, lane_name: bytes | None = None
    ) -> None:
        """Starts connecting; the completion is in `poll`. ``lane_name``: of the socket where it opens a lane itself."""
        given = (channel, *lanes)
        self.call("connect", *(sock.fileno() for sock in given), peer=peer, address=address, lane_name=lane_name)
        for sock in given:
            sock.close()

    def key(self) -> RegionKey:
        return msgspec.convert(self.call("key"), RegionKey)

    def expose(self, exposure: Exposure) -> None:
        fields = {name: getattr(exposure, name) for name in Exposure.__slots__}
        self.call("expose", **{**fields, "plan": pack_plan(exposure.plan)})

    def read(self, read: Read) -> int:
        fields = {name: getattr(read, name) for name in Read.__slots__}
        return int(self.call("read", **{**fields, "plan": pack_plan(read.plan)}))

    def lease(self, peer: str, attempt: int) -> LeaseReport:
        return msgspec.convert(self.call("lease", peer=peer, attempt=attempt), LeaseReport)

    def withdraw(self, peer: str, attempt: int) -> LeaseReport:
        return msgspec.convert(self.call("withdraw", peer=peer, attempt=attempt), LeaseReport)

    def poll(self) -> list[Completion]:
        return msgspec.convert(self.call("poll"), list[Completion])

    def close(self) -> None:
        self.kill()
        self._socket.close()
        if self.process.stdout is not None:
            self.process.stdout.close()


# --- there ----------------------------------------------------------------------------------------------------------


class Served:
    """What a peer process answers; each public method is a call."""

    def __init__(self, descriptor: int, length: int) -> None:
        self._descriptor = descriptor
        self._memory = map_memory(descriptor, length)
        self._transport: AnyTransport | None = None
        self.descriptors: list[int] = []

    def open(self, kind: str, settings: dict[str, Any]) -> bytes:
        """A transport in place of the one before."""
        if self._transport is not None:
            self._transport.close()
        backing = None
        if settings.pop("shareable", False):
            seal(self._descriptor)
            backing = Backing(self._descriptor, 0)
        self._transport = KINDS[kind](**settings)
        self._transport.register(REGION, self._memory.ctypes.data, len(self._memory), backing)
        self._tls = settings.get("ucx_tls")
        return self._transport.address()

    def connect(self, peer: str, address: bytes, lane_name: bytes | None) -> int:
        channel, *lanes = self.descriptors
        if lane_name is not None:
            lane = socket.socket(socket.AF_UNIX)
            lane.connect(lane_name)
            lanes = [lane.detach()]
        return self._transport.connect(peer, address, channel, lanes)

    def key(self) -> RegionKey:
        return self._transport.export_key(REGION)

    def import_key(self, peer: str, key: dict[str, Any]) -> None:
        self._transport.import_key(peer, msgspec.convert(key, RegionKey))

    def expose(self, plan: list[Any], **fields: Any) -> None:
        self._transport.expose(Exposure(plan=unpack_plan(plan), **fields))

    def lease(self, peer: str, attempt: int) -> LeaseReport:
        return self._transport.lease(peer, attempt)

    def withdraw(self, peer: str, attempt: int) -> LeaseReport:
        return self._transport.withdraw(peer, attempt)

    def read(self, plan: list[Any], **fields: Any) -> int:
        return self._transport.read(Read(plan=unpack_plan(plan), **fields))

    def poll(self) -> list[Completion]:
        return self._transport.poll(1 << 20)

    def capabilities(self) -> str:
        return self._transport.capabilities().detail

    def forbid_reading(self) -> None:
        """Let nobody read this process's memory who may not trace everything."""
        assert ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0) == 0

    def give_up_tracing(self) -> None:
        """Give up the right to trace everything, for threads that are started from now on, too."""
        header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
        sets = (ctypes.c_uint32 * 6)()
        libc = ctypes.CDLL(None)
        assert libc.capget(header, sets) == 0
        for low in range(3):  # effective, permitted, inheritable
            sets[low] &= ~(1 << CAP_SYS_PTRACE)
        assert libc.capset(header, sets) == 0

    def hold_gil(self, seconds: float) -> None:
        """Keep every other Python thread of the process from running."""
        sys.setswitchinterval(1e6)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pass

    def serve_probe(self) -> list[bytes]:
        self._probe = UcxProbe(ucx_tls=self._tls)
        self._probe.register(REGION, self._memory.ctypes.data, len(self._memory))
        self._probe.serve()
        key = self._probe.export_key(REGION)
        return [self._probe.address(), msgspec.msgpack.encode(key)]


def serve(calls: socket.socket, served: Served) -> None:
    while True:
        received, descriptors, _, _ = socket.recv_fds(calls, MAX_MESSAGE, MAX_SOCKETS)
        if not received:
            return
        call = msgspec.msgpack.decode(received, type=Call)
        served.descriptors = descriptors
        method: Callable[..., Any] = getattr(served, call.name)
        try:
            answer = Answer(method(**call.arguments))
        except KVLinkError as error:
            answer = Answer(error=str(error))
        calls.send(msgspec.msgpack.encode(answer))


if __name__ == "__main__":
    calling, shared, size = map(int, sys.argv[1:])
    serve(socket.socket(fileno=calling), Served(shared, size))
