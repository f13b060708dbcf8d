"""What the source half keeps of one request: its blocks, its attempts, and how its end is told."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from kvlink.descriptor import Facts, descriptor_digest
from kvlink.layout import NOTHING, Frontier
from kvlink.link.part import LivePart, Result
from kvlink.link.target_work import STATE_OF_END
from kvlink.protocol import End, SourceEvent, SourcePart
from kvlink.wire import Ask, ErrorInfo, info_to_error

if TYPE_CHECKING:
    from kvlink.descriptor import BlockList, FirstTokens, KVDescriptor
    from kvlink.layout import Place
    from kvlink.link.machine import Machine
    from kvlink.link.source_outgoing import Exposed, Outgoing
    from kvlink.plan import CopyPlan, LegPlanner
    from kvlink.relayout.gpu import Moment
    from kvlink.wire import Offer

Attempt: TypeAlias = tuple[str, int]
"""Peer and attempt."""


class Draft(NamedTuple):
    """What a seal would cover, checked, and its digest."""

    descriptor: KVDescriptor
    digest: str


@dataclass(slots=True, eq=False)
class SourceWork:
    """One request on this source rank.

    Attributes:
        key: the request's key.
        part: what the embedder holds.
        started: when, on the loop's clock.
        max_tokens: what was announced; the frontier rises up to it.
        facts: what is said of the request.
        blocks: this rank's, once given.
        frontier: which positions and layers are in place, as the engine has said.
        visible: likewise, and its work is done: it may be read.
        group_first_tokens: where each group begins, if not all alike.
        offer: what was published, if it was an offer.
        family: keys of the offer and its replicas, if it has any.
        target: a rank of the engine that was leased to last.
        opening: what a stream begins with: no blocks, and the most tokens; once something is ready.
        opening_digest: of that.
        descriptor: what is offered, once sealed and computed.
        digest: of that.
        sealed: nothing more will become ready.
        held: its blocks are.
        turns: what the engine has said and is not acted on yet, each with the GPU work that it comes after.
        machine: once held.
        asks: from an ask's arrival to its lease's end.
        plans: likewise, once it can be leased.
        foreseen: the plan that an ask will most likely need, and for which leg and beginning that is.
        exposed: under which of a transport's names an attempt reads.
        outgoing: what each attempt was told of its stream, if it reads one; else it is not among them.
        end_layer: one past our last layer.
        draft: what a seal would cover, if that is foreseen.
        advancing: the machine will be told of what has become visible.
        sealed_at: when the seal was acted on, on the loop's clock.
        attempts: every attempt that was leased.
        moved: payload bytes by target rank.
        transport, reason: what carried it, and why.
    """

    key: str
    part: LivePart
    started: float
    max_tokens: int
    facts: Facts = field(default_factory=Facts)
    blocks: tuple[BlockList, ...] | None = None
    frontier: Frontier = NOTHING
    visible: Frontier = NOTHING
    group_first_tokens: FirstTokens = ()
    offer: Offer | None = None
    family: tuple[str, ...] = ()
    target: Place | None = None
    opening: KVDescriptor | None = None
    opening_digest: str = ""
    descriptor: KVDescriptor | None = None
    digest: str = ""
    sealed: bool = False
    held: bool = False
    turns: deque[tuple[Moment | None, Callable[[], None]]] = field(default_factory=deque)
    machine: Machine[SourcePart, SourceEvent] | None = None
    asks: dict[Attempt, Ask] = field(default_factory=dict)
    plans: dict[Attempt, CopyPlan] = field(default_factory=dict)
    foreseen: tuple[LegPlanner, tuple[int, ...], CopyPlan] | None = None
    exposed: dict[Attempt, Exposed] = field(default_factory=dict)
    outgoing: dict[Attempt, Outgoing] = field(default_factory=dict)
    end_layer: int = 0
    draft: Draft | None = None
    advancing: bool = False
    sealed_at: float | None = None
    attempts: set[Attempt] = field(default_factory=set)
    moved: dict[str, int] = field(default_factory=dict)
    transport: str = ""
    reason: str = ""

    def streams_to(self, ask: Ask) -> bool:
        """Whether an ask is for the stream: it knows its beginning only."""
        return self.opening is not None and descriptor_digest(ask.descriptor) == self.opening_digest

    def result(self, end: End, error: ErrorInfo | None, now: float) -> Result:
        """How it ended, for the embedder."""
        return Result(
            key=self.key,
            state=STATE_OF_END[end],
            error=None if error is None else info_to_error(error, request_id=self.key),
            bytes=sum(self.moved.values()) if end is End.DONE else 0,
            tokens=self.descriptor.tokens if end is End.DONE and self.descriptor is not None else 0,
            seconds=now - self.started,
            attempts=len(self.attempts),
            legs=len({peer for peer, _ in self.attempts}),
            transport=self.transport,
            transport_reason=self.reason,
            integrity=self.descriptor is not None and self.descriptor.digest_scheme is not None,
            phases={} if self.sealed_at is None else {"exposed": now - self.sealed_at},
        )
