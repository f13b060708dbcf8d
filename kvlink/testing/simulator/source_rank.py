"""A source rank: the real machine, ledgers and parking lot, driven as `kvlink.link.source_half` does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvlink import errors, protocol, wire
from kvlink.layout import Frontier
from kvlink.memory.ledger import BlockLedger
from kvlink.protocol import End, Ledger, ParkingLot, SourcePart, SourcePhase, source
from kvlink.protocol.source_leg import LegPhase
from kvlink.testing.simulator.checks import Checks
from kvlink.testing.simulator.clockwork import InvariantError, Runner
from kvlink.testing.simulator.network import Network, Rank
from kvlink.testing.simulator.plan import Plan
from kvlink.testing.simulator.pool import Blocks, Pool

Ended = Callable[[Rank, End, wire.ErrorInfo | None], None]


@dataclass(frozen=True, slots=True, eq=False)
class Offer:
    """What the gateway carries from the source engine to a target engine.

    Attributes:
        key: the request.
        digest: of its content, blocks included.
        tag: what the KV is, wherever it lies.
        blocks: on each source rank's incarnation.
    """

    key: str
    digest: str
    tag: str
    blocks: dict[str, Blocks]


class Asked(NamedTuple):
    """`wire.Ask`, less what the simulator does not need."""

    key: str
    attempt: int
    digest: str
    readers: int


class Announced(NamedTuple):
    """`wire.Announce`."""

    offer: Offer
    stream: bool = False


class Expected(NamedTuple):
    """`wire.Expect`."""

    key: str
    ttl_seconds: float


INCREMENT = 1_000_000
"""Increment n of attempt a is read, and leased, as number a + n times this."""


def opening_of(key: str) -> str:
    """The digest of a stream's beginning: nothing of it but the request is known."""
    return f"the beginning of {key}"


@dataclass(slots=True, eq=False)
class _Work:
    key: str
    epoch: int
    ended: Ended
    runner: Runner[SourcePart] = field(init=False)
    offer: Offer | None = None
    asks: dict[tuple[str, int], Asked] = field(default_factory=dict)
    attempts: set[tuple[str, int]] = field(default_factory=set)
    told: dict[tuple[str, int, int], wire.Advance] = field(default_factory=dict)
    """Increments that have not landed, by peer, attempt and number."""
    reported: End | None = None


