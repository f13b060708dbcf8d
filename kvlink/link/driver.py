"""What a link and a bridge stand on: one rank's halves, its parts, and its opening and closing.

`kvlink.Link` is its awaited face, `kvlink.Bridge` its polled one; both make the parts, and hand them in here.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from kvlink import limits
from kvlink.errors import ClosedError, ConfigError, DeadlineError, KVLinkError, TransportError
from kvlink.layout import alias_classes
from kvlink.link.arguments import check_deadline, check_ttl, check_uncovered
from kvlink.link.linger import Linger
from kvlink.link.listener import Listener
from kvlink.link.making import gpu_of, keep_near, make_transports
from kvlink.link.moments import Moments
from kvlink.link.part import LivePart, Result, State
from kvlink.link.pump import Pump
from kvlink.link.rank import LocalRank, check_successor
from kvlink.link.registration import register_all, register_aside, unregister_all
from kvlink.link.replicas import ReplicatedPart, parts_of, replicas_of
from kvlink.link.retries import RetriedParts
from kvlink.link.room import Reservation, RoomKeeper, RoomStats
from kvlink.link.source_half import SourceHalf
from kvlink.link.target_half import TargetHalf
from kvlink.link.tasks import TaskSet
from kvlink.memory import BlockLedger, Caches, MemoryStats
from kvlink.observe import Counters, Events, PartEnded, PeerConnected, PeerDisconnected, cause_of
from kvlink.protocol import Timing
from kvlink.transports.base import CompletionKind, Transport
from kvlink.version import VERSION
from kvlink.wire import Address

if TYPE_CHECKING:
    from kvlink.config import Config
    from kvlink.descriptor import Facts
    from kvlink.link.part import Part
    from kvlink.link.recovery import RecoveryPoint
    from kvlink.link.sessions import Session
    from kvlink.link.target_work import Uncovered
    from kvlink.observe.events import Side
    from kvlink.relayout.gpu import Moment
    from kvlink.transports.base import Capabilities, Completion
    from kvlink.wire import Offer, Roster, Ticket

_log: Final = logging.getLogger("kvlink.link")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """A link at one moment.

    Attributes:
        memory: blocks by state.
        counters: what happened since it was opened, by name.
        parts_live: parts that have not ended.
        sessions: peers connected, in both directions.
        refused: connections that the listener turned away, by reason.
        room: capacity of the blocks lent to KVLink.
        ends: parts that ended, by ``"<side>_<cause>"``; see `kvlink.observe.Cause`.
    """

    memory: MemoryStats
    counters: Mapping[str, int]
    parts_live: int
    sessions: int
    refused: Mapping[str, int]
    room: RoomStats
    ends: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseReport:
    """What closing had to cut: keys of the parts that had not ended by themselves."""

    cut: tuple[str, ...]


class Driver:
    """One rank's end. Used from one asyncio loop, in the process that opened it; made by `open_driver`.

    A verb that raises has started nothing; the part it was given then stays as it was. What the verbs mean is said at
    `kvlink.Link`.
    """

    def __init__(self, rank: LocalRank, listener: Listener, tasks: TaskSet) -> None:
        timing = Timing(
            commit_ttl_seconds=rank.config.commit_ttl_seconds,
            park_seconds=rank.config.park_seconds,
        )
        self._rank = rank
        self._listener = listener
        self._tasks = tasks
        self._pid = os.getpid()
        self._closing = False
        self._paused = False
        self._report: CloseReport | None = None
        self._parts: dict[int, LivePart] = {}
        self.retried = RetriedParts(tasks)
        self._counters = Counters()
        self.events = Events()
        classes = alias_classes(rank.caches.spec)
        self._blocks = BlockLedger(classes)
        self._room = RoomKeeper(rank.caches.spec, classes, self._counters)
        self.target = TargetHalf(rank, tasks, self._blocks, self._counters, timing)
        self.source = SourceHalf(rank, tasks, self._blocks, self._counters, timing)
        self.target.coordinated_by(self.source.coordinator)
        self.target.sessions.watch = partial(self._peer_changed, "target")
        self.source.recovery.tell = self.events.emit
        self.source.sessions.watch = partial(self._peer_changed, "source")

    # --- about itself -----------------------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        """Where peers connect, with the real port."""
        advertise = self._rank.config.advertise
        bound = self._listener.address
        return str(bound if advertise is None else Address(host=advertise, port=bound.port))

    @property
    def card(self) -> bytes:
        """This rank's card."""
        return self._rank.card(self.address)

    @property
    def counters(self) -> Counters:
        """What happened so far, as it goes on."""
        return self._counters

    @property
    def ranks(self) -> int:
        """Of this rank's engine."""
        place = self._rank.caches.spec.place
        return place.pp_size * place.tp_size

    @property
    def capabilities(self) -> tuple[Capabilities, ...]:
        """Of the transports in use, best first."""
        return tuple(pump.transport.capabilities() for pump in self._rank.pumps)

    def set_siblings(self, roster: Roster) -> None:
        """See `kvlink.Link.set_siblings`."""
        place = self._rank.caches.spec.place
        if (roster.engine, roster.incarnation) != (place.engine, place.incarnation):
            raise ConfigError(
                f"siblings are of {roster.engine}@{roster.incarnation}, this rank is {place}; pass its own engine's"
            )
        self.target.set_siblings(roster)

    def stats(self) -> Stats:
        """Blocks, counters and parts as of now."""
        return Stats(
            memory=self._blocks.stats(),
            counters=self._counters.snapshot(),
            parts_live=self.source.live + self.target.live,
            sessions=len(self.source.sessions) + len(self.target.sessions),
            refused=dict(self._listener.refused),
            room=self._room.stats,
            ends=self.events.causes,
        )

    # --- verbs ------------------------------------------------------------------------------------------------------

    def moment(self, *, event: object = None, stream: object = None) -> Moment | None:
        """What the engine's GPU work has to reach before a verb goes on. Any thread. See `Moments.take`."""
        return self._rank.moments.take(event=event, stream=stream)

    def publish(self, offer: Offer, part: LivePart, after: Moment | None = None) -> None:
        """See `kvlink.Link.publish`; nothing is read before ``after``."""
        self._check_open()
        check_ttl(offer.ttl_seconds)
        family = (offer.key, *(replica.key for replica in part.replicas)) if part.replicas else ()
        copies: list[LivePart] = []
        try:  # the request's own last: before it nobody has been told a replica's key, so they can still be taken back
            for replica in part.replicas:
                copy = LivePart(replica.key)
                self.source.publish(replica, copy, after, family)
                self._track(copy, "source")
                copies.append(copy)
            self.source.publish(offer, part, after, family)
        except KVLinkError:
            for copy in copies:
                self.source.cancel(copy, "the request that it replicates was refused")
            raise
        if isinstance(part, ReplicatedPart):
            part.serve(copies)
        self._track(part, "source")

    def part_of(self, offer: Offer, replicas: int) -> LivePart:
        """The part to publish an offer with. Any thread; see `replicas_of` for what it raises."""
        offers = replicas_of(offer, replicas, self._rank.config.secret)
        return ReplicatedPart(offer.key, offers) if offers else LivePart(offer.key)

    def announce(self, part: LivePart, *, ttl_seconds: float, max_tokens: int, facts: Facts) -> None:
        """See `kvlink.Link.announce`."""
        self._check_open()
        check_ttl(ttl_seconds)
        self.source.announce(part.key, part, max_tokens=max_tokens, ttl_seconds=ttl_seconds, facts=facts)
        self._track(part, "source")

    def fetch(  # noqa: PLR0913 - what a request can say of itself
        self,
        offer: Offer,
        into: Sequence[Sequence[int]],
        part: LivePart,
        *,
        deadline_seconds: float,
        first_token: int | Sequence[int] | None,
        facts: Facts,
        uncovered: Uncovered,
        together: bool,
        after: Moment | None = None,
    ) -> None:
        """See `kvlink.Link.start_fetch`; nothing is written before ``after``."""
        self._check_open()
        check_deadline(deadline_seconds)
        check_uncovered(uncovered)
        self._room.check(offer.key, into)
        self.target.fetch(
            offer,
            into,
            facts=facts,
            first_token=first_token,
            uncovered=uncovered,
            deadline_seconds=deadline_seconds,
            part=part,
            together=together,
            after=after,
        )
        self._track(part, "target")
        self._room.used_by(part)

    def expect(  # noqa: PLR0913 - what a request can say of itself
        self,
        ticket: Ticket,
        source: Roster,
        into: Sequence[Sequence[int]],
        part: LivePart,
        *,
        deadline_seconds: float,
        uncovered: Uncovered,
        together: bool,
        after: Moment | None = None,
    ) -> None:
        """See `kvlink.Link.expect`; nothing is written before ``after``."""
        self._check_open()
        check_deadline(deadline_seconds)
        check_uncovered(uncovered)
        check_ttl(ticket.ttl_seconds)
        self._room.check(ticket.key, into)
        self.target.expect(
            ticket,
            source,
            into,
            uncovered=uncovered,
            deadline_seconds=deadline_seconds,
            part=part,
            together=together,
            after=after,
        )
        self._track(part, "target")
        self._room.used_by(part)

    def lend(self, blocks: Sequence[Sequence[int]]) -> None:
        """See `kvlink.Link.lend`."""
        self._check_open()
        self._room.lend(blocks)

    async def reserve(  # noqa: PLR0913 - what a request can say of itself
        self,
        key: str,
        *,
        tokens: int,
        growth_tokens: int,
        facts: Facts,
        deadline_seconds: float | None,
        wait_seconds: float,
        ttl_seconds: float,
    ) -> Reservation:
        """See `kvlink.Link.reserve`."""
        self._check_open()
        check_ttl(ttl_seconds)
        if tokens < 1 or growth_tokens < 0:
            raise ConfigError(f"tokens is {tokens} and growth_tokens {growth_tokens}; give at least 1, and at least 0")
        return await self._room.reserve(
            key,
            tokens=tokens,
            growth_tokens=growth_tokens,
            facts=facts,
            deadline_seconds=math.inf if deadline_seconds is None else deadline_seconds,
            wait_seconds=wait_seconds,
            ttl_seconds=ttl_seconds,
        )

    def refuse(self, part: LivePart, error: KVLinkError, side: Side) -> None:
        """End a part whose verb raised ``error``, for whom cannot raise it; one that runs is ended by its half."""
        if not self.source.fail(part, error) and not part.state.ended:
            result = Result(key=part.key, state=State.FAILED, error=error)
            part.end(result)
            self._tell_end(result, side)

    def renew(self, offers: Iterable[Offer]) -> None:
        """See `kvlink.Link.renew`."""
        self._check_open()
        self.target.renew(tuple(offers))

    def decline(self, offer: Offer, why: str) -> None:
        """See `kvlink.Link.decline`."""
        self._check_open()
        self.target.decline(offer, why)

    def release(self, key: str) -> None:
        """See `kvlink.Link.release`."""
        self._check_process()
        self.source.recovery.release(key)
        self.target.release(key)
        if self._blocks.state_of(key) is None:
            self._room.give_back(key)

    def cancel(self, part: Part, why: str) -> None:
        """See `kvlink.Link.cancel`."""
        self._check_process()
        if not part.state.ended and not self.retried.cancel(part):
            for one in parts_of(part):
                self.source.cancel(one, why)
                self.target.cancel(one, why)

    def recovery_point(self, key: str, cached_tokens: int) -> RecoveryPoint:
        """See `kvlink.Link.recovery_point`."""
        self._check_process()
        return self.source.recovery.point(key, cached_tokens)

    async def quiesce(self, parts: Iterable[Part], timeout_seconds: float) -> bool:
        """See `kvlink.Link.quiesce`."""
        waited = tuple(parts)
        for part in waited:
            self.cancel(part, "quiesced")
        return await self._ended_within(waited, timeout_seconds)

    async def close(self, timeout_seconds: float | None = None) -> CloseReport:
        """See `kvlink.Link.close`."""
        self._check_process()
        if self._report is not None:
            return self._report
        bound = self._rank.config.close_seconds if timeout_seconds is None else timeout_seconds
        self._closing = True
        cut = await self._drain(bound)
        if self._live_parts:
            _log.warning("some cut-offs did not complete before the transports were closed")
        why = "the link is closing"
        self._room.close(why)
        for sessions in (self.target.sessions, self.source.sessions):
            sessions.shut = why
            await sessions.close(why)
        await self._tasks.close()
        self.source.stop()
        self.target.stop()
        self._listener.close()
        _close_all(self._rank.pumps)
        self._rank.moments.close()
        self._report = CloseReport(cut=cut)
        return self._report

    async def pause(self, timeout_seconds: float) -> CloseReport:
        """See `kvlink.Link.pause`."""
        self._check_process()
        if self._closing:
            raise ClosedError("this link is closed; open another one")
        why = "the link is paused: its memory is not to be touched until it resumes"
        self._paused = True
        self._listener.turns_away = "paused"
        cut = await self._drain(timeout_seconds)
        await self._told()
        for sessions in (self.target.sessions, self.source.sessions):
            sessions.shut = why
            await sessions.close(why)
        # A session's end has its transport cut everything off, where the peer's silence had kept the cut-offs waiting.
        if not await self._ended_within(self._live_parts, limits.CLOSE_TIMEOUT_SECONDS):
            keys = ", ".join(part.key for part in self._live_parts)
            raise DeadlineError(f"bytes may still land for {keys}: the memory stays registered; call pause again")
        for pump in self._rank.pumps:
            unregister_all(pump)
        self.target.release_all()
        self.source.coordinator.forget()
        self._room.close(why)
        return CloseReport(cut=cut)

    def resume(self, caches: Caches) -> None:
        """See `kvlink.Link.resume`."""
        self._check_process()
        if self._closing:
            raise ClosedError("this link is closed; open another one")
        if not self._paused or any(pump.region_keys for pump in self._rank.pumps):
            raise ConfigError("resume follows a pause that has returned")
        check_successor(self._rank.caches.spec, caches.spec)
        if caches.device != self._rank.caches.device:
            raise ConfigError(
                f"resume: the cache lies on {caches.device}, the one before on {self._rank.caches.device}"
            )
        classes = alias_classes(caches.spec)
        self._blocks.restart(classes)
        done: list[Pump] = []
        try:
            for pump in self._rank.pumps:
                register_all(pump, caches)
                done.append(pump)
        except TransportError:
            for pump in done:
                unregister_all(pump)
            raise
        if self._rank.caches.spec.place.incarnation != caches.spec.place.incarnation:
            self.target.set_siblings(None)
        self._rank.caches = caches
        self._room = RoomKeeper(caches.spec, classes, self._counters)
        self.target.sessions.shut = self.source.sessions.shut = None
        self._listener.turns_away = None
        self._paused = False

    async def ended(self, parts: Iterable[Part]) -> None:
        """Wait until all of them have ended, however."""
        loop = asyncio.get_running_loop()
        for part in parts:
            ended: asyncio.Future[None] = loop.create_future()
            part.when_ended(lambda _part, ended=ended: None if ended.done() else ended.set_result(None))  # type: ignore[misc]
            await ended

    async def finished(self, part: Part) -> Result:
        """Wait for a part's end and raise what it ended with; a wait that is cancelled returns after its cut-off."""
        try:
            return await part.wait()
        except asyncio.CancelledError:
            self.cancel(part, "the caller stopped waiting")
            await asyncio.shield(self.ended((part,)))
            raise

    # --- inside -----------------------------------------------------------------------------------------------------

    @property
    def _live_parts(self) -> list[LivePart]:
        return [part for part in self._parts.values() if not part.state.ended]

    async def _drain(self, timeout_seconds: float) -> tuple[str, ...]:
        """Let what runs end by itself within the bound, then cut it off; the keys of what was cut."""
        live = self._live_parts
        if not live or await self._ended_within(live, timeout_seconds):
            return ()
        cut = [part for part in live if not part.state.ended]
        await self.quiesce(cut, limits.CLOSE_TIMEOUT_SECONDS)
        return tuple(part.key for part in cut)

    async def _told(self) -> None:
        """Let sources hear how their legs ended: one that does not would have to call it indeterminate."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + limits.PAUSE_TELL_SECONDS
        while self.target.telling and loop.time() < deadline:  # noqa: ASYNC110 - once in a sleep; nobody else waits for it
            await asyncio.sleep(limits.PAUSE_TELL_SECONDS / 50)

    async def _ended_within(self, parts: Sequence[Part], timeout_seconds: float) -> bool:
        try:
            async with asyncio.timeout(timeout_seconds):
                await self.ended(parts)
        except TimeoutError:
            return False
        return True

    def _track(self, part: LivePart, side: Side) -> None:
        self._parts[id(part)] = part
        part.when_ended(partial(self._untrack, side))

    def _untrack(self, side: Side, part: Part) -> None:
        self._parts.pop(id(part), None)
        if part.result is not None:
            self._tell_end(part.result, side)

    def _tell_end(self, result: Result, side: Side) -> None:
        error = result.error
        ended = PartEnded(
            at_seconds=asyncio.get_running_loop().time(),
            key=result.key,
            side=side,
            end=result.state.name.lower(),
            cause=cause_of(error),
            code=None if error is None else error.code,
            why="" if error is None else str(error),
            bytes=result.bytes,
            seconds=result.seconds,
            transport=result.transport,
        )
        self.events.emit(ended)

    def _peer_changed(self, side: Side, session: Session, error: KVLinkError | None) -> None:
        now, peer = asyncio.get_running_loop().time(), session.peer
        if error is not None:
            self.events.emit(PeerDisconnected(at_seconds=now, peer=peer, side=side, code=error.code, why=str(error)))
            return
        name, took = session.pump.transport.capabilities().name, session.handshake_seconds
        self.events.emit(PeerConnected(at_seconds=now, peer=peer, side=side, transport=name, handshake_seconds=took))

    def _check_process(self) -> None:
        """A child shares its parent's sockets and polls: whatever it did with them, it would do to its parent."""
        if os.getpid() != self._pid:
            raise ClosedError("this link was opened before a fork; open another one in this process")

    def _check_open(self) -> None:
        self._check_process()
        if self._closing:
            raise ClosedError("this link is closed; open another one")
        if self._paused:
            raise ClosedError("this link is paused; resume it first")


