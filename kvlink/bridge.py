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
from functools import partial
from typing import Any, Literal, Self, TypeVar

from kvlink.config import Config
from kvlink.descriptor import Facts
from kvlink.errors import ClosedError, DeadlineError, KVLinkError, TransferError
from kvlink.limits import (
    BRIDGE_ANSWER_SECONDS,
    BRIDGE_CLOSE_MARGIN_SECONDS,
    BRIDGE_TURNS,
    CLAIM_TTL_SECONDS,
    CLOSE_TIMEOUT_SECONDS,
    MAX_TOKENS_PER_REQUEST,
)
from kvlink.link import CloseReport, Part, RecoveryPoint, Reservation, Stats
from kvlink.link.driver import Driver, open_driver
from kvlink.link.part import LivePart, Ready
from kvlink.link.retries import GiveBack, NextOffer, Retrying, check_sources, fetch_with_retries
from kvlink.memory import Caches
from kvlink.observe import Events
from kvlink.observe.events import Side
from kvlink.protocol.retry import RetryPolicy
from kvlink.relayout.gpu import Moment
from kvlink.transports.base import Transport
from kvlink.wire import Offer, Roster, Ticket

T = TypeVar("T")
Pump = Literal["thread", "caller"]

_log = logging.getLogger("kvlink.bridge")


