"""The streams of a target: what its sources tell of KV that they compute, planned and read increment by increment."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvlink import protocol
from kvlink.errors import KVLinkError, PeerLostError
from kvlink.link.target_incoming import Incoming
from kvlink.link.target_work import LegWork, TargetWork, size_mismatch
from kvlink.link.uncovered import zero_uncovered
from kvlink.plan import Increments
from kvlink.relayout import native_plan
from kvlink.wire import Advance, error_to_info

if TYPE_CHECKING:
    from kvlink.descriptor import KVDescriptor
    from kvlink.link.rank import LocalRank
    from kvlink.link.sessions import Session, Sessions
    from kvlink.link.target_reads import Reads
    from kvlink.plan import CopyPlan


class Incomings:
    """Opens streams and carries out `StartIncrement`. `TargetHalf` only."""

    def __init__(
        self,
        rank: LocalRank,
        sessions: Sessions,
        reads: Reads,
        feed: Callable[[TargetWork, protocol.TargetEvent], None],
    ) -> None:
        self._rank = rank
        self._sessions = sessions
        self._reads = reads
        self._feed = feed
        self._loop = asyncio.get_running_loop()

    def open(self, work: TargetWork, leg: LegWork, session: Session, opening: KVDescriptor) -> None:
        """A leg is to be read increment by increment.

        Raises:
            MismatchError, UnsupportedError: the leg cannot be planned.
        """
        planner = session.planners.of_stream(leg.groups)
        starts = opening.starts(work.first_token, work.source_first_tokens(self._rank.caches.spec))
        room = opening.tokens if work.ticket is None else work.ticket.tokens
        blocks: list[list[int]] = [[] for _ in opening.blocks]
        increments = Increments(planner, blocks, work.into, starts=starts, max_tokens=opening.tokens)
        leg.stream = Incoming(opening, starts, room, blocks, increments)

    def start(self, work: TargetWork, leg: LegWork, advance: Advance) -> None:
        """Read one more increment of a leg."""
        try:
            plan = self._plan(work, leg, advance)
        except KVLinkError as error:
            ended = protocol.ReadEnded(leg.attempt, error=error_to_info(error), number=advance.number)
            self._feed(work, ended)
            return
        self._reads.start(work, leg, plan, advance.number)
        if advance.sealed is None and leg.stream is not None:
            self._loop.call_soon(self._look_ahead, leg, leg.stream)

    def _look_ahead(self, leg: LegWork, stream: Incoming) -> None:
        """While it is read, and the source computes."""
        session = self._sessions.get(leg.peer)
        if session is None or leg.cutting:
            return
        with contextlib.suppress(KVLinkError):  # if it comes to that, it will be said then
            plan = stream.look_ahead()
            if plan is not None:
                session.pump.transport.prepare(plan)

    def _plan(self, work: TargetWork, leg: LegWork, advance: Advance) -> CopyPlan:
        session, stream = self._sessions.get(leg.peer), leg.stream
        if session is None or stream is None:
            raise PeerLostError(f"no session with {leg.peer} to read from", peer=leg.peer)
        stream.hear(advance)
        if advance.sealed is not None and work.uncovered == "zero":
            zero_uncovered(self._rank.caches, self._rank.gpu, work.into, advance.frontier.tokens)
        plan = stream.increments.plan(advance.frontier, sealed=advance.sealed is not None)
        if plan.total_bytes != advance.total_bytes:
            own = str(self._rank.caches.spec.place)
            raise size_mismatch(leg, advance.total_bytes, plan.total_bytes, own)
        leg.total_bytes += plan.total_bytes
        if self._rank.gpu is not None:
            self._rank.gpu.prepare(native_plan(plan))
        if not work.path:
            work.path, work.path_reason = session.pump.transport.path(plan, session.wire_name)
        return plan
