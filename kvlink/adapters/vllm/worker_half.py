"""The worker's half: one rank's bridge. Hooks submit and poll, and never wait.

Every id is reported once, and only after this rank's cut-off: vLLM reuses the blocks at once. What is installed is
released as soon as it is reported: from then on vLLM alone knows what its blocks hold.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, Literal

from kvlink.adapters.vllm.messages import Fetch, Publish, StepWork
from kvlink.adapters.vllm.streams import Streams
from kvlink.adapters.vllm.tally import Tally
from kvlink.bridge import Bridge
from kvlink.errors import BusyError, CancelledError, ConflictError, KVLinkError
from kvlink.limits import PUSH_DEADLINE_SECONDS
from kvlink.link import Part, State
from kvlink.protocol import Again, RetryPolicy, again
from kvlink.wire import Offer, Roster, Ticket

_log: Final = logging.getLogger("kvlink.adapters.vllm")


@dataclass(slots=True)
class Ended:
    """Request ids since the last call. A failed load is in ``received`` too: vLLM wants it so."""

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)


@dataclass(slots=True)
class _Load:
    """A request whose KV is being fetched, or, with a ticket, is awaited.

    Between two tries it has no part, and ``due`` says when the next begins.
    """

    fetch: Fetch
    offer: Offer
    ticket: Ticket | None
    began: float
    tries: int = 0
    part: Part | None = None
    due: float = 0.0
    aborted: bool = False


class WorkerHalf:
    """One rank. Called on the worker's main thread.

    A load that fails in a way that may pass is tried again into the same blocks: its cut-off is behind it.

    Args:
        bridge: over this rank's cache; closed by `close`.
        fetch_seconds: bound on one transfer, and on all tries together.
        push_seconds: the same for what is pushed, with the time that its prefill takes.
        now: monotonic seconds.
        scrub: zeroes the blocks of a load that failed, from its first tokens on. What is left of a load may be spoiled
            or torn, and engines multiply what they mask by zero: a NaN there would reach whoever has the block next.
        uncovered: what becomes of slots past the last token that is loaded.
        layers: ids of the layers that `Streams` is told of as they are written; none: KV is pushed step by step.
    """

    def __init__(  # noqa: PLR0913 - what the operator and the cache say
        self,
        bridge: Bridge,
        *,
        fetch_seconds: float,
        now: Callable[[], float],
        scrub: Callable[[Fetch], None],
        push_seconds: float = PUSH_DEADLINE_SECONDS,
        uncovered: Literal["leave", "zero"] = "leave",
        layers: Iterable[int] = (),
    ) -> None:
        self._bridge = bridge
        self._fetch_seconds = fetch_seconds
        self._push_seconds = push_seconds
        self._now = now
        self._scrub = scrub
        self._uncovered: Literal["leave", "zero"] = uncovered
        self._sources: dict[Part, str] = {}
        self._loads: dict[str, _Load] = {}
        self._load_of: dict[Part, _Load] = {}
        self._ended = Ended()
        self.streams = Streams(bridge, self._sent, layers)
        self.tally = Tally()

    @property
    def card(self) -> bytes:
        """This rank's card, for the scheduler's roster."""
        return self._bridge.card

    def start(self, work: StepWork) -> None:
        """Submit what the scheduler decided in this step."""
        if work.siblings:
            self._bridge.set_siblings(Roster.of(work.siblings))
        for publish in work.publish:
            self._publish(publish)
        if work.void:
            for part in self._sources:
                self._bridge.cancel(part, "its source's cache was reset")
        self.streams.settle(work)
        for fetch in work.fetch:
            self._load(fetch)
        for refused in work.refused:
            self._ended.received.add(refused.request_id)
            self._ended.failed.add(refused.request_id)
            self.tally.failed(refused.kind, refused.field)
            _log.warning("request %s is not loaded: %s", refused.request_id, refused.text)
        for request_id in work.cancel:
            self._abort(request_id)
        for decline in work.decline:
            self._bridge.decline(Offer.from_bytes(decline.offer), decline.why)
        if work.renew:
            self._bridge.renew([Offer.from_bytes(offer) for offer in work.renew])

    def ended(self) -> Ended:
        """What ended since the last call, each id once. Begins the next try of loads that wait for one."""
        for part in self._bridge.poll():
            if part in self._sources:
                self._sent(self._sources.pop(part), part)
            elif self.streams.owns(part):
                self.streams.ended(part)
            else:
                self._tried(part, self._load_of.pop(part))
        for load in [load for load in self._loads.values() if load.part is None and self._now() >= load.due]:
            self._try(load)
        ended, self._ended = self._ended, Ended()
        return ended

    def close(self, timeout_seconds: float) -> None:
        """Drain within the bound, cut off what is left. Idempotent."""
        report = self._bridge.close(timeout_seconds)
        if report.cut:
            _log.warning("closed with %d transfers cut: %s", len(report.cut), ", ".join(report.cut[:4]))

    # --- source -----------------------------------------------------------------------------------------------------

    def _publish(self, publish: Publish) -> None:
        part = self._bridge.publish(Offer.from_bytes(publish.offer))
        self._sources[part] = publish.request_id

    def _sent(self, request_id: str, part: Part) -> None:
        self._ended.sent.add(request_id)
        self.tally.sent(part.state)
        if part.state is not State.DONE:
            _log.warning("request %s was not fetched: %s", request_id, _error_of(part))

    # --- target -----------------------------------------------------------------------------------------------------

    def _load(self, fetch: Fetch) -> None:
        ticket = None if fetch.ticket is None else Ticket.from_bytes(fetch.ticket)
        load = self._loads[fetch.request_id] = _Load(fetch, Offer.from_bytes(fetch.offer), ticket, self._now())
        self._try(load)

    def _try(self, load: _Load) -> None:
        load.tries += 1
        if load.ticket is None:
            load.part = self._bridge.fetch(
                load.offer,
                load.fetch.blocks,
                deadline_seconds=self._fetch_seconds,
                first_token=load.fetch.first_tokens,
                uncovered=self._uncovered,
            )
        else:
            load.part = self._bridge.expect(
                load.ticket,
                load.offer.roster,
                load.fetch.blocks,
                deadline_seconds=self._push_seconds,
                uncovered=self._uncovered,
            )
        self._load_of[load.part] = load

    def _abort(self, request_id: str) -> None:
        """Cancel a load; its end is reported as any other's, for vLLM waits for it."""
        load = self._loads.get(request_id)
        if load is None:
            return
        load.aborted = True
        if load.part is None:
            self._failed(load, CancelledError("the request was aborted between two tries"))
        else:
            self._bridge.cancel(load.part, "the request was aborted")

    def _tried(self, part: Part, load: _Load) -> None:
        load.part = None
        if part.state is State.DONE:
            self._bridge.release(part.key)
            del self._loads[load.fetch.request_id]
            self._ended.received.add(load.fetch.request_id)
            self.tally.fetched(part, load.tries)
            return
        error = _error_of(part)
        pause = None if load.aborted else self._pause(load, part, error)
        if pause is None:
            self._failed(load, error)
        else:
            load.due = self._now() + pause
            _log.info("request %s: try %d failed, another follows: %s", load.fetch.request_id, load.tries, error)

    def _pause(self, load: _Load, part: Part, error: KVLinkError) -> float | None:
        """How long to wait before the next try, or ``None`` if there is none."""
        if load.ticket is not None and isinstance(error, CancelledError):
            # The source took it back: its prefill was preempted, and announces anew, or aborted, and never will.
            error = BusyError(str(error), retry_after_seconds=0.0)
            if part.result is not None and part.result.attempts:
                load.tries = 1  # it had begun, so it was not the last word of an abort
        if again(error) is not Again.HERE:
            return None
        bound = self._fetch_seconds if load.ticket is None else self._push_seconds
        elapsed, draw = self._now() - load.began, random.random()  # noqa: S311 - jitter
        return RetryPolicy(total_seconds=bound).pause(error, tries=load.tries, elapsed_seconds=elapsed, draw=draw)

    def _failed(self, load: _Load, error: KVLinkError) -> None:
        request_id = load.fetch.request_id
        del self._loads[request_id]
        self._scrub(load.fetch)
        self._ended.received.add(request_id)
        self._ended.failed.add(request_id)
        if not isinstance(error, ConflictError):  # then another request's load of the same offer goes on
            self._bridge.release(load.offer.key)
            self._bridge.decline(load.offer, "its load failed, and is not tried again")
        self.tally.failed(error.code, getattr(error, "field", ""))
        _log.warning("request %s was not loaded: %s", request_id, error)


def _error_of(part: Part) -> KVLinkError:
    error = None if part.result is None else part.result.error
    return error or KVLinkError(f"it ended {part.state.name.lower()}", retryable=False)
