"""The first messages of a connection, before which nothing is told: who may speak, and in which version.

::

    dialer                                      listener
    Hello(versions, nonce, purpose)  ------->
                       <---------------------   Challenge(version, nonce)
    Proof(mac over all of the above) ------->
                       <---------------------   Proof(mac over all of the above and the dialer's)

All are small, and are held to `limits.MAX_UNAUTHENTICATED_FRAME_BYTES`. ``kvlink.link.handshake`` says what they mean.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final

import msgspec

from kvlink import limits
from kvlink.wire.codec import decode_with, encode_with
from kvlink.wire.messages import ErrorInfo, Mac

PROTOCOL_VERSIONS: Final = (1,)
"""Versions of the control protocol that we speak, best last."""

Version = Annotated[int, msgspec.Meta(ge=1, le=65_535)]
Nonce = Annotated[bytes, msgspec.Meta(min_length=limits.NONCE_BYTES, max_length=limits.NONCE_BYTES)]
SessionId = Annotated[bytes, msgspec.Meta(min_length=limits.SESSION_ID_BYTES, max_length=limits.SESSION_ID_BYTES)]


class Purpose(StrEnum):
    """What a connection is for."""

    CONTROL = "control"
    CHANNEL = "channel"


class Opening(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag=True):
    """Base of the messages that open a connection."""


class Hello(Opening, frozen=True):
    """Dialer -> listener. ``session`` names the control connection that a channel belongs to."""

    versions: Annotated[tuple[Version, ...], msgspec.Meta(min_length=1, max_length=16)]
    nonce: Nonce
    purpose: Purpose
    open_mode: bool
    session: SessionId | None = None


class Challenge(Opening, frozen=True):
    """Listener -> dialer: the version we will speak, and our nonce."""

    version: Version
    nonce: Nonce
    open_mode: bool


class Proof(Opening, frozen=True):
    """Either way: HMAC-SHA-256 that only who knows the secret can make, for this role and this connection."""

    mac: Mac


class Rejected(Opening, frozen=True):
    """Listener -> dialer: why not, before it closes. Says nothing that is not in the documentation."""

    error: ErrorInfo


AnyOpening = Hello | Challenge | Proof | Rejected
_decoder: Final = msgspec.msgpack.Decoder(AnyOpening)


def encode_opening(message: AnyOpening) -> bytes:
    """The payload of an opening message; raises as `kvlink.wire.encode` does."""
    return encode_with(message, limits.MAX_UNAUTHENTICATED_FRAME_BYTES)


def decode_opening(payload: bytes) -> AnyOpening:
    """The opening message in ``payload``; raises as `kvlink.wire.decode` does."""
    return decode_with(_decoder, payload, "opening message", limits.MAX_UNAUTHENTICATED_FRAME_BYTES)
