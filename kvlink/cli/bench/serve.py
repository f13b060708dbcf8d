"""The two halves on two machines: the serving side lends worker processes to whoever proves that it may ask.

A connection is first authenticated, by the control protocol's own handshake under a key derived from the secret, and
is then the standard input and output of one worker, until either ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import secrets
from collections.abc import Callable
from typing import Final

from kvlink import limits
from kvlink.cli.bench import messages as m
from kvlink.cli.bench.workers import StreamWorker, end_child, spawn_worker
from kvlink.config import Config
from kvlink.errors import (
    AuthenticationError,
    ConfigError,
    KVLinkError,
    PeerUnreachableError,
    SchemaError,
    UnavailableError,
)
from kvlink.link.handshake import DialerHandshake, ListenerHandshake, rejection
from kvlink.wire import Address, clip, frame_length, pack_frame
from kvlink.wire.codec import HEADER

_RELAY_BYTES: Final = 256 * 1024
_MAX_REFUSALS_TOLD: Final = 10
"""Between two benches: whoever reaches the port could otherwise fill the screen."""


def bench_secret(*, open_mode: bool) -> bytes | None:
    """The key of the bench's own connections, or ``None`` in open mode.

    It is derived from the shared secret, so that a proof made here is of no use on a link's control port.

    Raises:
        ConfigError: neither a secret nor open mode was given.
    """
    if open_mode:
        return None
    secret = Config.load().secret
    if secret is None:
        msg = "two machines need a secret: set KVLINK_SECRET or KVLINK_SECRET_FILE on both, or give --open on both"
        raise ConfigError(msg)
    return hmac.digest(secret, b"kvlink bench", "sha256")


def split_address(text: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT``; an IPv6 host stands in brackets.

    Raises:
        ConfigError: it is neither.
    """
    try:
        address = Address.parse(f"tcp://{text}")
    except SchemaError as error:
        msg = f"{text!r} is not HOST:PORT"
        raise ConfigError(msg) from error
    return address.host, address.port


