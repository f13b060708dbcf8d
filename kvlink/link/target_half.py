"""The target half of a link: it asks, reads, and installs once or not at all.

Everything that decides is in ``kvlink.protocol.target``; here its actions are carried out and what happens is told it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from kvlink import limits, protocol
from kvlink.descriptor import Facts, KVDescriptor, check_descriptor, compare_facts, descriptor_digest
from kvlink.errors import (
    CancelledError,
    ClosedError,
    ConfigError,
    ConflictError,
    ExpiredError,
    KVLinkError,
    LayoutError,
    PeerLostError,
    PeerRestartedError,
    TransferError,
)
from kvlink.layout import compare_identity
from kvlink.link.machine import Machine
from kvlink.link.part import LivePart, Part, State
from kvlink.link.sessions import Session, Sessions
from kvlink.link.target_calls import Calls
from kvlink.link.target_legs import Legs
from kvlink.link.target_reads import Reads
from kvlink.link.target_siblings import Siblings
from kvlink.link.target_streams import Incomings
from kvlink.link.target_work import LegWork, TargetWork, plan_of, size_mismatch, starts_of
from kvlink.link.uncovered import zero_uncovered
from kvlink.memory.ledger import ReservationState
from kvlink.protocol import End, Failure, TargetPhase
from kvlink.relayout import native_plan
from kvlink.wire import (
    Ack,
    Advance,
    Announce,
    AnyMessage,
    Commit,
    Decided,
    Decline,
    ErrorInfo,
    Expect,
    Lease,
    Parked,
    Refused,
    Renew,
    Revoked,
    Stands,
    Withdrawn,
    error_to_info,
    info_to_error,
)

if TYPE_CHECKING:
    from kvlink.link.coordinator import Coordinator
    from kvlink.link.rank import LocalRank
    from kvlink.link.target_work import Uncovered
    from kvlink.link.tasks import TaskSet
    from kvlink.memory import BlockLedger
    from kvlink.observe import Counters
    from kvlink.protocol import Action, Timing
    from kvlink.relayout.gpu import Moment
    from kvlink.wire import Claim, Offer, Roster, Ticket

_log = logging.getLogger("kvlink.link")


class TargetHalf:
    """All requests whose KV this rank takes in. Used by `kvlink.Link` only."""

    def __init__(
        self, rank: LocalRank, tasks: TaskSet, blocks: BlockLedger, counters: Counters, timing: Timing
    ) -> None:
        self._rank = rank
        self._tasks = tasks
        self._blocks = blocks
        self._counters = counters
        self._timing = timing
        self._loop = asyncio.get_running_loop()
        self._works: dict[str, TargetWork] = {}
        self._of_attempt: dict[int, TargetWork] = {}
        self._ledger: protocol.Ledger[TargetWork] = protocol.Ledger()
        self._last_attempt = 0
        self.legs = Legs()
        self.sessions = Sessions(
            rank, tasks, reading=True, on_message=self._on_message, on_up=self._on_up, on_down=self._on_down
        )
        self._calls = Calls(self.sessions, tasks)
        self._reads = Reads(rank, self.sessions, counters, self._feed)
        self._incomings = Incomings(rank, self.sessions, self._reads, self._feed)
        self._siblings = Siblings(rank, self.sessions, self._calls)

    @property
    def live(self) -> int:
        """Parts that have not ended."""
        return sum(not work.part.state.ended for work in self._works.values())

    @property
    def telling(self) -> bool:
        """Whether sources have yet to acknowledge how their legs ended."""
        return any(work.machine is not None for work in self._works.values())

    def coordinated_by(self, coordinator: Coordinator) -> None:
        """Where this rank is itself the one that coordinates its engine's."""
        self._siblings.own = coordinator
        coordinator.own_rank = self._decided

    def set_siblings(self, roster: Roster | None) -> None:
        """All ranks of our engine; ``None``: not known any more."""
        self.legs.siblings = () if roster is None else roster.shares
        self._siblings.roster = roster

    # --- verbs --------------------------------------------------------------------------------------------------

    def fetch(  # noqa: PLR0913 - the verb's own arguments
        self,
        offer: Offer,
        into: Sequence[Sequence[int]],
        *,
        facts: Facts,
        first_token: int | Sequence[int] | None,
        uncovered: Uncovered,
        deadline_seconds: float,
        part: LivePart,
        together: bool,
        after: Moment | None,
    ) -> None:
        """Start fetching an offer; see `kvlink.Link.start_fetch`."""
        self._check_claim(offer, facts)
        descriptor = offer.descriptor(deadline_seconds)
        starts = starts_of(offer, self._rank.caches.spec, first_token)
        work = TargetWork.of(offer, into, part, starts, uncovered, deadline_seconds, self._loop.time())
        work.together = self._has_siblings(together)
        work.descriptor, work.after = descriptor, after
        if not self._joined(work, descriptor_digest(descriptor), offer.tokens) and not self._asked_at_once(work):
            self._tasks.start(self._prepare(work), f"fetch {work.key}")

    def expect(  # noqa: PLR0913 - the verb's own arguments
        self,
        ticket: Ticket,
        source: Roster,
        into: Sequence[Sequence[int]],
        *,
        uncovered: Uncovered,
        deadline_seconds: float,
        part: LivePart,
        together: bool,
        after: Moment | None,
    ) -> None:
        """Start expecting a push; see `kvlink.Link.expect`."""
        self._check_claim(ticket, Facts())
        own = self._rank.caches.spec
        compare_identity(source.identity, own.identity, source_peer=source.engine, target_peer=str(own.place))
        starts = ticket.first_token, ticket.group_first_tokens
        work = TargetWork.of(ticket, into, part, starts, uncovered, deadline_seconds, self._loop.time())
        work.roster = source
        work.together = self._has_siblings(together)
        work.ticket, work.after = ticket, after
        if not self._joined(work, None, ticket.tokens):
            self._tasks.start(self._deliver(work), f"expect {work.key}")

    def renew(self, offers: Sequence[Offer]) -> None:
        """Keep the holds of offers that are queued here."""
        for offer in offers:
            for index, ranked in enumerate(offer.roster.ranks):
                message = Renew(keys=(offer.key,))
                self._calls.tell(ranked.address, offer.roster.place(index), message)

    def decline(self, offer: Offer, why: str) -> None:
        """Tell the sources that we would read that we will not."""
        legs, unread = self.legs.of(offer.roster, self._rank.share)
        told = Decline(key=offer.key, why=why[: limits.MAX_TEXT_BYTES])
        for leg in legs:
            place = offer.roster.place(leg.source_index)
            self._calls.tell(leg.address, place, told)
        self._calls.tell_unread(offer.key, offer.roster, unread)

    def release(self, key: str) -> None:
        """The engine reuses the blocks of an installed request: its outcome no longer stands. Idempotent."""
        if self._blocks.state_of(key) is ReservationState.INSTALLED:
            self._blocks.release(key)
        self._ledger.release(key, self._loop.time())

    def release_all(self) -> None:
        """The memory goes: nothing that was installed in it stands any more."""
        for key in self._blocks.installed():
            self.release(key)

    def cancel(self, part: Part, why: str) -> None:
        """End a part, with all that joined it; nothing happens if it is not ours, or has ended."""
        work = self._works.get(part.key)
        if work is None or (part is not work.part and part not in work.followers):
            return
        failure = protocol.fail(End.CANCELLED, CancelledError, f"cancelled by the target: {why}")
        if work.machine is None:
            self._end_early(work, failure)
        else:
            work.machine.feed(protocol.Cancel(failure))

    def stop(self) -> None:
        """No more timers: sources that have not acknowledged learn the rest from the peer's end."""
        for work in self._works.values():
            if work.machine is not None:
                work.machine.stop()

    # --- before the machine runs ----------------------------------------------------------------------------------

    def _check_claim(self, claim: Claim, facts: Facts) -> None:
        place = self._rank.caches.spec.place
        if place.pp_size * place.tp_size > 1 and not self.legs.siblings:
            raise ConfigError(
                f"{place} does not know its engine's other ranks, and sources must hear how many ranks will read them; "
                "call set_siblings with the roster of this engine",
                request_id=claim.key,
            )
        read_only = [number for number, region in enumerate(self._rank.caches.regions) if not region.writable]
        if read_only:
            text = (
                f"regions {read_only} of {place} are read-only memory: a source may give them, nothing can be installed"
            )
            raise LayoutError(text, request_id=claim.key)
        if self._rank.config.secret is not None:
            claim.verify(self._rank.config.secret)
        if (mismatch := claim.check(facts, self._rank.caches.spec.identity)) is not None:
            raise mismatch

    def _joined(self, work: TargetWork, digest: str | None, tokens: int) -> bool:
        """Join the live request of this key, or take its recorded outcome, or begin anew (``False``)."""
        now = self._loop.time()
        match self._ledger.look(work.key, digest, now):
            case protocol.Join(live=live):
                if (live.into, live.together) != (work.into, work.together):
                    text = "this request is live here with other target blocks, or with another word on its siblings"
                    raise ConflictError(text, request_id=work.key)
                live.followers.append(work.part)
                live.part.when_ended(lambda ended: _follow(ended, work.part))
            case protocol.Recorded(end=end, error=error):
                written = tuple(map(tuple, work.written(self._rank.caches.spec, tokens)))
                if self._blocks.blocks_of(work.key) not in (None, written):
                    text = "this request is installed here in other target blocks; release it before fetching it anew"
                    raise ConflictError(text, request_id=work.key)
                work.part.end(work.result(end, error, integrity=self._rank.config.integrity, now=now))
            case protocol.Refuse(error=error):
                raise info_to_error(error, request_id=work.key)
            case _:
                self._blocks.reserve(work.key, work.written(self._rank.caches.spec, tokens))
                self._ledger.begin(work.key, digest, work)
                self._works[work.key] = work
                return False
        return True

    def _has_siblings(self, together: bool) -> bool:
        """A part that is alone is visible with itself."""
        place = self._rank.caches.spec.place
        return together and place.pp_size * place.tp_size > 1

    def _asked_at_once(self, work: TargetWork) -> bool:
        """Ask in the verb's own turn, where there is nothing to wait for; False: `_prepare` it."""
        if work.after is not None or work.together:
            return False
        legs: Sequence[LegWork] = ()
        try:
            legs, unread = self.legs.of(work.roster, self._rank.share)
            sessions = self._calls.connected(legs)
            if unread or sessions is None or not self._reads.place_at_once(legs):
                return False
            self._ask(work, legs, sessions)
        except Exception as error:  # noqa: BLE001 - as below
            self._reads.leave(legs)
            self._fail_early(work, error)
        return True

    async def _prepare(self, work: TargetWork) -> None:
        """Sessions, plans, then the protocol's first step."""
        legs: Sequence[LegWork] = ()
        try:
            legs, unread = self.legs.of(work.roster, self._rank.share)
            self._calls.tell_unread(work.key, work.roster, unread)
            await self._reads.place(work, legs)
            sessions = await self._calls.connect(work.roster, legs)
            if work.together:
                await self._siblings.reach()
            await self._rank.moments.passed(work.after)
            work.after = None
            if work.part.state.ended:
                self._reads.leave(legs)
                return
            self._ask(work, legs, sessions)
        except Exception as error:  # noqa: BLE001 - a part that never ends is worse than any error in it
            self._reads.leave(legs)
            self._fail_early(work, error)

    def _ask(self, work: TargetWork, legs: Sequence[LegWork], sessions: Sequence[Session]) -> None:
        """Plan, and begin: in this order where either may be refused, else while the source is at its answer already.

        A raise means that nobody was asked.
        """
        descriptor = work.descriptor
        if descriptor is None:  # pragma: no cover - set by every caller
            raise ClosedError("a request was prepared without a descriptor", request_id=work.key)
        work.phases["handshake"] = self._loop.time() - work.started
        for session in sessions:
            check_descriptor(descriptor, session.spec, stream=work.streams)
        known = not work.streams and all(
            session.planners.knows(leg.groups) for leg, session in zip(legs, sessions, strict=True)
        )
        if not known or work.uncovered == "zero":
            self._plan(work, legs, sessions, descriptor)
            self._begin(work, legs, sessions)
            return
        self._begin(work, legs, sessions)
        try:
            self._plan(work, legs, sessions, descriptor)
        except KVLinkError as error:
            self._feed(work, protocol.Cancel(protocol.failure_of(error_to_info(error))))

    def _plan(
        self, work: TargetWork, legs: Sequence[LegWork], sessions: Sequence[Session], descriptor: KVDescriptor
    ) -> None:
        began = self._loop.time()
        own = self._rank.caches.spec
        for leg, session in zip(legs, sessions, strict=True):
            capabilities = session.pump.transport.capabilities()
            work.transport, work.transport_reason = capabilities.name, session.reason
            if work.streams:
                self._incomings.open(work, leg, session, descriptor)
                continue
            leg.plan = plan_of(leg, session, own, work, descriptor)
            leg.total_bytes = leg.plan.total_bytes
            native = native_plan(leg.plan)  # for the transport, too: while the source is at its answer
            if self._rank.gpu is not None:
                self._rank.gpu.prepare(native)
            work.path, work.path_reason = session.pump.transport.path(leg.plan, session.wire_name)
        if work.uncovered == "zero" and not work.streams:  # a stream's last token is known with its seal
            zero_uncovered(self._rank.caches, self._rank.gpu, work.into, descriptor.tokens)
        work.phases["plan"] = self._loop.time() - began

    def _begin(self, work: TargetWork, legs: Sequence[LegWork], sessions: Sequence[Session]) -> None:
        now = self._loop.time()
        for leg in legs:
            self._last_attempt += 1
            leg.attempt = self._last_attempt
            self._last_attempt += limits.MAX_INCREMENTS if work.streams else 0
            work.legs[leg.attempt] = leg
            self._of_attempt[leg.attempt] = work
        self._counters.attempts_started += len(work.legs)
        state, actions = protocol.target.begin(
            work.key,
            [(leg.peer, leg.attempt) for leg in legs],
            deadline_seconds=work.deadline_seconds,
            now=now,
            timing=self._timing,
            siblings=self._siblings.membership(work, legs[0].attempt) if work.together else None,
            stream=work.streams,
        )
        work.marks["asked"] = now
        act, settle = partial(self._act, work), partial(self._settle, work)
        work.machine = Machine(state, protocol.target.step, protocol.target.next_timer, act, settle)
        work.machine.start(actions)
        for session in sessions:
            if session.ended:  # before there was a request that it concerned
                self._tasks.start(self._redial(session.peer), f"redial {session.peer}")

    def _end_early(self, work: TargetWork, failure: Failure) -> None:
        """End a request that never asked: nothing has moved, so there is nothing to cut off."""
        if not work.part.state.ended:
            self._blocks.drain(work.key)
            self._blocks.drained(work.key)
            self._report(work, failure.end, failure.error)
            self._works.pop(work.key, None)
            if work.together:
                self._last_attempt += 1
                self._siblings.tell_failed(work, self._last_attempt, failure.error)

    def _fail_early(self, work: TargetWork, error: Exception) -> None:
        if not isinstance(error, KVLinkError):
            _log.error("request %s failed inside", work.key, exc_info=error)
            error = TransferError(f"{type(error).__name__}: {error}")
        self._end_early(work, protocol.failure_of(error_to_info(error)))

    # --- push: until the source announces ---------------------------------------------------------------------------

    async def _deliver(self, work: TargetWork) -> None:
        """Bring the ticket to every source that we will read, and wait for the first to announce."""
        try:
            legs, unread = self.legs.of(work.roster, self._rank.share)
            self._calls.tell_unread(work.key, work.roster, unread)
            await self._calls.connect(work.roster, legs)
        except Exception as error:  # noqa: BLE001 - as above
            self._fail_early(work, error)
            return
        if work.part.state.ended or work.ticket is None:
            return
        for leg in legs:
            self.sessions.send(leg.peer, Expect(ticket=work.ticket.to_bytes()))
        work.part.rise(State.READY)
        self._loop.call_later(work.ticket.ttl_seconds, self._expire_ticket, work)

    def _expire_ticket(self, work: TargetWork) -> None:
        if work.descriptor is None and work.ticket is not None:
            text = f"no source announced {work.key} within the ticket's {work.ticket.ttl_seconds:g} s"
            self._end_early(work, protocol.fail(End.EXPIRED, ExpiredError, text))

    def _announced(self, peer: str, message: Announce) -> None:
        work = self._works.get(message.key)
        if work is None or work.ticket is None or peer not in self._peers_of(work):
            self._counters.messages_late += 1
            return
        if work.descriptor is not None:  # another source's announcement: its leg is asked already
            return
        try:
            ticket, descriptor = work.ticket, message.descriptor
            compare_facts(descriptor.facts, ticket.facts, source_peer=work.roster.engine)
            if descriptor.tokens > ticket.tokens and not message.stream:
                raise LayoutError(
                    f"{descriptor.tokens} tokens are announced; the ticket has room for {ticket.tokens}",
                    request_id=work.key,
                )
        except KVLinkError as error:
            self._end_early(work, protocol.failure_of(error_to_info(error)))
            return
        work.descriptor, work.streams = descriptor, message.stream
        self._ledger.content(work.key, descriptor_digest(descriptor))
        self._tasks.start(self._prepare(work), f"pushed {work.key}")

    # --- messages and sessions -----------------------------------------------------------------------------------

    def _on_message(self, session: Session, message: AnyMessage) -> None:
        match message:
            case Announce():
                self._announced(session.peer, message)
            case Withdrawn(key=key, error=error):
                work = self._works.get(key)
                if work is not None and work.machine is None and session.peer in self._peers_of(work):
                    self._end_early(work, protocol.failure_of(error))
            case Lease() | Parked() | Refused() | Advance() | Commit() | Revoked() | Ack():
                work = self._of_attempt.get(message.attempt)
                if work is None or work.machine is None:
                    self._counters.messages_late += 1
                    return
                work.note(message, self._loop.time())
                work.machine.feed(protocol.Received(session.peer, message))
            case Decided():
                self._decided(session.peer, message)
            case _:
                _log.debug("%s sent %s, which is not a source's to send", session.peer, type(message).__name__)

    def _decided(self, peer: str, message: Decided) -> None:
        """The coordinator's word; a part's number is its first attempt's."""
        work = self._of_attempt.get(message.part)
        if work is not None and work.machine is not None:
            work.machine.feed(protocol.Received(peer, message))
            return
        for send in protocol.membership.answer_unknown(peer, message):
            self._siblings.send(send)

    def _on_up(self, session: Session) -> None:
        self._counters.peers_connected += 1
        for work in self._works.values():
            if work.ticket is None or work.descriptor is not None or work.part.state is not State.READY:
                continue
            if session.peer in self._peers_of(work):
                self.sessions.send(session.peer, Expect(ticket=work.ticket.to_bytes()))

    def _on_down(self, session: Session, error: KVLinkError) -> None:
        self._counters.peers_lost += 1
        _log.info("the session with %s ended: %s", session.peer, error)
        if any(self._concerns(work, session.peer) for work in self._works.values()):
            self._tasks.start(self._redial(session.peer), f"redial {session.peer}")

    def _concerns(self, work: TargetWork, peer: str) -> bool:
        if work.machine is None:
            return not work.part.state.ended and work.ticket is not None
        return any(leg.peer == peer for leg in work.legs.values()) or (work.together and self._siblings.leads(peer))

    async def _redial(self, peer: str) -> None:
        """Connect again; where that does not come about, whoever reads from it hears of it."""
        event = await self._calls.redial(peer)
        if event is None:
            return
        for work in list(self._works.values()):
            if work.machine is not None:
                work.machine.feed(event)
            elif self._concerns(work, peer) and peer in self._peers_of(work):
                text = f"{peer} was lost before it announced"
                kind = PeerRestartedError if isinstance(event, protocol.PeerDead) else PeerLostError
                self._end_early(work, protocol.fail(End.FAILED, kind, text))

    def _peers_of(self, work: TargetWork) -> list[str]:
        """The sources that this rank reads; others of their engine have our siblings' share, and their own ends."""
        legs, _ = self.legs.of(work.roster, self._rank.share)
        return [leg.peer for leg in legs]

    # --- the machine's actions ------------------------------------------------------------------------------------

    def _act(self, work: TargetWork, action: Action) -> None:  # noqa: C901, PLR0912 - one case an action
        match action:
            case protocol.Send(peer=peer, message=message) if isinstance(message, Stands):
                self._siblings.send(action)
            case protocol.Send(peer=peer, message=message):
                self.sessions.send(peer, message)
            case protocol.SendAsk(peer=peer, attempt=attempt):
                if work.descriptor is not None:
                    integrity = work.integrity(self._rank.config)
                    ask = work.ask(work.legs[attempt], work.descriptor, self._rank.caches.spec, integrity=integrity)
                    self.sessions.send(peer, ask)
            case protocol.StartRead(attempt=attempt, lease=lease):
                work.part.rise(State.MOVING)
                self._start(work, work.legs[attempt], lease)
            case protocol.StartIncrement(attempt=attempt, advance=advance):
                work.part.rise(State.MOVING)
                self._incomings.start(work, work.legs[attempt], advance)
            case protocol.CutOff(attempt=attempt):
                work.part.rise(State.DRAINING)
                self._drain(work)
                self._reads.cut_off(work, work.legs[attempt])
            case protocol.StopRenewing(attempt=attempt, increments=increments):
                # A timer's turn comes after whoever waits for the result: the engine's thread would run before it.
                self._loop.call_later(0, self._reads.forget, work.legs[attempt], increments)
            case protocol.Install():
                self._install(work)
            case protocol.Show():
                self._blocks.install(work.key)
            case protocol.ReleaseBlocks():
                self._drain(work)
                self._blocks.drained(work.key)
            case protocol.Report(end=end, error=error):
                self._report(work, end, error)
            case _:
                raise AssertionError(f"a target machine does not do {action}")

    def _start(self, work: TargetWork, leg: LegWork, lease: Lease) -> None:
        """Read a whole leg."""
        if leg.plan is None or lease.total_bytes != leg.total_bytes:
            mismatch = size_mismatch(leg, lease.total_bytes, leg.total_bytes, str(self._rank.caches.spec.place))
            self._feed(work, protocol.ReadEnded(leg.attempt, error=error_to_info(mismatch)))
            return
        self._reads.start(work, leg, leg.plan)

    def _settle(self, work: TargetWork) -> None:
        """A machine may close in a step that asks for nothing: the last acknowledgement."""
        if work.machine is not None and work.machine.state.phase is TargetPhase.CLOSED:
            self._forget(work)

    def _drain(self, work: TargetWork) -> None:
        if self._blocks.state_of(work.key) is not ReservationState.DRAINING:
            self._blocks.drain(work.key)

    def _install(self, work: TargetWork) -> None:
        """The one switch.

        It needs no fence: a READ completes when its bytes are in place, on a GPU when an event that follows them has
        passed, so whatever is launched from now on, on any stream, sees them.
        """
        began = self._loop.time()
        self._blocks.land(work.key)
        if not work.together:
            self._blocks.install(work.key)
        now = self._loop.time()
        work.phases["install"] = now - began
        if work.streams:
            work.phases["exposed"] = now - work.marks["sealed"]
        self._feed(work, protocol.InstallDone())

    def _feed(self, work: TargetWork, event: protocol.TargetEvent) -> None:
        if work.machine is not None:
            work.machine.feed(event)

    def _report(self, work: TargetWork, end: End, error: ErrorInfo | None) -> None:
        now = self._loop.time()
        result = work.result(end, error, integrity=work.integrity(self._rank.config), now=now)
        self._ledger.end(work.key, end, error, now, standing=end is End.DONE)
        self._counters.ended(end.value)
        work.part.end(result)

    def _forget(self, work: TargetWork) -> None:
        for attempt in work.legs:
            self._of_attempt.pop(attempt, None)
        self._reads.leave(work.legs.values())
        if self._works.get(work.key) is work:
            del self._works[work.key]
        if work.machine is not None:
            work.machine.stop()
            work.machine = None  # they hold each other: without this only the collector ends them


def _follow(ended: Part, follower: LivePart) -> None:
    """A repeated request ends as the one that it joined."""
    if ended.result is not None:
        follower.end(ended.result)
