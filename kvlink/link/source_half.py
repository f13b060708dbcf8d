"""The source half of a link: it holds blocks, leases them, and commits each leg once.

Everything that decides is in ``kvlink.protocol.source``; here its actions are carried out and what happens is told it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from kvlink import limits, protocol
from kvlink.descriptor import Facts, KVDescriptor, check_descriptor, descriptor_digest
from kvlink.errors import (
    CancelledError,
    ClosedError,
    ConflictError,
    GpuError,
    KVLinkError,
)
from kvlink.layout import NOTHING, Frontier, end_layer_of
from kvlink.link.coordinator import Coordinator
from kvlink.link.machine import Machine
from kvlink.link.part import LivePart, Part, State
from kvlink.link.recovery import Recovery
from kvlink.link.sessions import Session, Sessions
from kvlink.link.source_early import Early
from kvlink.link.source_frontier import descriptor_of, final_draft, frontier_after
from kvlink.link.source_leases import Leases
from kvlink.link.source_streams import Streams
from kvlink.link.source_work import SourceWork
from kvlink.protocol import End, SourceEvent, SourcePhase
from kvlink.wire import (
    Announce,
    AnyMessage,
    Ask,
    Decline,
    ErrorInfo,
    Expect,
    Installed,
    Landed,
    NotInstalled,
    Prepared,
    Refused,
    Renew,
    Stands,
    Ticket,
    Withdrawn,
    error_to_info,
    info_to_error,
)

if TYPE_CHECKING:
    from kvlink.descriptor import BlockList
    from kvlink.layout import Place
    from kvlink.link.control import ControlConnection
    from kvlink.link.part import Ready
    from kvlink.link.rank import LocalRank
    from kvlink.link.tasks import TaskSet
    from kvlink.memory import BlockLedger
    from kvlink.observe import Counters
    from kvlink.protocol import Action, Timing
    from kvlink.relayout.gpu import Moment
    from kvlink.wire import Offer

_log = logging.getLogger("kvlink.link")


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
        self._works: dict[str, SourceWork] = {}
        self._ledger: protocol.Ledger[SourceWork] = protocol.Ledger()
        self._incarnations: dict[tuple[str, int, int], Place] = {}
        self.sessions = Sessions(
            rank, tasks, reading=False, on_message=self._on_message, on_up=self._on_up, on_down=self._on_down
        )
        self._leases = Leases(rank, self.sessions, blocks, counters, self._feed)
        self._streams = Streams(rank, self.sessions, self._leases, self._fail_work)
        self.recovery = Recovery(rank, self.sessions, counters, self._works)
        self.early = Early(rank, self.sessions, self._leases, counters)
        self.coordinator = Coordinator(rank, self.sessions, timing)

    @property
    def live(self) -> int:
        """Parts that have not ended."""
        return sum(not work.part.state.ended for work in self._works.values())

    def accepted(self, connection: ControlConnection) -> None:
        """The listener let a peer in."""
        task = self._tasks.start(self.sessions.adopt(connection), f"adopt {connection.peer}")
        # Cancelled before its first step, `adopt` closes nothing itself.
        task.add_done_callback(lambda task: connection.close() if task.cancelled() else None)

    # --- verbs --------------------------------------------------------------------------------------------------

    def publish(self, offer: Offer, part: LivePart, after: Moment | None, family: tuple[str, ...] = ()) -> None:
        """Hold the offer's blocks and answer asks for them, once ``after`` has come; see `kvlink.Link.publish`."""
        descriptor = offer.descriptor(limits.MAX_ATTEMPT_SECONDS)
        check_descriptor(descriptor, self._rank.caches.spec)
        work = SourceWork(offer.key, part, self._loop.time(), max_tokens=offer.tokens, facts=offer.facts)
        work.blocks, work.frontier, work.sealed = offer.blocks, Frontier.whole(offer.tokens), True
        work.offer, work.family = offer, family
        digest = descriptor_digest(descriptor)
        self._admit(work, digest)
        if after is None:
            work.descriptor = descriptor
            self._begin(work, digest, offer.ttl_seconds)
            part.rise(State.READY)
            self._loop.call_soon(self._leases.foresee, work)
        else:  # asks that come before are parked, as those of a part that is still announced
            self._begin(work, None, offer.ttl_seconds)
            self._in_turn(work, after, partial(self._offer, work, descriptor, digest))

    def announce(self, key: str, part: LivePart, *, max_tokens: int, ttl_seconds: float, facts: Facts) -> None:
        """Hold a place for KV that is still being computed; see `kvlink.Link.announce`."""
        work = SourceWork(key, part, self._loop.time(), max_tokens=max_tokens, facts=facts)
        work.end_layer = end_layer_of(self._rank.caches.spec)
        self._admit(work, None)
        self._begin(work, None, ttl_seconds)

    def ready(self, part: Part, ready: Ready, event: object = None) -> None:
        """Advance the frontier of an announced part; see `kvlink.Part.ready`."""
        work = self._announced(part)
        told = frontier_after(work, ready, self._rank.caches.spec)
        moment = self._rank.moments.take(event=event)
        blocks = work.blocks
        work.frontier, work.blocks, work.group_first_tokens = told
        if work.blocks is not None and work.blocks is not blocks:
            self._hold_blocks(work, work.blocks)
        self._in_turn(work, moment, partial(self._advance, work, work.frontier))

    def seal(self, part: Part) -> None:
        """Nothing more will come; see `kvlink.Part.seal`."""
        work = self._announced(part)
        descriptor, digest = final_draft(work, self._rank.caches.spec, integrity=self._rank.config.integrity)
        work.sealed = True
        self._ledger.content(work.key, digest)
        self._in_turn(work, None, partial(self._offer, work, descriptor, digest))

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
        self._fail_work(work, error)
        return True

    def _fail_work(self, work: SourceWork, error: KVLinkError) -> None:
        self._feed(work, protocol.Cancel(protocol.failure_of(error_to_info(error))))

    def stop(self) -> None:
        """No more timers."""
        self.early.stop()
        self.coordinator.forget()
        for work in self._works.values():
            if work.machine is not None:
                work.machine.stop()

    # --- holds -----------------------------------------------------------------------------------------------------

    def _admit(self, work: SourceWork, digest: str | None) -> None:
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
            self._hold_blocks(work, work.blocks)
        self._ledger.begin(work.key, digest, work)
        self._works[work.key] = work

    def _hold_blocks(self, work: SourceWork, blocks: tuple[BlockList, ...]) -> None:
        if work.held:
            self._blocks.change_hold(work.key, blocks)
        else:
            self._blocks.hold(work.key, blocks)
            work.held = True

    def _begin(self, work: SourceWork, digest: str | None, ttl_seconds: float) -> None:
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
        for peer in self.early.tickets.take(work.key):
            self._feed(work, protocol.TicketArrived(peer))
        self._unpark(work.key)

    def _offer(self, work: SourceWork, descriptor: KVDescriptor, digest: str) -> None:
        """All of it is in place: whoever asks may read."""
        work.descriptor, work.digest = descriptor, digest
        work.visible, work.sealed_at = work.frontier, self._loop.time()
        work.part.rise(State.READY)
        opening = None if work.offer is not None else self._opening(work)
        self._feed(work, protocol.Seal(work.digest, work.visible, opening))

    def _advance(self, work: SourceWork, frontier: Frontier) -> None:
        """The engine's work up to here is done. What it says in one turn of the loop is told at once."""
        work.visible = frontier
        if not work.advancing:
            work.advancing = True
            self._loop.call_soon(self._tell_advance, work)

    def _tell_advance(self, work: SourceWork) -> None:
        work.advancing = False
        if work.part.state.ended or work.descriptor is not None or work.blocks is None or work.visible == NOTHING:
            return
        work.part.rise(State.READY)
        self._feed(work, protocol.Advanced(work.visible, self._opening(work)))

    def _opening(self, work: SourceWork) -> str:
        """The digest of a stream's beginning; made with its first word."""
        if work.opening is None:
            spec, integrity = self._rank.caches.spec, self._rank.config.integrity
            none: tuple[BlockList, ...] = tuple(() for _ in spec.groups)
            work.opening = descriptor_of(work, spec, work.max_tokens, none, integrity=integrity)
            work.opening_digest = descriptor_digest(work.opening)
        return work.opening_digest

    def _in_turn(self, work: SourceWork, after: Moment | None, act: Callable[[], None]) -> None:
        """Act once the engine's work is done, and what was said before of this part has been acted on."""
        if after is None and not work.turns:
            act()
            return
        work.turns.append((after, act))
        if len(work.turns) == 1:
            self._tasks.start(self._take_turns(work), f"computing {work.key}")

    async def _take_turns(self, work: SourceWork) -> None:
        try:
            while work.turns and not work.part.state.ended:
                after, act = work.turns[0]
                await self._rank.moments.passed(after)
                if not work.part.state.ended:
                    act()
                work.turns.popleft()
        except GpuError as error:
            self.fail(work.part, error)
        finally:
            work.turns.clear()

    def _announced(self, part: Part) -> SourceWork:
        work = self._works.get(part.key)
        if work is None or work.part is not part or part.state.ended:
            raise ClosedError("this part has ended, or is not ours", request_id=part.key)
        if work.sealed:
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
                self._declined(key, protocol.DeclineArrived(peer, why, unread))
            case Landed() | Prepared() | Installed() | NotInstalled():
                self._about_attempt(session, message)
            case Stands():
                self.coordinator.hears(session.place, message)
            case _:
                _log.debug("%s sent %s, which is not a target's to send", peer, type(message).__name__)

    def _declined(self, key: str, declined: protocol.DeclineArrived) -> None:
        if (work := self._works.get(key)) is not None:
            self._feed(work, declined)
        elif self._ledger.outcome(key) is None:
            self.early.keep_decline(key, declined)

    def _asked(self, session: Session, ask: Ask) -> None:
        work = self._works.get(ask.key)
        if work is None:
            self._ask_unknown(session.peer, ask)
            return
        attempt = (session.peer, ask.attempt)
        refusal = None
        if attempt not in work.attempts:
            work.asks[attempt] = ask
            if work.descriptor is not None or work.streams_to(ask):
                refusal = self._leases.verdict(work, session, ask)
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
        self._leases.drop_unless_leased(work, attempt)

    def _ask_unknown(self, peer: str, ask: Ask) -> None:
        outcome = self._ledger.outcome(ask.key)
        if outcome is not None:
            error = outcome.error or protocol.ended_error(ask.key, outcome.end, None)
            self._counters.asks_refused += 1
            self.sessions.send(peer, Refused(attempt=ask.attempt, error=error, capacity=self._leases.capacity))
            return
        self.early.park(peer, ask)

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
        self.early.keep(session.peer, ticket)

    def _about_attempt(self, session: Session, message: Landed | Prepared | Installed | NotInstalled) -> None:
        peer, attempt = session.peer, message.attempt
        work = self._leases.of(peer, attempt)
        if isinstance(message, NotInstalled):
            for key in list(self._works) if work is None else [work.key]:
                self.early.asks.drop(key, peer, attempt)
        if work is None:
            self._counters.messages_late += 1
            for action in protocol.answer_unknown(peer, message):
                self.sessions.send(peer, action.message)
            return
        if isinstance(message, Landed | Prepared):
            for landed in self._streams.landed(work, peer, message):
                self._feed(work, landed)
        if isinstance(message, Prepared):
            held, root = self._leases.state(work, (peer, attempt))
            counts = message.increments, message.content
            self._feed(work, protocol.PreparedArrived(peer, attempt, message.root, held, root, *counts))
        elif not isinstance(message, Landed):
            self._feed(work, protocol.Received(peer, message))

    def _on_up(self, session: Session) -> None:
        self._counters.peers_connected += 1
        place: Place = session.place
        rank = (place.engine, place.pp_rank, place.tp_rank)
        before = self._incarnations.get(rank)
        self._incarnations[rank] = place
        if before == place:
            before = None
        if before is not None:
            # Its successor has authenticated: whatever the old incarnation installed died with it.
            for work in list(self._works.values()):
                self._feed(work, protocol.PeerDead(str(before)))
            self.coordinator.dead(str(before))
        self.recovery.up(place, before)

    def _on_down(self, session: Session, error: KVLinkError) -> None:
        self._counters.peers_lost += 1
        _log.info("the session with %s ended: %s", session.peer, error)
        self.early.forget(session.peer)
        self.coordinator.lost(session.peer)
        for work in list(self._works.values()):
            self._feed(work, protocol.PeerLost(session.peer))
        self.recovery.down(session.place)

    def lapsed(self, wire_name: str, attempt: int) -> None:
        """The transport's LEASE_LAPSED."""
        session = self.sessions.of_wire_name(wire_name)
        if session is None:
            return
        self._counters.leases_lapsed += 1
        if (work := self._leases.of(session.peer, attempt)) is not None:
            self._feed(work, protocol.LeaseLapsed(session.peer, attempt))
            return
        for work in list(self._works.values()):
            if (streaming := self._streams.attempt_of(work, session.peer, attempt)) is not None:
                self._feed(work, protocol.LeaseLapsed(session.peer, streaming))

    def _unpark(self, key: str) -> None:
        for peer, ask in self.early.asks.take(key):
            session = self.sessions.get(peer)
            if session is not None:
                self._asked(session, ask)
        for declined in self.early.declines.take(key):
            self._declined(key, declined)

    # --- the machine's actions ------------------------------------------------------------------------------------

    def _act(self, work: SourceWork, action: Action) -> None:  # noqa: C901, PLR0912 - one case an action
        match action:
            case protocol.Send(peer=peer, message=message):
                self.sessions.send(peer, message)
            case protocol.Expose(peer=peer, attempt=attempt, stream=stream):
                self._leases.expose(work, peer, attempt, stream=stream)
            case protocol.ExposeIncrement():
                self._streams.expose(work, action)
            case protocol.SendAdvance(peer=peer, attempt=attempt, number=number):
                self._streams.send(work, peer, attempt, number)
            case protocol.SendLease(peer=peer, attempt=attempt):
                self._leases.send(work, peer, attempt)
            case protocol.Withdraw(peer=peer, attempt=attempt):
                self._leases.withdraw(work, peer, attempt)
            case protocol.SendAnnounce(peer=peer):
                claim, stream = work.descriptor or work.opening, work.descriptor is None
                if claim is not None:
                    self.sessions.send(peer, Announce(key=work.key, descriptor=claim, stream=stream))
            case protocol.ParkAsk(peer=peer, attempt=attempt):
                self.early.park(peer, work.asks[peer, attempt])
            case protocol.Unpark():
                self._loop.call_soon(self._unpark, work.key)
            case protocol.EndHold():
                if work.held:
                    self._blocks.end_hold(work.key)
            case protocol.Report(end=end, error=error):
                self._report(work, end, error)
            case protocol.Learned(end=end):
                self._ledger.release(work.key, self._loop.time())
                if end is End.DONE:
                    self.recovery.installed(work)
            case _:
                raise AssertionError(f"a source machine does not do {action}")

    def _settle(self, work: SourceWork) -> None:
        """A machine may close in a step that asks for nothing."""
        if work.machine is not None and work.machine.state.phase is SourcePhase.CLOSED:
            self._forget(work)

    def _feed(self, work: SourceWork, event: SourceEvent) -> None:
        if work.machine is not None:
            work.machine.feed(event)

    def _report(self, work: SourceWork, end: End, error: ErrorInfo | None) -> None:
        now = self._loop.time()
        self._ledger.end(work.key, end, error, now, standing=end is End.INDETERMINATE)
        self._counters.ended(end.value)
        if end is End.DONE:
            self.recovery.installed(work)
        work.part.end(work.result(end, error, now))

    def _forget(self, work: SourceWork) -> None:
        self._leases.forget(work)
        if self._works.get(work.key) is work:
            del self._works[work.key]
        if work.machine is not None:
            work.machine.stop()
            work.machine = None  # they hold each other: without this only the collector ends them