class Bridge:
    """A `kvlink.Link` behind non-blocking calls.

    Every verb returns at once; what it started ends in a part that `poll` returns exactly once: a verb that the link
    refuses ends its part `State.FAILED` with the refusal, it does not raise. Nothing below blocks unless it takes a
    timeout. Every call raises `ClosedError` after `close`, except `poll`, and always in a process forked since.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, pump: Pump) -> None:
        self._loop = loop
        self._pump: Pump = pump
        self._pid = os.getpid()
        self._thread: threading.Thread | None = None
        self._driver: Driver | None = None
        self._ended: deque[Part] = deque()
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._posting = threading.Lock()
        self._closer = threading.Lock()
        self._closing = False
        self._report: CloseReport | None = None

    @classmethod
    def open(
        cls,
        config: Config,
        caches: Caches,
        *,
        pump: Pump = "thread",
        siblings: Roster | None = None,
        transports: Sequence[Transport] | None = None,
    ) -> Self:
        """Open a link over ``caches``. Blocks until it listens (memory is registered by then).

        Arguments are those of `kvlink.open_link`; ``transports`` are used from the bridge's thread only.

        Raises:
            ConfigError: a setting is wrong.
            UnavailableError: the machine lacks what the transport needs.
        """
        bridge = cls(asyncio.new_event_loop(), pump)
        if pump == "thread":
            bridge._thread = threading.Thread(target=bridge._loop.run_forever, name="kvlink-bridge", daemon=True)
            bridge._thread.start()

        try:
            opening = open_driver(config, caches, siblings, transports, linger=pump == "thread")
            bridge._driver = bridge._run(opening, BRIDGE_ANSWER_SECONDS)
        except BaseException:
            bridge._stop_loop()
            raise
        return bridge

    def set_siblings(self, roster: Roster) -> None:
        """Tell this rank who its engine's other ranks are; waits for the loop. See `kvlink.Link.set_siblings`."""
        self._ask(lambda driver: driver.set_siblings(roster))

    # --- verbs --------------------------------------------------------------------------------------------------

    @property
    def card(self) -> bytes:
        """This rank's card, for `kvlink.Roster.of`."""
        return self._open_driver().card

    def publish(self, offer: Offer, *, event: object = None, replicas: int = 0) -> Part:
        """Source: this KV may be fetched. See `kvlink.Link.publish`; no event, or a bad ``replicas``, raises here."""
        driver = self._open_driver()
        after, part = driver.moment(event=event), driver.part_of(offer, replicas)
        return self._submit(lambda driver, part: driver.publish(offer, part, after), part, "source")

    def recovery_point(self, key: str, *, cached_tokens: int = 0) -> RecoveryPoint:
        """Source: from where an installed request can go on; waits for the loop. See `kvlink.Link.recovery_point`."""
        return self._ask(lambda driver: driver.recovery_point(key, cached_tokens))

    def announce(
        self,
        key: str,
        *,
        ttl_seconds: float,
        max_tokens: int = MAX_TOKENS_PER_REQUEST,
        facts: Facts | None = None,
    ) -> Part:
        """Source, push: KV for ``key`` is coming. See `kvlink.Link.announce`.

        A frontier that does not fit (`Part.ready`, `Part.seal`) ends the part `State.FAILED`; it does not raise.
        """
        return self._submit(
            lambda driver, part: driver.announce(
                part, ttl_seconds=ttl_seconds, max_tokens=max_tokens, facts=facts or Facts()
            ),
            LivePart(key, controls=_Controls(self._guarded, lambda event: self._open_driver().moment(event=event))),
            "source",
        )

    def fetch(  # noqa: PLR0913 - what a request can say of itself
        self,
        offer: Offer,
        into: Sequence[Sequence[int]],
        *,
        deadline_seconds: float,
        first_token: int | Sequence[int] | None = None,
        facts: Facts | None = None,
        uncovered: Literal["leave", "zero"] = "leave",
        together: bool = False,
        stream: object = None,
    ) -> Part:
        """Target: fetch an offer. See `kvlink.Link.start_fetch`; what is no stream raises here."""
        after = self._open_driver().moment(stream=stream)
        return self._submit(
            lambda driver, part: driver.fetch(
                offer,
                into,
                part,
                deadline_seconds=deadline_seconds,
                first_token=first_token,
                facts=facts or Facts(),
                uncovered=uncovered,
                together=together,
                after=after,
            ),
            LivePart(offer.key),
            "target",
        )

    def fetch_with_retries(  # noqa: PLR0913 - what a request can say of itself
        self,
        offer: Offer,
        take_blocks: Callable[[Offer], Sequence[Sequence[int]]],
        *,
        give_back: GiveBack,
        deadline_seconds: float,
        policy: RetryPolicy | None = None,
        next_offer: NextOffer | None = None,
        first_token: int | Sequence[int] | None = None,
        facts: Facts | None = None,
        uncovered: Literal["leave", "zero"] = "leave",
        together: bool = False,
        stream: object = None,
    ) -> Part:
        """Target: fetch, and again while that may help; one part for all tries. See `kvlink.Link.fetch_with_retries`.

        ``take_blocks``, ``give_back`` and ``next_offer`` are called on the loop's thread, or in `poll`, and must not
        block; what they raise ends the part. The part's result says how many tries there were; each try also is an
        event. Cancelling the part ends the try that runs, whose blocks were given back before the end is told.
        """
        driver = self._open_driver()
        check_sources(next_offer, 1 if together else driver.ranks)

        async def take(wanted: Offer) -> Sequence[Sequence[int]]:
            return take_blocks(wanted)

        def start(driver: Driver, part: LivePart) -> None:
            retrying = Retrying(policy or RetryPolicy(), deadline_seconds, take, give_back, next_offer, driver.counters)
            tries = partial(
                fetch_with_retries,
                driver,
                offer,
                retrying,
                first_token=first_token,
                facts=facts or Facts(),
                uncovered=uncovered,
                together=together,
                stream=stream,
            )
            driver.retried.start(part, tries)

        return self._submit(start, LivePart(offer.key), "target")

    def expect(  # noqa: PLR0913 - what a request can say of itself
        self,
        ticket: Ticket,
        source: Roster,
        into: Sequence[Sequence[int]],
        *,
        deadline_seconds: float,
        uncovered: Literal["leave", "zero"] = "leave",
        together: bool = False,
        stream: object = None,
    ) -> Part:
        """Target, push: reserve and deliver the ticket. See `kvlink.Link.expect`; what is no stream raises here."""
        after = self._open_driver().moment(stream=stream)
        return self._submit(
            lambda driver, part: driver.expect(
                ticket,
                source,
                into,
                part,
                deadline_seconds=deadline_seconds,
                uncovered=uncovered,
                together=together,
                after=after,
            ),
            LivePart(ticket.key, ticket=ticket),
            "target",
        )

    def lend(self, blocks: Sequence[Sequence[int]]) -> None:
        """Target without an allocator of its own: KVLink may give these out; waits for the loop. See `kvlink.Link`."""
        self._ask(lambda driver: driver.lend(blocks))

    def reserve(  # noqa: PLR0913 - what a request can say of itself
        self,
        key: str,
        *,
        tokens: int,
        growth_tokens: int = 0,
        facts: Facts | None = None,
        deadline_seconds: float | None = None,
        wait_seconds: float = 0.0,
        ttl_seconds: float = CLAIM_TTL_SECONDS,
    ) -> Reservation:
        """Target: room among the lent blocks; blocks for ``wait_seconds`` at most. See `kvlink.Link.reserve`."""
        driver = self._open_driver()
        waiting = driver.reserve(
            key,
            tokens=tokens,
            growth_tokens=growth_tokens,
            facts=facts or Facts(),
            deadline_seconds=deadline_seconds,
            wait_seconds=wait_seconds,
            ttl_seconds=ttl_seconds,
        )
        return self._run(waiting, wait_seconds + BRIDGE_ANSWER_SECONDS)

    def renew(self, offers: Iterable[Offer]) -> None:
        """Target: these offers are queued here and not yet fetched; keep their source blocks."""
        kept = tuple(offers)
        self._tell(lambda driver: driver.renew(kept))

    def decline(self, offer: Offer, why: str) -> None:
        """Target: this rank will not fetch ``offer`` (full local hit, abort in the queue)."""
        self._tell(lambda driver: driver.decline(offer, why))

    def release(self, key: str) -> None:
        """Target: the engine is done with an installed request's blocks. Source: with recovering it. Idempotent."""
        self._tell(lambda driver: driver.release(key))

    def cancel(self, part: Part, why: str) -> None:
        """End a part. Its end is reported by `poll` after the cut-off, as for any other end."""
        self._tell(lambda driver: driver.cancel(part, why))

    def poll(self, limit: int = 256) -> list[Part]:
        """Parts that ended since the last call, each once, at most ``limit``. Never blocks.

        After `close` it returns what is left, such as the parts that were cut.
        """
        self._check_process()
        if self._pump == "caller" and self._report is None:
            self._turn()
        if self._event >= 0:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._event)
        ended: list[Part] = []
        while self._ended and len(ended) < limit:
            ended.append(self._ended.popleft())
        if self._ended:
            self._wake()
        return ended

    def fileno(self) -> int:
        """Readable while `poll` may have something (``pump="thread"``; with ``"caller"``, poll on your own tick).

        It is this bridge's own, and closed with it.
        """
        self._open_driver()
        return self._event

    def quiesce(self, parts: Iterable[Part], timeout_seconds: float) -> bool:
        """Block until none of ``parts`` touches a block any more; True if that came about within the timeout."""
        waited = tuple(parts)
        driver = self._open_driver()
        return self._run(driver.quiesce(waited, timeout_seconds), timeout_seconds + BRIDGE_CLOSE_MARGIN_SECONDS)

    def pause(self, timeout_seconds: float) -> CloseReport:
        """Sleep: drain within the bound, cut the rest, unregister the memory. Blocks. See `kvlink.Link.pause`.

        Verbs that start something then end their part `State.FAILED` with `ClosedError`; `poll` goes on.
        """
        driver = self._open_driver()
        return self._run(driver.pause(timeout_seconds), timeout_seconds + BRIDGE_CLOSE_MARGIN_SECONDS)

    def resume(self, caches: Caches) -> None:
        """Wake up over this cache; waits for the loop. See `kvlink.Link.resume`."""
        self._ask(lambda driver: driver.resume(caches))

    @property
    def events(self) -> Events:
        """Every part's end with its cause, and peers that come and go. ``take`` them from any thread, also after close.

        Subscribers are called on the loop's thread, or in `poll`.
        """
        if self._driver is None:
            raise ClosedError("this bridge was never open")
        return self._driver.events

    def stats(self) -> Stats:
        """Counters and block accounting, as of now; waits for the loop."""
        return self._ask(lambda driver: driver.stats())

    def close(self, timeout_seconds: float = CLOSE_TIMEOUT_SECONDS) -> CloseReport:
        """Drain within the bound, cut off what is left, close. Idempotent; says what it cut.

        Any thread may call it; of several that do at once, all wait for the one close and get its report.
        """
        self._check_process()
        with self._closer:
            if self._report is not None or self._driver is None:
                return self._report or CloseReport(cut=())
            with self._posting:  # what was posted before is in the loop's queue before the close, and gets its end
                self._closing = True
            self._report = self._run(self._driver.close(timeout_seconds), timeout_seconds + BRIDGE_CLOSE_MARGIN_SECONDS)
            self._stop_loop()
            return self._report

    # --- inside ---------------------------------------------------------------------------------------------------

    def _submit(self, start: Callable[[Driver, LivePart], None], part: LivePart, side: Side) -> Part:
        self._open_driver()
        part.when_ended(self._on_end)
        self._guarded(part, lambda driver: start(driver, part), side)
        return part

    def _guarded(self, part: LivePart, act: Callable[[Driver], object], side: Side = "source") -> None:
        """Run ``act`` on the loop. Nobody listens there: whatever it raises is the part's end."""

        def run(driver: Driver) -> None:
            try:
                act(driver)
            except Exception as error:  # noqa: BLE001 - a part that never ends is worse than any error in it
                told = error if isinstance(error, KVLinkError) else TransferError(f"{type(error).__name__}: {error}")
                driver.refuse(part, told, side)

        self._post(run)

    def _tell(self, act: Callable[[Driver], object]) -> None:
        """Run ``act`` on the loop; it has no part that could carry its refusal."""

        def run(driver: Driver) -> None:
            try:
                act(driver)
            except KVLinkError as error:
                _log.warning("%s", error)

        self._post(run)

    def _post(self, act: Callable[[Driver], None]) -> None:
        with self._posting:
            self._loop.call_soon_threadsafe(act, self._open_driver())

    def _on_end(self, part: Part) -> None:
        self._ended.append(part)
        self._wake()

    def _wake(self) -> None:
        if self._event >= 0:
            os.eventfd_write(self._event, 1)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ClosedError("this bridge was opened before a fork; open another one in this process")

    def _open_driver(self) -> Driver:
        self._check_process()
        if self._driver is None or self._closing:
            raise ClosedError("this bridge is closed; open a new one")
        return self._driver

    def _turn(self) -> None:
        """Some turns of the loop: what is ready now and what follows from it, no waiting."""

        def turned(left: int) -> None:
            if left:
                self._loop.call_soon(turned, left - 1)
            else:
                self._loop.stop()

        self._loop.call_soon(turned, BRIDGE_TURNS)
        self._loop.run_forever()

    def _ask(self, question: Callable[[Driver], T]) -> T:
        driver = self._open_driver()

        async def answer() -> T:
            return question(driver)

        return self._run(answer(), BRIDGE_ANSWER_SECONDS)

    def _run(self, work: Coroutine[Any, Any, T], timeout_seconds: float) -> T:
        late = f"the bridge's loop did not answer within {timeout_seconds:g} s"
        if self._pump == "caller":
            try:
                return self._loop.run_until_complete(asyncio.wait_for(work, timeout_seconds))
            except TimeoutError:
                raise DeadlineError(late) from None
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout_seconds)
        except TimeoutError:
            future.cancel()
            raise DeadlineError(late) from None

    def _stop_loop(self) -> None:
        if self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(BRIDGE_ANSWER_SECONDS)
        if not self._loop.is_running():
            self._loop.close()
        event, self._event = self._event, -1
        os.close(event)


class _Controls:
    """``ready()`` and ``seal()`` of a part come from the engine's thread; a bad frontier fails the part."""

    def __init__(
        self,
        guarded: Callable[[LivePart, Callable[[Driver], object]], None],
        moment: Callable[[object], Moment | None],
    ) -> None:
        self._guarded = guarded
        self._moment = moment

    def ready(self, part: Part, ready: Ready, event: object = None) -> None:
        """See `Part.ready`. The event is looked at now: its owner may record it again while the loop is busy."""
        assert isinstance(part, LivePart), "the bridge makes its parts"
        after = self._moment(event)
        self._guarded(part, lambda driver: driver.source.ready(part, ready, after))

    def seal(self, part: Part) -> None:
        """See `Part.seal`."""
        assert isinstance(part, LivePart), "the bridge makes its parts"
        self._guarded(part, lambda driver: driver.source.seal(part))
