"""The leases of a source: who may have one, what is exposed under it, and what it says of itself before a commit."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvlink import limits, protocol
from kvlink.descriptor import check_group_first_tokens
from kvlink.errors import BusyError, KVLinkError, PeerLostError, SchemaError, UnknownRequestError
from kvlink.link.source_outgoing import Exposed, Outgoing
from kvlink.link.source_work import Attempt, SourceWork
from kvlink.plan import CopyPlan, Increments
from kvlink.relayout import native_plan
from kvlink.transports.base import Exposure
from kvlink.wire import Ask, Capacity, ErrorInfo, Lease, error_to_info

if TYPE_CHECKING:
    from kvlink.link.rank import LocalRank
    from kvlink.link.sessions import Session, Sessions
    from kvlink.memory import BlockLedger
    from kvlink.observe import Counters

_log = logging.getLogger("kvlink.link")


class Leases:
    """Carries out `Expose`, `SendLease` and `Withdraw`. `SourceHalf` only.

    Args:
        rank: ourselves.
        sessions: who reads us.
        blocks: who has which blocks.
        counters: of the link.
        feed: puts an event to a request's machine.
    """

    def __init__(
        self,
        rank: LocalRank,
        sessions: Sessions,
        blocks: BlockLedger,
        counters: Counters,
        feed: Callable[[SourceWork, protocol.SourceEvent], None],
    ) -> None:
        self._rank = rank
        self._sessions = sessions
        self._blocks = blocks
        self._counters = counters
        self._feed = feed
        self._active = 0
        self._of_attempt: dict[Attempt, SourceWork] = {}

    @property
    def capacity(self) -> Capacity:
        """Of this rank, now."""
        return Capacity(
            leased_blocks=self._blocks.leased_blocks,
            active_legs=self._active,
            max_legs=self._rank.config.max_legs,
        )

    def of(self, peer: str, attempt: int) -> SourceWork | None:
        """The request that leased to this attempt, until it is forgotten."""
        return self._of_attempt.get((peer, attempt))

    def verdict(self, work: SourceWork, session: Session, ask: Ask) -> ErrorInfo | None:
        """Admission, and whether the leg can be planned; the plan is kept for the lease."""
        capacity = self.capacity
        try:
            if capacity.active_legs >= self._rank.config.max_legs:
                raise BusyError(
                    f"{capacity.active_legs} legs are leased, of {self._rank.config.max_legs}",
                    retry_after_seconds=limits.BUSY_HINT_SECONDS,
                )
            if capacity.leased_blocks >= self._rank.config.max_leased_blocks:
                raise BusyError(
                    f"{capacity.leased_blocks} blocks are leased, of {self._rank.config.max_leased_blocks}",
                    retry_after_seconds=limits.BUSY_HINT_SECONDS,
                )
            plan = self._plan(work, session, ask)
        except KVLinkError as error:
            return error_to_info(error)
        self._active += (session.peer, ask.attempt) not in work.plans
        work.plans[session.peer, ask.attempt] = plan
        return None

    def _plan(self, work: SourceWork, session: Session, ask: Ask) -> CopyPlan:
        """What the attempt may read at once; nothing, if it will read increment by increment."""
        descriptor = work.opening if work.streams_to(ask) else work.descriptor
        if descriptor is None or work.blocks is None:
            raise UnknownRequestError("not sealed yet")
        if not descriptor.first_token <= ask.first_token <= descriptor.tokens:
            raise SchemaError(f"first_token {ask.first_token} lies outside of what is offered")
        own = self._rank.caches.spec
        check_group_first_tokens("ask.group_first_tokens", ask.group_first_tokens, own, descriptor.tokens)
        starts = descriptor.starts(ask.first_token, ask.group_first_tokens)
        if descriptor is work.opening:
            blocks: list[list[int]] = [[] for _ in own.groups]
            of_stream = session.planners.of_stream(ask.leg)
            increments = Increments(of_stream, blocks, None, starts=starts, max_tokens=work.max_tokens)
            work.outgoing[session.peer, ask.attempt] = Outgoing(increments, blocks)
            return CopyPlan((), 0)
        planner = session.planners.of(ask.leg)
        foreseen, work.foreseen = work.foreseen, None
        if foreseen is not None and foreseen[0] is planner and foreseen[1] == starts:
            return foreseen[2]
        return planner.plan(work.blocks, None, first_token=starts, tokens=descriptor.tokens)

    def foresee(self, work: SourceWork) -> None:
        """Plan a short request before it is asked for, where one target reads us, and always the same leg."""
        session, descriptor = self._sessions.only, work.descriptor
        planner = None if session is None else session.planners.only
        if planner is None or descriptor is None or work.blocks is None or work.part.state.ended or work.attempts:
            return
        if sum(map(len, work.blocks)) > limits.FORESEEN_BLOCKS:
            return
        starts = descriptor.starts(descriptor.first_token)
        with contextlib.suppress(KVLinkError):  # whoever asks is told
            plan = planner.plan(work.blocks, None, first_token=starts, tokens=descriptor.tokens)
            native_plan(plan)
            work.foreseen = planner, starts, plan

    def drop_unless_leased(self, work: SourceWork, attempt: Attempt) -> None:
        """An ask was parked, refused or stale: nothing of it is needed any more."""
        if attempt not in work.attempts:
            work.asks.pop(attempt, None)
            work.outgoing.pop(attempt, None)
            self._active -= work.plans.pop(attempt, None) is not None

    def expose(self, work: SourceWork, peer: str, attempt: int, *, stream: bool) -> None:
        """Ownership is recorded before anything can be read (B8)."""
        key = (peer, attempt)
        self._blocks.lease(key, work.key)
        work.attempts.add(key)
        self._of_attempt[key] = work
        self._counters.leases_granted += 1
        if not stream and (exposed := self.let_read(work, key, attempt, work.plans[key])) is not None:
            work.exposed[key] = exposed

    def let_read(self, work: SourceWork, key: Attempt, number: int, plan: CopyPlan) -> Exposed | None:
        """Expose a plan to an attempt under this number; ``None`` if it cannot be, and then its lease has lapsed.

        An increment's has a number of its own, and a lease that its target's interpreter may be late for.
        """
        peer, attempt = key
        ask = work.asks[key]
        seconds = self._rank.config.lease_seconds
        if number != attempt:
            seconds = max(seconds, limits.INCREMENT_LEASE_SECONDS)
        session = self._sessions.get(peer)
        try:
            if session is None:
                raise PeerLostError("the peer went away between its ask and its lease", peer=peer)
            session.pump.transport.expose(
                Exposure(
                    peer=session.wire_name,
                    attempt=number,
                    plan=plan,
                    lease_seconds=seconds,
                    integrity=ask.integrity,
                    chunk_leaves=self._rank.config.chunk_leaves,
                )
            )
        except KVLinkError as error:
            _log.info("attempt %d of %s cannot be exposed: %s", attempt, peer, error)
            self._feed(work, protocol.LeaseLapsed(peer, attempt))
            return None
        work.transport, work.reason = session.pump.transport.capabilities().name, session.reason
        work.target = session.place
        return session.pump, session.wire_name

    def send(self, work: SourceWork, peer: str, attempt: int) -> None:
        """Tell the target that it may read; nothing, if that was exposed once and withdrawn since."""
        plan = work.plans.get((peer, attempt))
        if plan is None:
            return
        self._sessions.send(
            peer,
            Lease(
                attempt=attempt,
                lease_seconds=self._rank.config.lease_seconds,
                total_bytes=plan.total_bytes,
                capacity=self.capacity,
            ),
        )

    @staticmethod
    def state(work: SourceWork, attempt: Attempt) -> tuple[bool, bytes | None]:
        """The transport's verdict on a lease, taken natively, now: whether it held, and the source's root digest.

        A stream's increments were judged one by one, as they landed.
        """
        if attempt in work.outgoing:
            return True, None
        exposed = work.exposed.get(attempt)
        if exposed is None:
            return False, None
        pump, wire_name = exposed
        report = pump.transport.lease(wire_name, attempt[1])
        return report.held, None if report.root is None else report.root.to_bytes(8, "little")

    def withdraw(self, work: SourceWork, peer: str, attempt: int) -> None:
        """Ends the exposure and the block lease, once; the hold keeps the blocks until the part ends."""
        key = (peer, attempt)
        if (exposed := work.exposed.pop(key, None)) is not None:
            pump, wire_name = exposed
            pump.transport.withdraw(wire_name, attempt)
        work.asks.pop(key, None)
        streamed = 0 if (outgoing := work.outgoing.pop(key, None)) is None else outgoing.end()
        if (plan := work.plans.pop(key, None)) is not None:
            self._active -= 1
            self._blocks.end_lease(key)
            work.moved[peer] = plan.total_bytes + streamed

    def __len__(self) -> int:
        return len(self._of_attempt)

    def forget(self, work: SourceWork) -> None:
        """The request is over: its attempts are nobody's any more."""
        for attempt in work.attempts:
            self._of_attempt.pop(attempt, None)
