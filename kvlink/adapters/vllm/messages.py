"""What travels between the halves, inside one engine: plain values, which vLLM carries to its own processes.

Claims travel in their signed encoding, so a worker reads exactly what its scheduler accepted.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Publish:
    """Source: hold this finished request's KV for whoever has the offer."""

    request_id: str
    offer: bytes


@dataclass(frozen=True, slots=True)
class Fetch:
    """Target: read an offer's KV into these blocks.

    Attributes:
        request_id: the engine's.
        offer: the encoded `kvlink.Offer`.
        blocks: one list a KVLink group, in the engine's blocks; entry i takes positions ``[i * block_size, ...)``.
        first_tokens: one a group: what lies before is there already, or has left the group's window.
    """

    request_id: str
    offer: bytes
    blocks: tuple[tuple[int, ...], ...]
    first_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """Target: the scheduler will not have this request's KV fetched; every rank reports its load as failed."""

    request_id: str
    kind: str
    field: str
    text: str


@dataclass(frozen=True, slots=True)
class Decline:
    """Target: nobody here will fetch this offer; its source may free the blocks."""

    offer: bytes
    why: str


@dataclass(slots=True)
class StepWork:
    """All that one step's scheduling asks of every rank.

    ``siblings``: the cards of all of the engine's ranks, once; ``renew``: offers that still queue here.
    """

    siblings: tuple[bytes, ...] = ()
    publish: list[Publish] = field(default_factory=list)
    fetch: list[Fetch] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)
    cancel: list[str] = field(default_factory=list)
    decline: list[Decline] = field(default_factory=list)
    renew: list[bytes] = field(default_factory=list)
