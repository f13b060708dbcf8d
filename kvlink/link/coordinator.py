"""The rank that makes the parts of its engine's ranks visible together: the engine's first, for those that ask for it.

What decides is in ``kvlink.protocol.group``. The other ranks reach it as they reach a source: by its address in their
engine's roster, through the same handshake and session, so its silence is noticed as any other's.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from kvlink import limits, protocol
from kvlink.errors import ConfigError
from kvlink.link.machine import Machine
from kvlink.protocol import Group, GroupEvent, GroupPhase, group
from kvlink.wire import Decided, Stage, Stands, Verdict, error_to_info

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvlink.layout import Place
    from kvlink.link.rank import LocalRank
    from kvlink.link.sessions import Sessions
    from kvlink.protocol import Action, Timing

_log = logging.getLogger("kvlink.link")


class Coordinator:
    """All requests of which this rank decides. `SourceHalf` owns it: it hears the other ranks as it hears readers.

    Attributes:
        own_rank: takes a word to this rank's own part.
    """

    def __init__(self, rank: LocalRank, sessions: Sessions, timing: Timing) -> None:
        self._rank = rank
        self._sessions = sessions
        self._timing = timing
        self._loop = asyncio.get_running_loop()
        self._groups: dict[str, Machine[Group, GroupEvent]] = {}
        self._gatherings = 0
        self.own_rank: Callable[[str, Decided], None] = lambda _peer, _word: None

    def __len__(self) -> int:
        return len(self._groups)

    def hears(self, place: Place, message: Stands) -> None:
        """A peer tells where its part stands: our business if it is one of the other ranks of this engine."""
        own = self._rank.caches.spec.place
        if place == own or place not in places_of(own):
            _log.warning("%s is none of the other ranks of %s, which coordinates those only", place, own)
        elif own == first_of(own):
            self.stood(str(place), message)
        elif message.stage not in (Stage.FAILED, Stage.REVEALED):  # whoever has ended waits for nobody
            error = error_to_info(ConfigError(f"{own} does not coordinate: its engine's first rank does"))
            word = Decided(key=message.key, part=message.part, group=1, verdict=Verdict.ABANDON, error=error)
            self._send(protocol.Send(str(place), word))

    def stood(self, peer: str, message: Stands) -> None:
        """A rank of this engine, or this one itself, tells where its part stands."""
        own = self._rank.caches.spec.place
        machine = self._groups.get(message.key)
        if group.begins(None if machine is None else machine.state, peer, message):
            machine = self._begin(message.key, own)
        if machine is None:
            self._send(group.answer_unknown(peer, message))
        else:
            machine.feed(protocol.Stood(peer, message))

    def lost(self, peer: str) -> None:
        """A session ended; the rank redials it for a while, and is lost if it does not come back."""
        if self._groups:
            self._loop.call_later(limits.REDIAL_SECONDS, self._lost_unless_back, peer)

    def dead(self, peer: str) -> None:
        """A rank's successor has authenticated."""
        self._feed_all(protocol.PeerDead(peer))

    def forget(self) -> None:
        """This rank leaves all others: nothing is decided any more."""
        for machine in self._groups.values():
            machine.stop()
        self._groups.clear()

    def _lost_unless_back(self, peer: str) -> None:
        if self._sessions.get(peer) is None:
            self._feed_all(protocol.PeerLost(peer))

    def _feed_all(self, event: GroupEvent) -> None:
        for machine in list(self._groups.values()):
            machine.feed(event)

    def _begin(self, key: str, own: Place) -> Machine[Group, GroupEvent]:
        if (older := self._groups.get(key)) is not None:
            older.stop()
        self._gatherings += 1
        peers = [str(place) for place in places_of(own)]
        now, after = self._loop.time(), None if older is None else older.state
        state = group.begin(key, self._gatherings, str(own), peers, now=now, timing=self._timing, after=after)
        machine: Machine[Group, GroupEvent] = Machine(
            state, group.step, group.next_timer, self._act, partial(self._settle, key)
        )
        self._groups[key] = machine
        machine.start(())
        return machine

    def _act(self, action: Action) -> None:
        assert isinstance(action, protocol.Send), f"a group does not do {action}"
        self._send(action)

    def _send(self, send: protocol.Send) -> None:
        if send.peer == str(self._rank.caches.spec.place) and isinstance(send.message, Decided):
            self.own_rank(send.peer, send.message)
        else:
            self._sessions.send(send.peer, send.message)

    def _settle(self, key: str) -> None:
        machine = self._groups.get(key)
        if machine is not None and machine.state.phase is GroupPhase.CLOSED:
            machine.stop()
            del self._groups[key]


def first_of(place: Place) -> Place:
    """The rank that coordinates this rank's engine."""
    return replace(place, pp_rank=0, tp_rank=0)


def places_of(place: Place) -> list[Place]:
    """All ranks of this rank's engine."""
    return [replace(place, pp_rank=pp, tp_rank=tp) for pp in range(place.pp_size) for tp in range(place.tp_size)]
