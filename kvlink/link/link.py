"""The link: one rank's end of everything, for those who await."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from kvlink import limits
from kvlink.descriptor import Facts
from kvlink.link.driver import CloseReport, Driver, Stats, open_driver
from kvlink.link.part import LivePart, Part, Result
from kvlink.link.retries import Retrying, check_sources, fetch_with_retries
from kvlink.link.room import Reservation
from kvlink.protocol.retry import RetryPolicy

if TYPE_CHECKING:
    from kvlink.config import Config
    from kvlink.link.recovery import RecoveryPoint
    from kvlink.link.retries import GiveBack, NextOffer, TakeBlocks
    from kvlink.link.target_work import Uncovered
    from kvlink.memory import Caches
    from kvlink.observe import Events
    from kvlink.transports.base import Capabilities, Transport
    from kvlink.wire import Offer, Roster, Ticket


class Link:
    """One rank's end. Made by `open_link`; used from one asyncio loop, in the process that opened it.

    Verbs that return a `Part` start something and never block; its end is reported once, after its cut-off on this
    rank. Verbs of the target only ever write this rank's own blocks, and only those that they were given.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

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
        return self._driver.address

    @property
    def card(self) -> bytes:
        """This rank's card, for `kvlink.Roster.of`."""
        return self._driver.card

    @property
    def capabilities(self) -> tuple[Capabilities, ...]:
        """Of the transports in use, best first."""
        return self._driver.capabilities

    def set_siblings(self, roster: Roster) -> None:
        """Tell this rank who its engine's other ranks are, so that replicated heads are spread over their sources.

        Raises:
            ConfigError: the roster is of another engine or incarnation.
        """
        self._driver.set_siblings(roster)

    def stats(self) -> Stats:
        """Blocks, counters and parts as of now."""
        return self._driver.stats()

    @property
    def events(self) -> Events:
        """Every part's end with its cause, and peers that come and go: `Events.take` them, or `Events.subscribe`."""
        return self._driver.events

    # --- source verbs -------------------------------------------------------------------------------------------------

    def publish(self, offer: Offer, *, event: object = None, replicas: int = 0) -> Part:
        """Source, fetch flow: hold this KV and let the offer's holder fetch it.

        Ends `State.DONE` once every rank that reads this one has installed, `State.EXPIRED` if nobody asks within
        ``offer.ttl_seconds``. The blocks are the library's until the end.

        Args:
            offer: what its holder may fetch.
            event: on a GPU, an event recorded after the work that writes this KV: torch's, CuPy's, or its handle.
                Nothing is read before; a target that asks before waits, within its own bound. Without it, all of it is
                written already.
            replicas: further targets that may fetch the same KV, for when the first is lost (`recovery_point`). Each
                has a key and an offer of its own, for one target, in the part's ``replicas``. The part then ends after
                them all, as the request itself did: each keeps the blocks until it is installed, declined, or
                ``offer.ttl_seconds`` are over.

        Raises:
            ConflictError: the key is held already.
            ConfigError: ``replicas`` is below 0 or above `limits.MAX_REPLICAS`.
            SchemaError: the key leaves no room for a replica's.
            LayoutError, MismatchError: the offer is not of this cache, or it is no event.
            GpuError: the GPU's driver refused.
            BusyError: too many requests are remembered.
        """
        part = self._driver.part_of(offer, replicas)
        self._driver.publish(offer, part, self._driver.moment(event=event))
        return part

    def recovery_point(self, key: str, *, cached_tokens: int = 0) -> RecoveryPoint:
        """Source: from where a request that was installed can go on, and what it costs; asks nobody, changes nothing.

        `kvlink.observe.InstalledLost` tells when it is worth asking; it may be asked before. What was installed is
        known until `release`, or for `limits.RETRY_HORIZON_SECONDS` (10 minutes) from then.

        Args:
            key: the request's, or one of its replicas'.
            cached_tokens: first positions that whoever prefills again has cached.

        Raises:
            UnknownRequestError: it is not known to be installed from here.
            ConfigError: ``cached_tokens`` is below 0.
        """
        return self._driver.recovery_point(key, cached_tokens)

    def announce(
        self,
        key: str,
        *,
        ttl_seconds: float,
        max_tokens: int = limits.MAX_TOKENS_PER_REQUEST,
        facts: Facts | None = None,
    ) -> Part:
        """Source, push flow: KV for this ticket is being computed. ``Part.ready`` and ``Part.seal`` follow.

        A target that asks before the seal waits, within its own bound. Ends as for `publish`.

        Raises:
            ConflictError: the key is held already.
            BusyError: too many requests are remembered.
        """
        part = LivePart(key, controls=self._driver.source)
        self._driver.announce(part, ttl_seconds=ttl_seconds, max_tokens=max_tokens, facts=facts or Facts())
        return part

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
        together: bool = False,
        stream: object = None,
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
            together: the parts of all ranks of this engine become visible together, or none does: every rank fetches
                under the same key with ``together``, and the engine's first rank, which `set_siblings` names,
                coordinates. `State.DONE` on any rank means that all have installed; on the first, that all are visible.
                A failure or a cancel on one rank ends all, with its error; `State.INDETERMINATE` says that the engine
                has lost a rank at the last step. For engines that reduce their ranks' ends themselves: leave it off.
            stream: on a GPU, the stream whose work so far may still use these blocks: torch's, CuPy's, or its handle.
                Nothing is written before it is done. Once the part is done, work on any stream sees what was read.

        A repeat with the same content joins the live request, or gets its outcome until `release`.

        Raises:
            MismatchError: another model, prompt, adapter or tenant.
            AuthenticationError: the offer is not signed with our secret.
            ConflictError: the key with other content, or a block that another request has.
            LayoutError: the blocks do not fit.
        """
        part = LivePart(offer.key)
        self._driver.fetch(
            offer,
            into,
            part,
            deadline_seconds=deadline_seconds,
            first_token=first_token,
            facts=facts or Facts(),
            uncovered=uncovered,
            together=together,
            after=self._driver.moment(stream=stream),
        )
        return part

    async def fetch(  # noqa: PLR0913 - what a request can say of itself
        self,
        offer: Offer,
        into: Sequence[Sequence[int]],
        *,
        deadline_seconds: float,
        first_token: int | Sequence[int] | None = None,
        facts: Facts | None = None,
        uncovered: Uncovered = "leave",
        together: bool = False,
        stream: object = None,
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
            together=together,
            stream=stream,
        )
        return await self._driver.finished(part)

    async def fetch_with_retries(  # noqa: PLR0913 - what a request can say of itself
        self,
        offer: Offer,
        take_blocks: TakeBlocks,
        *,
        give_back: GiveBack,
        deadline_seconds: float,
        policy: RetryPolicy | None = None,
        next_offer: NextOffer | None = None,
        first_token: int | Sequence[int] | None = None,
        facts: Facts | None = None,
        uncovered: Uncovered = "leave",
        together: bool = False,
        stream: object = None,
    ) -> Result:
        """`fetch`, and again while that may help: each try a fresh attempt into fresh blocks.

        Args:
            offer: the first source's.
            take_blocks: called before each try; gives this rank's blocks for that offer. What it raises counts as the
                try's end, so a `BusyError` (of `reserve`, say) is tried again after its hint.
            give_back: called with the blocks of a try that failed, after its cut-off: they may be reused at once.
            deadline_seconds: for each try; all of them together have ``policy.total_seconds``.
            policy: how often, how long and with what pauses; its defaults if not given.
            next_offer: called with the last offer and its error before each retry; another source's offer, or ``None``
                to stay. Without it, or with ``None``, what only another source can mend ends the request. Only for
                engines of one rank, and with ``together``: siblings must read from one source, and a try in which they
                chose differently fails on all of them.
            first_token: as for `fetch`.
            facts: as for `fetch`.
            uncovered: as for `fetch`.
            together: as for `fetch`; each try fails on all ranks or on none, and each rank tries again by itself.
            stream: as for `fetch`, as of each try.

        Never tried again: what the table `kvlink.protocol.AGAIN` says makes no sense, and what is *indeterminate*.
        Nothing here turns to another target: this rank is the only one.

        Cancelling the wait returns after the cut-off of the try that runs; its blocks were given back.

        Returns:
            Of the try that was done; ``tries`` says how many there were, ``seconds`` is over all of them.

        Raises:
            KVLinkError: what the last try ended with, with a note of how many there were.
        """
        check_sources(next_offer, 1 if together else self._driver.ranks)
        retrying = Retrying(
            policy or RetryPolicy(), deadline_seconds, take_blocks, give_back, next_offer, self._driver.counters
        )

        return await fetch_with_retries(
            self._driver,
            offer,
            retrying,
            first_token=first_token,
            facts=facts or Facts(),
            uncovered=uncovered,
            together=together,
            stream=stream,
        )

    def expect(  # noqa: PLR0913 - what a request can say of itself
        self,
        ticket: Ticket,
        source: Roster,
        into: Sequence[Sequence[int]],
        *,
        deadline_seconds: float,
        uncovered: Uncovered = "leave",
        together: bool = False,
        stream: object = None,
    ) -> Part:
        """Target, push flow: room is reserved in ``into``; deliver the ticket, and read once a source announces.

        Ends `State.EXPIRED` if nobody announces within ``ticket.ttl_seconds``. See `start_fetch` for the rest.

        Raises:
            MismatchError: the source serves another model.
            ConflictError: the key is live with other blocks, or a block belongs to another request.
            LayoutError: the blocks do not hold ``ticket.tokens``.
        """
        part = LivePart(ticket.key, ticket=ticket)
        after = self._driver.moment(stream=stream)
        self._driver.expect(
            ticket,
            source,
            into,
            part,
            deadline_seconds=deadline_seconds,
            uncovered=uncovered,
            together=together,
            after=after,
        )
        return part

    def lend(self, blocks: Sequence[Sequence[int]]) -> None:
        """Target without an allocator of its own: these blocks are KVLink's to give out with `reserve`.

        Args:
            blocks: this rank's block ids, one list a group; a block that groups share is lent once. They stay lent
                until the link is closed or paused. Lend on one rank of an engine, which decides for its siblings.

        Raises:
            LayoutError: a block is not of this cache, or lent already; nothing was lent.
        """
        self._driver.lend(blocks)

    async def reserve(  # noqa: PLR0913 - what a request can say of itself
        self,
        key: str,
        *,
        tokens: int,
        growth_tokens: int = 0,
        facts: Facts | None = None,
        deadline_seconds: float | None = None,
        wait_seconds: float = 0.0,
        ttl_seconds: float = limits.CLAIM_TTL_SECONDS,
    ) -> Reservation:
        """Target: room among the lent blocks for a whole request, before its prefill is spent; all of it or nothing.

        The reservation ends when a part that used its blocks fails, when the key is released, or by itself if nobody
        uses it within ``ttl_seconds``. Verbs that are given blocks of the engine's own never come by here.

        Args:
            key: the request's; the verb that uses the blocks has the same.
            tokens: positions of the prompt.
            growth_tokens: positions that decode is expected to add.
            facts: ``tenant`` and ``priority`` decide who goes first: tenants below their fair share before others, then
                priority, then deadline, then arrival.
            deadline_seconds: when the room would be of no use any more.
            wait_seconds: how long to wait in the queue; 0 answers at once.
            ttl_seconds: how long an unused reservation lasts.

        Cancelling the wait leaves the queue, and gives back what had just been given.

        Raises:
            TooLargeError: it can never fit; at once.
            BusyError: no room in the time given, or the queue is full; with a hint and what is free.
            ConflictError: the key has room, or waits for it, already.
            ConfigError: no tokens, or too many.
        """
        return await self._driver.reserve(
            key,
            tokens=tokens,
            growth_tokens=growth_tokens,
            facts=facts or Facts(),
            deadline_seconds=deadline_seconds,
            wait_seconds=wait_seconds,
            ttl_seconds=ttl_seconds,
        )

    def renew(self, offers: Iterable[Offer]) -> None:
        """Target: these offers are queued here and not yet fetched; their sources keep the blocks a while longer."""
        self._driver.renew(offers)

    def decline(self, offer: Offer, why: str) -> None:
        """Target: this rank will not fetch the offer (full local hit, abort in the queue); its sources are told."""
        self._driver.decline(offer, why)

    def release(self, key: str) -> None:
        """The engine is done with a request. Idempotent.

        Target: with its blocks; its recorded outcome and its reservation end. While the request is live it changes
        nothing; `cancel` it first. Source: with recovering it; its recovery point, and its replicas', are forgotten.
        """
        self._driver.release(key)

    # --- both ---------------------------------------------------------------------------------------------------------

    def cancel(self, part: Part, why: str) -> None:
        """End a part, from either side. The end is reported after the cut-off; a part that has ended stays as it is."""
        self._driver.cancel(part, why)

    async def quiesce(self, parts: Iterable[Part], timeout_seconds: float) -> bool:
        """Cancel ``parts`` and wait until none of them touches a block; whether that came about in time.

        Cancelling the wait leaves the cut-offs running.
        """
        return await self._driver.quiesce(parts, timeout_seconds)

    async def pause(self, timeout_seconds: float) -> CloseReport:
        """Sleep: let live parts end within the bound, cut off the rest, leave all peers, unregister the memory.

        When it has returned no byte of the cache is read or written through KVLink, and the engine may free it. Nothing
        that was installed, held or lent stands any more. The address stays bound; peers that come are turned away, and
        were told by a goodbye. Until `resume`, verbs that start something raise `ClosedError`. Idempotent.

        Cancelling it leaves a link that is pausing: call it again.

        Returns:
            What was cut.

        Raises:
            DeadlineError: cut-offs did not complete; the memory stays registered. Call it again.
            ClosedError: the link is closed, or its parent's.
        """
        return await self._driver.pause(timeout_seconds)

    def resume(self, caches: Caches) -> None:
        """Wake up over this cache, which may lie elsewhere: register it, and let peers in again.

        Registers in this call, for as long as that takes; `open_link` does so aside, while its loop goes on.

        Args:
            caches: of the same rank of the same engine. If identity (another weights revision) or geometry changed,
                its place names a new incarnation: to peers it is another engine, and the old one is dead. Then make
                new cards and rosters, and call `set_siblings` again.

        Raises:
            ConfigError: the link is not paused, the cache is another rank's, or it changed under the same incarnation.
            TransportError: the memory cannot be registered; the link stays paused.
        """
        self._driver.resume(caches)

    async def close(self, timeout_seconds: float | None = None) -> CloseReport:
        """Let live parts end within the bound, cut off the rest, and give everything up. Idempotent.

        Cancelling it leaves a link that is closing: call it again.

        Returns:
            What was cut.

        Raises:
            ClosedError: in a process forked since; the link is its parent's to close.
        """
        return await self._driver.close(timeout_seconds)


class OpeningLink:
    """What `open_link` returns: await it for a `Link`, or enter it to have the link closed at the end."""

    def __init__(self, start: Callable[[], Coroutine[Any, Any, Link]]) -> None:
        self._start = start
        self._link: Link | None = None

    def __await__(self) -> Generator[Any, None, Link]:
        return self._start().__await__()

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
        return Link(await open_driver(config, caches, siblings, transports))

    return OpeningLink(start)
