"""A fetch that is tried again: fresh attempts, fresh blocks, another source where the caller has one."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

from kvlink.errors import CancelledError, ConfigError, KVLinkError, TransferError
from kvlink.link.part import LivePart, Part, Result
from kvlink.link.target_work import STATE_OF_END
from kvlink.protocol import failure_of
from kvlink.protocol.retry import Again, RetryPolicy, again
from kvlink.wire import error_to_info

if TYPE_CHECKING:
    from kvlink.link.tasks import TaskSet
    from kvlink.observe import Counters
    from kvlink.wire import Offer

Blocks: TypeAlias = "Sequence[Sequence[int]]"
TakeBlocks: TypeAlias = "Callable[[Offer], Awaitable[Blocks]]"
GiveBack: TypeAlias = "Callable[[Blocks], None]"
NextOffer: TypeAlias = "Callable[[Offer, KVLinkError], Offer | None]"
FetchOnce: TypeAlias = "Callable[[Offer, Blocks, float], Awaitable[Result]]"
"""An offer, fresh blocks, and the seconds it may take; raises what it ended with, after its cut-off."""

_chance: Final = random.Random()  # noqa: S311 - spreads retries; keeps no secret


@dataclass(slots=True)
class Retrying:
    """One request over its tries.

    Attributes:
        policy: how often and how long.
        deadline_seconds: of one try.
        take: gives fresh blocks, before each try.
        give_back: takes those of a failed try, after its cut-off.
        next_offer: the caller's policy on sources; ``None``: there is only one.
        counters: of the link.
        tries, attempts: so far, of the part and of its legs.
        started: when the first try began, on the loop's clock.
    """

    policy: RetryPolicy
    deadline_seconds: float
    take: TakeBlocks
    give_back: GiveBack
    next_offer: NextOffer | None
    counters: Counters
    tries: int = field(default=0)
    attempts: int = field(default=0)
    started: float = field(default=0.0)

    async def run(self, offer: Offer, fetch: FetchOnce) -> Result:
        """Try until it is done, it makes no sense, or the policy ends it.

        Raises:
            KVLinkError: what the last try ended with, noting how many there were.
        """
        self.started = self._now()
        while True:
            try:
                result = await self._once(offer, fetch)
            except KVLinkError as error:
                offer, pause = self._next(offer, error)
                await asyncio.sleep(pause)
            else:
                return replace(result, tries=self.tries, attempts=self.attempts, seconds=self._now() - self.started)

    async def _once(self, offer: Offer, fetch: FetchOnce) -> Result:
        self.tries += 1
        blocks = await self.take(offer)
        left = self.started + self.policy.total_seconds - self._now()
        try:
            return await fetch(offer, blocks, max(min(self.deadline_seconds, left), 1e-3))
        except BaseException:  # it has ended, so it is cut off: nothing lands in these blocks any more
            self.give_back(blocks)
            raise

    def _next(self, offer: Offer, error: KVLinkError) -> tuple[Offer, float]:
        """The source and the pause of the next try.

        Raises:
            KVLinkError: ``error``, if there is none.
        """
        elapsed = self._now() - self.started
        pause = self.policy.pause(error, tries=self.tries, elapsed_seconds=elapsed, draw=_chance.random())
        chosen: Offer | None = None
        if pause is not None:
            chosen = None if self.next_offer is None else self.next_offer(offer, error)
            if chosen is None and again(error) is Again.HERE:
                chosen = offer
        if pause is None or chosen is None:
            if self.tries > 1:
                error.add_note(f"after {self.tries} tries in {elapsed:.1f} s")
            raise error
        self.counters.fetches_retried += 1
        self.counters.sources_changed += chosen.key != offer.key or chosen.roster != offer.roster
        return chosen, pause

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def check_sources(next_offer: NextOffer | None, ranks: int) -> None:
    """Refuse to turn one rank of several to another source.

    Raises:
        ConfigError: the siblings would have read from another prefill than this rank.
    """
    if next_offer is not None and ranks > 1:
        raise ConfigError(
            f"this engine has {ranks} ranks, and one must not read from another source than its siblings: "
            "fail the request on all of them, and fetch the other offer on all"
        )


class Fetching(Protocol):
    """What tries are made with: `Driver`."""

    @property
    def fetch(self) -> Callable[..., None]:
        """Starts one try."""

    def moment(self, *, stream: object) -> Any:  # noqa: ANN401 - passed on to ``fetch``
        """What the reads of a try wait for."""

    async def finished(self, part: Part) -> Result:
        """The end of a part; raises what it ended with."""


async def fetch_with_retries(
    driver: Fetching,
    offer: Offer,
    retrying: Retrying,
    stream: object = None,
    **fields: Any,  # noqa: ANN401 - those of `Driver.fetch`, passed on
) -> Result:
    """Fetch until it is done or there is no sense in it; each try is a part of its own. See `kvlink.Link`."""

    async def once(offer: Offer, into: Blocks, seconds: float) -> Result:
        part = LivePart(offer.key)
        after = driver.moment(stream=stream)
        driver.fetch(offer, into, part, deadline_seconds=seconds, after=after, **fields)
        try:
            return await driver.finished(part)
        finally:
            retrying.attempts += 0 if part.result is None else part.result.attempts

    return await retrying.run(offer, once)


class RetriedParts:
    """Parts that stand for all tries of a request, for those who do not await. `Driver` only."""

    def __init__(self, tasks: TaskSet) -> None:
        self._tasks = tasks
        self._running: dict[int, asyncio.Task[None]] = {}

    def start(self, part: LivePart, tries: Callable[[], Coroutine[Any, Any, Result]]) -> None:
        """Run the tries; their end is the part's."""
        task = self._tasks.start(_to_its_end(part, tries), f"tries of {part.key}")
        self._running[id(part)] = task
        task.add_done_callback(lambda _task: self._over(part))

    def _over(self, part: LivePart) -> None:
        del self._running[id(part)]
        part.end(_ended(part, CancelledError("cancelled before its first try", request_id=part.key)))

    def cancel(self, part: Part) -> bool:
        """End the try that runs, and try no more; whether it is such a part."""
        task = self._running.get(id(part))
        return task is not None and task.cancel()


async def _to_its_end(part: LivePart, tries: Callable[[], Coroutine[Any, Any, Result]]) -> None:
    try:
        part.end(await tries())
    except asyncio.CancelledError:
        part.end(_ended(part, CancelledError("cancelled; the try that ran was cut off", request_id=part.key)))
        raise
    except KVLinkError as error:
        part.end(_ended(part, error))
    except Exception as error:  # noqa: BLE001 - the caller's own functions may raise: the part ends all the same
        part.end(_ended(part, TransferError(f"{type(error).__name__}: {error}", request_id=part.key)))


def _ended(part: Part, error: KVLinkError) -> Result:
    return Result(key=part.key, state=STATE_OF_END[failure_of(error_to_info(error)).end], error=error)
