"""What comes to a source before its KV: asks, tickets and declines, parked, bounded in number and time."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvlink import limits, protocol
from kvlink.errors import BusyError, UnknownRequestError
from kvlink.wire import Ask, Parked, Refused, Ticket, error_to_info

if TYPE_CHECKING:
    from kvlink.link.rank import LocalRank
    from kvlink.link.sessions import Sessions
    from kvlink.link.source_leases import Leases
    from kvlink.observe import Counters


class Early:
    """Asks, tickets and declines whose KV is not here yet. `SourceHalf` only.

    Attributes:
        asks, tickets, declines: those parked; what a test may count.
    """

    def __init__(self, rank: LocalRank, sessions: Sessions, leases: Leases, counters: Counters) -> None:
        self._rank = rank
        self._sessions = sessions
        self._leases = leases
        self._counters = counters
        self._loop = asyncio.get_running_loop()
        self.asks: protocol.ParkingLot[tuple[str, Ask]] = protocol.ParkingLot()
        self.tickets: protocol.ParkingLot[str] = protocol.ParkingLot()
        self.declines: protocol.ParkingLot[protocol.DeclineArrived] = protocol.ParkingLot()
        self._sweeper: asyncio.TimerHandle | None = None

    def park(self, peer: str, ask: Ask) -> None:
        """Keep an ask and say so, or say that there is no room for it."""
        park_seconds = self._rank.config.park_seconds
        until = self._loop.time() + park_seconds
        if self.asks.park(ask.key, peer, ask.attempt, (peer, ask), until):
            self._counters.asks_parked += 1
            self._sessions.send(peer, Parked(attempt=ask.attempt, park_seconds=park_seconds))
            self._sweep_later()
        else:
            self._refuse(
                peer, ask, BusyError("no room for another early ask", retry_after_seconds=limits.BUSY_HINT_SECONDS)
            )

    def keep(self, peer: str, ticket: Ticket) -> None:
        """Keep a ticket, for the announcement that may come."""
        until = self._loop.time() + min(ticket.ttl_seconds, self._rank.config.claim_ttl_seconds)
        self.tickets.park(ticket.key, peer, 1, peer, until)
        self._sweep_later()

    def keep_decline(self, key: str, decline: protocol.DeclineArrived) -> None:
        """Keep the word of a target that will not ask: else its source would hold the KV until its claim runs out."""
        until = self._loop.time() + self._rank.config.park_seconds
        self.declines.park(key, decline.peer, 1, decline, until)
        self._sweep_later()

    def forget(self, peer: str) -> None:
        """The peer is lost: nobody waits any more. What it declined stays declined."""
        self.asks.forget(peer)
        self.tickets.forget(peer)

    def stop(self) -> None:
        """No more timers."""
        if self._sweeper is not None:
            self._sweeper.cancel()

    def _refuse(self, peer: str, ask: Ask, error: BusyError | UnknownRequestError) -> None:
        refused = Refused(attempt=ask.attempt, error=error_to_info(error), capacity=self._leases.capacity)
        self._sessions.send(peer, refused)

    def _sweep_later(self) -> None:
        lots = (self.asks, self.tickets, self.declines)
        times = [time for time in (lot.next_timer() for lot in lots) if time is not None]
        if self._sweeper is not None:
            self._sweeper.cancel()
        self._sweeper = self._loop.call_at(min(times), self._sweep) if times else None

    def _sweep(self) -> None:
        """Early asks have their own clock, whatever else goes on."""
        now = self._loop.time()
        for peer, ask in self.asks.expire(now):
            self._refuse(peer, ask, UnknownRequestError(f"no KV came under key {ask.key} while the ask was parked"))
        self.tickets.expire(now)
        self.declines.expire(now)
        self._sweep_later()
