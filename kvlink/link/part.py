"""A part: one rank's share of one transfer, as the embedder sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from operator import index
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kvlink.errors import ClosedError, KVLinkError, LayoutError

if TYPE_CHECKING:
    from kvlink.descriptor import BlockList, FirstTokens
    from kvlink.wire import Offer, Ticket


class State(IntEnum):
    """Where a part stands. It only rises; from `DONE` up it is an end, and an end implies the cut-off on this rank."""

    WAITING = 0
    READY = 1
    MOVING = 2
    DRAINING = 3
    DONE = 4
    FAILED = 5
    CANCELLED = 6
    EXPIRED = 7
    INDETERMINATE = 8

    @property
    def ended(self) -> bool:
        """Whether this is one of the five ends."""
        return self >= State.DONE


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How a part ended.

    Attributes:
        key: the request's key.
        state: one of the five ends.
        error: why it is not `State.DONE`, else ``None``.
        bytes: payload bytes of this rank's share (each counted once, re-reads apart).
        tokens: one past the last position that it covers: of a push, where its source sealed it. 0 if it is not done.
        streamed_bytes: of these, what had landed before the source's seal was heard (target, push).
        seconds: from the verb's call to the end.
        attempts: attempts started, over all legs.
        tries: times that the whole part was tried, each a fresh attempt of every leg.
        legs: legs of this part.
        rereads: chunks read again because a digest differed.
        transport, transport_reason, path, path_reason: what carried it, and why it was chosen.
        integrity: whether every chunk was verified against the source's digests.
        phases: seconds by phase (``handshake reserve plan wire verify commit install``), the slowest leg's.
    """

    key: str
    state: State
    error: KVLinkError | None = None
    bytes: int = 0
    tokens: int = 0
    streamed_bytes: int = 0
    seconds: float = 0.0
    attempts: int = 0
    tries: int = 1
    legs: int = 0
    rereads: int = 0
    transport: str = ""
    transport_reason: str = ""
    path: str = ""
    path_reason: str = ""
    integrity: bool = False
    phases: Mapping[str, float] = field(default_factory=dict)


class Ready(NamedTuple):
    """What one `Part.ready` said."""

    tokens: int | None
    layers: int | None
    blocks: tuple[BlockList, ...] | None
    group_first_tokens: FirstTokens | None


class Part:
    """One rank's share of a transfer. ``state`` is one attribute read; it may be read from any thread.

    ``replicas``: offers for further targets, one each, of a part that was published with replicas.

    Returned by the verbs of `kvlink.Link` and `kvlink.Bridge`. Dropping it cancels nothing.
    """

    __slots__ = ("_controls", "_done", "key", "replicas", "result", "state", "ticket")

    def __init__(self, key: str, *, controls: PartControls | None = None, ticket: Ticket | None = None) -> None:
        self.key = key
        self.state = State.WAITING
        self.ticket = ticket
        self.replicas: tuple[Offer, ...] = ()
        self.result: Result | None = None
        self._controls = controls
        self._done: list[Callable[[Part], None]] = []

    def __repr__(self) -> str:
        return f"<Part {self.key} {self.state.name.lower()}>"

    async def wait(self) -> Result:
        """Wait for the end.

        Cancelling the wait leaves the part running; use the link's ``cancel`` to end it.

        Raises:
            KVLinkError: the typed error the part ended with.
        """
        if self.result is None:
            ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.when_ended(lambda _part: None if ended.done() else ended.set_result(None))
            await ended
        result = self.result
        if result is None:  # pragma: no cover - when_ended only calls back with a result
            raise ClosedError(f"part {self.key} was dropped without a result", request_id=self.key)
        if result.error is not None:
            raise result.error
        return result

    def ready(
        self,
        *,
        tokens: int | None = None,
        layers: int | None = None,
        blocks: Sequence[Sequence[int]] | None = None,
        group_first_tokens: Sequence[int] | None = None,
        event: object = None,
    ) -> None:
        """Source, push: this KV is in place up to here, and may be read from now on, while more is computed.

        An engine that computes positions chunk by chunk, and each chunk layer by layer, says so as it goes:
        ``ready(tokens=2048, layers=1)``, ``ready(layers=2)`` ... ``ready(tokens=2048)``, then the next chunk.

        Args:
            tokens: positions ``[0, tokens)`` are in place; by default, up to the end of the chunk under way.
            layers: in layers whose global id is below, and not yet in later ones; by default, in all. Layers are
                computed in the order of their ids. A pipeline stage counts globally, too.
            blocks: all of this request's blocks so far, one list a group, entry i for positions
                ``[i * block_size, ...)``; later calls may append to them. They are the library's until the end.
            group_first_tokens: a group, before which position nothing is left (a sliding window's); with the first
                call that says how far the KV has come.
            event: on a GPU, an event recorded after the work that writes this (torch's, CuPy's, or its handle):
                nothing of it is read before.

        Groups that are not indexed by tokens (recurrent states, an engine's own rows) move once positions have come
        to the announced ``max_tokens``, or with the seal: what they hold before is not the request's last.

        Raises:
            LayoutError: the frontier goes backwards or past what was announced, blocks do not hold the positions or
                are not those of an earlier call, or it is no event; nothing changed.
            GpuError: the GPU's driver refused; nothing changed.
            ClosedError: the part is not a source part, is sealed, or has ended.
        """
        whole = None if blocks is None else whole_blocks(blocks, self.key)
        starts = None if group_first_tokens is None else tuple(group_first_tokens)
        self._need_controls().ready(self, Ready(tokens, layers, whole, starts), event)

    def seal(self) -> None:
        """Source, push: nothing more will become ready. Only what the seal covers is ever installed, and all of it.

        Call it right after the last `ready`: what that made ready then crosses with the seal, in one piece.

        Raises:
            ClosedError: the part is not a source part, or has ended.
            LayoutError: no blocks or tokens were given before, or a chunk is under way that not all layers hold.
        """
        self._need_controls().seal(self)

    def when_ended(self, callback: Callable[[Part], None]) -> None:
        """Call ``callback(part)`` once, at the end (at once if ended), on the loop's thread."""
        if self.result is not None:
            callback(self)
        else:
            self._done.append(callback)

    def _need_controls(self) -> PartControls:
        if self._controls is None:
            raise ClosedError("only a source part made by announce() takes ready() and seal()", request_id=self.key)
        return self._controls


class LivePart(Part):
    """A part from the side that moves it: what the link's halves hold of it."""

    __slots__ = ()

    def rise(self, state: State) -> None:
        """Move up to ``state``; never down, never past an end."""
        if not self.state.ended and state > self.state:
            self.state = state

    def end(self, result: Result) -> None:
        """Record the end, once."""
        if self.result is not None:
            return
        self.result = result
        self.state = result.state
        callbacks, self._done = self._done, []
        for callback in callbacks:
            callback(self)


class PartControls(Protocol):
    """What a source part calls back into: the link's source half, or the bridge in front of it."""

    def ready(self, part: Part, ready: Ready, event: object = None) -> None:
        """Advance the part's frontier."""

    def seal(self, part: Part) -> None:
        """Seal the part."""


def whole_blocks(blocks: Sequence[Sequence[int]], key: str) -> tuple[BlockList, ...]:
    """Block ids as the embedder gave them, one list a group.

    Raises:
        LayoutError: an id is no whole number; nothing is rounded.
    """
    try:
        return tuple(tuple(index(block) for block in ids) for ids in blocks)
    except TypeError as error:
        raise LayoutError(
            f"blocks must be lists of whole block ids, one list a group: {error}", request_id=key
        ) from None
