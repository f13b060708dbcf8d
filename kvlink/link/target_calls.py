"""How a target reaches its sources: dials before a request, redials when a session ends, words nobody waits for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvlink import limits, protocol
from kvlink.errors import KVLinkError, PeerRestartedError
from kvlink.wire import Decline

if TYPE_CHECKING:
    from kvlink.layout import Place
    from kvlink.link.sessions import Session, Sessions
    from kvlink.link.target_work import LegWork
    from kvlink.link.tasks import TaskSet
    from kvlink.wire import AnyMessage, Roster

_log = logging.getLogger("kvlink.link")


class Calls:
    """Connections to sources, as a target needs them. `TargetHalf` only."""

    def __init__(self, sessions: Sessions, tasks: TaskSet) -> None:
        self._sessions = sessions
        self._tasks = tasks
        self._loop = asyncio.get_running_loop()
        self._places: dict[str, tuple[str, Place]] = {}

    def connected(self, legs: Sequence[LegWork]) -> list[Session] | None:
        """A session for each leg, if all are up."""
        live = [self._sessions.get(leg.peer) for leg in legs]
        up = [session for session in live if session is not None]
        return up if len(up) == len(legs) else None

    async def connect(self, roster: Roster, legs: Sequence[LegWork]) -> list[Session]:
        """A session for each leg; raises as `Sessions.dial` does."""
        if (up := self.connected(legs)) is not None:
            return up
        dials = []
        for leg in legs:
            place = roster.place(leg.source_index)
            self._places[leg.peer] = (leg.address, place)
            dials.append(self._sessions.dial(leg.address, place))
        return await asyncio.gather(*dials)

    async def reach(self, address: str, place: Place) -> None:
        """Connect to a rank that is no source of ours: the one that coordinates. Raises as `Sessions.dial` does."""
        self._places[str(place)] = (address, place)
        await self._sessions.dial(address, place)

    async def redial(self, peer: str) -> protocol.PeerLost | protocol.PeerDead | None:
        """Within an incarnation a lost connection is redialled, for a bounded time; what the machines must hear.

        A silent host does not answer a dial within the bound either: the dial goes on for later requests.
        """
        address, place = self._places[peer]
        deadline = self._loop.time() + limits.REDIAL_SECONDS
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    await self._sessions.dial(address, place)
            except TimeoutError:
                return protocol.PeerLost(peer)
            except PeerRestartedError:
                return protocol.PeerDead(peer)
            except KVLinkError as error:
                if not error.retryable or self._loop.time() >= deadline:
                    return protocol.PeerLost(peer)
                await asyncio.sleep(limits.REDIAL_PAUSE_SECONDS)
            else:
                return None

    def tell(self, address: str, place: Place, message: AnyMessage) -> None:
        """Deliver a message that nobody waits for; the source's own clock covers its loss."""
        self._tasks.start(self._tell(address, place, message), f"tell {place}: {type(message).__name__}")

    def tell_unread(self, key: str, roster: Roster, unread: Sequence[int]) -> None:
        """Tell sources, by their index in the roster, that no rank of our engine reads them."""
        message = Decline(key=key, why="no rank of the target engine reads this replica", unread=True)
        for index in unread:
            self.tell(roster.ranks[index].address, roster.place(index), message)

    async def _tell(self, address: str, place: Place, message: AnyMessage) -> None:
        try:
            session = await self._sessions.dial(address, place)
        except KVLinkError as error:
            _log.debug("could not tell %s: %s", place, error)
        else:
            self._sessions.send(session.peer, message)
