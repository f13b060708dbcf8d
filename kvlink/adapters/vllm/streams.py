"""Requests that are prefilled here and pushed, on one rank: their KV becomes ready while it is computed.

vLLM gives the blocks of a preempted request to others with the same step, and asks nobody but `Streams.before_forward`
first: readers are cut off there, and the request is announced anew, for a fresh attempt. What had been read before is
installed nowhere, for its commit is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from kvlink.adapters.vllm.messages import Advance, Announce, Hand, StepWork
from kvlink.bridge import Bridge
from kvlink.errors import KVLinkError
from kvlink.limits import PREEMPTION_SECONDS, PUSH_WORDS_PER_STEP
from kvlink.link import Part, State

_log: Final = logging.getLogger("kvlink.adapters.vllm")


@dataclass(slots=True)
class _Stream:
    """One request. It is ``due`` once the scheduler holds its blocks until its end is reported."""

    announce: Announce
    part: Part
    sealed: bool = False
    due: bool = False
    over: bool = False


class Streams:
    """One rank's pushes. Called on the worker's main thread.

    Args:
        bridge: over this rank's cache.
        report: told each request's id and part once, after its cut-off, when its blocks are held for that.
        layers: ids of this rank's layers, if each is told when it is written; if not, KV becomes ready step by step.
    """

    def __init__(self, bridge: Bridge, report: Callable[[str, Part], None], layers: Iterable[int] = ()) -> None:
        self._bridge = bridge
        self._report = report
        self._layers = tuple(sorted(layers))
        self._stride = max(1, len(self._layers) // PUSH_WORDS_PER_STEP)
        self._written: set[int] = set()
        self._next = 0
        self._streams: dict[str, _Stream] = {}
        self._of_part: dict[Part, _Stream] = {}
        self._step: list[tuple[_Stream, Advance]] = []

    def before_forward(self, work: StepWork) -> None:
        """A step begins. Waits for the readers of requests that it preempts, within `PREEMPTION_SECONDS`."""
        if work.preempted:
            self._preempt([self._streams[request_id] for request_id in work.preempted if request_id in self._streams])
        for announce in work.announce:
            self._streams[announce.request_id] = self._announced(announce)
        self._step = [
            (stream, advance)
            for advance in work.advance
            if (stream := self._streams.get(advance.request_id)) is not None and not stream.sealed
        ]
        self._written.clear()
        self._next = 0

    def layer_written(self, layer: int, moment: Callable[[], object] = lambda: None) -> None:
        """The step's KV is written in this layer, too; see `after_forward`.

        A prompt whose beginning was found in the cache may share it with one that this very step computes: so nothing
        of a step is told before, and all layers count from the first.
        """
        if not self._step:
            return
        self._written.add(layer)
        told = self._next
        while self._next < len(self._layers) and self._layers[self._next] in self._written:
            self._next += 1
        if told // self._stride == self._next // self._stride or self._next == len(self._layers):
            return  # too little for a word of its own, or the step's last
        event = moment()
        for stream, advance in self._step:
            if not stream.part.state.ended:
                below = self._layers[self._next - 1] + 1
                stream.part.ready(blocks=advance.blocks, tokens=advance.tokens, layers=below, event=event)

    def after_forward(self, moment: Callable[[], object] = lambda: None) -> None:
        """The step's KV is written; on a GPU, it will be once the event that ``moment`` records has passed."""
        event = moment() if self._step else None
        for stream, advance in self._step:
            if not stream.part.state.ended:
                stream.part.ready(blocks=advance.blocks, tokens=advance.tokens, event=event)
                if advance.tokens == stream.announce.tokens:
                    self._seal(stream)
        self._step = []

    def settle(self, work: StepWork) -> None:
        """Requests ended, and their blocks are held: report them when nobody reads them any more."""
        for hand in work.hand:
            self._hand(hand)
        for request_id in work.withdraw:
            stream = self._streams[request_id]
            self._bridge.cancel(stream.part, "its prefill was aborted")
            self._await_end(stream)
        if work.void:  # those that still compute are preempted by the reset, and begin anew
            for stream in self._streams.values():
                if stream.due:
                    self._bridge.cancel(stream.part, "its source's cache was reset")

    def owns(self, part: Part) -> bool:
        """Whether it is a push's."""
        return part in self._of_part

    def ended(self, part: Part) -> None:
        """The bridge gave back a part that is ours."""
        stream = self._of_part.pop(part)
        if part is not stream.part:  # taken back, and announced anew since
            return
        stream.over = True
        if stream.due:
            self._over(stream)

    # --- inside -----------------------------------------------------------------------------------------------------

    def _announced(self, announce: Announce) -> _Stream:
        part = self._bridge.announce(
            announce.key, ttl_seconds=announce.ttl_seconds, max_tokens=announce.tokens, facts=announce.facts
        )
        stream = self._of_part[part] = _Stream(announce, part)
        return stream

    def _preempt(self, streams: Sequence[_Stream]) -> None:
        parts = [stream.part for stream in streams]
        for part in parts:
            self._bridge.cancel(part, "its prefill was preempted")
        try:
            still = self._bridge.quiesce(parts, PREEMPTION_SECONDS)
        except KVLinkError as error:
            _log.error("%d preempted requests may still be read: %s", len(parts), error)
        else:
            if not still:  # committed, so all of it has arrived, and its reader has yet to say so
                _log.warning("%d preempted requests were not over within %g s", len(parts), PREEMPTION_SECONDS)
        for stream in streams:
            if stream.part.state is State.CANCELLED:  # else it is installed, or nobody wants it any more
                self._streams[stream.announce.request_id] = self._announced(stream.announce)

    def _hand(self, hand: Hand) -> None:
        stream = self._streams[hand.request_id]
        if not stream.sealed and not stream.part.state.ended:
            starts = hand.first_tokens if any(hand.first_tokens) else None
            stream.part.ready(blocks=hand.blocks, tokens=hand.tokens, group_first_tokens=starts)
            self._seal(stream)
        self._await_end(stream)

    def _seal(self, stream: _Stream) -> None:
        stream.part.seal()
        stream.sealed = True

    def _await_end(self, stream: _Stream) -> None:
        stream.due = True
        if stream.over:
            self._over(stream)

    def _over(self, stream: _Stream) -> None:
        del self._streams[stream.announce.request_id]
        self._report(stream.announce.request_id, stream.part)