class Lender:
    """Serves one bench: every authenticated connection gets a worker; ends when the last of them has ended.

    Once the first of them has ended, so has the bench, and who comes now is refused: it must be another one. A lender
    that is to ``stay`` refuses nobody for that, and serves one bench after the other until it is cancelled.
    """

    def __init__(self, secret: bytes | None, *, stay: bool = False) -> None:
        self._secret = secret
        self._stay = stay
        self._live = 0
        self._statuses: list[int] = []
        self._ended = asyncio.Event()
        self._spent = False
        self._refusals = 0
        self._announce: Callable[[str], None] = lambda _words: None

    async def serve(self, host: str, port: int, announce: Callable[[str], None]) -> bool:
        """Listen until one bench has run; whether all its workers ended verified.

        Args:
            host: the address to listen on.
            port: likewise; 0 is any that is free.
            announce: shows a line to the user: where it listens, what has ended, whom it refused and why.

        Raises:
            UnavailableError: the address cannot be listened on.
        """
        self._announce = announce
        try:
            server = await asyncio.start_server(self._lend, host, port, limit=m.MAX_LINE_BYTES)
        except OSError as error:
            msg = f"cannot listen on {host} port {port}: {error.strerror or error}; give another --serve"
            raise UnavailableError(msg) from error
        try:
            bound = server.sockets[0].getsockname()
            announce(f"serving on {bound[0]} port {bound[1]}: waiting for a target half")
            await self._ended.wait()
            while self._stay:
                verdict = "verified" if self._verified() else "NOT verified"
                announce(f"workers that have ended, {verdict}: {len(self._statuses)}; waiting for a target half")
                self._statuses.clear()
                self._refusals = 0
                self._ended.clear()
                await self._ended.wait()
        finally:
            server.close()
        return self._verified()

    def _verified(self) -> bool:
        return bool(self._statuses) and not any(self._statuses)

    async def _lend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await asyncio.wait_for(self._admit(reader, writer), limits.HANDSHAKE_TIMEOUT_SECONDS)
        except (KVLinkError, TimeoutError, ConnectionError, asyncio.IncompleteReadError) as error:
            writer.close()
            self._tell_refused(writer, error)
            return
        self._live += 1
        try:
            self._statuses.append(await self._relay(reader, writer))
        finally:
            self._live -= 1
            if not self._live:
                self._ended.set()

    def _tell_refused(self, writer: asyncio.StreamWriter, error: Exception) -> None:
        self._refusals += 1
        if self._refusals > _MAX_REFUSALS_TOLD:
            return
        host, port = writer.get_extra_info("peername")[:2]
        why = clip(str(error)) if isinstance(error, KVLinkError) else "it did not complete the handshake"
        more = "; further refusals are not shown" if self._refusals == _MAX_REFUSALS_TOLD else ""
        self._announce(f"refused {host} port {port}: {why}{more}")

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handshake = ListenerHandshake(
            secret=self._secret, nonce=secrets.token_bytes(limits.NONCE_BYTES), take_channel_key=lambda _session: None
        )
        try:
            writer.write(pack_frame(handshake.challenge(await _frame(reader))))
            proof, _ = handshake.verify(await _frame(reader))
            if self._spent:
                raise ConfigError("the serving half has run its one bench: give it --stay for more")
            writer.write(pack_frame(proof))
        except KVLinkError as error:
            writer.write(pack_frame(rejection(error)))
            raise

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
        host = writer.get_extra_info("sockname")[0]
        process = await spawn_worker(host, os.environ, open_mode=self._secret is None)
        if process.stdin is None or process.stdout is None:
            msg = "a worker's standard input and output must be pipes"
            raise ValueError(msg)
        inward = asyncio.create_task(_pump(reader, process.stdin))
        outward = asyncio.create_task(_pump(process.stdout, writer))
        try:
            await asyncio.wait((inward, outward), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._spent = not self._stay
            process.stdin.close()
            status = await end_child(process)
            outward.cancel()
            inward.cancel()
            writer.close()
        return status


async def borrow(name: str, host: str, port: int, secret: bytes | None) -> tuple[StreamWorker, str]:
    """Connect to a lender: a worker there, and the address of ours by which that machine is reached.

    Raises:
        PeerUnreachableError: nobody serves there.
        AuthenticationError: one side does not know the other's secret.
    """
    try:
        reader, writer = await asyncio.open_connection(host, port, limit=m.MAX_LINE_BYTES)
    except OSError as error:
        msg = (
            f"nobody serves on {host} port {port} ({error.strerror or error}): start --serve there first, with --stay "
            "for more than one bench"
        )
        raise PeerUnreachableError(msg) from error
    handshake = DialerHandshake(secret=secret, nonce=secrets.token_bytes(limits.NONCE_BYTES))
    try:
        async with asyncio.timeout(limits.HANDSHAKE_TIMEOUT_SECONDS):
            writer.write(pack_frame(handshake.hello()))
            writer.write(pack_frame(handshake.answer(await _frame(reader))))
            handshake.confirm(await _frame(reader))
    except (TimeoutError, ConnectionError, asyncio.IncompleteReadError) as error:
        writer.close()
        msg = (
            f"{host} port {port} did not complete the handshake: is a bench serving there, with --stay for more than "
            "one?"
        )
        raise AuthenticationError(msg, stage="handshake") from error
    except KVLinkError:
        writer.close()
        raise
    return StreamWorker(name, reader, writer), writer.get_extra_info("sockname")[0]


async def _frame(reader: asyncio.StreamReader) -> bytes:
    header = await reader.readexactly(HEADER.size)
    return await reader.readexactly(frame_length(header, limits.MAX_UNAUTHENTICATED_FRAME_BYTES))


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await source.read(_RELAY_BYTES):
            sink.write(data)
            await sink.drain()
