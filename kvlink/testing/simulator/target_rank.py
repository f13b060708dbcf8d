"""A target rank: the real machine and ledgers, driven as `kvlink.link.target_half` does, and its reads.

A read moves block by block, each at its own time, also while the process is stopped (a NIC does not care), and until
its cut-off is complete. It copies what lies in the source's blocks *then*.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvlink import errors, protocol, wire
from kvlink.errors import ConflictError
from kvlink.memory.ledger import BlockLedger
from kvlink.protocol import End, Failure, Ledger, TargetPart, TargetPhase, target
from kvlink.testing.simulator.checks import Checks, Try
from kvlink.testing.simulator.clockwork import InvariantError, Runner
from kvlink.testing.simulator.coordinating import Coordinating
from kvlink.testing.simulator.network import Network, Rank
from kvlink.testing.simulator.plan import CUT_OFF_SECONDS, Plan
from kvlink.testing.simulator.pool import Blocks, Pool
from kvlink.testing.simulator.source_rank import (
    INCREMENT,
    Announced,
    Asked,
    Expected,
    Offer,
    SourceRank,
    opening_of,
    root_of,
)

Ended = Callable[[Rank, End, wire.ErrorInfo | None], None]
Leg = tuple[str, int]
"""A source rank's incarnation, and how many ranks of the target engine read it."""


@dataclass(slots=True, eq=False)
class _Read:
    peer: str
    attempt: int
    places: range
    """Of the request's blocks, those that it reads."""
    left: int
    number: int = 0
    """The increment's, of a stream."""
    moving: bool = True
    """Bytes may land."""
    ended: bool = False
    """The process knows that it has ended."""

    @property
    def name(self) -> int:
        """Under which it is read and leased."""
        return self.attempt + INCREMENT * self.number


@dataclass(slots=True, eq=False)
class _Work:
    key: str
    legs: tuple[Leg, ...]
    blocks: Blocks
    ended: Ended
    began: float
    offer: Offer | None
    truth: Try
    runner: Runner[TargetPart] | None = None
    reads: dict[int, _Read] = field(default_factory=dict)
    streams: bool = False
    told: dict[int, int] = field(default_factory=dict)
    """Blocks that a stream has told of so far, by attempt."""


