"""What a source can say once a request is installed: does it still stand, where else its KV is, what recomputing costs.

It decides nothing and starts nothing: to prefill again, or to turn to a replica, is the caller's policy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from typing import TYPE_CHECKING

from kvlink import limits
from kvlink.errors import ConfigError, UnknownRequestError
from kvlink.layout import payload_bytes, starts_of_groups
from kvlink.observe import InstalledLost
from kvlink.protocol import Installation, Installations, SourcePhase, Standing
from kvlink.protocol.source_leg import LegPhase

if TYPE_CHECKING:
    from kvlink.layout import Place
    from kvlink.link.rank import LocalRank
    from kvlink.link.sessions import Sessions
    from kvlink.link.source_work import SourceWork
    from kvlink.observe import Counters
    from kvlink.protocol.installations import Target
    from kvlink.wire import Offer


class ReplicaStage(StrEnum):
    """How far another copy of a request's KV is."""

    INSTALLED = "installed"
    """A target has it, and is connected: decode there, under the replica's key."""
    OFFERED = "offered"
    """The source still holds it for whoever fetches the offer."""
    MOVING = "moving"
    """A target is reading it: ask again once its part has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """Another copy of a request's KV.

    Attributes:
        key: under which it is, or will be, installed.
        stage: how far it is.
        target: ``"engine@incarnation"`` that has it, if it is installed.
        offer: what another target may fetch, if it is offered.
    """

    key: str
    stage: ReplicaStage
    target: str | None = None
    offer: Offer | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryPoint:
    """From where an installed request can go on if its target is lost: the end of its prompt.

    It speaks for one source rank. Of an engine with several, a replica is whole if all ranks name it, and the bytes
    add up. Tokens that were decoded since are the caller's: they are in no source's cache.

    Attributes:
        key: the request's.
        target: ``"engine@incarnation"`` that installed it.
        standing: what is known of that.
        tokens: positions that were installed.
        replicas: other copies: installed ones first, then what can be fetched, then what moves.
        recompute_tokens: positions to prefill if there is none, less what the caller has cached.
        recompute_bytes: of KV on this rank that prefilling them writes.
    """

    key: str
    target: str
    standing: Standing
    tokens: int
    replicas: tuple[Replica, ...]
    recompute_tokens: int
    recompute_bytes: int

    @property
    def prefill_again(self) -> bool:
        """Whether nothing but prefill brings the KV back."""
        return not self.replicas


class Recovery:
    """Remembers what was installed from here, and tells of what is lost. `SourceHalf` owns it.

    Args:
        rank: ourselves.
        sessions: who reads us.
        counters: of the link.
        works: requests that have not been forgotten, by key.

    Attributes:
        tell: is called with each event.
    """

    def __init__(
        self, rank: LocalRank, sessions: Sessions, counters: Counters, works: Mapping[str, SourceWork]
    ) -> None:
        self._rank = rank
        self._sessions = sessions
        self._counters = counters
        self._works = works
        self._loop = asyncio.get_running_loop()
        self._installed = Installations()
        self.tell: Callable[[InstalledLost], None] = lambda _event: None

    # --- what happens -------------------------------------------------------------------------------------------------

    def installed(self, work: SourceWork) -> None:
        """All ranks that read a request have installed it; nothing is kept of one that nobody read."""
        if work.target is None or work.machine is None or work.descriptor is None:
            return
        target = _engine(work.target)
        away = [leg.peer for leg in work.machine.state.legs if self._sessions.get(leg.peer) is None]
        starts = work.descriptor.group_first_tokens
        self._installed.add(
            Installation(work.key, target, work.descriptor.tokens, starts, work.family), away, self._loop.time()
        )
        if away:
            self._loop.call_later(limits.LOSS_GRACE_SECONDS, self._tell, target)

    def up(self, place: Place, before: Place | None) -> None:
        """A rank is connected, in the place of ``before`` if that was another incarnation."""
        self._installed.back(_engine(place), str(place))
        if before is not None:
            self._installed.dead(_engine(before))
            self._tell(_engine(before))

    def down(self, place: Place) -> None:
        """A rank is not connected any more. Told a moment later: a connection that just broke may be redialled."""
        self._installed.lost(_engine(place), str(place))
        self._loop.call_later(limits.LOSS_GRACE_SECONDS, self._tell, _engine(place))

    def release(self, key: str) -> None:
        """The request is over, so its replicas are of no use either; or, with a replica's key, only that is gone."""
        known = self._installed.look(key, self._loop.time())
        family = known[0].family if known is not None else ()
        for one in family if key == next(iter(family), None) else (key,):
            self._installed.release(one)

    # --- what is asked ------------------------------------------------------------------------------------------------

    def point(self, key: str, cached_tokens: int = 0) -> RecoveryPoint:
        """See `kvlink.Link.recovery_point`."""
        if cached_tokens < 0:
            raise ConfigError(f"cached_tokens is {cached_tokens}; give how many first positions need no prefill")
        known = self._installed.look(key, self._loop.time())
        if known is None:
            raise UnknownRequestError(
                "not known to be installed from here: it has not ended done, was released, or is forgotten",
                request_id=key,
            )
        installation, standing = known
        spec = self._rank.caches.spec
        cached = min(cached_tokens, installation.tokens)
        starts = starts_of_groups(len(spec.groups), cached, installation.group_first_tokens)
        copies = [self._copy(one) for one in installation.family if one != key]
        return RecoveryPoint(
            key=key,
            target=_words(installation.target),
            standing=standing,
            tokens=installation.tokens,
            replicas=tuple(
                copy for stage in ReplicaStage for copy in copies if copy is not None and copy.stage is stage
            ),
            recompute_tokens=installation.tokens - cached,
            recompute_bytes=payload_bytes(spec, starts, installation.tokens),
        )

    def _copy(self, key: str) -> Replica | None:
        known = self._installed.look(key, self._loop.time())
        if known is not None:
            installation, standing = known
            stands = standing is Standing.INSTALLED
            return (
                Replica(key=key, stage=ReplicaStage.INSTALLED, target=_words(installation.target)) if stands else None
            )
        work = self._works.get(key)
        if work is None or work.machine is None or work.machine.state.phase not in (SourcePhase.OPEN, SourcePhase.HELD):
            return None
        state = work.machine.state
        if state.idle and not any(leg.phase is LegPhase.INSTALLED for leg in state.legs):
            return Replica(key=key, stage=ReplicaStage.OFFERED, offer=work.offer)
        return Replica(key=key, stage=ReplicaStage.MOVING)

    def _tell(self, target: Target) -> None:
        self._tell_some(iter(self._installed.untold(target, self._loop.time())))

    def _tell_some(self, losses: Iterator[tuple[Installation, Standing]]) -> None:
        """An engine may take thousands of requests with it: what is live must not wait until all have been told."""
        some = tuple(islice(losses, limits.LOSSES_TOLD_PER_TURN))
        for installation, standing in some:
            if self._installed.look(installation.key, self._loop.time()) is not None:
                self._tell_one(installation.key, proven=standing is Standing.DEAD)
        if some:
            self._loop.call_soon(self._tell_some, losses)

    def _tell_one(self, key: str, *, proven: bool) -> None:
        point = self.point(key)
        self._counters.installs_lost += 1
        self.tell(
            InstalledLost(
                at_seconds=self._loop.time(),
                key=key,
                target=point.target,
                proven=proven,
                tokens=point.tokens,
                bytes=point.recompute_bytes,
                prefill_again=point.prefill_again,
            )
        )


def _engine(place: Place) -> Target:
    return place.engine, place.incarnation


def _words(target: Target) -> str:
    return "@".join(target)
