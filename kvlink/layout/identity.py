"""Whether two sides serve the same model: compared field by field where both state it, and never guessed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import msgspec

from kvlink.errors import MismatchError
from kvlink.layout.geometry import Identity

_FINGERPRINT_DOMAIN = b"kvlink.identity/1\0"


def fingerprint(identity: Identity) -> str:
    """Stable name of an identity: equal identities have equal fingerprints, in every process and on every machine.

    It also covers what is *not* stated, so two identities that agree (`compare_identity`) may have different ones.

    Returns:
        64 hex digits: SHA-256 over the canonical MessagePack of the fields.
    """
    content = msgspec.msgpack.encode(identity, order="deterministic")
    return hashlib.sha256(_FINGERPRINT_DOMAIN + content).hexdigest()


def compare_identity(
    source: Identity, target: Identity, *, source_peer: str = "source", target_peer: str = "target"
) -> None:
    """Refuse KV of another model.

    Args:
        source: what the sending side states.
        target: what the receiving side states.
        source_peer: who the source is, for the message (``str(place)``).
        target_peer: who the target is.

    Raises:
        MismatchError: names the first field that both state and state differently, such as ``identity.rope.theta``.
    """
    compare_stated("identity", source, target, source_peer=source_peer, target_peer=target_peer)


def compare_stated(
    prefix: str,
    source: msgspec.Struct,
    target: msgspec.Struct,
    *,
    fields: Sequence[str] | None = None,
    source_peer: str = "source",
    target_peer: str = "target",
) -> None:
    """Compare two structs of one type in field order; a field that either side leaves ``None`` is not compared.

    Args:
        prefix: dotted path of the structs, for the error.
        source: the source's.
        target: the target's.
        fields: which fields to compare; all by default.
        source_peer: who the source is.
        target_peer: who the target is.

    Raises:
        MismatchError: for the first difference, nested fields by their dotted path.
    """
    if fields is None and source == target:
        return
    for field, source_value, target_value in _stated_pairs(prefix, source, target, fields):
        if source_value != target_value:
            raise MismatchError(field, source_value, target_value, source=source_peer, target=target_peer)


def _stated_pairs(
    prefix: str, source: msgspec.Struct, target: msgspec.Struct, fields: Sequence[str] | None
) -> Iterator[tuple[str, object, object]]:
    for name in source.__struct_fields__ if fields is None else fields:
        source_value, target_value = getattr(source, name), getattr(target, name)
        if source_value is None or target_value is None:
            continue
        path = f"{prefix}.{name}"
        if isinstance(source_value, msgspec.Struct) and isinstance(target_value, msgspec.Struct):
            yield from _stated_pairs(path, source_value, target_value, None)
        else:
            yield path, source_value, target_value
