"""The link: one rank's end of everything. Opens, closes, and hands the verbs to its two halves."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from kvlink import limits
from kvlink.descriptor import Facts
from kvlink.errors import ClosedError, ConfigError
from kvlink.layout import alias_classes
from kvlink.link.listener import Listener
from kvlink.link.part import Part, Result
from kvlink.link.pump import Pump
from kvlink.link.rank import LocalRank, register_all
from kvlink.link.source_half import SourceHalf
from kvlink.link.target_half import TargetHalf
from kvlink.link.tasks import TaskSet
from kvlink.memory import BlockLedger, Caches, MemoryStats
from kvlink.observe import Counters
from kvlink.protocol import Timing
from kvlink.transports.base import CompletionKind, Transport
from kvlink.transports.ucx import UcxTransport
from kvlink.version import VERSION
from kvlink.wire import Address

if TYPE_CHECKING:
    from kvlink.config import Config
    from kvlink.link.target_work import Uncovered
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
    """

    memory: MemoryStats
    counters: Mapping[str, int]
    parts_live: int
    sessions: int
    refused: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseReport:
    """What `Link.close` had to cut: keys of the parts that had not ended by themselves."""

    cut: tuple[str, ...]


class Link:
    """One rank's end. Made by `open_link`; used from one asyncio loop, in the process that opened it.

    Verbs that return a `Part` start something and never block; its end is reported once, after its cut-off on this
    rank. Verbs of the target only ever write this rank's own blocks, and only those that they were given.
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
        self._report: CloseReport | None = None
        self._parts: dict[int, Part] = {}
        self._counters = Counters()
        self._blocks = BlockLedger(alias_classes(rank.caches.spec))
        self.target = TargetHalf(rank, tasks, self._blocks, self._counters, timing)
        self.source = SourceHalf(rank, tasks, self._blocks, self._counters, timing)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # --- about itself -----------------------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        """Where peers connect, with the real port."""
        advertise = self._rank.config.advertise
        bound = self._listener.address
        return str(bound if advertise is None else Address(host=advertise, port=bound.port))

    @property
    def card(self) -> bytes:
        """This rank's card, for `kvlink.Roster.of`."""
        return self._rank.card(self.address)

    @property
    def capabilities(self) -> tuple[Capabilities, ...]:
        """Of the transports in use, best first."""
        return tuple(pump.transport.capabilities() for pump in self._rank.pumps)

    def set_siblings(self, roster: Roster) -> None:
        """Tell this rank who its engine's other ranks are, so that replicated heads are spread over their sources.

        Raises:
            ConfigError: the roster is of another engine or incarnation.
        """
        place = self._rank.caches.spec.place
        if (roster.engine, roster.incarnation) != (place.engine, place.incarnation):
            raise ConfigError(
                f"siblings are of {roster.engine}@{roster.incarnation}, this rank is {place}; pass its own engine's"
            )
        self.target.siblings = roster.shares

    def stats(self) -> Stats:
        """Blocks, counters and parts as of now."""
        return Stats(
            memory=self._blocks.stats(),
            counters=self._counters.snapshot(),
            parts_live=self.source.live + self.target.live,
            sessions=len(self.source.sessions) + len(self.target.sessions),
            refused=dict(self._listener.refused),
        )

    # --- source verbs -------------------------------------------------------------------------------------------------

    def publish(self, offer: Offer, *, part: Part | None = None) -> Part:
        """Source, fetch flow: hold this KV and let the offer's holder fetch it.

        Ends `State.DONE` once every rank that reads this one has installed, `State.EXPIRED` if nobody asks within
        ``offer.ttl_seconds``. The blocks are the library's until the end.

        Raises:
            ConflictError: the key is held already.
            LayoutError, MismatchError: the offer is not of this cache.
            BusyError: too many requests are remembered.
        """
        self._check_open()
        return self._track(self.source.publish(offer, part or Part(offer.key)))

    def announce(
        self,
        key: str,
        *,
        ttl_seconds: float,
        max_tokens: int = limits.MAX_TOKENS_PER_REQUEST,
        facts: Facts | None = None,
        part: Part | None = None,
    ) -> Part:
        """Source, push flow: KV for this ticket is being computed. ``Part.ready`` and ``Part.seal`` follow.

        A target that asks before the seal waits, within its own bound. Ends as for `publish`.

        Raises:
            ConflictError: the key is held already.
            BusyError: too many requests are remembered.
        """
        self._check_open()
        started = part or Part(key, controls=self.source)
        facts = facts or Facts()
        return self._track(
            self.source.announce(key, started, max_tokens=max_tokens, ttl_seconds=ttl_seconds, facts=facts)
        )

    # --- target verbs -------------------------------------------------------------------------------------------------

    def start_fetch(  # noqa: PLR0913 - what a request can say of itself
        self,
        offer: Offer,
        into: Sequence[Sequence[int]],
        *,
        deadline_seconds: float,
        first_token: int | Sequence[int] | None = None,
        facts: Facts | None = None,
        uncovered: Uncovered = "leave",
        part: Part | None = None,
    ) -> Part:
        """Target, fetch flow: read the offer's KV into these blocks, and install it once or not at all.

        Args:
            offer: from the source, however it travelled; its signature is checked where there is a secret.
            into: this rank's block ids, one list a group; entry i takes positions ``[i * block_size, ...)``. They are
                the library's until the part ends, and the engine's from then on.
            deadline_seconds: for the transfer, from its first ask; connecting and being parked have their own bounds.
            first_token: first position to read, where the target has a prefix already: one for all groups, or one for
                each of this rank's; the offer's by default. What the source's windows have left behind is not read.
            facts: what this side knows of the request, compared where both state it.
            uncovered: what becomes of the slots past the last token in its block.
            part: for the bridge.

        A repeat with the same content joins the live request, or gets its outcome until `release`.

        Raises:
            MismatchError: another model, prompt, adapter or tenant.
            AuthenticationError: the offer is not signed with our secret.
            ConflictError: the key with other content, or a block that another request has.
            LayoutError: the blocks do not fit.
        """
        self._check_open()
        _check_deadline(deadline_seconds)
        return self._track(
            self.target.fetch(
                offer,
                into,
                facts=facts or Facts(),
                first_token=first_token,
                uncovered=uncovered,
                deadline_seconds=deadline_seconds,
                part=part or Part(offer.key),
            )
        )

    async def fetch(
        self,
        offer: Offer,
        into: Sequence[Sequence[int]],
        *,
        deadline_seconds: float,
        first_token: int | Sequence[int] | None = None,
        facts: Facts | None = None,
        uncovered: Uncovered = "leave",
    ) -> Result:
        """`start_fetch`, and wait for its end.

        Cancelling the wait cancels the request and waits for its cut-off: when it is over, no byte can land in
        ``into`` any more.

        Raises:
            KVLinkError: as `start_fetch`, and the typed error the part ended with.
        """
        part = self.start_fetch(
            offer,
            into,
            deadline_seconds=deadline_seconds,
            first_token=first_token,
            facts=facts,
            uncovered=uncovered,
        )
        try:
            return await part.wait()
        except asyncio.CancelledError:
            self.cancel(part, "the caller stopped waiting")
            await asyncio.shield(self._ended((part,)))
            raise

    def expect(
        self,
        ticket: Ticket,
        source: Roster,
        into: Sequence[Sequence[int]],
        *,
        deadline_seconds: float,
        part: Part | None = None,
    ) -> Part:
        """Target, push flow: room is reserved in ``into``; deliver the ticket, and read once a source announces.

        Ends `State.EXPIRED` if nobody announces within ``ticket.ttl_seconds``. See `start_fetch` for the rest.

        Raises:
            MismatchError: the source serves another model.
            ConflictError: the key is live with other blocks, or a block belongs to another request.
            LayoutError: the blocks do not hold ``ticket.tokens``.
        """
        self._check_open()
        _check_deadline(deadline_seconds)
        started = part or Part(ticket.key, ticket=ticket)
        return self._track(self.target.expect(ticket, source, into, deadline_seconds=deadline_seconds, part=started))

    def renew(self, offers: Iterable[Offer]) -> None:
        """Target: these offers are queued here and not yet fetched; their sources keep the blocks a while longer."""
        self._check_open()
        self.target.renew(tuple(offers))

    def decline(self, offer: Offer, why: str) -> None:
        """Target: this rank will not fetch the offer (full local hit, abort in the queue); its sources are told."""
        self._check_open()
        self.target.decline(offer, why)

    def release(self, key: str) -> None:
        """Target: the engine is done with an installed request's blocks; its recorded outcome ends. Idempotent."""
        self._check_process()
        self.target.release(key)

    # --- both ---------------------------------------------------------------------------------------------------------

    def cancel(self, part: Part, why: str) -> None:
        """End a part, from either side. The end is reported after the cut-off; a part that has ended stays as it is."""
        self._check_process()
        if not part.state.ended:
            self.source.cancel(part, why)
            self.target.cancel(part, why)

    async def quiesce(self, parts: Iterable[Part], timeout_seconds: float) -> bool:
        """Cancel ``parts`` and wait until none of them touches a block; whether that came about in time.

        Cancelling the wait leaves the cut-offs running.
        """
        waited = tuple(parts)
        for part in waited:
            self.cancel(part, "quiesced")
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._ended(waited)
        except TimeoutError:
            return False
        return True

    async def close(self, timeout_seconds: float | None = None) -> CloseReport:
        """Let live parts end within the bound, cut off the rest, and give everything up. Idempotent.

        Cancelling it leaves a link that is closing: call it again.

        Returns:
            What was cut.

        Raises:
            ClosedError: in a process forked since; the link is its parent's to close.
        """
        self._check_process()
        if self._report is not None:
            return self._report
        bound = self._rank.config.close_seconds if timeout_seconds is None else timeout_seconds
        self._closing = True
        live = [part for part in self._parts.values() if not part.state.ended]
        if live and not await self._wait_for(live, bound):
            cut = tuple(part.key for part in live if not part.state.ended)
            if not await self.quiesce(live, limits.CLOSE_TIMEOUT_SECONDS):
                _log.warning("some cut-offs did not complete before the transports were closed")
        else:
            cut = ()
        await self.target.sessions.close("the link is closing")
        await self.source.sessions.close("the link is closing")
        await self._tasks.close()
        self.source.stop()
        self._listener.close()
        close_all(self._rank.pumps)
        self._report = CloseReport(cut=cut)
        return self._report

    async def _wait_for(self, parts: Sequence[Part], timeout_seconds: float) -> bool:
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._ended(parts)
        except TimeoutError:
            return False
        return True

    @staticmethod
    async def _ended(parts: Iterable[Part]) -> None:
        loop = asyncio.get_running_loop()
        for part in parts:
            ended: asyncio.Future[None] = loop.create_future()
            part.when_ended(lambda _part, ended=ended: None if ended.done() else ended.set_result(None))  # type: ignore[misc]
            await ended

    def _track(self, part: Part) -> Part:
        self._parts[id(part)] = part
        part.when_ended(self._untrack)
        return part

    def _untrack(self, part: Part) -> None:
        self._parts.pop(id(part), None)

    def _check_process(self) -> None:
        """A child shares its parent's sockets and polls: whatever it did with them, it would do to its parent."""
        if os.getpid() != self._pid:
            raise ClosedError("this link was opened before a fork; open another one in this process")

    def _check_open(self) -> None:
        self._check_process()
        if self._closing:
            raise ClosedError("this link is closed; open another one")


