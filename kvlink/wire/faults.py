"""Errors across the wire: one table of codes over the tree in `kvlink.errors`, read both ways."""

from __future__ import annotations

from typing import Final

import msgspec

from kvlink import errors, limits
from kvlink.errors import BusyError, KVLinkError, MismatchError
from kvlink.wire.codec import clip
from kvlink.wire.messages import ErrorInfo

CLASS_OF_CODE: Final[dict[str, type[KVLinkError]]] = {
    cls.code: cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, KVLinkError)
}
_MAX_RETRY_AFTER_SECONDS: Final = 86_400.0


def error_to_info(error: KVLinkError) -> ErrorInfo:
    """What the peer is told about ``error``: its text, its code, and the fields of its class.

    A class from outside `kvlink.errors` (a transport's own) travels as its nearest ancestor there.
    """
    info = ErrorInfo(
        code=next(cls.code for cls in type(error).__mro__ if cls in _CLASSES),
        message=_fit(error.message),
        retryable=error.retryable,
    )
    if isinstance(error, BusyError):
        hint = min(max(error.retry_after_seconds, 0.0), _MAX_RETRY_AFTER_SECONDS)
        return msgspec.structs.replace(info, retry_after_seconds=hint)
    if isinstance(error, MismatchError):
        values = {"source_value": _fit(error.source_value), "target_value": _fit(error.target_value)}
        return msgspec.structs.replace(info, field=_fit(error.field), **values)
    return info


def info_to_error(
    info: ErrorInfo, *, request_id: str | None = None, peer: str | None = None, stage: str | None = None
) -> KVLinkError:
    """The error that ``info`` tells of, as if raised here: the peer's text, our knowledge of where.

    A code that we do not know becomes the root class, with the code named in the text.
    """
    error: KVLinkError
    cls = CLASS_OF_CODE.get(info.code)
    if cls is None:
        error = KVLinkError(f"{info.message} (peer's code {clip(info.code)})", retryable=info.retryable)
    elif issubclass(cls, MismatchError):
        error = cls(info.field or "unnamed field", info.source_value, info.target_value)
        _say(error, info.message)
    elif issubclass(cls, BusyError):
        error = cls(info.message, retry_after_seconds=info.retry_after_seconds)
    else:
        error = cls(info.message)
    error.retryable = info.retryable
    error.request_id, error.peer, error.stage = request_id, peer, stage
    return error


_CLASSES: Final = frozenset(CLASS_OF_CODE.values())


def _fit(value: object) -> str:
    """``value`` as text that the schema accepts: Unicode without lone surrogates, and short enough."""
    text = str(value).encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= limits.MAX_TEXT_BYTES else text[: limits.MAX_TEXT_BYTES - 3] + "..."


def _say(error: KVLinkError, message: str) -> None:
    """Replace the text that the class composed by the peer's own, which names its ranks."""
    error.message = message
    error.args = (message,)
