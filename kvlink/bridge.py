"""KVLink for engines that do not await: a loop of its own, and verbs that never block.

``pump="thread"`` runs the loop in a daemon thread; ``pump="caller"`` runs it only inside `Bridge.poll`, for those who
want no thread (the transport's own native thread still moves the bytes). All verbs may be called from any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Literal, Self, TypeVar

from kvlink.config import Config
from kvlink.descriptor import BlockList
from kvlink.errors import ClosedError, DeadlineError, KVLinkError
from kvlink.limits import CLOSE_TIMEOUT_SECONDS
from kvlink.link import CloseReport, Link, Part, Result, State, Stats, open_link
from kvlink.memory import Caches
from kvlink.wire import Offer, Roster, Ticket

_log = logging.getLogger("kvlink.bridge")
T = TypeVar("T")
Pump = Literal["thread", "caller"]
_OPEN_TIMEOUT_SECONDS = 30.0


class Bridge:
    """A `kvlink.Link` behind non-blocking calls.

    Every verb returns at once; what it started ends in a part that `poll` returns exactly once. Nothing below blocks
    unless it takes a timeout.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, pump: Pump) -> None:
        self._loop = loop
        self._pump: Pump = pump
        self._thread: threading.Thread | None = None
        self._link: Link | None = None
        self._ended: deque[Part] = deque()
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closed = False

    @classmethod
    def open(cls, config: Config, caches: Caches, *, pump: Pump = "thread", siblings: Roster | None = None) -> Self:
        """Open a link over ``caches``. Blocks until it listens (memory is registered by then).

        Raises:
            ConfigError: a setting is wrong.
            UnavailableError: the machine lacks what the transport needs.
        """
        bridge = cls(asyncio.new_event_loop(), pump)
        if pump == "thread":
            bridge._thread = threading.Thread(target=bridge._loop.run_forever, name="kvlink-bridge", daemon=True)
            bridge._thread.start()

        async def enter() -> Link:
            return await open_link(config, caches, siblings=siblings)

        try:
            bridge._link = bridge._run(enter(), _OPEN_TIMEOUT_SECONDS)
        except BaseException:
            bridge._stop_loop()
            raise
        return bridge

    # --- verbs --------------------------------------------------------------------------------------------------

    @property
    def card(self) -> bytes:
        """This rank's card, for `kvlink.Roster.of`."""
        return self._open_link().card

    def publish(self, offer: Offer) -> Part:
        """Source: this KV may be fetched. See `kvlink.Link.publish`."""
        return self._submit(lambda link, part: link.publish(offer, part=part), Part(offer.key))

    def announce(self, key: str, *, max_tokens: int, ttl_seconds: float) -> Part:
        """Source, push: KV for ``key`` is coming. See `kvlink.Link.announce`."""
        part = Part(key, controls=self)
        return self._submit(
            lambda link, part: link.announce(key, max_tokens=max_tokens, ttl_seconds=ttl_seconds, part=part), part
        )

    def fetch(
        self,
        offer: Offer,
        into: Sequence[Sequence[int]],
        *,
        deadline_seconds: float,
        first_token: int | None = None,
        uncovered: Literal["leave", "zero"] = "leave",
    ) -> Part:
        """Target: fetch an offer. See `kvlink.Link.start_fetch`."""
        return self._submit(
            lambda link, part: link.start_fetch(
                offer,
                into,
                deadline_seconds=deadline_seconds,
                first_token=first_token,
                uncovered=uncovered,
                part=part,
            ),
            Part(offer.key),
        )

    def expect(
        self, ticket: Ticket, source: Roster, into: Sequence[Sequence[int]], *, deadline_seconds: float
    ) -> Part:
        """Target, push: reserve and deliver the ticket. See `kvlink.Link.expect`."""
        return self._submit(
            lambda link, part: link.expect(ticket, source, into, deadline_seconds=deadline_seconds, part=part),
            Part(ticket.key, ticket=ticket),
        )

    def renew(self, offers: Iterable[Offer]) -> None:
        """Target: these offers are queued here and not yet fetched; keep their source blocks."""
        kept = tuple(offers)
        self._post(lambda: self._open_link().renew(kept))

    def decline(self, offer: Offer, why: str) -> None:
        """Target: this rank will not fetch ``offer`` (full local hit, abort in the queue)."""
        self._post(lambda: self._open_link().decline(offer, why))

    def release(self, part: Part) -> None:
        """Target: the engine reuses the blocks of an installed part; its recorded outcome ends."""
        self._post(lambda: self._open_link().release(part.key))

    def cancel(self, part: Part, why: str) -> None:
        """End a part. Its end is reported by `poll` after the cut-off, as for any other end."""
        self._post(lambda: self._open_link().cancel(part, why))

    def poll(self, limit: int = 256) -> list[Part]:
        """Parts that ended since the last call, each once, at most ``limit``. Never blocks."""
        if self._pump == "caller" and not self._closed:
            self._turn()
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)
        ended: list[Part] = []
        while self._ended and len(ended) < limit:
            ended.append(self._ended.popleft())
        if self._ended:
            os.eventfd_write(self._event, 1)
        return ended

    def fileno(self) -> int:
        """Readable while `poll` may have something (``pump="thread"``; with ``"caller"``, poll on your own tick)."""
        return self._event

    def quiesce(self, parts: Iterable[Part], timeout_seconds: float) -> bool:
        """Block until none of ``parts`` touches a block any more; True if that came about within the timeout."""
        waited = tuple(parts)
        link = self._open_link()
        return self._run(link.quiesce(waited, timeout_seconds), timeout_seconds + 1.0)

    def stats(self) -> Stats:
        """Counters and block accounting, as of now."""
        link = self._open_link()

        async def read() -> Stats:
            return link.stats()

        return self._run(read(), _OPEN_TIMEOUT_SECONDS)

    def close(self, timeout_seconds: float = CLOSE_TIMEOUT_SECONDS) -> CloseReport:
        """Drain within the bound, cut off what is left, close. Idempotent; says what it cut."""
        if self._link is None or self._closed:
            return CloseReport(cut=())
        report = self._run(self._link.close(timeout_seconds), timeout_seconds + 5.0)
        self._closed = True
        self._stop_loop()
        return report

    # --- PartControls: ready() and seal() of a part come from the engine's thread -----------------------------------

    def ready(self, part: Part, blocks: tuple[BlockList, ...] | None, tokens: int | None) -> None:
        """Forward `Part.ready` to the loop; a bad frontier fails the part."""
        self._guarded(part, lambda link: link.source.ready(part, blocks, tokens))

    def seal(self, part: Part) -> None:
        """Forward `Part.seal` to the loop."""
        self._guarded(part, lambda link: link.source.seal(part))

    # --- inside ---------------------------------------------------------------------------------------------------

    def _submit(self, start: Callable[[Link, Part], object], part: Part) -> Part:
        self._open_link()
        part.when_ended(self._on_end)
        self._guarded(part, lambda link: start(link, part))
        return part

    def _guarded(self, part: Part, act: Callable[[Link], object]) -> None:
        """Run ``act`` on the loop; a refusal there is the part's end, since the caller is no longer listening."""

        def run() -> None:
            try:
                act(self._open_link())
            except KVLinkError as error:
                self._refused(part, error)
            except Exception as error:  # noqa: BLE001 - our own fault: it ends the part, and is logged
                _log.exception("a verb for part %s failed", part.key)
                self._refused(part, KVLinkError(f"internal: {type(error).__name__}: {error}", request_id=part.key))

        self._post(run)

    def _refused(self, part: Part, error: KVLinkError) -> None:
        """The part ends with the refusal; if it was live already, the link then ends it, too."""
        part.end(Result(key=part.key, state=State.FAILED, error=error))
        if self._link is not None:
            self._link.source.cancel(part, str(error))

    def _post(self, act: Callable[[], None]) -> None:
        if self._closed:
            raise ClosedError("this bridge is closed; open a new one")
        self._loop.call_soon_threadsafe(act)

    def _on_end(self, part: Part) -> None:
        self._ended.append(part)
        os.eventfd_write(self._event, 1)

    def _open_link(self) -> Link:
        if self._link is None or self._closed:
            raise ClosedError("this bridge is closed; open a new one")
        return self._link

    def _turn(self) -> None:
        """One turn of the loop: what is ready now, no waiting."""
        self._loop.call_soon(self._loop.stop)
        self._loop.run_forever()

    def _run(self, work: Coroutine[Any, Any, T], timeout_seconds: float) -> T:
        if self._pump == "caller":
            return self._loop.run_until_complete(asyncio.wait_for(work, timeout_seconds))
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout_seconds)
        except TimeoutError:
            future.cancel()
            raise DeadlineError(f"the bridge's loop did not answer within {timeout_seconds:g} s") from None

    def _stop_loop(self) -> None:
        if self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_OPEN_TIMEOUT_SECONDS)
        if not self._loop.is_running():
            self._loop.close()
        if self._event >= 0:
            os.close(self._event)
            self._event = -1
