"""Frames and their content: bounded before allocation, typed on decoding, and every failure typed and in few words.

A frame is its payload's length (4 bytes, little-endian) and the payload; the version of what is inside was settled by
the handshake of the connection. A payload is a MessagePack map whose *first* field is its tag. That order makes the
schema alone the bound on nesting: msgspec reads typed fields and refuses an unknown field before looking at its value;
only in search of a tag would it skip over values, of any depth.
"""

from __future__ import annotations

import struct
from typing import Final, TypeVar

import msgspec

from kvlink import limits
from kvlink.errors import FrameError, SchemaError
from kvlink.wire.messages import AnyMessage

T = TypeVar("T")

HEADER: Final = struct.Struct("<I")
_TAG_FIRST: Final = b"\xa4type"
_encoder: Final = msgspec.msgpack.Encoder()
_message_decoder: Final = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: AnyMessage) -> bytes:
    """The payload of ``message``, without its frame header.

    Its ranges are not checked again: our own messages are within them, and the peer refuses them if not.

    Raises:
        SchemaError: a text in it is not Unicode.
        FrameError: it is larger than `limits.MAX_FRAME_BYTES`.
    """
    return encode_with(message, limits.MAX_FRAME_BYTES)


def decode(payload: bytes | bytearray | memoryview) -> AnyMessage:
    """The message in ``payload``. Time and memory are bounded by its size.

    Raises:
        FrameError: truncated, too large, with bytes left over, or not MessagePack.
        SchemaError: unknown tag or field, wrong type, out of range, or nested beyond the schema.
    """
    return decode_with(_message_decoder, payload, "control message", limits.MAX_FRAME_BYTES)


def pack_frame(payload: bytes) -> bytes:
    """``payload`` behind its length."""
    return HEADER.pack(len(payload)) + payload


def frame_length(header: bytes | bytearray | memoryview, limit_bytes: int) -> int:
    """Payload bytes that a frame header announces.

    Args:
        header: exactly `HEADER.size` bytes.
        limit_bytes: what is accepted at this point of the connection.

    Raises:
        FrameError: empty, or larger than ``limit_bytes``; nothing was allocated for it.
    """
    (length,) = HEADER.unpack(header)
    if not 0 < length <= limit_bytes:
        msg = f"frame announces {length} bytes; between 1 and {limit_bytes} are accepted here"
        raise FrameError(msg)
    return int(length)


def encode_with(value: msgspec.Struct, limit_bytes: int) -> bytes:
    """Encode any tagged struct within ``limit_bytes``; raises as `encode` does."""
    name = type(value).__name__
    try:
        payload = _encoder.encode(value)
    except (UnicodeEncodeError, OverflowError, TypeError) as error:
        msg = f"cannot encode {name}: {clip(str(error))}"
        raise SchemaError(msg) from None
    if len(payload) > limit_bytes:
        msg = f"{name} takes {len(payload)} bytes on the wire; {limit_bytes} are allowed"
        raise FrameError(msg)
    return payload


def decode_with(
    decoder: msgspec.msgpack.Decoder[T], payload: bytes | bytearray | memoryview, what: str, limit_bytes: int
) -> T:
    """Decode one tagged struct with ``decoder``; ``what`` names it in errors. Raises as `decode` does."""
    if len(payload) > limit_bytes:
        msg = f"{what} has {len(payload)} bytes; {limit_bytes} are accepted"
        raise FrameError(msg)
    head = bytes(payload[: 1 + len(_TAG_FIRST)])
    if head[1:] != _TAG_FIRST or not 0x80 <= head[0] <= 0x8F:
        msg = (
            f"{what} must be a map of at most 15 fields whose first is 'type'; it starts with {head.hex() or 'nothing'}"
        )
        raise SchemaError(msg)
    try:
        return decoder.decode(payload)
    except msgspec.ValidationError as error:
        msg = f"{what} breaks its schema: {clip(str(error))}"
        raise SchemaError(msg) from None
    except msgspec.DecodeError as error:
        msg = f"{what} is not well-formed: {clip(str(error))}"
        raise FrameError(msg) from None
    except RecursionError:  # cannot be: see the module's text. Were it to, the peer is at fault all the same.
        msg = f"{what} is nested deeper than {limits.MAX_NESTING_DEPTH}"
        raise SchemaError(msg) from None


def clip(text: str) -> str:
    """At most `limits.MAX_ECHO_CHARS` printable ASCII characters of foreign text, for errors and logs."""
    shown = text.encode("ascii", "backslashreplace").decode()
    shown = "".join(c if " " <= c <= "~" else repr(c)[1:-1] for c in shown[: limits.MAX_ECHO_CHARS + 1])
    return shown if len(shown) <= limits.MAX_ECHO_CHARS else shown[: limits.MAX_ECHO_CHARS - 3] + "..."
