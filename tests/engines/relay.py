"""A relay in front of one engine's port: it slows or spoils what comes from the engine, on any number of connections.

The engine listens on one loopback address and advertises another, on which the relay listens under the same port.
"""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import Self

BIG_BYTES = 4096
"""Only payload comes in pieces of this size: messages and heartbeats are left as they are."""
PIECE_BYTES = 1 << 16
SPOILED_BYTES = 8


class Relay:
    """Listens on ``host:port`` and passes everything on to ``to:port``.

    ``spoil``: make some numbers in every big piece from the engine infinite, NaN, or far from what they were.
    ``bytes_per_second``: for each connection.
    """

    def __init__(self, host: str, port: int, to: str) -> None:
        self._to = (to, port)
        self._server = socket.create_server((host, port))
        self._sockets: list[socket.socket] = [self._server]
        self.spoil = False
        self.bytes_per_second: float | None = None
        self.passed = 0
        """Bytes from the engine."""

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for one in self._sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._server.accept()
                try:
                    far = socket.create_connection(self._to)
                except OSError:  # nobody listens there just now
                    near.close()
                    continue
                self._sockets += [near, far]
                for ends in ((near, far, False), (far, near, True)):
                    threading.Thread(target=self._pass, args=ends, daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, from_engine: bool) -> None:
        with suppress(OSError):
            while piece := bytearray(source.recv(PIECE_BYTES)):
                if from_engine:
                    self.passed += len(piece)
                    if self.bytes_per_second is not None and len(piece) >= BIG_BYTES:
                        time.sleep(len(piece) / self.bytes_per_second)
                    if self.spoil and len(piece) >= BIG_BYTES:
                        middle = len(piece) // 2
                        for index in range(middle, middle + SPOILED_BYTES):  # few: frames have headers, to be spared
                            piece[index] ^= 0x40
                target.sendall(piece)
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
