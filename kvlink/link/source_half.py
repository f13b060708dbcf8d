"""The source half of a link: it holds blocks, leases them, and commits each leg once.

Everything that decides is in ``kvlink.protocol.source``; here its actions are carried out and what happens is told it.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from kvlink import limits, protocol
from kvlink.descriptor import Facts, KVDescriptor, check_descriptor, check_group_first_tokens, descriptor_digest
from kvlink.errors import (
    BusyError,
    CancelledError,
    ClosedError,
    ConflictError,
    KVLinkError,
    LayoutError,
    PeerLostError,
    SchemaError,
    UnknownRequestError,
)
from kvlink.layout import fingerprint
from kvlink.link.machine import Machine
from kvlink.link.part import LivePart, Part, Result, State
from kvlink.link.sessions import Session, Sessions
from kvlink.link.target_work import STATE_OF_END, whole_blocks
from kvlink.plan import CopyPlan
from kvlink.protocol import End, SourceEvent, SourcePart, SourcePhase
from kvlink.transports.base import Exposure
from kvlink.wire import (
    Announce,
    AnyMessage,
    Ask,
    Capacity,
    Decline,
    ErrorInfo,
    Expect,
    Installed,
    Lease,
    NotInstalled,
    Parked,
    Prepared,
    Refused,
    Renew,
    Ticket,
    Withdrawn,
    error_to_info,
    info_to_error,
)

if TYPE_CHECKING:
    from kvlink.descriptor import BlockList, FirstTokens
    from kvlink.layout import Place
    from kvlink.link.control import ControlConnection
    from kvlink.link.pump import Pump
    from kvlink.link.rank import LocalRank
    from kvlink.link.tasks import TaskSet
    from kvlink.memory import BlockLedger
    from kvlink.observe import Counters
    from kvlink.protocol import Action, Timing
    from kvlink.wire import Offer

_log = logging.getLogger("kvlink.link")
_Attempt = tuple[str, int]
"""Peer and attempt."""


@dataclass(slots=True, eq=False)
class _Work:
    """One request on this source rank.

    ``asks`` and ``plans`` are kept from an ask's arrival to its lease's end, by (peer, attempt); ``exposed`` says under
    which of the transport's names an attempt reads.
    """

    key: str
    part: LivePart
    started: float
    max_tokens: int
    facts: Facts = field(default_factory=Facts)
    blocks: tuple[BlockList, ...] | None = None
    tokens: int = 0
    group_first_tokens: FirstTokens = ()
    descriptor: KVDescriptor | None = None
    machine: Machine[SourcePart, SourceEvent] | None = None
    asks: dict[_Attempt, Ask] = field(default_factory=dict)
    plans: dict[_Attempt, CopyPlan] = field(default_factory=dict)
    exposed: dict[_Attempt, tuple[Pump, str]] = field(default_factory=dict)
    attempts: set[_Attempt] = field(default_factory=set)
    moved: dict[str, int] = field(default_factory=dict)
    transport: str = ""
    reason: str = ""


class SourceHalf:
    """All requests whose KV this rank gives. Used by `kvlink.Link` only."""

    def __init__(
        self, rank: LocalRank, tasks: TaskSet, blocks: BlockLedger, counters: Counters, timing: Timing
    ) -> None:
        self._rank = rank
        self._tasks = tasks
        self._blocks = blocks
        self._counters = counters
        self._timing = timing
        self._loop = asyncio.get_running_loop()
        self._works: dict[str, _Work] = {}
        self._of_attempt: dict[tuple[str, int], _Work] = {}
        self._ledger: protocol.Ledger[_Work] = protocol.Ledger()
        self._parked: protocol.ParkingLot[tuple[str, Ask]] = protocol.ParkingLot()
        self._tickets: protocol.ParkingLot[str] = protocol.ParkingLot()
        self._sweeper: asyncio.TimerHandle | None = None
        self._incarnations: dict[tuple[str, int, int], str] = {}
        self.sessions = Sessions(
            rank, tasks, reading=False, on_message=self._on_message, on_up=self._on_up, on_down=self._on_down
        )

    @property
    def live(self) -> int:
        """Parts that have not ended."""
        return sum(not work.part.state.ended for work in self._works.values())

    def accepted(self, connection: ControlConnection) -> None:
        """The listener let a peer in."""
        self._tasks.start(self.sessions.adopt(connection), f"adopt {connection.peer}")

    # --- verbs --------------------------------------------------------------------------------------------------

    def publish(self, offer: Offer, part: LivePart) -> None:
        """Hold the offer's blocks and answer asks for them; see `kvlink.Link.publish`."""
        descriptor = offer.descriptor(limits.MAX_ATTEMPT_SECONDS)
        check_descriptor(descriptor, self._rank.caches.spec)
        work = _Work(offer.key, part, self._loop.time(), max_tokens=offer.tokens, facts=offer.facts)
        work.blocks, work.tokens, work.descriptor = offer.blocks, offer.tokens, descriptor
        self._admit(work, descriptor_digest(descriptor))
        self._hold(work, descriptor_digest(descriptor), offer.ttl_seconds)
        part.rise(State.READY)

    def announce(self, key: str, part: LivePart, *, max_tokens: int, ttl_seconds: float, facts: Facts) -> None:
        """Hold a place for KV that is still being computed; see `kvlink.Link.announce`."""
        work = _Work(key, part, self._loop.time(), max_tokens=max_tokens, facts=facts)
        self._admit(work, None)
        self._hold(work, None, ttl_seconds)

    def ready(
        self,
        part: Part,
        blocks: tuple[BlockList, ...] | None,
        tokens: int | None,
        group_first_tokens: FirstTokens | None = None,
    ) -> None:
        """Advance the frontier of an announced part; see `kvlink.Part.ready`."""
        work = self._announced(part)
        if tokens is not None and not work.tokens <= tokens <= work.max_tokens:
            raise LayoutError(
                f"tokens may rise from {work.tokens} to the announced {work.max_tokens}, not to {tokens}",
                request_id=part.key,
            )
        if blocks is not None:
            work.blocks = whole_blocks(blocks, part.key)
        work.tokens = work.tokens if tokens is None else tokens
        if group_first_tokens is not None:
            work.group_first_tokens = tuple(group_first_tokens)

    def seal(self, part: Part) -> None:
        """Nothing more will come; see `kvlink.Part.seal`."""
        work = self._announced(part)
        if work.blocks is None or work.tokens == 0:
            raise LayoutError("nothing was made ready before the seal; give blocks and tokens", request_id=part.key)
        spec = self._rank.caches.spec
        descriptor = KVDescriptor(
            request_id=work.key,
            tokens=work.tokens,
            first_token=0,
            blocks=work.blocks,
            identity_fingerprint=fingerprint(spec.identity),
            digest_scheme=limits.DIGEST_SCHEME if self._rank.config.integrity else None,
            facts=work.facts,
            deadline_seconds=limits.MAX_ATTEMPT_SECONDS,
            group_first_tokens=work.group_first_tokens,
        )
        check_descriptor(descriptor, spec)
        self._blocks.hold(work.key, work.blocks)
        work.descriptor = descriptor
        digest = descriptor_digest(descriptor)
        self._ledger.content(work.key, digest)
        work.part.rise(State.READY)
        self._feed(work, protocol.Seal(digest))

    def cancel(self, part: Part, why: str) -> None:
        """End a part; nothing happens if it is not ours, or has ended."""
        work = self._works.get(part.key)
        if work is not None and work.part is part:
            failure = protocol.fail(End.CANCELLED, CancelledError, f"cancelled by the source: {why}")
            self._feed(work, protocol.Cancel(failure))

    def fail(self, part: Part, error: KVLinkError) -> bool:
        """End a live part of this half with ``error``, for whom cannot raise it; whether it is one."""
        work = self._works.get(part.key)
        if work is None or work.part is not part or part.state.ended:
            return False
        self._feed(work, protocol.Cancel(protocol.failure_of(error_to_info(error))))
        return True

    def stop(self) -> None:
        """No more timers."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        for work in self._works.values():
            if work.machine is not None:
                work.machine.stop()

    # --- holds -----------------------------------------------------------------------------------------------------

    def _admit(self, work: _Work, digest: str | None) -> None:
        match self._ledger.look(work.key, digest, self._loop.time()):
            case protocol.Refuse(error=error) | protocol.Recorded(error=ErrorInfo() as error):
                raise info_to_error(error, request_id=work.key)
            case protocol.Join() | protocol.Recorded():
                raise ConflictError(
                    "this key is held already; cancel it first, or give the request a new key", request_id=work.key
                )
            case _:
                pass
        if work.blocks is not None:
            self._blocks.hold(work.key, work.blocks)
        self._ledger.begin(work.key, digest, work)
        self._works[work.key] = work

    def _hold(self, work: _Work, digest: str | None, ttl_seconds: float) -> None:
        now = self._loop.time()
        state = protocol.source.begin(
            work.key,
            digest=digest,
            ttl_seconds=ttl_seconds,
            deadline_seconds=limits.MAX_ATTEMPT_SECONDS,
            now=now,
            timing=self._timing,
        )
        act, settle = partial(self._act, work), partial(self._settle, work)
        work.machine = Machine(state, protocol.source.step, protocol.source.next_timer, act, settle)
        work.machine.start(())
        for peer in self._tickets.take(work.key):
            self._feed(work, protocol.TicketArrived(peer))
        self._unpark(work.key)

    def _announced(self, part: Part) -> _Work:
        work = self._works.get(part.key)
        if work is None or work.part is not part or part.state.ended:
            raise ClosedError("this part has ended, or is not ours", request_id=part.key)
        if work.descriptor is not None:
            raise ClosedError("this part is sealed; nothing more can become ready", request_id=part.key)
        return work

    # --- messages and sessions --------------------------------------------------------------------------------------

    def _on_message(self, session: Session, message: AnyMessage) -> None:
        peer = session.peer
        match message:
            case Ask():
                self._asked(session, message)
            case Expect(ticket=data):
                self._expected(session, data)
            case Renew(keys=keys):
                for key in keys:
                    if (work := self._works.get(key)) is not None:
                        self._feed(work, protocol.RenewHold())
            case Decline(key=key, why=why, unread=unread):
                if (work := self._works.get(key)) is not None:
                    self._feed(work, protocol.DeclineArrived(peer, why, unread))
            case Prepared() | Installed() | NotInstalled():
                self._about_attempt(session, message)
            case _:
                _log.debug("%s sent %s, which is not a target's to send", peer, type(message).__name__)

    def _asked(self, session: Session, ask: Ask) -> None:
        work = self._works.get(ask.key)
        if work is None:
            self._ask_unknown(session.peer, ask)
            return
        attempt = (session.peer, ask.attempt)
        refusal = None
        if attempt not in work.attempts:
            work.asks[attempt] = ask
            if work.descriptor is not None:
                refusal = self._verdict(work, session, ask)
        if refusal is not None:
            self._counters.asks_refused += 1
        self._feed(
            work,
            protocol.AskArrived(
                peer=session.peer,
                engine=session.place.incarnation,
                attempt=ask.attempt,
                digest=descriptor_digest(ask.descriptor),
                readers=ask.readers,
                refusal=refusal,
            ),
        )
        if attempt not in work.attempts:  # parked, refused or stale: nothing of it is needed any more
            work.asks.pop(attempt, None)
            work.plans.pop(attempt, None)

    def _ask_unknown(self, peer: str, ask: Ask) -> None:
        outcome = self._ledger.outcome(ask.key)
        if outcome is not None:
            error = outcome.error or protocol.ended_error(ask.key, outcome.end, None)
            self._counters.asks_refused += 1
            self.sessions.send(peer, Refused(attempt=ask.attempt, error=error, capacity=self._capacity()))
            return
        self._park(peer, ask)

    def _verdict(self, work: _Work, session: Session, ask: Ask) -> ErrorInfo | None:
        """Admission, and whether the leg can be planned; the plan is kept for the lease."""
        capacity = self._capacity()
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
            if not ask.descriptor.first_token <= ask.first_token <= ask.descriptor.tokens:
                raise SchemaError(f"first_token {ask.first_token} lies outside of what is offered")
            if work.descriptor is None or work.blocks is None:
                raise UnknownRequestError("not sealed yet")
            own = self._rank.caches.spec
            check_group_first_tokens("ask.group_first_tokens", ask.group_first_tokens, own, work.tokens)
            starts = work.descriptor.starts(ask.first_token, ask.group_first_tokens)
            planner = session.planners.of(ask.leg)
            plan = planner.plan(work.blocks, None, first_token=starts, tokens=work.tokens)
        except KVLinkError as error:
            return error_to_info(error)
        work.plans[session.peer, ask.attempt] = plan
        return None

    def _expected(self, session: Session, data: bytes) -> None:
        try:
            ticket = Ticket.from_bytes(data)
            if self._rank.config.secret is not None:
                ticket.verify(self._rank.config.secret)
            mismatch = ticket.check(Facts(), self._rank.caches.spec.identity)
            if mismatch is not None:
                raise mismatch
        except KVLinkError as error:
            _log.info("a ticket of %s was refused: %s", session.peer, error)
            if error.request_id is not None:
                self.sessions.send(session.peer, Withdrawn(key=error.request_id, error=error_to_info(error)))
            return
        work = self._works.get(ticket.key)
        if work is not None:
            self._feed(work, protocol.TicketArrived(session.peer))
            return
        outcome = self._ledger.outcome(ticket.key)
        if outcome is not None:
            error_info = outcome.error or protocol.ended_error(ticket.key, outcome.end, None)
            self.sessions.send(session.peer, Withdrawn(key=ticket.key, error=error_info))
            return
        until = self._loop.time() + min(ticket.ttl_seconds, self._rank.config.claim_ttl_seconds)
        self._tickets.park(ticket.key, session.peer, 1, session.peer, until)
        self._sweep_later()

    def _about_attempt(self, session: Session, message: Prepared | Installed | NotInstalled) -> None:
        peer, attempt = session.peer, message.attempt
        work = self._of_attempt.get((peer, attempt))
        if isinstance(message, NotInstalled):
            for key in list(self._works) if work is None else [work.key]:
                self._parked.drop(key, peer, attempt)
        if work is None:
            self._counters.messages_late += 1
            for action in protocol.answer_unknown(peer, message):
                self.sessions.send(peer, action.message)
            return
        if isinstance(message, Prepared):
            held, root = self._lease_state(work, (peer, attempt))
            self._feed(work, protocol.PreparedArrived(peer, attempt, message.root, held, root))
        else:
            self._feed(work, protocol.Received(peer, message))

    def _on_up(self, session: Session) -> None:
        self._counters.peers_connected += 1
        place: Place = session.place
        rank = (place.engine, place.pp_rank, place.tp_rank)
        before = self._incarnations.get(rank)
        self._incarnations[rank] = session.peer
        if before is not None and before != session.peer:
            # Its successor has authenticated: whatever the old incarnation installed died with it.
            for work in list(self._works.values()):
                self._feed(work, protocol.PeerDead(before))

    def _on_down(self, session: Session, error: KVLinkError) -> None:
        self._counters.peers_lost += 1
        _log.info("the session with %s ended: %s", session.peer, error)
        self._parked.forget(session.peer)
        self._tickets.forget(session.peer)
        for work in list(self._works.values()):
            self._feed(work, protocol.PeerLost(session.peer))

    def lapsed(self, wire_name: str, attempt: int) -> None:
        """The transport's LEASE_LAPSED."""
        session = self.sessions.of_wire_name(wire_name)
        if session is None:
            return
        self._counters.leases_lapsed += 1
        if (work := self._of_attempt.get((session.peer, attempt))) is not None:
            self._feed(work, protocol.LeaseLapsed(session.peer, attempt))

    # --- parking ----------------------------------------------------------------------------------------------------

    def _park(self, peer: str, ask: Ask) -> None:
        park_seconds = self._rank.config.park_seconds
        until = self._loop.time() + park_seconds
        if self._parked.park(ask.key, peer, ask.attempt, (peer, ask), until):
            self._counters.asks_parked += 1
            self.sessions.send(peer, Parked(attempt=ask.attempt, park_seconds=park_seconds))
            self._sweep_later()
        else:
            error = BusyError("no room for another early ask", retry_after_seconds=limits.BUSY_HINT_SECONDS)
            self.sessions.send(
                peer, Refused(attempt=ask.attempt, error=error_to_info(error), capacity=self._capacity())
            )

    def _unpark(self, key: str) -> None:
        for peer, ask in self._parked.take(key):
            session = self.sessions.get(peer)
            if session is not None:
                self._asked(session, ask)

    def _sweep_later(self) -> None:
        times = [time for time in (self._parked.next_timer(), self._tickets.next_timer()) if time is not None]
        if self._sweeper is not None:
            self._sweeper.cancel()
        self._sweeper = self._loop.call_at(min(times), self._sweep) if times else None

    def _sweep(self) -> None:
        """Early asks have their own clock, whatever else goes on."""
        now = self._loop.time()
        for peer, ask in self._parked.expire(now):
            error = UnknownRequestError(f"no KV came under key {ask.key} while the ask was parked")
            self.sessions.send(
                peer, Refused(attempt=ask.attempt, error=error_to_info(error), capacity=self._capacity())
            )
        self._tickets.expire(now)
        self._sweep_later()

    # --- the machine's actions ------------------------------------------------------------------------------------

    def _act(self, work: _Work, action: Action) -> None:  # noqa: C901, PLR0912 - one case an action
        match action:
            case protocol.Send(peer=peer, message=message):
                self.sessions.send(peer, message)
            case protocol.Expose(peer=peer, attempt=attempt):
                self._expose(work, peer, attempt)
            case protocol.SendLease(peer=peer, attempt=attempt):
                self._send_lease(work, peer, attempt)
            case protocol.Withdraw(peer=peer, attempt=attempt):
                self._withdraw(work, peer, attempt)
            case protocol.SendAnnounce(peer=peer):
                if work.descriptor is not None:
                    self.sessions.send(peer, Announce(key=work.key, descriptor=work.descriptor))
            case protocol.ParkAsk(peer=peer, attempt=attempt):
                self._park(peer, work.asks[peer, attempt])
            case protocol.Unpark():
                self._loop.call_soon(self._unpark, work.key)
            case protocol.EndHold():
                if work.descriptor is not None:
                    self._blocks.end_hold(work.key)
            case protocol.Report(end=end, error=error):
                self._report(work, end, error)
            case protocol.Learned():
                self._ledger.release(work.key, self._loop.time())
            case _:
                raise AssertionError(f"a source machine does not do {action}")

    def _settle(self, work: _Work) -> None:
        """A machine may close in a step that asks for nothing."""
        if work.machine is not None and work.machine.state.phase is SourcePhase.CLOSED:
            self._forget(work)

    def _feed(self, work: _Work, event: SourceEvent) -> None:
        if work.machine is not None:
            work.machine.feed(event)

    def _expose(self, work: _Work, peer: str, attempt: int) -> None:
        """Ownership is recorded before anything can be read (B8)."""
        key = (peer, attempt)
        ask, plan = work.asks[key], work.plans[key]
        self._blocks.lease(key, work.key)
        work.attempts.add(key)
        self._of_attempt[key] = work
        self._counters.leases_granted += 1
        session = self.sessions.get(peer)
        try:
            if session is None:
                raise PeerLostError("the peer went away between its ask and its lease", peer=peer)
            session.pump.transport.expose(
                Exposure(
                    peer=session.wire_name,
                    attempt=attempt,
                    plan=plan,
                    lease_seconds=self._rank.config.lease_seconds,
                    integrity=ask.integrity,
                    chunk_leaves=self._rank.config.chunk_leaves,
                )
            )
        except KVLinkError as error:
            _log.info("attempt %d of %s cannot be exposed: %s", attempt, peer, error)
            self._feed(work, protocol.LeaseLapsed(peer, attempt))
            return
        capabilities = session.pump.transport.capabilities()
        work.transport, work.reason = capabilities.name, session.reason
        work.exposed[key] = (session.pump, session.wire_name)

    def _send_lease(self, work: _Work, peer: str, attempt: int) -> None:
        plan = work.plans.get((peer, attempt))
        if plan is None:  # exposed once, and withdrawn since
            return
        self.sessions.send(
            peer,
            Lease(
                attempt=attempt,
                lease_seconds=self._rank.config.lease_seconds,
                total_bytes=plan.total_bytes,
                capacity=self._capacity(),
            ),
        )

    def _lease_state(self, work: _Work, attempt: _Attempt) -> tuple[bool, bytes | None]:
        """The transport's verdict on a lease, taken natively, now."""
        exposed = work.exposed.get(attempt)
        if exposed is None:
            return False, None
        pump, wire_name = exposed
        report = pump.transport.lease(wire_name, attempt[1])
        return report.held, None if report.root is None else report.root.to_bytes(8, "little")

    def _withdraw(self, work: _Work, peer: str, attempt: int) -> None:
        """Ends the exposure and the block lease, once; the hold keeps the blocks until the part ends."""
        key = (peer, attempt)
        if (exposed := work.exposed.pop(key, None)) is not None:
            pump, wire_name = exposed
            pump.transport.withdraw(wire_name, attempt)
        work.asks.pop(key, None)
        if (plan := work.plans.pop(key, None)) is not None:
            self._blocks.end_lease(key)
            work.moved[peer] = plan.total_bytes

    def _capacity(self) -> Capacity:
        return Capacity(
            leased_blocks=self._blocks.stats().leased,
            active_legs=sum(len(work.plans) for work in self._works.values()),
            max_legs=self._rank.config.max_legs,
        )

    def _report(self, work: _Work, end: End, error: ErrorInfo | None) -> None:
        now = self._loop.time()
        self._ledger.end(work.key, end, error, now, standing=end is End.INDETERMINATE)
        self._counters.ended(end.value)
        work.part.end(
            Result(
                key=work.key,
                state=STATE_OF_END[end],
                error=None if error is None else info_to_error(error, request_id=work.key),
                bytes=sum(work.moved.values()) if end is End.DONE else 0,
                seconds=now - work.started,
                attempts=len(work.attempts),
                legs=len({peer for peer, _ in work.attempts}),
                transport=work.transport,
                transport_reason=work.reason,
                integrity=work.descriptor is not None and work.descriptor.digest_scheme is not None,
            )
        )

    def _forget(self, work: _Work) -> None:
        for attempt in work.attempts:
            self._of_attempt.pop(attempt, None)
        if self._works.get(work.key) is work:
            del self._works[work.key]
        if work.machine is not None:
            work.machine.stop()
