"""Who is at the other end: mutual challenge-response over one shared secret, bound to one connection.

Pure: bytes in, bytes out; the driver reads and writes frames, and gives the nonces. The messages are in
``kvlink.wire.opening``. Each proof is HMAC-SHA-256 under the secret over the prover's *role* and a hash of every byte
exchanged so far, so that a proof cannot be reflected (roles differ), replayed (both sides give a fresh nonce), or moved
to another version or purpose (both are among the bytes).

A channel, and each lane beside it, proves itself by the same exchange under its own one-time key, which both ends of a
control connection derive from that connection's handshake: the key never crosses a wire. In open mode the secret is
empty and proves nothing.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from kvlink import limits
from kvlink.errors import AuthenticationError, KVLinkError, SchemaError, VersionError
from kvlink.wire import clip, error_to_info, info_to_error
from kvlink.wire.opening import (
    PROTOCOL_VERSIONS,
    Challenge,
    Hello,
    Proof,
    Purpose,
    Rejected,
    decode_opening,
    encode_opening,
)

_Opening = TypeVar("_Opening", Hello, Challenge, Proof)

_DIALER: Final = b"kvlink dialer proof"
_LISTENER: Final = b"kvlink listener proof"
_CHANNEL_KEY: Final = b"kvlink channel key"
_SESSION_ID: Final = b"kvlink session id"
_LANE: Final = b"kvlink lane "


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """What an authenticated connection agreed on.

    Attributes:
        version: of the control protocol.
        purpose: what the connection is for.
        session_id: names a control connection; of a channel, names the control connection that it belongs to.
        channel_key: the one-time key under which the control connection's channel proves itself.
    """

    version: int
    purpose: Purpose
    session_id: bytes
    channel_key: bytes

    def socket(self, index: int) -> tuple[bytes, bytes]:
        """By what a socket of this control connection names and proves itself: a session id, and a one-time key.

        Args:
            index: 0 is the channel, from 1 on its lanes.
        """
        if index == 0:
            return self.session_id, self.channel_key
        lane = hmac.digest(self.channel_key, _LANE + str(index).encode(), "sha512")
        return lane[: limits.SESSION_ID_BYTES], lane[-limits.MAC_BYTES :]


class DialerHandshake:
    """The side that connects: `hello`, then `answer` what comes, then `confirm` what comes.

    Args:
        secret: the shared secret (of a channel: its one-time key), or ``None`` in open mode.
        nonce: `limits.NONCE_BYTES` fresh random bytes.
        purpose: what the connection is for.
        session_id: the control connection that a channel belongs to.
        versions: protocol versions offered.
    """

    def __init__(
        self,
        *,
        secret: bytes | None,
        nonce: bytes,
        purpose: Purpose = Purpose.CONTROL,
        session_id: bytes | None = None,
        versions: tuple[int, ...] = PROTOCOL_VERSIONS,
    ) -> None:
        self._secret = secret
        self._hello = Hello(
            versions=versions, nonce=nonce, purpose=purpose, open_mode=secret is None, session=session_id
        )
        self._transcript = _Transcript(secret)
        self._version = 0

    def hello(self) -> bytes:
        """The first payload to send."""
        return self._transcript.add(encode_opening(self._hello))

    def answer(self, payload: bytes) -> bytes:
        """Read the listener's challenge; returns our proof.

        Raises:
            WireError: not a challenge.
            VersionError: the listener speaks none of our versions.
            AuthenticationError: one side is open and the other is not, or the listener reflects our nonce.
        """
        challenge = _expect(Challenge, payload)
        if challenge.open_mode != (self._secret is None):
            raise _mode_error(dialer_is_open=self._secret is None)
        if challenge.version not in self._hello.versions:
            msg = f"the listener chose protocol version {challenge.version}; we speak {_list(self._hello.versions)}"
            raise VersionError(msg, stage="handshake")
        if hmac.compare_digest(challenge.nonce, self._hello.nonce):
            raise AuthenticationError("the listener sent our own nonce back", stage="handshake")
        self._version = challenge.version
        self._transcript.add(payload)
        return self._transcript.add(encode_opening(Proof(mac=self._transcript.mac(_DIALER))))

    def confirm(self, payload: bytes) -> Session:
        """Read the listener's proof. Only now may anything be told.

        Raises:
            WireError: not a proof.
            AuthenticationError: the proof is wrong, or the listener found ours wrong.
        """
        self._transcript.check(_LISTENER, _expect(Proof, payload), "listener")
        return self._transcript.session(self._version, self._hello)


class ListenerHandshake:
    """The side that is connected to: `challenge` the hello, then `verify` the proof.

    Args:
        secret: the shared secret, or ``None`` in open mode.
        nonce: `limits.NONCE_BYTES` fresh random bytes.
        take_channel_key: gives a session's one-time channel key and forgets it, or ``None`` if it has none (any more).
        versions: protocol versions spoken, best last.
    """

    def __init__(
        self,
        *,
        secret: bytes | None,
        nonce: bytes,
        take_channel_key: Callable[[bytes], bytes | None],
        versions: tuple[int, ...] = PROTOCOL_VERSIONS,
    ) -> None:
        self._secret = secret
        self._nonce = nonce
        self._take_channel_key = take_channel_key
        self._versions = versions
        self._hello: Hello | None = None
        self._version = 0
        self._transcript = _Transcript(secret)

    def challenge(self, payload: bytes) -> bytes:
        """Read the dialer's hello; returns the challenge to send.

        Raises:
            WireError: not a hello.
            VersionError: no common version; both sides' are named.
            AuthenticationError: one side is open and the other is not, the dialer sent no fresh nonce, or a channel's
                key is unknown, used or too old.
        """
        hello = _expect(Hello, payload)
        if (hello.session is None) != (hello.purpose is Purpose.CONTROL):
            # A dialer must not choose the name of a new session: it could take another's.
            raise SchemaError("a channel names its session, and nothing else does", stage="handshake")
        common = set(hello.versions) & set(self._versions)
        if not common:
            msg = f"no common protocol version: listener speaks {_list(self._versions)}, dialer {_list(hello.versions)}"
            raise VersionError(msg, stage="handshake")
        secret = self._secret if hello.purpose is Purpose.CONTROL else self._channel_key(hello.session)
        if hello.open_mode != (secret is None):
            raise _mode_error(dialer_is_open=hello.open_mode)
        self._version = max(common)
        self._hello = hello
        self._transcript = _Transcript(secret)
        self._transcript.add(payload)
        message = Challenge(version=self._version, nonce=self._nonce, open_mode=secret is None)
        return self._transcript.add(encode_opening(message))

    def verify(self, payload: bytes) -> tuple[bytes, Session]:
        """Read the dialer's proof; returns our proof, to be sent first, and what was agreed.

        Raises:
            WireError: not a proof.
            AuthenticationError: the proof is wrong; nothing may be told.
        """
        proof = _expect(Proof, payload)
        if self._hello is None:
            raise SchemaError("a proof came before a hello", stage="handshake")
        self._transcript.check(_DIALER, proof, "dialer")
        self._transcript.add(payload)
        reply = encode_opening(Proof(mac=self._transcript.mac(_LISTENER)))
        return reply, self._transcript.session(self._version, self._hello)

    def _channel_key(self, session_id: bytes | None) -> bytes:
        key = None if session_id is None else self._take_channel_key(session_id)
        if key is None:
            msg = "no such channel key: it is used, too old, or was never given; dial a new control connection"
            raise AuthenticationError(msg, stage="channel")
        return key


def rejection(error: KVLinkError) -> bytes:
    """The payload by which a listener tells a dialer why, before it closes."""
    return encode_opening(Rejected(error=error_to_info(error)))


class _Transcript:
    """Every byte exchanged so far, and what the secret makes of it."""

    def __init__(self, secret: bytes | None) -> None:
        self._secret = secret or b""
        self._hash = hashlib.sha256()

    def add(self, payload: bytes) -> bytes:
        # The length goes in too: without it, bytes could be moved over the border between two messages.
        self._hash.update(len(payload).to_bytes(4, "little") + payload)
        return payload

    def mac(self, label: bytes) -> bytes:
        return hmac.digest(self._secret, label + b"\0" + self._hash.digest(), "sha256")

    def check(self, label: bytes, proof: Proof, who: str) -> None:
        if not hmac.compare_digest(self.mac(label), proof.mac):
            msg = f"the {who} did not prove that it knows the secret; give both sides the same one"
            raise AuthenticationError(msg, stage="handshake")

    def session(self, version: int, hello: Hello) -> Session:
        """Both sides call this with the dialer's proof as the last thing added, so both derive the same."""
        session_id = hello.session or self.mac(_SESSION_ID)[: limits.SESSION_ID_BYTES]
        return Session(
            version=version, purpose=hello.purpose, session_id=session_id, channel_key=self.mac(_CHANNEL_KEY)
        )


def _expect(kind: type[_Opening], payload: bytes) -> _Opening:
    message = decode_opening(payload)
    if isinstance(message, Rejected):
        raise _rejected(message)
    if not isinstance(message, kind):
        msg = f"expected {kind.__name__}, got {type(message).__name__}"
        raise SchemaError(msg, stage="handshake")
    return message


def _rejected(message: Rejected) -> KVLinkError:
    """The listener's refusal as ours. It is not authenticated: only its class and a few of its words are used."""
    told = info_to_error(message.error, stage="handshake")
    cls = type(told) if isinstance(told, (AuthenticationError, VersionError)) else AuthenticationError
    msg = f"the listener refused us: {clip(message.error.message)}"
    return cls(msg, stage="handshake")


def _mode_error(*, dialer_is_open: bool) -> AuthenticationError:
    one, other = ("dialer", "listener") if dialer_is_open else ("listener", "dialer")
    msg = f"the {one} is open and the {other} has a secret; give both the same secret, or set open_mode on both"
    return AuthenticationError(msg, stage="handshake")


def _list(versions: tuple[int, ...]) -> str:
    return ", ".join(map(str, versions))
