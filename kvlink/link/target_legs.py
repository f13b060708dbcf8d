"""Who reads whom: the legs of this rank for each source engine, assigned once an engine, not once a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvlink.link.target_work import LegWork
from kvlink.plan import assign_legs, readers_of, unread_sources

if TYPE_CHECKING:
    from kvlink.layout import GroupShare, RankShare
    from kvlink.wire import Roster

_MAX_ENGINES: Final = 64
"""Source engines whose assignment is kept; a restart is another engine, and old ones are not asked for again."""


@dataclass(frozen=True, slots=True)
class _Leg:
    peer: str
    address: str
    groups: tuple[GroupShare, ...]
    readers: int
    source_index: int


@dataclass(frozen=True, slots=True)
class _Assigned:
    roster: Roster
    legs: tuple[_Leg, ...]
    unread: tuple[int, ...]


class Legs:
    """Assignments of one target rank, by source engine. A roster stands for an incarnation, and never changes.

    A claim may all the same bring another roster under an incarnation's name; it is compared, and assigned anew.
    """

    def __init__(self) -> None:
        self._siblings: tuple[RankShare, ...] = ()
        self._known: dict[tuple[str, str], _Assigned] = {}

    @property
    def siblings(self) -> tuple[RankShare, ...]:
        """All ranks of our own engine, if we know them; set it when they are told."""
        return self._siblings

    @siblings.setter
    def siblings(self, shares: Sequence[RankShare]) -> None:
        self._siblings = tuple(shares)
        self._known.clear()

    def of(self, roster: Roster, own: RankShare) -> tuple[tuple[LegWork, ...], tuple[int, ...]]:
        """Fresh legs for one request, and the sources that no rank of our engine reads (by index into the roster).

        Which sources are unread is only told by the engine's first rank, and only if all its ranks are known.

        Raises:
            UnsupportedError: the sources together lack something that we hold.
        """
        engine = (roster.engine, roster.incarnation)
        known = self._known.get(engine)
        if known is None or known.roster != roster:
            known = self._assign(roster, own)
            if len(self._known) >= _MAX_ENGINES:
                self._known.clear()
            self._known[engine] = known
        fresh = (LegWork(leg.peer, leg.address, leg.groups, leg.readers, leg.source_index) for leg in known.legs)
        return tuple(fresh), known.unread

    def _assign(self, roster: Roster, own: RankShare) -> _Assigned:
        targets = list(self._siblings) or [own]
        seats = [(share.pp_rank, share.tp_rank) for share in targets]
        mine = seats.index((own.pp_rank, own.tp_rank))
        legs = assign_legs(roster.shares, targets)
        ours = tuple(
            _Leg(
                peer=str(roster.place(leg.source)),
                address=roster.ranks[leg.source].address,
                groups=leg.groups,
                readers=readers_of(legs, leg.source),
                source_index=leg.source,
            )
            for leg in legs
            if leg.target == mine
        )
        unread = unread_sources(legs, len(roster.ranks)) if self._siblings and mine == 0 else ()
        return _Assigned(roster, ours, unread)