class OpeningLink:
    """What `open_link` returns: await it for a `Link`, or enter it to have the link closed at the end."""

    def __init__(self, start: Callable[[], Any]) -> None:
        self._start = start
        self._link: Link | None = None

    def __await__(self) -> Generator[Any, None, Link]:
        result: Generator[Any, None, Link] = self._start().__await__()
        return result

    async def __aenter__(self) -> Link:
        self._link = await self
        return self._link

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._link is not None:
            await self._link.close()


def open_link(
    config: Config,
    caches: Caches,
    *,
    siblings: Roster | None = None,
    transports: Sequence[Transport] | None = None,
) -> OpeningLink:
    """Open one rank's end: register its memory, bind its address, let peers in.

    Args:
        config: its settings.
        caches: its cache; the memory must live until the link is closed.
        siblings: all ranks of its own engine, if known already; see `Link.set_siblings`.
        transports: made by the caller (such as `kvlink.transports.loopback`'s), instead of those that ``config`` names;
            the link closes them.

    Raises:
        ConfigError: a setting is wrong.
        UnavailableError: no UCX, or the address cannot be bound.
        TransportError: the memory cannot be registered.
    """

    async def start() -> Link:
        return await _open(config, caches, siblings, transports)

    return OpeningLink(start)


async def _open(
    config: Config, caches: Caches, siblings: Roster | None, transports: Sequence[Transport] | None
) -> Link:
    made = list(transports) if transports is not None else [_make(name, config) for name in config.transports]
    tasks = TaskSet()
    links: list[Link] = []

    def on_event(completion: Completion) -> None:
        if not links:
            return
        if completion.kind is CompletionKind.PEER_LOST:
            links[0].target.sessions.lost(completion.peer, completion.detail)
            links[0].source.sessions.lost(completion.peer, completion.detail)
        else:
            links[0].source.lapsed(completion.peer, completion.attempt)

    pumps = tuple(Pump(transport, on_event) for transport in made)
    try:
        for pump in pumps:
            register_all(pump, caches)
        rank = LocalRank(config, caches, pumps, VERSION)
        listener = await Listener.bind(
            config.listen,
            secret=config.secret,
            introduce=rank.introduce,
            handshake_seconds=config.handshake_seconds,
        )
    except BaseException:
        close_all(pumps)
        raise
    link = Link(rank, listener, tasks)
    links.append(link)
    if siblings is not None:
        link.set_siblings(siblings)
    tasks.start(listener.serve(link.source.accepted), "serve")
    return link


def close_all(pumps: Iterable[Pump]) -> None:
    """Stop watching and close every transport."""
    for pump in pumps:
        pump.close()
        pump.transport.close()


def _make(name: str, config: Config) -> Transport:
    if name == "ucx":
        return UcxTransport(
            ucx_origin=config.ucx_origin,
            ucx_tls=config.ucx_tls,
            heartbeat_seconds=config.heartbeat_seconds,
            peer_lost_seconds=config.peer_lost_seconds,
        )
    raise ConfigError(
        f"transports names {name!r}; known is 'ucx'. A loopback is made by the caller: open_link(..., transports=[...])"
    )


def _check_deadline(seconds: float) -> None:
    if not 0 < seconds <= limits.MAX_ATTEMPT_SECONDS:
        raise ConfigError(
            f"deadline_seconds is {seconds}; give the time that is left, above 0 and at most "
            f"{limits.MAX_ATTEMPT_SECONDS:g}"
        )
