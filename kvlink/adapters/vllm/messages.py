"""What travels between the halves, inside one engine: plain values, which vLLM carries to its own processes.

Claims travel in their signed encoding, so a worker reads exactly what its scheduler accepted.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvlink.descriptor import Facts


@dataclass(frozen=True, slots=True)
class Publish:
    """Source: hold this finished request's KV for whoever has the offer."""

    request_id: str
    offer: bytes


@dataclass(frozen=True, slots=True)
class Announce:
    """Source, push: this request has arrived, and its KV is for whoever brings a ticket for ``key``.

    Attributes:
        request_id: the engine's.
        key: the router's, the same on both sides.
        tokens: of its prompt.
        facts: what is said of it.
        ttl_seconds: how long it waits for a reader, from now and from its seal; the reader renews it.
    """

    request_id: str
    key: str
    tokens: int
    facts: Facts
    ttl_seconds: float


@dataclass(frozen=True, slots=True)
class Advance:
    """Source, push: this step computes a request up to ``tokens``.

    ``blocks``: one list a KVLink group, all of the request's so far, in the engine's blocks.
    """

    request_id: str
    blocks: tuple[tuple[int, ...], ...]
    tokens: int


@dataclass(frozen=True, slots=True)
class Hand:
    """Source, push: the request has ended, and its blocks are held until every rank has reported.

    ``first_tokens``: where each group begins; windows have left earlier positions behind.
    """

    request_id: str
    blocks: tuple[tuple[int, ...], ...]
    tokens: int
    first_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fetch:
    """Target: read an offer's KV into these blocks, or take in what is pushed.

    Attributes:
        request_id: the engine's.
        offer: the encoded `kvlink.Offer`.
        blocks: one list a KVLink group, in the engine's blocks; entry i takes positions ``[i * block_size, ...)``.
        first_tokens: one a group: what lies before is there already, or has left the group's window.
        ticket: push: the encoded `kvlink.Ticket`; the offer then only says who will announce, and under which key.
    """

    request_id: str
    offer: bytes
    blocks: tuple[tuple[int, ...], ...]
    first_tokens: tuple[int, ...]
    ticket: bytes | None = None


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

    ``siblings``: the cards of all of the engine's ranks, once; ``renew``: offers that still queue here, and pushes that
    are not here yet. ``preempted``: pushes whose blocks other requests write in this step; ``withdraw``: pushes whose
    requests were aborted, their blocks held until every rank has reported. ``void``: what was published or
    handed over, in this step too, and has not been fetched is withdrawn.
    """

    siblings: tuple[bytes, ...] = ()
    publish: list[Publish] = field(default_factory=list)
    announce: list[Announce] = field(default_factory=list)
    advance: list[Advance] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    hand: list[Hand] = field(default_factory=list)
    withdraw: list[str] = field(default_factory=list)
    fetch: list[Fetch] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)
    cancel: list[str] = field(default_factory=list)
    decline: list[Decline] = field(default_factory=list)
    renew: list[bytes] = field(default_factory=list)
    void: bool = False