class TargetRank(Rank):
    """One incarnation of a rank that takes KV in."""

    def __init__(self, network: Network, checks: Checks, plan: Plan, slot: str, incarnation: int) -> None:
        super().__init__(network, slot, incarnation)
        self.pool = Pool(self.name, plan.pool)
        self.blocks = BlockLedger()
        self.ledger: Ledger[_Work] = Ledger()
        self.works = {}
        self._of_attempt: dict[int, _Work] = {}
        self._checks = checks
        self._plan = plan
        self._last_attempt = 0
        self._installed: dict[str, _Work] = {}
        self.coordinating = Coordinating(self, plan, self._decided)

    # --- verbs --------------------------------------------------------------------------------------------------------

    def fetch(  # noqa: PLR0911 - one return an answer
        self, key: str, legs: tuple[Leg, ...], offer: Offer | None, ended: Ended
    ) -> str:
        """Fetch an offer, or (``offer`` is ``None``) expect a push.

        Returns:
            ``"begun"``; ``"joined"`` or ``"recorded"`` for a repeat; ``"full"`` or ``"refused"``.
        """
        if self.asleep:
            return "refused"
        match self.ledger.look(key, None if offer is None else offer.digest, self.clock()):
            case protocol.Join():
                return "joined"
            case protocol.Recorded(end=end):
                self._check_recorded(key, end)
                return "recorded"
            case protocol.Refuse():
                return "refused"
            case _:
                pass
        try:
            work = self._reserve(key, legs, offer, ended)
        except ConflictError:
            return "refused"  # the engine has not released what an earlier request of this key installed
        if work is None:
            return "full"
        if offer is not None:
            self._begin(work, offer)
        else:
            for peer, _ in legs:
                self.network.send(self, peer, Expected(key, self._plan.ttl))
            self.wake_at(self.clock() + self._plan.ttl, lambda _at: self._expire_ticket(work))
        return "begun"

    def cancel(self, key: str) -> None:
        """The embedder takes the request back."""
        work = self.works.get(key)
        if work is not None:
            failure = protocol.fail(End.CANCELLED, errors.CancelledError, "cancelled by the target")
            if work.runner is None:
                self._end_early(work, failure)
            else:
                work.runner.feed(protocol.Cancel(failure))

    def release(self, key: str) -> None:
        """The engine reuses the blocks of an installed request."""
        work = self._installed.pop(key, None)
        if work is not None:
            self._check_content(work, "was installed, and now there")
            self.blocks.release(key)
            self._checks.released(work.truth)
            self.pool.give_back(work.blocks, _owner(work))
        self.ledger.release(key, self.clock())

    @property
    def idle(self) -> bool:
        """See `Rank.idle`."""
        return all(work.truth.end is not None for work in self.works.values())

    def fall_asleep(self) -> None:
        """See `Rank.fall_asleep`."""
        for key in list(self._installed):
            self.release(key)

    def reads_now(self) -> list[tuple[str, int]]:
        """Key and attempt of what moves."""
        return [(work.key, read.name) for work in self.works.values() for read in work.reads.values() if read.moving]

    def part_of(self, attempt: int) -> TargetPart | None:
        """The state of the part that an attempt belongs to."""
        work = self._of_attempt.get(attempt)
        return None if work is None or work.runner is None else work.runner.state

    def _check_recorded(self, key: str, end: End) -> None:
        work = self._installed.get(key)
        if work is None:
            raise InvariantError(f"7: {self.name} answers {end.value} for {key}, whose blocks were released")
        self._check_content(work, "is said to be installed, and there")

    # --- before the machine runs --------------------------------------------------------------------------------------

    def _reserve(self, key: str, legs: tuple[Leg, ...], offer: Offer | None, ended: Ended) -> _Work | None:
        owner = f"{key}/{self._last_attempt + 1}"
        blocks = self.pool.take(self._plan.blocks, owner)
        if blocks is None:
            return None
        try:
            self.blocks.reserve(key, (blocks,))
        except ConflictError:
            self.pool.give_back(blocks, owner)
            raise
        together = self._plan.together and self._plan.target_ranks[self.slot.split("/", maxsplit=1)[0]] > 1
        truth = Try(self, key, {peer: self._next_attempt() for peer, _ in legs}, together)
        work = _Work(key, legs, blocks, ended, self.running_clock(), offer, truth)
        self.ledger.begin(key, None if offer is None else offer.digest, work)
        self.works[key] = work
        self._checks.begun(truth)
        return work

    def _next_attempt(self) -> int:
        self._last_attempt += 1
        return self._last_attempt

    def _begin(self, work: _Work, offer: Offer) -> None:
        work.offer = offer
        work.began = self.running_clock()
        attempts = work.truth.attempts
        state, actions = target.begin(
            work.key,
            [(peer, attempts[peer]) for peer, _ in work.legs],
            deadline_seconds=self._plan.deadline,
            now=self.clock(),
            timing=self._plan.timing,
            siblings=self._siblings(work, offer) if work.truth.together else None,
            stream=work.streams,
        )
        self._of_attempt.update(dict.fromkeys(attempts.values(), work))
        work.runner = Runner(
            self,
            target,
            state,
            partial(self._act, work),
            lambda _event, _after, _actions: None,
            lambda: self._settle(work),
        )
        work.runner.start(actions)

    def _siblings(self, work: _Work, offer: Offer) -> protocol.Membership:
        leader = self.leader
        if leader != self.name:
            self.network.pair(leader, self.name)
        number = min(work.truth.attempts.values())
        return protocol.Membership(key=work.key, coordinator=leader, number=number, content=offer.digest)

    @property
    def leader(self) -> str:
        """The rank that coordinates this one's engine."""
        kind, incarnation = self.engine.split("@")
        return f"{kind}/0@{incarnation}"

    def _expire_ticket(self, work: _Work) -> None:
        if work.runner is None:
            self._end_early(work, protocol.fail(End.EXPIRED, errors.ExpiredError, "no source announced"))

    def _end_early(self, work: _Work, failure: Failure) -> None:
        if work.truth.end is None:
            self._give_back(work)
            self._report(work, failure.end, failure.error)
            self.works.pop(work.key, None)

    # --- what comes ---------------------------------------------------------------------------------------------------

    def hear(self, peer: str, message: Any) -> None:  # noqa: ANN401
        """See `Rank.hear`."""
        match message:
            case Announced(offer=offer, stream=stream):
                work = self.works.get(offer.key)
                if work is not None and work.offer is None and work.truth.end is None:
                    self.ledger.content(offer.key, offer.digest)
                    work.streams = stream
                    self._begin(work, offer)
            case wire.Withdrawn(key=key, error=error):
                work = self.works.get(key)
                if work is not None and work.runner is None:
                    self._end_early(work, protocol.failure_of(error))
            case wire.Stands():
                self.coordinating.hears(peer, message)
            case wire.Decided():
                self._decided(peer, message)
            case _:
                work = self._of_attempt.get(message.attempt)
                if work is not None and work.runner is not None:
                    work.runner.feed(protocol.Received(peer, message))

    def _decided(self, peer: str, message: wire.Decided) -> None:
        work = self._of_attempt.get(message.part)
        if work is not None and work.runner is not None:
            work.runner.feed(protocol.Received(peer, message))
            return
        for send in protocol.membership.answer_unknown(peer, message):
            self._send(send)

    def _send(self, send: protocol.Send) -> None:
        if send.peer == self.name and isinstance(send.message, wire.Stands):
            self.coordinating.hears(self.name, send.message)
        else:
            self.network.send(self, send.peer, send.message)

    def learn(self, event: protocol.PeerLost | protocol.PeerDead) -> None:
        """See `Rank.learn`. The transport completes every read of a lost peer first, if it is the first to know."""
        self.network.note(f"{self.name} learns: {event}")
        if self.network.dice.random() < 0.5:
            self._tell_works(event)
            return
        for work in list(self.works.values()):
            for read in list(work.reads.values()):
                if read.peer == event.peer and not read.ended:
                    self._end_read(work, read, "the peer is lost")
        self._tell_works(event)

    def _tell_works(self, event: protocol.PeerLost | protocol.PeerDead) -> None:
        self.coordinating.learn(event)
        for work in list(self.works.values()):
            if work.runner is not None:
                work.runner.feed(event)
            elif any(peer == event.peer for peer, _ in work.legs):
                self._end_early(work, protocol.fail(End.FAILED, errors.PeerLostError, "lost before it announced"))

    # --- deeds --------------------------------------------------------------------------------------------------------

    def _act(self, work: _Work, action: Any) -> None:  # noqa: ANN401, C901, PLR0912 - one case an action
        match action:
            case protocol.Send():
                if isinstance(action.message, wire.Installed):
                    self._checks.tells_installed(work.truth)
                self._send(action)
            case protocol.SendAsk(peer=peer, attempt=attempt):
                if work.offer is not None:
                    readers = next(count for source, count in work.legs if source == peer)
                    digest = opening_of(work.key) if work.streams else work.offer.digest
                    self.network.send(self, peer, Asked(work.key, attempt, digest, readers))
            case protocol.StartRead(peer=peer, attempt=attempt):
                self._start_read(work, _Read(peer, attempt, range(len(work.blocks)), len(work.blocks)))
            case protocol.StartIncrement(peer=peer, attempt=attempt, advance=said):
                before, work.told[attempt] = work.told.get(attempt, 0), said.frontier.tokens
                places = range(before, said.frontier.tokens)
                self._start_read(work, _Read(peer, attempt, places, len(places), said.number))
            case protocol.CutOff(peer=peer, attempt=attempt):
                self._cut_off(work, peer, attempt)
            case protocol.StopRenewing(peer=peer, attempt=attempt, increments=increments):
                for read in [read for read in work.reads.values() if read.attempt == attempt]:
                    if read.number <= increments:
                        self.network.renew(peer, self.name, read.name, renewing=False)
            case protocol.Install():
                self._install(work)
            case protocol.Show():
                self._show(work)
            case protocol.ReleaseBlocks():
                self._give_back(work)
            case protocol.Report(end=end, error=error):
                self._report(work, end, error)

    def _settle(self, work: _Work) -> None:
        if work.runner is not None and work.runner.state.phase is TargetPhase.CLOSED:
            for attempt in work.truth.attempts.values():
                self._of_attempt.pop(attempt, None)
            if self.works.get(work.key) is work:
                del self.works[work.key]
            work.runner.stop()

    def _give_back(self, work: _Work) -> None:
        self._checks.released(work.truth)
        self.blocks.drain(work.key)
        self.blocks.drained(work.key)
        self.pool.give_back(work.blocks, _owner(work))

    def _report(self, work: _Work, end: End, error: wire.ErrorInfo | None) -> None:
        self.network.note(f"{self.name} ENDS {work.key}: {end.value}, {error and error.message}")
        self._checks.target_reports(work.truth, end)
        self._check_bound(work)
        self.ledger.end(work.key, end, error, self.clock(), standing=end is End.DONE)
        work.ended(self, end, error)

    def _check_bound(self, work: _Work) -> None:
        """A part ends within its deadline and what it may be parked, and its cut-off's bound."""
        if work.runner is None:
            return
        timing, parks = self._plan.timing, len(work.legs)
        bound = self._plan.deadline + parks * timing.park_seconds + 4 * CUT_OFF_SECONDS + 1.0
        bound += timing.tell_seconds if work.truth.together else 0.0
        bound += (len(work.blocks) + 2) * timing.rest_seconds if work.streams else 0.0
        took = self.running_clock() - work.began
        if took > bound:
            raise InvariantError(f"5: {work.key} at {self.name} took {took:g} s to end; its bound is {bound:g} s")

    def _install(self, work: _Work) -> None:
        self._check_content(work, "is installed, and there")
        self._checks.installs(work.truth)
        dice = self.network.dice
        refused = not self.network.quiet and dice.random() < self._plan.refuse_install
        if dice.random() < 0.8:
            self._installed_or_not(work, refused=refused)
        else:
            self.post(dice.random() * 0.5, partial(self._installed_or_not, work, refused=refused))

    def _installed_or_not(self, work: _Work, *, refused: bool) -> None:
        if work.runner is None:
            return
        if refused:
            error = protocol.error_info(errors.TransferError, "the engine does not take the blocks")
            work.runner.feed(protocol.InstallFailed(error))
            return
        self.blocks.land(work.key)
        work.truth.ready = True
        self.network.note(f"{self.name} INSTALLS {work.key}")
        if not work.truth.together:
            self._hand_over(work)
        work.runner.feed(protocol.InstallDone())

    def _show(self, work: _Work) -> None:
        """Installed before; its siblings are, too."""
        self._check_content(work, "is shown, and there")
        self._checks.shows(work.truth)
        self.network.note(f"{self.name} SHOWS {work.key}")
        self._hand_over(work)

    def _hand_over(self, work: _Work) -> None:
        self.blocks.install(work.key)
        work.truth.installed = work.truth.ever = True
        self._installed[work.key] = work

    def _check_content(self, work: _Work, where: str) -> None:
        tag = "" if work.offer is None else work.offer.tag
        for peer, attempt in work.truth.attempts.items():
            for block in work.blocks:
                content = self.pool.look(block, peer)
                if content != (tag, attempt):
                    number = 8 if content[1] == attempt else 3
                    raise InvariantError(
                        f"{number}: {work.key} {where} lies {content} of {peer} in block {block} of {self.name}, "
                        f"not {(tag, attempt)}"
                    )

    # --- reads --------------------------------------------------------------------------------------------------------

    def _start_read(self, work: _Work, read: _Read) -> None:
        work.reads[read.name] = read
        if not read.places and work.runner is not None:
            read.moving, read.ended = False, True
            work.runner.feed(protocol.ReadEnded(read.attempt, number=read.number))
            return
        work.truth.moving.add(read.name)
        self.network.renew(read.peer, self.name, read.name, renewing=True)
        for place in read.places:
            self.agenda.after(self.network.way() * 2.0, None, self._move, work, read, place)

    def _move(self, work: _Work, read: _Read, place: int) -> None:
        """One block's bytes, whatever lies there now."""
        if not read.moving or not self.alive:
            return
        pair = self.network.pair(read.peer, self.name)
        if not self.network.hears(pair) and self.network.dice.random() < 0.8:
            pair.waiting.append(partial(self._move, work, read, place))
            return
        origin = pair.source
        if not isinstance(origin, SourceRank) or work.offer is None or not origin.alive:
            return
        exposed = self.network.held(read.peer, self.name, read.name)
        if not exposed and self.network.dice.random() < 0.5:  # else nobody tells it in time, and it reads on
            self.post(0.0, self._end_read, work, read, "the source no longer lets it read")
            return
        tag, _ = origin.pool.look(work.offer.blocks[read.peer][place])
        self.pool.land(work.blocks[place], read.peer, (tag, read.attempt), _owner(work))
        read.left -= 1
        if read.left == 0:
            self.post(self.network.way(), self._landed, work, read)

    def _landed(self, work: _Work, read: _Read) -> None:
        if read.ended or work.runner is None:
            return
        tag = "" if work.offer is None else work.offer.tag
        found = {self.pool.look(work.blocks[place], read.peer)[0] for place in read.places}
        if self._plan.integrity and found != {tag} and tag + "!" not in found:
            self._end_read(work, read, "digests differ", errors.IntegrityError)
            return
        self._over(work, read)
        root = root_of(tag if found == {tag} else "corrupt") if self._plan.integrity else None
        work.runner.feed(protocol.ReadEnded(read.attempt, root, number=read.number))

    def fail_read(self, key: str, attempt: int) -> None:
        """A fault: the read fails."""
        work = self.works.get(key)
        if work is not None and attempt in work.reads:
            self._end_read(work, work.reads[attempt], "fault injected")

    def corrupt(self, key: str, attempt: int) -> None:
        """A fault: what has landed is not what was sent, and only the root shows it."""
        work = self.works.get(key)
        if work is not None and work.offer is not None and work.reads[attempt].moving and self._plan.integrity:
            read = work.reads[attempt]
            for place in read.places:
                self.pool.land(work.blocks[place], read.peer, (work.offer.tag + "!", read.attempt), _owner(work))
            read.left, read.moving = 0, False
            self._moved(work, read)
            self.post(0.01, self._landed, work, read)

    def _end_read(
        self, work: _Work, read: _Read, why: str, kind: type[errors.KVLinkError] = errors.TransportError
    ) -> None:
        """A READ completion with an error: nothing of it lands any more."""
        if not read.ended and work.runner is not None:
            self._over(work, read)
            self.network.renew(read.peer, self.name, read.name, renewing=False)
            error = protocol.error_info(kind, why)
            work.runner.feed(protocol.ReadEnded(read.attempt, error=error, number=read.number))

    def _over(self, work: _Work, read: _Read) -> None:
        read.ended, read.moving = True, False
        self._moved(work, read)

    def _moved(self, work: _Work, read: _Read) -> None:
        work.truth.moving.discard(read.name)

    def _cut_off(self, work: _Work, peer: str, attempt: int) -> None:
        reads = [read for read in work.reads.values() if read.attempt == attempt]
        for read in reads:
            self.network.renew(peer, self.name, read.name, renewing=False)
        if all(read.ended for read in reads):
            self._cut_off_done(work, attempt)
        else:
            seconds = 0.001 if self.network.quiet else self.network.dice.random() ** 3 * CUT_OFF_SECONDS
            self.post(seconds, self._cut_off_completes, work, attempt)

    def _cut_off_completes(self, work: _Work, attempt: int) -> None:
        for read in [read for read in work.reads.values() if read.attempt == attempt]:
            self._end_read(work, read, "cut off")
        self._cut_off_done(work, attempt)

    def _cut_off_done(self, work: _Work, attempt: int) -> None:
        if work.runner is not None:
            work.runner.feed(protocol.CutOffDone(attempt))


def _owner(work: _Work) -> str:
    return f"{work.key}/{min(work.truth.attempts.values())}"
