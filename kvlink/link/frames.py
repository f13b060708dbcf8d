"""Frames on a socket of our own: sent at once, taken apart as bytes arrive, in whichever turn finds them there.

No asyncio transport stands between: a short request is a handful of messages, and of what each one costs, most was on
the way through it.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Final, Protocol

from kvlink import limits
from kvlink.errors import KVLinkError
from kvlink.wire import Ack, AnyMessage, Goodbye, Installed, decode, frame_length
from kvlink.wire.codec import HEADER

_log: Final = logging.getLogger("kvlink.link")

_BUFFER_BYTES: Final = 16 * 1024
"""Of each connection, for what arrives; a longer frame gets more as it comes in."""
_SHORT_BYTES: Final = 256
"""Less than this behind a frame is no reason to hold its answer back: what nobody waits for, at most."""
UNHURRIED: Final = (Installed, Ack, Goodbye)
"""Messages for which no request waits; repeats and bounds of the protocol are hundreds of times longer.
A goodbye is one of them so that it leaves behind the others, and takes them along: what follows it is not heard."""


class Owner(Protocol):
    """Whose frames they are."""

    peer: str

    def arrived(self, message: AnyMessage, size_bytes: int) -> bool:
        """One more; whether there is room for others."""

    def fail(self, error: KVLinkError) -> None:
        """What came is not what may come."""

    def lost(self, how: str) -> None:
        """The socket is closed."""


class Frames:
    """The socket side of a connection: stops reading while its owner has no room.

    What somebody waits for leaves at once, or, while more of one delivery is being answered, with the answers to the
    rest. What nobody waits for leaves behind the next that is hurried, or alone a little later: it costs neither side
    a call of its own. It is about attempts that have ended, so that order says nothing.
    """

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._have_bytes = 0
        self._sock: socket.socket | None = None
        self._reading = True
        self._holding = False
        self._hurried: list[bytes] = []
        self._unhurried: list[bytes] = []
        self._unsent_bytes = 0
        self._backlog = bytearray()
        self._late: asyncio.TimerHandle | None = None
        self._closing = False
        self._dropped = False

    # --- the socket -------------------------------------------------------------------------------------------------

    def attach(self, sock: socket.socket) -> None:
        """Take over a connected, non-blocking socket."""
        self._sock = sock
        self._loop.add_reader(sock.fileno(), self.readable)

    def readable(self) -> None:
        """Take in what the socket has; nothing happens if it has nothing. Once a call, so that others have a turn."""
        if self._sock is None or self._closing or not self._reading:
            return
        if self._have_bytes == len(self._buffer):  # a long frame: it has come this far, so it may have as much again
            self._replace_buffer(min(2 * len(self._buffer), HEADER.size + limits.MAX_FRAME_BYTES))
        try:
            count = self._sock.recv_into(self._buffer[self._have_bytes :])
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._drop(f"{type(error).__name__}: {error}")
            return
        if not count:
            self._drop("closed by the peer")
            return
        self._have_bytes += count
        self._take_apart()

    @property
    def unsent_bytes(self) -> int:
        """Bytes that wait for the socket, or for something to leave with."""
        return self._unsent_bytes + len(self._backlog)

    def write(self, frame: bytes, *, hurried: bool) -> None:
        """Send a frame, at once if ``hurried``. Never blocks."""
        self._unsent_bytes += len(frame)
        (self._hurried if hurried else self._unhurried).append(frame)
        if hurried and not self._holding:
            self._flush()
        elif not hurried and self._late is None:
            self._late = self._loop.call_later(limits.UNHURRIED_SECONDS, self._flush_late)

    def hurry(self) -> None:
        """Whatever waits leaves now."""
        self._flush()

    def resume(self) -> None:
        """There is room again. Frames that are here already come first, in the loop's own time."""
        if not self._reading and self._sock is not None and not self._closing:
            self._reading = True
            self._take_apart()
            if self._reading and not self._closing:
                self._loop.add_reader(self._sock.fileno(), self.readable)

    def close(self) -> None:
        """Read no more; close once all is sent."""
        self._flush()
        if self._sock is None or self._closing:
            return
        if self._backlog:
            self._closing = True
            self._loop.remove_reader(self._sock.fileno())
        else:
            self._drop("closed by us")

    def abort(self) -> None:
        """Close at once."""
        self._drop("closed by us")

    def _drop(self, how: str) -> None:
        """The socket is done with; its owner hears so in a turn of its own."""
        if self._sock is None or self._dropped:
            return
        self._closing = self._dropped = True
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        self._backlog.clear()
        self._loop.call_soon(self._lost, self._sock, how)

    def _lost(self, sock: socket.socket, how: str) -> None:
        if self._reading:
            self._take_apart()
        if self._have_bytes:
            how += f", with {self._have_bytes} bytes of an unfinished frame"
        self._have_bytes = 0
        if self._late is not None:
            self._late.cancel()
        sock.close()
        self._owner.lost(how)

    def _flush_late(self) -> None:
        self._late = None
        self._flush()

    def _flush(self) -> None:
        """Hurried first: their receiver need not take in the rest before it answers."""
        frames = self._hurried + self._unhurried
        self._hurried.clear()
        self._unhurried.clear()
        self._unsent_bytes = 0
        if not frames or self._sock is None or self._closing:
            return
        data = frames[0] if len(frames) == 1 else b"".join(frames)
        sent = 0 if self._backlog else self._send(data)
        if sent < len(data) and not self._closing:
            if not self._backlog:
                self._loop.add_writer(self._sock.fileno(), self._writable)
            self._backlog += memoryview(data)[sent:]

    def _writable(self) -> None:
        if self._sock is None or self._dropped:
            return
        del self._backlog[: self._send(self._backlog)]
        if not self._backlog and not self._dropped:
            self._loop.remove_writer(self._sock.fileno())
            if self._closing:
                self._drop("closed by us")

    def _send(self, data: bytes | bytearray) -> int:
        """What the socket took of it."""
        if self._sock is None:
            return 0
        try:
            return self._sock.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            self._drop(f"{type(error).__name__}: {error}")
            return 0

    def _pause(self) -> None:
        self._reading = False
        if self._sock is not None and not self._closing:
            self._loop.remove_reader(self._sock.fileno())

    # --- frames -----------------------------------------------------------------------------------------------------

    def _take_apart(self) -> None:
        start = 0
        put_off = False
        try:
            while self._reading and not put_off and (end := self._frame_end(start)) is not None:
                message = decode(self._buffer[start + HEADER.size : end])
                size_bytes, start = end - start, end
                left = self._have_bytes - end
                self._holding = left > _SHORT_BYTES
                put_off = 0 < left <= _SHORT_BYTES and not isinstance(message, UNHURRIED)
                if not self._owner.arrived(message, size_bytes):
                    self._pause()
        except KVLinkError as error:
            _log.debug("closing the control connection to %s: %s", self._owner.peer, error)
            error.peer = self._owner.peer
            self._owner.fail(error)
            start = self._have_bytes
        self._holding = False
        if self._hurried:
            self._flush()
        self._discard(start)
        if put_off and self._have_bytes:  # most likely what nobody waits for: whoever waits for this goes on first
            self._loop.call_soon(self._take_apart)

    def _discard(self, count: int) -> None:
        """What was taken apart makes room; a buffer that grew for a long frame goes once that is gone."""
        left = self._have_bytes = max(self._have_bytes - count, 0)
        if len(self._buffer) > _BUFFER_BYTES and left <= _BUFFER_BYTES // 2:
            self._buffer = self._buffer[count:]
            self._replace_buffer(_BUFFER_BYTES)
        elif left and count:
            self._buffer[:left] = bytes(self._buffer[count : count + left])

    def _replace_buffer(self, size_bytes: int) -> None:
        larger = memoryview(bytearray(size_bytes))
        larger[: self._have_bytes] = self._buffer[: self._have_bytes]
        self._buffer = larger

    def _frame_end(self, start: int) -> int | None:
        """Where the frame at ``start`` ends in the buffer, or ``None`` while it is not whole."""
        begin = start + HEADER.size
        if self._have_bytes < begin:
            return None
        end = begin + frame_length(self._buffer[start:begin], limits.MAX_FRAME_BYTES)
        return end if self._have_bytes >= end else None
