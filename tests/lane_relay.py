"""A relay on a lane of the stream, which knows its frames and can spoil a byte of payload on the way."""

from __future__ import annotations

import select
import socket
import struct
import threading
from collections import Counter
from types import TracebackType
from typing import Self

from kvlink.limits import LEAF_BYTES

HEADER = struct.Struct("<HHIQqq")  # word, digests, reason, attempt, begin, end; see native/src/stream_wire.hpp
ASK, FRAME = 1, 2


class Spoil:
    """What the relays on a pair's lanes spoil together: a chunk may come again on another lane."""

    def __init__(self) -> None:
        self.on_try: dict[int, int | None] = {}
        """By wire offset: on which try of the frame that has it to spoil the byte there, or on every try."""
        self._tries: Counter[int] = Counter()

    def spoil(self, payload: memoryview, begin: int) -> None:
        for offset, on_try in self.on_try.items():
            if begin <= offset < begin + len(payload):
                self._tries[offset] += 1
                if on_try in (None, self._tries[offset]):
                    payload[offset - begin] ^= 1


class Relay:
    """Passes bytes between two sockets, both ways, in a thread.

    Args:
        target, source: the relay's sockets to either end.
        spoil: what to spoil.
    """

    def __init__(self, target: socket.socket, source: socket.socket, spoil: Spoil) -> None:
        self._ends = {target: source, source: target}
        self._source = source
        self._spoil = spoil
        self._frames = b""  # from the source, not yet whole
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for end in self._ends:
            end.close()

    def _run(self) -> None:
        try:
            while True:
                for end in select.select(list(self._ends), [], [])[0]:
                    received = end.recv(1 << 20)
                    if not received:
                        self._ends[end].shutdown(socket.SHUT_WR)
                        return
                    self._ends[end].sendall(self._spoiled(received) if end is self._source else received)
        except (OSError, ValueError):  # one of them is closed
            for end in self._ends:
                end.close()

    def _spoiled(self, received: bytes) -> bytes:
        """Whole frames that can be passed on, spoiled where asked for."""
        self._frames += received
        passed = bytearray()
        while len(self._frames) >= HEADER.size:
            _, digests, reason, _, begin, end = HEADER.unpack_from(self._frames)
            leaves = -((begin - end) // LEAF_BYTES) if digests else 0
            size = HEADER.size + (0 if reason else 8 * leaves + end - begin + 8)
            if len(self._frames) < size:
                break
            frame = bytearray(self._frames[:size])
            self._frames = self._frames[size:]
            if not reason:
                self._spoil.spoil(memoryview(frame)[HEADER.size : HEADER.size + end - begin], begin)
            passed += frame
        return bytes(passed)