class SourceRank(Rank):
    """One incarnation of a rank that gives KV."""

    def __init__(self, network: Network, checks: Checks, plan: Plan, slot: str, incarnation: int) -> None:
        super().__init__(network, slot, incarnation)
        self.pool = Pool(self.name, plan.pool)
        self.blocks = BlockLedger()
        self.ledger: Ledger[_Work] = Ledger()
        self.lot: ParkingLot[tuple[str, Asked]] = ParkingLot(plan.parked)
        self.tickets: ParkingLot[str] = ParkingLot()
        self.works = {}
        self._of_attempt: dict[tuple[str, int], _Work] = {}
        self._told_to: dict[tuple[str, int], int] = {}
        self._checks = checks
        self._plan = plan
        self._epoch = 0
        self._sweep_at: float | None = None
        self._answered = False
        self._asked_for: int | None = None

    # --- verbs --------------------------------------------------------------------------------------------------------

    def prefill(self, offer: Offer) -> None:
        """Compute the KV into blocks that the engine has taken for it."""
        self.pool.compute(offer.blocks[self.name], offer.tag)

    def publish(self, offer: Offer, ttl_seconds: float, ended: Ended) -> wire.ErrorInfo | None:
        """Hold sealed KV; why not, if not."""
        if self.asleep:
            return protocol.error_info(errors.ClosedError, "paused")
        return self._admit(offer.key, offer, ttl_seconds, ended)

    def announce(self, key: str, ttl_seconds: float, ended: Ended) -> wire.ErrorInfo | None:
        """Hold a place for KV to come; why not, if not."""
        if self.asleep:
            return protocol.error_info(errors.ClosedError, "paused")
        return self._admit(key, None, ttl_seconds, ended)

    def advance(self, offer: Offer, computed: int) -> bool:
        """So many blocks of an announced request are computed; whether anybody still wants it."""
        work = self._computing(offer)
        if work is not None:
            self.pool.compute(offer.blocks[self.name][:computed], offer.tag)
            work.runner.feed(protocol.Advanced(Frontier.whole(computed), opening_of(offer.key)))
        return work is not None

    def seal(self, offer: Offer) -> bool:
        """The KV of an announced request is complete; whether anybody still wants it."""
        work = self._computing(offer)
        if work is not None:
            self.ledger.content(offer.key, offer.digest)
            blocks = len(offer.blocks[self.name])
            work.runner.feed(protocol.Seal(offer.digest, Frontier.whole(blocks), opening_of(offer.key)))
        return work is not None

    def _computing(self, offer: Offer) -> _Work | None:
        """An announced request that is not sealed; its blocks are held from its first word on."""
        work: _Work | None = self.works.get(offer.key)
        if work is None or work.offer not in (None, offer) or work.reported is not None:
            return None
        if work.runner.state.phase not in (SourcePhase.OPEN, SourcePhase.STREAMING):
            return None
        if work.offer is None:
            self.blocks.hold(offer.key, (offer.blocks[self.name],))
            work.offer = offer
        return work

    def cancel(self, key: str) -> None:
        """The engine takes the request back."""
        if (work := self.works.get(key)) is not None:
            failure = protocol.fail(End.CANCELLED, errors.CancelledError, "cancelled by the source")
            work.runner.feed(protocol.Cancel(failure))

    @property
    def idle(self) -> bool:
        """See `Rank.idle`."""
        return all(work.reported is not None for work in self.works.values())

    def phase_of(self, key: str, peer: str, attempt: int) -> LegPhase | None:
        """How this source sees an attempt."""
        work = self.works.get(key)
        leg = None if work is None else work.runner.state.leg(peer)
        return leg.phase if leg is not None and leg.attempt == attempt else None

    def _admit(self, key: str, offer: Offer | None, ttl_seconds: float, ended: Ended) -> wire.ErrorInfo | None:
        match self.ledger.look(key, None if offer is None else offer.digest, self.clock()):
            case protocol.Fresh():
                pass
            case protocol.Refuse(error=error):
                return error
            case _:
                return protocol.error_info(errors.ConflictError, "held already")
        self._epoch += 1
        checks = self._checks
        work = _Work(key, self._epoch, ended, offer=offer)
        if offer is not None:
            self.blocks.hold(key, (offer.blocks[self.name],))
        self.ledger.begin(key, None if offer is None else offer.digest, work)
        self.works[key] = work
        state = source.begin(
            key,
            digest=None if offer is None else offer.digest,
            ttl_seconds=ttl_seconds,
            deadline_seconds=self._plan.deadline,
            now=self.clock(),
            timing=self._plan.timing,
        )
        work.runner = Runner(
            self,
            source,
            state,
            lambda action: self._act(work, action),
            lambda event, after, actions: checks.source_stepped(self, work.epoch, event, after, actions),
            lambda: self._settle(work),
        )
        work.runner.start(())
        for peer in self.tickets.take(key):
            work.runner.feed(protocol.TicketArrived(peer))
        self._unpark(key)
        return None

    # --- what comes ---------------------------------------------------------------------------------------------------

    def hear(self, peer: str, message: Any) -> None:  # noqa: ANN401
        """See `Rank.hear`."""
        self._asked_for, self._answered = getattr(message, "attempt", None), False
        match message:
            case Asked():
                self._hear_ask(peer, message)
            case Expected():
                self._hear_ticket(peer, message)
            case wire.Renew(keys=keys):
                for key in keys:
                    self._feed(key, protocol.RenewHold())
            case wire.Decline(key=key, why=why, unread=unread):
                self._feed(key, protocol.DeclineArrived(peer, why, unread))
            case _:
                self._hear_of_attempt(peer, message)
        if self._asked_for is not None and not self._answered:
            self._checks.unanswered(self, peer, message)
        self._asked_for = None

    def learn(self, event: protocol.PeerLost | protocol.PeerDead) -> None:
        """See `Rank.learn`."""
        self.network.note(f"{self.name} learns: {event}")
        if isinstance(event, protocol.PeerLost):
            self.lot.forget(event.peer)
            self.tickets.forget(event.peer)
        for work in list(self.works.values()):
            work.runner.feed(event)

    def lapsed(self, peer: str, attempt: int) -> None:
        """See `Rank.lapsed`."""
        attempt %= INCREMENT
        if (work := self._of_attempt.get((peer, attempt))) is not None:
            work.runner.feed(protocol.LeaseLapsed(peer, attempt))

    def _feed(self, key: str, event: Any) -> None:  # noqa: ANN401
        if (work := self.works.get(key)) is not None:
            work.runner.feed(event)

    def _hear_ask(self, peer: str, ask: Asked) -> None:
        work = self.works.get(ask.key)
        if work is None:
            outcome = self.ledger.outcome(ask.key)
            if outcome is None:
                self._park(peer, ask)
                return
            error = outcome.error or protocol.ended_error(ask.key, outcome.end, None)
            self._send(peer, wire.Refused(attempt=ask.attempt, error=error))
            return
        refusal = None
        attempt = (peer, ask.attempt)
        if attempt not in work.attempts:
            work.asks[attempt] = ask
            if not self.network.quiet and self.network.dice.random() < self._plan.busy:
                refusal = protocol.error_info(errors.BusyError, "no room now")
        engine = self.network.ranks[peer].engine
        work.runner.feed(
            protocol.AskArrived(
                peer=peer,
                engine=engine,
                attempt=ask.attempt,
                digest=ask.digest,
                readers=ask.readers,
                refusal=refusal,
            )
        )
        if attempt not in work.attempts:
            work.asks.pop(attempt, None)

    def _hear_ticket(self, peer: str, ticket: Expected) -> None:
        if (work := self.works.get(ticket.key)) is not None:
            work.runner.feed(protocol.TicketArrived(peer))
        elif (outcome := self.ledger.outcome(ticket.key)) is not None:
            error = outcome.error or protocol.ended_error(ticket.key, outcome.end, None)
            self._send(peer, wire.Withdrawn(key=ticket.key, error=error))
        else:
            self.tickets.park(ticket.key, peer, 1, peer, self.clock() + ticket.ttl_seconds)
            self._sweep_later()

    def _hear_of_attempt(self, peer: str, message: Any) -> None:  # noqa: ANN401
        attempt = message.attempt
        work = self._of_attempt.get((peer, attempt))
        if isinstance(message, wire.NotInstalled):
            for key in list(self.works) if work is None else [work.key]:
                self.lot.drop(key, peer, attempt)
        if work is None:
            for action in protocol.answer_unknown(peer, message):
                self._send(peer, action.message)
        elif isinstance(message, wire.Landed):
            self._landed(work, peer, message)
        elif isinstance(message, wire.Prepared):
            if message.increments:
                self._landed(work, peer, message)
            held = message.increments > 0 or self.network.held(self.name, peer, attempt)
            root = _root(work.offer) if self._plan.integrity else None
            counts = message.increments, message.content
            work.runner.feed(
                protocol.PreparedArrived(peer, attempt, message.root, held, root if held else None, *counts)
            )
        else:
            work.runner.feed(protocol.Received(peer, message))

    def _landed(self, work: _Work, peer: str, message: wire.Landed | wire.Prepared) -> None:
        """Each increment that it tells of for the first time, with what is last known of its lease."""
        attempt = message.attempt
        leg = work.runner.state.leg(peer)
        stream = None if leg is None or leg.attempt != attempt else leg.stream
        numbers = () if stream is None else range(stream.landed + 1, min(message.increments, stream.exposed) + 1)
        for number in numbers:
            advance, name = work.told.pop((peer, attempt, number), None), attempt + INCREMENT * number
            held, root = True, None
            if advance is not None and advance.total_bytes:
                held = self.network.held(self.name, peer, name)
                root = _root(work.offer) if self._plan.integrity and held else None
                self.network.withdraw(self.name, peer, name)
            work.runner.feed(protocol.LandedArrived(peer, attempt, number, held, root))
        if not numbers and isinstance(message, wire.Landed):
            work.runner.feed(protocol.LandedArrived(peer, attempt, message.increments))

    # --- parking ------------------------------------------------------------------------------------------------------

    def _park(self, peer: str, ask: Asked) -> None:
        seconds = self._plan.timing.park_seconds
        if self.lot.park(ask.key, peer, ask.attempt, (peer, ask), self.clock() + seconds):
            self._send(peer, wire.Parked(attempt=ask.attempt, park_seconds=seconds))
            self._sweep_later()
        else:
            error = protocol.error_info(errors.BusyError, "no room for another early ask")
            self._send(peer, wire.Refused(attempt=ask.attempt, error=error))
        if len(self.lot) > self._plan.parked:
            raise InvariantError(f"5: {self.name} parks {len(self.lot)} asks; its bound is {self._plan.parked}")

    def _unpark(self, key: str) -> None:
        for peer, ask in self.lot.take(key):
            self._hear_ask(peer, ask)

    def _sweep_later(self) -> None:
        times = [time for time in (self.lot.next_timer(), self.tickets.next_timer()) if time is not None]
        at = min(times, default=None)
        if at != self._sweep_at:
            self._sweep_at = at
            if at is not None:
                self.wake_at(at, self._sweep)

    def _sweep(self, at: float) -> None:
        if at != self._sweep_at:
            return
        self._sweep_at = None
        self.reach(at)
        for peer, ask in self.lot.expire(self.clock()):
            error = protocol.error_info(errors.UnknownRequestError, "no KV came under this key")
            self._send(peer, wire.Refused(attempt=ask.attempt, error=error))
        self.tickets.expire(self.clock())
        self._sweep_later()

    # --- deeds --------------------------------------------------------------------------------------------------------

    def _act(self, work: _Work, action: Any) -> None:  # noqa: ANN401, C901, PLR0912 - one case an action
        match action:
            case protocol.Send(peer=peer, message=message):
                self._send(peer, message)
            case protocol.Expose(peer=peer, attempt=attempt, stream=stream):
                self.blocks.lease((peer, attempt), work.key)
                work.attempts.add((peer, attempt))
                self._of_attempt[peer, attempt] = work
                if not stream:
                    self.network.expose(self.name, peer, attempt)
            case protocol.ExposeIncrement():
                self._expose_increment(work, action)
            case protocol.SendAdvance(peer=peer, attempt=attempt, number=number):
                if (advance := work.told.get((peer, attempt, number))) is not None:
                    self._send(peer, advance)
            case protocol.SendLease(peer=peer, attempt=attempt):
                if (peer, attempt) in work.asks:
                    capacity = wire.Capacity(leased_blocks=0, active_legs=0, max_legs=1)
                    lease = wire.Lease(attempt=attempt, lease_seconds=2.5, total_bytes=0, capacity=capacity)
                    self._send(peer, lease)
            case protocol.Withdraw(peer=peer, attempt=attempt):
                self.network.withdraw(self.name, peer, attempt)
                for told in [told for told in work.told if told[:2] == (peer, attempt)]:
                    self.network.withdraw(self.name, peer, attempt + INCREMENT * told[2])
                    del work.told[told]
                if work.asks.pop((peer, attempt), None) is not None and (peer, attempt) in work.attempts:
                    self.blocks.end_lease((peer, attempt))
            case protocol.SendAnnounce(peer=peer):
                if work.offer is not None:
                    self._send(peer, Announced(work.offer, work.runner.state.digest is None))
            case protocol.ParkAsk(peer=peer, attempt=attempt):
                self._park(peer, work.asks[peer, attempt])
            case protocol.Unpark():
                self.post(0.0, self._unpark, work.key)
            case protocol.EndHold():
                self._end_hold(work)
            case protocol.Report(end=end, error=error):
                self._report(work, end, error)
            case protocol.Learned():
                self.ledger.release(work.key, self.clock())

    def _expose_increment(self, work: _Work, action: protocol.ExposeIncrement) -> None:
        """Its blocks are its bytes; one without any is told and not exposed."""
        peer, attempt, number, tokens = action.peer, action.attempt, action.number, action.frontier.tokens
        sofar = self._told_to.get((peer, attempt), 0) if number > 1 else 0
        self._told_to[peer, attempt] = tokens
        work.told[peer, attempt, number] = wire.Advance(
            attempt=attempt,
            number=number,
            frontier=action.frontier,
            blocks=(),
            total_bytes=tokens - sofar,
            sealed=work.offer.digest if action.sealed and work.offer is not None else None,
        )
        if tokens > sofar:
            self.network.expose(self.name, peer, attempt + INCREMENT * number)

    def _end_hold(self, work: _Work) -> None:
        if work.offer is None:
            return
        if self.blocks.end_hold(work.key) is None:
            raise InvariantError(f"4: {self.name} ends the hold of {work.key}, and a lease keeps its blocks")
        self.pool.give_back(work.offer.blocks[self.name], work.key)

    def _report(self, work: _Work, end: End, error: wire.ErrorInfo | None) -> None:
        self.network.note(f"{self.name} ENDS {work.key}: {end.value}, {error and error.message}")
        if work.reported is not None:
            raise InvariantError(f"4: {self.name} reports {end} for {work.key} after {work.reported}")
        work.reported = end
        self.ledger.end(work.key, end, error, self.clock(), standing=end is End.INDETERMINATE)
        work.ended(self, end, error)

    def _settle(self, work: _Work) -> None:
        if work.runner.state.phase is not SourcePhase.CLOSED:
            return
        for attempt in work.attempts:
            self._of_attempt.pop(attempt, None)
        if self.works.get(work.key) is work:
            del self.works[work.key]
        work.runner.stop()

    def _send(self, peer: str, message: Any) -> None:  # noqa: ANN401
        if getattr(message, "attempt", None) == self._asked_for:
            self._answered = True
        self.network.send(self, peer, message)


def root_of(tag: str) -> bytes:
    """The root digest of KV with this tag."""
    return tag.encode().ljust(8, b".")[:8]


def _root(offer: Offer | None) -> bytes | None:
    return None if offer is None else root_of(offer.tag)
