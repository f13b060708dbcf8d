"""What a peer tells of itself must be possible, before anything is built on it."""

from __future__ import annotations

from kvlink.errors import SchemaError
from kvlink.layout import check_spec
from kvlink.wire import AnyMessage, Introduce, TransportCard


def check_introduce(message: AnyMessage) -> Introduce:
    """Check a peer's first message in itself; comparing it with our side is the link's.

    Returns:
        The message, which is an `Introduce` whose planes lie inside its regions and do not overlap, and whose keys
        cover its regions.

    Raises:
        SchemaError: another message, or keys that are not of these regions.
        LayoutError: a malformed spec.
    """
    if not isinstance(message, Introduce):
        msg = f"a connection begins with Introduce; the peer sent {type(message).__name__}"
        raise SchemaError(msg, stage="introduce")
    check_spec(message.spec)
    for card in message.transports:
        _check_keys(card, message.spec.region_bytes)
    return message


def _check_keys(card: TransportCard, region_bytes: tuple[int, ...]) -> None:
    seen: set[int] = set()
    for key in card.keys:
        if key.region in seen:
            msg = f"transport {card.name} gives two keys for region {key.region}"
            raise SchemaError(msg, stage="introduce")
        seen.add(key.region)
        if key.region >= len(region_bytes):
            msg = f"transport {card.name} has a key for region {key.region}; the spec has {len(region_bytes)} regions"
            raise SchemaError(msg, stage="introduce")
        if key.length < region_bytes[key.region]:
            have = region_bytes[key.region]
            msg = f"transport {card.name} has a key over {key.length} bytes of region {key.region}, which has {have}"
            raise SchemaError(msg, stage="introduce")
