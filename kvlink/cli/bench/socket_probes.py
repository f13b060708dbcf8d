"""The limit of the stream transport: as many bytes over as many plain sockets, from memory in one piece to such memory.

A server sends bytes of its own, never a cache's: whoever reaches its port gets nothing else.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np

from kvlink import limits
from kvlink.cli.bench.case import Case
from kvlink.cli.bench.probes import Plans
from kvlink.link.sockets import dial, listen, local_address
from kvlink.memory import Caches, allocate_pool
from kvlink.plan import Leg
from kvlink.wire import Address

_POOL_BYTES: Final = 256 * 1024 * 1024
"""Past any cache: neither side may find its bytes there from the last time."""
_CALL_BYTES: Final = limits.DEFAULT_CHUNK_LEAVES * limits.LEAF_BYTES
_COUNT: Final = struct.Struct("<Q")


class SocketServer:
    """A source worker's side: one listening socket a rank, and a thread for each connection."""

    def __init__(self, listeners: Sequence[socket.socket]) -> None:
        self._pool = allocate_pool(_POOL_BYTES)
        self._pool.array[:: limits.LEAF_BYTES // 4] = 1  # every page is there
        self._listeners = list(listeners)
        self._open: list[socket.socket] = list(listeners)
        for listener in listeners:
            listener.setblocking(True)
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    @classmethod
    async def start(cls, host: str, ranks: int) -> SocketServer:
        """Bind and serve until `close`."""
        return cls([await listen(Address(host=host, port=0)) for _ in range(ranks)])

    def addresses(self) -> tuple[bytes, ...]:
        """One a rank."""
        return tuple(str(local_address(listener)).encode() for listener in self._listeners)

    def close(self) -> None:
        """Stop serving. Idempotent."""
        for sock in self._open:
            _end(sock)
        self._open.clear()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:  # closed
                return
            self._open.append(sock)
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            while len(asked := sock.recv(_COUNT.size, socket.MSG_WAITALL)) == _COUNT.size:
                _pass(self._pool.array.data, _COUNT.unpack(asked)[0], sock.send)
        except OSError:  # closed, by either side
            sock.close()


class SocketProber:
    """A target worker's side: for each leg as many sockets as the transport has lanes, each with a thread.

    See `SocketProber.connect`.
    """

    def __init__(self, sockets: Mapping[tuple[int, int], Sequence[socket.socket]], ranks: int, lanes: int) -> None:
        self._sockets = sockets
        self._lanes = lanes
        self._pool = allocate_pool(_POOL_BYTES)
        self._pool.array[:: limits.LEAF_BYTES // 4] = 1
        self._threads = ThreadPoolExecutor(ranks * lanes, thread_name_prefix="bench-probe")

    @classmethod
    async def connect(
        cls, case: Case, legs: Sequence[Leg], targets: Mapping[int, Caches], addresses: Sequence[bytes]
    ) -> SocketProber:
        """Dial the source ranks that ``targets`` read; ``addresses`` are of all of them, in rank order."""
        sockets: dict[tuple[int, int], list[socket.socket]] = {}
        for leg in legs:
            if leg.target in targets:
                address = Address.parse(addresses[leg.source].decode())
                sockets[leg.source, leg.target] = [await dial(address) for _ in range(case.stream_lanes)]
        for dialled in sockets.values():
            for sock in dialled:
                sock.setblocking(True)
        return cls(sockets, len(targets), case.stream_lanes)

    async def move(self, plans: Plans) -> float:
        """See `Prober.move`. The legs of one rank follow each other, as over the UCX probe."""
        by_target: dict[int, list[tuple[Sequence[socket.socket], int]]] = defaultdict(list)
        for leg, plan in plans:
            by_target[leg.target].append((self._sockets[leg.source, leg.target], plan.total_bytes))
        return max(await asyncio.gather(*(self._move(own) for own in by_target.values())))

    def close(self) -> None:
        """See `Prober.close`."""
        for sockets in self._sockets.values():
            for sock in sockets:
                _end(sock)
        self._threads.shutdown()

    async def _move(self, work: Sequence[tuple[Sequence[socket.socket], int]]) -> float:
        loop = asyncio.get_running_loop()
        start = time.monotonic()
        for sockets, total in work:
            shares = [total // self._lanes + (lane < total % self._lanes) for lane in range(self._lanes)]
            pieces = np.array_split(self._pool.array, self._lanes)
            await asyncio.gather(
                *(
                    loop.run_in_executor(self._threads, _receive, sock, piece.data, share)
                    for sock, piece, share in zip(sockets, pieces, shares, strict=True)
                )
            )
        return time.monotonic() - start


def _receive(sock: socket.socket, into: memoryview, count: int) -> None:
    sock.sendall(_COUNT.pack(count))
    _pass(into, count, lambda piece: sock.recv_into(piece, flags=socket.MSG_WAITALL))


def _pass(memory: memoryview, count: int, call: Callable[[memoryview], int]) -> None:
    """Move ``count`` bytes in order through ``memory``, from its beginning again at its end."""
    done = 0
    while done < count:
        start = done % len(memory)
        moved = call(memory[start : start + min(_CALL_BYTES, count - done)])
        if moved == 0:
            raise ConnectionResetError("the other end of a probe is gone")
        done += moved


def _end(sock: socket.socket) -> None:
    """Close, and wake the thread that is in a call of it."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:  # not connected, or closed already
        pass
    finally:
        sock.close()
