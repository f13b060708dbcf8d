"""The reads of a target's legs at their transports: a place for each before its lease, started, cut off.

A leg that has a lease must read, or the lease lapses: nothing renews it but its read. So a request waits for places
before it asks, not after.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from kvlink import limits, protocol
from kvlink.errors import DeadlineError, TransportError
from kvlink.link.target_work import LegWork, TargetWork, read_error
from kvlink.transports.base import Completion, Outcome, Read, TransportFull
from kvlink.wire import error_to_info

if TYPE_CHECKING:
    from kvlink.link.rank import LocalRank
    from kvlink.link.sessions import Sessions
    from kvlink.observe import Counters
    from kvlink.plan import CopyPlan

Feed = Callable[[TargetWork, protocol.TargetEvent], None]


class Reads:
    """Carries out `StartRead` and `CutOff`, and answers each with its one event. `TargetHalf` and `Incomings` only.

    Args:
        rank: ourselves.
        sessions: to whom we read.
        counters: of the link.
        feed: puts an event to a request's machine.
    """

    def __init__(self, rank: LocalRank, sessions: Sessions, counters: Counters, feed: Feed) -> None:
        self._rank = rank
        self._sessions = sessions
        self._counters = counters
        self._feed = feed
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[tuple[TargetWork, LegWork, CopyPlan, int]] = deque()
        self._placed = 0
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def place(self, work: TargetWork, legs: Sequence[LegWork]) -> None:
        """Wait until all legs of a request can read at once; requests go first that came first.

        Raises:
            DeadlineError: no room in all the time that the transfer itself may take.

        Cancelling it leaves the queue.
        """
        if not self.place_at_once(legs):
            await self._turn(work, sum(leg.wanted_places for leg in legs))
            for leg in legs:
                leg.places = leg.wanted_places

    def place_at_once(self, legs: Sequence[LegWork]) -> bool:
        """Take the places if they are free and nobody was there before; whether it did."""
        count = sum(leg.wanted_places for leg in legs)
        if self._queue or not self._fits(count):
            return False
        self._placed += count
        for leg in legs:
            leg.places = leg.wanted_places
        return True

    def leave(self, legs: Iterable[LegWork]) -> None:
        """These read no more, or never will: whoever waits may have their places. Idempotent."""
        for leg in legs:
            self._placed -= leg.places
            leg.places = 0
        while self._queue and (self._queue[0][1].done() or self._fits(self._queue[0][0])):
            count, turn = self._queue.popleft()
            if not turn.done():
                self._placed += count
                turn.set_result(None)

    def _fits(self, count: int) -> bool:
        """What is larger than all there is goes alone; its reads then wait for each other."""
        return not self._placed or self._placed + count <= limits.MAX_ACTIVE_READS

    async def _turn(self, work: TargetWork, count: int) -> None:
        turn: asyncio.Future[None] = self._loop.create_future()
        self._queue.append((count, turn))
        try:
            async with asyncio.timeout(work.deadline_seconds):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():  # it came with the turn
                self._placed -= count
            else:
                self._queue.remove((count, turn))
            self.leave(())
            if not isinstance(error, TimeoutError):
                raise
            text = f"{self._placed} legs of other requests read, as many as there is room for; try again later"
            raise DeadlineError(text, request_id=work.key, stage="queue") from None

    def start(self, work: TargetWork, leg: LegWork, plan: CopyPlan, increment: int = 0) -> None:
        """Read a leg, or one increment of it; to the transport that is an attempt with a number of its own."""
        session = self._sessions.get(leg.peer)
        if session is None:
            error = TransportError(f"no session with {leg.peer} to read from")
            self._feed(work, protocol.ReadEnded(leg.attempt, error=error_to_info(error), number=increment))
            return
        if increment and not plan.total_bytes:
            self._feed(work, protocol.ReadEnded(leg.attempt, number=increment))
            return
        config = self._rank.config
        read = Read(
            peer=session.wire_name,
            attempt=leg.attempt + increment,
            plan=plan,
            integrity=work.integrity(config),
            chunk_leaves=config.chunk_leaves,
            max_rereads=config.max_rereads_per_chunk,
        )
        try:
            op = session.pump.transport.read(read)
        except TransportFull:
            self._waiting.append((work, leg, plan, increment))
            return
        except TransportError as error:
            self._feed(work, protocol.ReadEnded(leg.attempt, error=error_to_info(error), number=increment))
            return
        leg.wire_name = session.wire_name
        leg.reading.add(read.attempt)
        if plan.total_bytes <= limits.LINGER_BYTES:
            self._rank.linger.on(session.pump)
        session.pump.on(op, partial(self._ended, work, leg, increment, plan.total_bytes))

    def cut_off(self, work: TargetWork, leg: LegWork) -> None:
        """Nothing lands after `CutOffDone`: either no get is outstanding, or the transport says when none is."""
        leg.cutting = True
        self.forget(leg)
        if not leg.reading:
            self.leave((leg,))
            self._feed(work, protocol.CutOffDone(leg.attempt))
            return
        self._cut(leg)

    def forget(self, leg: LegWork, increments: int | None = None) -> None:
        """End the leases' renewals for what reads no more: all of it, or of a stream the first ``increments``."""
        last = None if increments is None else leg.attempt + increments
        over = {number for number in leg.renewed if last is None or number <= last}
        leg.renewed -= over
        session = self._sessions.of_wire_name(leg.wire_name)
        if session is not None:
            for number in over:
                session.pump.transport.forget(leg.wire_name, number)

    def _cut(self, leg: LegWork) -> None:
        """Without a session its end has the transport cut everything off, and READ completions follow."""
        session = self._sessions.of_wire_name(leg.wire_name)
        if session is not None:
            for number in leg.reading:
                session.pump.transport.cut_off(leg.wire_name, number)

    def _ended(self, work: TargetWork, leg: LegWork, increment: int, wanted_bytes: int, completion: Completion) -> None:
        session = self._sessions.of_wire_name(leg.wire_name)
        if session is not None:
            self._rank.linger.forget(session.pump)
        leg.reading.discard(leg.attempt + increment)
        leg.renewed.add(leg.attempt + increment)
        work.read_ended(leg, completion)
        if leg.stream is None or (leg.cutting and not leg.reading):
            self.leave((leg,))
        work.marks["landed"] = self._loop.time()
        self._counters.bytes_moved += completion.bytes_moved
        self._counters.chunks_reread += completion.rereads
        ended = session is None
        error = read_error(completion, leg, session_ended=ended)
        if increment and error is None and "sealed" not in work.marks:
            work.streamed_bytes += wanted_bytes
        root = None if completion.root is None else completion.root.to_bytes(8, "little")
        event = protocol.ReadEnded(leg.attempt, root=root, error=error, number=increment)
        if completion.outcome is Outcome.SOURCE_FAILED and not (ended or leg.cutting):
            # The source says why (cancelled, lapsed) on the control connection, which may be slower than the channel
            # on which it refuses to be read.
            self._loop.call_later(limits.SOURCE_WORD_SECONDS, self._feed, work, event)
        else:
            self._feed(work, event)
        if leg.cutting and not leg.reading:
            # The cut-off waited for this: READ completions mean that nothing is outstanding.
            self.forget(leg)
            self._feed(work, protocol.CutOffDone(leg.attempt))
        self._start_waiting()

    def _start_waiting(self) -> None:
        """There is room for a read: start one that waits. Those that cannot start any more make room for the next."""
        for _ in range(len(self._waiting)):
            work, leg, plan, increment = self._waiting.popleft()
            if not leg.cutting:
                waiting = len(self._waiting)
                self.start(work, leg, plan, increment)
                if leg.attempt + increment in leg.reading or len(self._waiting) > waiting:
                    break
