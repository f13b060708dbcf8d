"""A target rank and its siblings: which of them coordinates, how it is reached, and what it is told."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvlink import protocol
from kvlink.descriptor import descriptor_digest
from kvlink.errors import ConfigError
from kvlink.link.coordinator import first_of
from kvlink.wire import ErrorInfo, Stage, Stands

if TYPE_CHECKING:
    from kvlink.link.coordinator import Coordinator
    from kvlink.link.rank import LocalRank
    from kvlink.link.sessions import Sessions
    from kvlink.link.target_calls import Calls
    from kvlink.link.target_work import TargetWork
    from kvlink.wire import Roster


class Siblings:
    """The way to the coordinator. `TargetHalf` only.

    Attributes:
        roster: all ranks of our engine, once told.
        own: the coordinator, where it is this rank.
    """

    def __init__(self, rank: LocalRank, sessions: Sessions, calls: Calls) -> None:
        self._rank = rank
        self._sessions = sessions
        self._calls = calls
        self.roster: Roster | None = None
        self.own: Coordinator | None = None

    def leads(self, peer: str) -> bool:
        """Whether this is the rank that coordinates."""
        return peer == str(first_of(self._rank.caches.spec.place))

    async def reach(self) -> None:
        """Connect to the coordinator; raises as `Sessions.dial` does, and ConfigError without a roster."""
        place = first_of(self._rank.caches.spec.place)
        if place == self._rank.caches.spec.place:
            return
        if self.roster is None:
            raise ConfigError(
                f"{self._rank.caches.spec.place} does not know its engine's other ranks; call set_siblings"
            )
        await self._calls.reach(self.roster.ranks[0].address, place)

    def membership(self, work: TargetWork, number: int) -> protocol.Membership:
        """A part's place among its siblings."""
        leader = str(first_of(self._rank.caches.spec.place))
        tokens = None if work.streams or work.descriptor is None else work.descriptor.tokens
        return protocol.Membership(
            key=work.key, coordinator=leader, number=number, content=_content(work), tokens=tokens
        )

    def tell_failed(self, work: TargetWork, number: int, error: ErrorInfo | None) -> None:
        """A part ended before it had begun: its siblings need not wait for it. Said once; they have their own bound."""
        leader = str(first_of(self._rank.caches.spec.place))
        stands = Stands(key=work.key, part=number, group=0, content=_content(work), stage=Stage.FAILED, error=error)
        self.send(protocol.Send(leader, stands))

    def send(self, send: protocol.Send) -> None:
        """Tell the coordinator, wherever it is."""
        place = self._rank.caches.spec.place
        if send.peer != str(place):
            self._sessions.send(send.peer, send.message)
        elif self.own is not None and isinstance(send.message, Stands):
            self.own.stood(str(place), send.message)


def _content(work: TargetWork) -> str:
    """Source and content: what siblings must have in common."""
    source = f"{work.roster.engine}@{work.roster.incarnation}"
    if work.ticket is not None:  # what is pushed may still be computed: its source seals it once, for all ranks
        return f"{source} pushes {work.key}"
    return source if work.descriptor is None else f"{source} {descriptor_digest(work.descriptor)}"
