"""The listening side: binds once and holds, lets in who proves itself, and survives whoever does not."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Final

from kvlink import limits
from kvlink.errors import AuthenticationError, ClosedError, KVLinkError, VersionError
from kvlink.link.control import ControlConnection
from kvlink.link.handshake import ListenerHandshake, Session, rejection
from kvlink.link.sockets import listen, local_address, receive_frame, send_frame, tune_accepted
from kvlink.wire import Address, Introduce, pack_frame

log: Final = logging.getLogger("kvlink.link")

OnConnection = Callable[[ControlConnection], None]


class Listener:
    """One address on which peers open control connections and their channels.

    Attributes:
        address: where it is bound, with its real port.
        refused: connections that did not get in, by reason: the ``code`` of a typed error, ``timeout``, ``crowded``, or
            what ``turns_away`` says.
        turns_away: why every connection is closed at once for the time being, in a word, or ``None``.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        secret: bytes | None,
        introduce: Callable[[], Introduce],
        handshake_seconds: float,
    ) -> None:
        self.address = local_address(sock)
        self.refused: Counter[str] = Counter()
        self.turns_away: str | None = None
        self._socket = sock
        self._lane_sockets: list[socket.socket] = []
        self._inode = os.stat(self.address.path).st_ino if self.address.path else None
        self._secret = secret
        self._introduce = introduce
        self._handshake_seconds = handshake_seconds
        self._unproven: dict[asyncio.Task[bool], None] = {}
        # By session id: not yet come. Connections belong to whoever brings them up; those that ended are not kept.
        self._sockets: dict[bytes, tuple[float, weakref.ref[ControlConnection], int]] = {}
        self._resumes: dict[socket.socket, asyncio.TimerHandle] = {}

    @classmethod
    async def bind(
        cls,
        address: str,
        *,
        secret: bytes | None,
        introduce: Callable[[], Introduce],
        handshake_seconds: float = limits.HANDSHAKE_TIMEOUT_SECONDS,
    ) -> Listener:
        """Bind and hold. Peers may connect from now on; they are answered once `serve` runs.

        Args:
            address: as `Address` reads it; port 0 takes any free one.
            secret: the cluster's, or ``None`` for open mode: whoever reaches the address is let in.
            introduce: composes what we tell of ourselves; called once for each peer that has proven itself.
            handshake_seconds: bound on a connection's way from accepted to introduced.

        Raises:
            SchemaError: not an address.
            UnavailableError: it cannot be bound; the remedy is named.
        """
        sock = await listen(Address.parse(address))
        listener = cls(sock, secret=secret, introduce=introduce, handshake_seconds=handshake_seconds)
        if secret is None:
            log.info("listening on %s in open mode: whoever reaches it is let in", listener.address)
        else:
            log.info("listening on %s, with a secret", listener.address)
        return listener

    def accept_lanes(self, sock: socket.socket) -> None:
        """Let in lanes, and nothing else, on ``sock``: listening, non-blocking, its owner's to close."""
        self._lane_sockets.append(sock)

    async def serve(self, on_connection: OnConnection) -> None:
        """Let peers in until cancelled.

        Args:
            on_connection: gets each introduced connection, and owns it from then on. Must not block.

        Cancellation ends the handshakes that run and closes their sockets. Connections that were handed over live on;
        the address stays bound until `close`.
        """
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as handshakes:
            sockets = (self._socket, *self._lane_sockets)
            for sock in sockets:
                loop.add_reader(sock, self._accept, sock, handshakes, on_connection)
            try:
                await loop.create_future()
            finally:
                for resume in self._resumes.values():
                    resume.cancel()
                for sock in sockets:
                    loop.remove_reader(sock)

    def close(self) -> None:
        """Give the address up. Idempotent; call it after `serve` has ended."""
        if self._socket.fileno() < 0:
            return
        self._socket.close()
        self._sockets.clear()
        if self.address.path:
            with contextlib.suppress(FileNotFoundError):
                if os.stat(self.address.path).st_ino == self._inode:  # or another listener has taken the path since
                    os.unlink(self.address.path)

    def _accept(self, listening: socket.socket, handshakes: asyncio.TaskGroup, on_connection: OnConnection) -> None:
        """The socket is readable: take what waits. Synchronous, so that no accepted socket is lost to a cancel."""
        for _ in range(limits.LISTEN_BACKLOG):
            try:
                sock, _ = listening.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionAbortedError:
                self.refused["peer_lost"] += 1
                continue
            except OSError as error:
                self._pause(error, listening, handshakes, on_connection)
                return
            if self.turns_away is not None:
                sock.close()
                self.refused[self.turns_away] += 1
                continue
            sock.setblocking(False)
            if len(self._unproven) >= limits.MAX_PENDING_HANDSHAKES:
                # The oldest goes: a good peer is through in milliseconds, so the slow ones make room.
                oldest = next(iter(self._unproven))
                del self._unproven[oldest]
                oldest.cancel()
                self.refused["crowded"] += 1
            lane_only = listening is not self._socket
            task = handshakes.create_task(self._let_in(sock, on_connection, lane_only=lane_only))
            self._unproven[task] = None
            task.add_done_callback(partial(self._finished, sock))

    def _finished(self, sock: socket.socket, task: asyncio.Task[bool]) -> None:
        """A socket that was not handed over is closed here, also where its task was cancelled before it began."""
        self._unproven.pop(task, None)
        if task.cancelled() or not task.result():
            sock.close()

    def _pause(
        self, error: OSError, listening: socket.socket, handshakes: asyncio.TaskGroup, on_connection: OnConnection
    ) -> None:
        """Out of descriptors, most likely: the pending connection keeps the socket readable, so do not spin on it."""
        log.warning("cannot accept on %s: %s; trying again", self.address, error.strerror)
        loop = asyncio.get_running_loop()
        loop.remove_reader(listening)
        self._resumes[listening] = loop.call_later(
            limits.ACCEPT_PAUSE_SECONDS, loop.add_reader, listening, self._accept, listening, handshakes, on_connection
        )

    async def _let_in(self, sock: socket.socket, on_connection: OnConnection, *, lane_only: bool) -> bool:
        """One accepted socket's way to a connection; False if it was refused. Its errors end here."""
        try:
            async with asyncio.timeout(self._handshake_seconds):
                await self._greet(sock, on_connection, lane_only=lane_only)
        except TimeoutError:
            self._refuse("timeout", f"not introduced within {self._handshake_seconds:g} s")
        except KVLinkError as error:
            self._refuse(error.code, str(error))
        except OSError as error:
            self._refuse("peer_lost", str(error))
        except Exception:  # our own fault: it must not take the listener down, nor stay unseen
            log.exception("letting in a connection to %s failed", self.address)
            self._refuse("internal", "see the log")
        else:
            return True
        return False

    async def _greet(self, sock: socket.socket, on_connection: OnConnection, *, lane_only: bool) -> None:
        """Authenticate, then introduce and hand over, or bring a channel to its connection."""
        tune_accepted(sock)
        session, owner = await self._authenticate(sock)
        if (task := asyncio.current_task()) is not None:
            self._unproven.pop(task, None)
        if owner is not None:
            connection, index = owner
            connection.deliver_channel(index, sock)
            return
        if lane_only:  # in open mode it may be reached by users who cannot reach the address that we listen on
            raise AuthenticationError("a control connection came where only lanes may", stage="handshake")
        connection = ControlConnection(session, dialled=None)
        # Before the peer can have our Introduce, and with it leave to open the channel.
        self._remember(connection)
        try:
            await connection.start(sock, self._introduce)
            on_connection(connection)
        except BaseException:
            self._forget(session)
            connection.fail(ClosedError("nobody took the connection"))
            raise

    async def _authenticate(self, sock: socket.socket) -> tuple[Session, tuple[ControlConnection, int] | None]:
        """The handshake. Returns the session and, for a channel or lane, whose it is and which."""
        owner: tuple[ControlConnection, int] | None = None

        def take_channel_key(session_id: bytes) -> bytes | None:
            nonlocal owner
            owner = self._take_socket(session_id)
            if owner is None:
                return None
            connection, index = owner
            return connection.session.socket(index)[1]

        handshake = ListenerHandshake(
            secret=self._secret, nonce=os.urandom(limits.NONCE_BYTES), take_channel_key=take_channel_key
        )
        limit = limits.MAX_UNAUTHENTICATED_FRAME_BYTES
        try:
            await send_frame(sock, handshake.challenge(await receive_frame(sock, limit)))
            proof, session = handshake.verify(await receive_frame(sock, limit))
        except (AuthenticationError, VersionError) as error:
            with contextlib.suppress(OSError):  # told if there is room in the socket; never waited for
                sock.send(pack_frame(rejection(error)))
            raise
        await send_frame(sock, proof)
        return session, owner

    def _remember(self, connection: ControlConnection) -> None:
        now = asyncio.get_running_loop().time()
        for session_id, (deadline, _, _) in list(self._sockets.items()):  # oldest first
            if deadline > now:
                break
            del self._sockets[session_id]
        for index in range(1 + limits.MAX_LANES):
            session_id, _ = connection.session.socket(index)
            self._sockets[session_id] = (now + limits.CHANNEL_KEY_SECONDS, weakref.ref(connection), index)

    def _forget(self, session: Session) -> None:
        for index in range(1 + limits.MAX_LANES):
            self._sockets.pop(session.socket(index)[0], None)

    def _take_socket(self, session_id: bytes) -> tuple[ControlConnection, int] | None:
        """The live control connection that awaits a socket by this name, and which: once, and not too late."""
        deadline, held, index = self._sockets.pop(session_id, (0.0, None, 0))
        connection = held() if held is not None else None
        if connection is None or connection.error is not None or deadline < asyncio.get_running_loop().time():
            return None
        return connection, index

    def _refuse(self, reason: str, detail: str) -> None:
        self.refused[reason] += 1
        log.debug("a connection to %s was refused (%s): %s", self.address, reason, detail)
