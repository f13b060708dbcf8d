"""Raw non-blocking sockets: dialling, listening, and frames of exact length.

A connection starts as a bare socket because it may end as one: a channel's socket is given away to native code, so not
one byte more than the handshake's may have been read from it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import stat
from typing import Final

from kvlink import limits
from kvlink.errors import PeerLostError, PeerUnreachableError, UnavailableError
from kvlink.wire import Address, frame_length, pack_frame
from kvlink.wire.codec import HEADER

_PRIVATE: Final = 0o600
_PACING: Final = (b"bbr",)
_UNPACED: Final = b"reno"  # every kernel has it, and lets everybody choose it


async def dial(address: Address) -> socket.socket:
    """A connected non-blocking socket. Cancellation closes what it had opened.

    Raises:
        PeerUnreachableError: no such host, refused, or no route; retryable.
    """
    loop = asyncio.get_running_loop()
    reason = "the name has no address"
    try:
        targets = await _resolve(address)
    except OSError as error:
        targets, reason = [], str(error)
    for family, target in targets:
        try:
            sock = _new_socket(family)
        except OSError as error:  # out of descriptors, most likely
            reason = error.strerror or str(error)
            continue
        try:
            if sock.family != socket.AF_UNIX and _is_here(family, target):
                _stop_pacing(sock)
            await loop.sock_connect(sock, target)
        except OSError as error:
            sock.close()
            reason = error.strerror or str(error)
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    msg = f"cannot connect to {address}: {reason}"
    raise PeerUnreachableError(msg, peer=str(address), stage="connect")


async def listen(address: Address) -> socket.socket:
    """Bind and listen, once; the socket is held from then on (J1: no port is probed and then bound).

    A Unix socket is private to its user; a stale one, which nobody listens on, is replaced.

    Raises:
        UnavailableError: the address is in use, is not this machine's, or may not be used; the remedy is named.
    """
    try:
        family, target = (await _resolve(address))[0]
        sock = _new_socket(family)
    except (OSError, IndexError) as error:
        msg = f"cannot listen on {address}: {error or 'the name has no address'}"
        raise UnavailableError(msg, stage="listen") from None
    try:
        if address.path:
            _remove_stale(address.path)
        else:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            _stop_pacing(sock)
        sock.bind(target)
        if address.path:
            os.chmod(address.path, _PRIVATE)
        sock.listen(limits.LISTEN_BACKLOG)
    except OSError as error:
        sock.close()
        remedy = "use another port, or 0 for any free one" if error.errno == errno.EADDRINUSE else "check the address"
        msg = f"cannot listen on {address}: {error.strerror}; {remedy}"
        raise UnavailableError(msg, stage="listen") from None
    return sock


def local_address(sock: socket.socket) -> Address:
    """Where ``sock`` is bound, with the port it really has."""
    name = sock.getsockname()
    return Address(path=name) if sock.family == socket.AF_UNIX else Address(host=name[0], port=name[1])


async def receive_frame(sock: socket.socket, limit_bytes: int) -> bytes:
    """The payload of the next frame; not a byte past it is read.

    Raises:
        FrameError: it announces more than ``limit_bytes``; nothing was allocated for it.
        PeerLostError: the connection ended first.
    """
    length = frame_length(await _receive_exactly(sock, HEADER.size), limit_bytes)
    return await _receive_exactly(sock, length)


async def send_frame(sock: socket.socket, payload: bytes) -> None:
    """Send one frame.

    Raises:
        PeerLostError: the connection ended first.
    """
    try:
        await asyncio.get_running_loop().sock_sendall(sock, pack_frame(payload))
    except OSError as error:
        raise _lost(error.strerror) from None


async def _receive_exactly(sock: socket.socket, length: int) -> bytes:
    loop = asyncio.get_running_loop()
    data = bytearray(length)
    have = 0
    while have < length:
        try:
            got = await loop.sock_recv_into(sock, memoryview(data)[have:])
        except OSError as error:
            raise _lost(error.strerror) from None
        if not got:
            raise _lost(f"after {have} of {length} bytes")
        have += got
    return bytes(data)


async def _resolve(address: Address) -> list[tuple[int, str | tuple[str, int] | tuple[str, int, int, int]]]:
    """(family, socket address) to try, in order. Asks the resolver only where the host is a name."""
    if address.path:
        return [(socket.AF_UNIX, address.path)]
    try:
        found = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST | socket.AI_PASSIVE
        )
    except socket.gaierror:
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    return [(family, target) for family, _, _, _, target in found]  # type: ignore[misc]  # IPv4 or IPv6 only


def _new_socket(family: int) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setblocking(False)
    tune(sock)
    return sock


def tune(sock: socket.socket) -> None:
    """Set a TCP socket to send small messages at once, and to notice in the end that its peer's host is gone."""
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def tune_accepted(sock: socket.socket) -> None:
    """`tune`, for a socket that `listen`'s accepted: from another host it gets back what the operator chose."""
    tune(sock)
    if sock.family == socket.AF_UNIX or sock.getsockname()[0] == sock.getpeername()[0]:
        return
    with socket.socket(sock.family, socket.SOCK_STREAM) as fresh:
        chosen = _congestion_control(fresh)
    if chosen != _congestion_control(sock):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, chosen)


def _stop_pacing(sock: socket.socket) -> None:
    """Within a host there is nothing to congest, and a congestion control that paces costs most of the speed.

    Measured with BBR, whose pacing stays even if another one is chosen later: 3.1 GB/s against 5.3. So it is decided
    before a socket connects, and for what a listener accepts, taken back where it matters (`tune_accepted`).
    """
    if _congestion_control(sock) in _PACING:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _UNPACED)


def _congestion_control(sock: socket.socket) -> bytes:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")


def _is_here(family: int, target: str | tuple[str, int] | tuple[str, int, int, int]) -> bool:
    """Whether an address is of this host: then it is also where connections to it come from."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(target)  # sends nothing
        return bool(probe.getsockname()[0] == target[0])
    return False


def _remove_stale(path: str) -> None:
    """Unlink a Unix socket that refuses connections: its listener is gone. Anything else at ``path`` stays."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            try:
                probe.connect(path)
            except ConnectionRefusedError:
                os.unlink(path)
            except OSError:
                return


def _lost(how: str | None) -> PeerLostError:
    msg = f"the connection ended during the handshake: {how or 'unknown reason'}"
    return PeerLostError(msg, stage="handshake")
