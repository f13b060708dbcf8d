"""Control connections: authenticated, introduced, and then a queue of typed messages each way.

A connection is made by `connect` or by ``kvlink.link.listener.Listener``. It owns no task: frames are taken apart as
they arrive, in the loop's callback, and whoever waits for a message is woken.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Final

from kvlink import limits
from kvlink.errors import (
    ClosedError,
    KVLinkError,
    PeerLostError,
    PeerUnreachableError,
)
from kvlink.link.frames import UNHURRIED, Frames
from kvlink.link.handshake import DialerHandshake, Session
from kvlink.link.introduction import check_introduce
from kvlink.link.sockets import dial, receive_frame, send_frame
from kvlink.wire import Address, AnyMessage, Goodbye, Introduce, encode, pack_frame
from kvlink.wire.opening import Purpose

log: Final = logging.getLogger("kvlink.link")


async def connect(
    address: str,
    *,
    secret: bytes | None,
    introduce: Callable[[], Introduce],
    timeout_seconds: float = limits.HANDSHAKE_TIMEOUT_SECONDS,
) -> ControlConnection:
    """Dial a rank, prove each other, and exchange `Introduce`.

    Args:
        address: as `Address` reads it, from a claim.
        secret: the cluster's, or ``None`` for open mode; the listener must be the same.
        introduce: composes what we tell of ourselves; called only once the listener has proven itself.
        timeout_seconds: bound on all of it.

    Raises:
        PeerUnreachableError, PeerLostError: nobody answers, or it went away; retryable.
        AuthenticationError, VersionError: it is not ours, or not of our version.
        WireError, LayoutError: what it says is not what it must be.

    Cancellation closes the socket; the listener sees a lost peer.
    """
    target = Address.parse(address)
    try:
        async with asyncio.timeout(timeout_seconds):
            sock, session = await _dial_and_prove(target, secret, Purpose.CONTROL, None)
            connection = ControlConnection(session, dialled=target)
            await connection.start(sock, introduce)
    except TimeoutError:
        raise _no_answer(target, timeout_seconds) from None
    except KVLinkError as error:
        error.peer = error.peer or address
        raise
    return connection


class ControlConnection:
    """One authenticated connection to one peer, after both have introduced themselves.

    Attributes:
        peer_introduce: what the peer told; its spec is checked (`kvlink.layout.check_spec`), and not yet compared.
        told: what we told the peer.
        peer: ``str`` of the peer's place.
        session: what the handshake agreed on.
        dialled: where we connected to, or ``None`` on the listener's side.
        descriptor: the socket's, readable when a message comes; -1 before there is one.
        closed: set once the socket is closed; nothing is sent or received from then on.
        error: why it ended, or is about to; ``None`` while it works.
    """

    peer_introduce: Introduce
    told: Introduce

    def __init__(self, session: Session, dialled: Address | None) -> None:
        self.session = session
        self.dialled = dialled
        self.peer = "a peer not introduced yet" if dialled is None else str(dialled)
        self.descriptor = -1
        self.closed = asyncio.Event()
        self.error: KVLinkError | None = None
        self._on_message: Callable[[AnyMessage], None] | None = None
        self._on_end: Callable[[KVLinkError], None] | None = None
        self._inbox: deque[tuple[AnyMessage, int]] = deque()
        self._inbox_bytes = 0
        self._arrived = asyncio.Event()
        self._channels: dict[int, socket.socket] = {}
        self._channel_arrived: dict[int, asyncio.Event] = defaultdict(asyncio.Event)
        self._frames = Frames(self)
        self._abort_timer: asyncio.TimerHandle | None = None

    async def start(self, sock: socket.socket, introduce: Callable[[], Introduce]) -> None:
        """Take over an authenticated socket and exchange `Introduce`. `connect` and the listener call it, once.

        Raises:
            SchemaError: the peer's first message is another, or contradicts itself.
            LayoutError: its spec is malformed.
            PeerLostError: it went away.

        Whatever is raised, cancellation included, the socket is closed.
        """
        try:
            self._frames.attach(sock)
            self.descriptor = sock.fileno()
            self.told = introduce()
            self.send(self.told)
            introduced = check_introduce(await self.receive())
        except BaseException as error:
            self.fail(error if isinstance(error, KVLinkError) else ClosedError("given up before it was introduced"))
            sock.close()  # `fail` has taken it out of the loop
            raise
        self.peer_introduce = introduced
        self.peer = str(introduced.spec.place)

    def send(self, message: AnyMessage) -> None:
        """Send ``message``, or queue it; all leave in order. Never blocks.

        Raises:
            KVLinkError: the connection has ended, by `error`.
            PeerLostError: the peer does not read; `limits.MAX_SEND_QUEUE_BYTES` are waiting. The connection is closed.
            SchemaError, FrameError: the message cannot be encoded; the connection goes on without it.
        """
        if self.error is not None:
            raise self.error
        frame = pack_frame(encode(message))
        if self._frames.unsent_bytes + len(frame) > limits.MAX_SEND_QUEUE_BYTES:
            msg = f"the peer does not read: {self._frames.unsent_bytes} bytes are waiting"
            error = PeerLostError(msg, peer=self.peer, stage="send")
            self.fail(error)
            raise error
        self._frames.write(frame, hurried=not isinstance(message, UNHURRIED))
        if isinstance(message, Goodbye):
            self._frames.hurry()

    def listen(self, on_message: Callable[[AnyMessage], None], on_end: Callable[[KVLinkError], None]) -> None:
        """Hand over each message as it arrives, and in the end why there are no more. Once, and instead of `receive`.

        What a task that awaits `receive` would cost, a turn of the loop a message, is most of a short request's time.

        Args:
            on_message: what has arrived before comes first, at once. Whatever it raises ends the connection.
            on_end: called once, in a turn of its own.
        """
        self._on_message, self._on_end = on_message, on_end
        while self._inbox:
            self._hear(self._inbox.popleft()[0])
        self._inbox_bytes = 0
        if self.error is not None:
            asyncio.get_running_loop().call_soon(on_end, self.error)
        else:
            self._frames.resume()

    async def receive(self) -> AnyMessage:
        """The next message. One caller at a time; cancellation loses no message.

        Raises:
            PeerLostError: the peer closed or reset the connection.
            WireError: it sent what it must not; the connection is closed.
            ClosedError: `close` was called.
        """
        while not self._inbox:
            if self.error is not None:
                raise self.error
            self._arrived.clear()
            await self._arrived.wait()
        message, size_bytes = self._inbox.popleft()
        self._inbox_bytes -= size_bytes
        if self._has_room(limits.MAX_QUEUED_MESSAGES // 2, limits.MAX_QUEUED_BYTES // 2):
            self._frames.resume()
        return message

    async def channel(
        self,
        index: int = 0,
        *,
        path: str | None = None,
        timeout_seconds: float = limits.HANDSHAKE_TIMEOUT_SECONDS,
    ) -> socket.socket:
        """The native channel that goes with this connection, or a lane beside it: a socket proven by a one-time key.

        The side that dialled dials again, the other waits for it. Both get a non-blocking socket that nobody else
        knows, at its first byte: ready for the native engine, which takes over its descriptor (``sock.detach()``).

        Args:
            index: 0 is the channel; its lanes are 1 to `limits.MAX_LANES`. Each can be had once.
            path: the Unix socket to dial, where the transport listens by itself (`Transport.lane_listener`).
            timeout_seconds: bound on it.

        Raises:
            PeerUnreachableError, PeerLostError: no channel within the bound; retryable, with a new connection.
            AuthenticationError: the key is used or too old (`limits.CHANNEL_KEY_SECONDS`).
            KVLinkError: the connection has ended, by `error`.

        Cancellation closes a half-open channel and uses up the key; a whole one that nobody took is closed with the
        connection.
        """
        try:
            async with asyncio.timeout(timeout_seconds):
                if self.dialled is not None:
                    return await self._dial_channel(Address(path=path) if path else self.dialled, index)
                if self.error is None:
                    await self._channel_arrived[index].wait()
        except TimeoutError:
            msg = f"no channel within {timeout_seconds:g} s"
            raise PeerUnreachableError(msg, peer=self.peer, stage="channel") from None
        sock = self._channels.pop(index, None)
        if sock is None:
            raise self.error or ClosedError("the channel was taken already", peer=self.peer, stage="channel")
        return sock

    def readable(self) -> None:
        """Take in what the socket has, and hear it; nothing happens if it has nothing."""
        self._frames.readable()

    def deliver_channel(self, index: int, sock: socket.socket) -> None:
        """The listener's call: the channel or a lane has proven itself. Closes ``sock`` if the connection ended."""
        if self.error is not None:
            sock.close()
            return
        self._channels[index] = sock
        self._channel_arrived[index].set()

    def close(self) -> None:
        """Close; what is queued is sent first, within `limits.CLOSE_TIMEOUT_SECONDS`. Idempotent; see `closed`."""
        if self._end(ClosedError("the control connection was closed", peer=self.peer)):
            self._frames.close()
            loop = asyncio.get_running_loop()
            self._abort_timer = loop.call_later(limits.CLOSE_TIMEOUT_SECONDS, self._frames.abort)

    def fail(self, error: KVLinkError) -> None:
        """Close at once because of ``error``, which `receive` raises after what came before it. Idempotent."""
        if self._end(error):
            self._frames.abort()

    def arrived(self, message: AnyMessage, size_bytes: int) -> bool:
        """The frames' call: hand ``message`` over, or put it into the inbox; whether there is room for more."""
        if self._on_message is not None:
            self._hear(message)
            return True
        self._inbox.append((message, size_bytes))
        self._inbox_bytes += size_bytes
        self._arrived.set()
        return self._has_room(limits.MAX_QUEUED_MESSAGES, limits.MAX_QUEUED_BYTES)

    def lost(self, how: str) -> None:
        """The frames' call: the socket is closed."""
        self._end(PeerLostError(f"the control connection ended: {how}", peer=self.peer, stage="control"))
        if self._abort_timer is not None:
            self._abort_timer.cancel()
        self.closed.set()

    def _hear(self, message: AnyMessage) -> None:
        if self.error is not None or self._on_message is None:
            return
        try:
            self._on_message(message)
        except KVLinkError as error:
            self.fail(error)
        except Exception as error:  # our own fault, and the peer waits for an answer that will not come
            log.exception("a %s of %s failed inside", type(message).__name__, self.peer)
            self.fail(ClosedError(f"failed inside: {type(error).__name__}", peer=self.peer, stage="control"))

    async def _dial_channel(self, address: Address, index: int) -> socket.socket:
        if self.error is not None:
            raise self.error
        session_id, key = self.session.socket(index)
        sock, _ = await _dial_and_prove(address, key, Purpose.CHANNEL, session_id)
        return sock

    def _has_room(self, messages: int, size_bytes: int) -> bool:
        return len(self._inbox) < messages and self._inbox_bytes < size_bytes

    def _end(self, error: KVLinkError) -> bool:
        if self.error is not None:
            return False
        self.error = error
        self._arrived.set()
        for arrived in self._channel_arrived.values():
            arrived.set()
        for sock in self._channels.values():
            sock.close()
        self._channels.clear()
        if self._on_end is not None:
            asyncio.get_running_loop().call_soon(self._on_end, error)
        return True


async def _dial_and_prove(
    address: Address, secret: bytes | None, purpose: Purpose, session_id: bytes | None
) -> tuple[socket.socket, Session]:
    """A socket whose other end has proven itself. Closed if anything goes wrong, cancellation included."""
    handshake = DialerHandshake(
        secret=secret, nonce=os.urandom(limits.NONCE_BYTES), purpose=purpose, session_id=session_id
    )
    limit = limits.MAX_UNAUTHENTICATED_FRAME_BYTES
    sock = await dial(address)
    with contextlib.ExitStack() as undo:
        undo.callback(sock.close)
        await send_frame(sock, handshake.hello())
        await send_frame(sock, handshake.answer(await receive_frame(sock, limit)))
        session = handshake.confirm(await receive_frame(sock, limit))
        undo.pop_all()
    return sock, session


def _no_answer(address: Address, seconds: float) -> PeerUnreachableError:
    msg = f"{address} did not answer and introduce itself within {seconds:g} s"
    return PeerUnreachableError(msg, peer=str(address), stage="handshake")