async def open_driver(
    config: Config,
    caches: Caches,
    siblings: Roster | None,
    transports: Sequence[Transport] | None,
    *,
    linger: bool = True,
) -> Driver:
    """Register the memory, bind the address, let peers in; see `kvlink.open_link` for arguments and errors.

    ``linger``: whether its loop may wait awake for answers that come soon.
    """
    gpu = None if caches.on_host else gpu_of(config, caches)
    made = list(transports) if transports is not None else await asyncio.to_thread(make_transports, config, gpu)
    tasks = TaskSet()
    moments = Moments(gpu)
    drivers: list[Driver] = []

    def on_event(completion: Completion) -> None:
        """The channel's end and the peer's last word on control may be found in one turn: the word comes first (A7)."""
        _after_turns(limits.LAST_WORD_TURNS, partial(heed, completion))

    def heed(completion: Completion) -> None:
        if not drivers:
            return
        if completion.kind is CompletionKind.PEER_LOST:
            drivers[0].target.sessions.lost(completion.peer, completion.detail)
            drivers[0].source.sessions.lost(completion.peer, completion.detail)
        else:
            drivers[0].source.lapsed(completion.peer, completion.attempt)

    pumps = tuple(Pump(transport, on_event) for transport in made)
    try:
        for pump in pumps:
            await register_aside(pump, caches)
        keep_near(made, config, caches)
        rank = LocalRank(config, caches, pumps, VERSION, gpu, moments, Linger(enabled=linger))
        listener = await Listener.bind(
            config.listen,
            secret=config.secret,
            introduce=rank.introduce,
            handshake_seconds=config.handshake_seconds,
        )
        for pump in pumps:
            if (lanes := pump.transport.lane_listener()) is not None:
                listener.accept_lanes(lanes)
    except BaseException:
        _close_all(pumps)
        moments.close()
        raise
    driver = Driver(rank, listener, tasks)
    drivers.append(driver)
    if siblings is not None:
        driver.set_siblings(siblings)
    tasks.start(listener.serve(driver.source.accepted), "serve")
    return driver


def _after_turns(turns: int, act: Callable[[], None]) -> None:
    """Call ``act`` once the loop has taken in what is here already, and what follows from it."""
    loop = asyncio.get_running_loop()
    if turns:
        loop.call_soon(_after_turns, turns - 1, act)
    else:
        act()


def _close_all(pumps: Iterable[Pump]) -> None:
    """Stop watching and close every transport."""
    for pump in pumps:
        pump.close()
        pump.transport.close()
