"""The streams of a source: increments exposed and told one by one, and what the transport says of each as it lands."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvlink import protocol
from kvlink.errors import KVLinkError
from kvlink.link.source_frontier import draft_seal
from kvlink.wire import Advance, Landed, Prepared

if TYPE_CHECKING:
    from kvlink.link.rank import LocalRank
    from kvlink.link.sessions import Sessions
    from kvlink.link.source_leases import Leases
    from kvlink.link.source_outgoing import Outgoing
    from kvlink.link.source_work import Attempt, SourceWork


class Streams:
    """Carries out `ExposeIncrement` and `SendAdvance`. `SourceHalf` only.

    To a transport each increment is an attempt of its own: increment n of attempt a is number a + n, and a target
    leaves as many numbers free.

    Args:
        rank: ourselves.
        sessions: who reads us.
        leases: of the same half.
        fail: ends a request whose increments cannot be planned.
    """

    def __init__(
        self, rank: LocalRank, sessions: Sessions, leases: Leases, fail: Callable[[SourceWork, KVLinkError], None]
    ) -> None:
        self._rank = rank
        self._sessions = sessions
        self._leases = leases
        self._fail = fail
        self._loop = asyncio.get_running_loop()

    def expose(self, work: SourceWork, action: protocol.ExposeIncrement) -> None:
        """Let an attempt read one more increment, and keep the words that tell it so."""
        key = (action.peer, action.attempt)
        outgoing = work.outgoing.get(key)
        if outgoing is None or work.blocks is None:
            return
        tokens = action.frontier.next_tokens
        added = outgoing.add_blocks(
            work.blocks, self._rank.caches.spec, tokens, last=tokens == work.max_tokens, sealed=action.sealed
        )
        try:
            plan = outgoing.increments.plan(action.frontier, sealed=action.sealed)
        except KVLinkError as error:
            self._fail(work, error)
            return
        outgoing.told[action.number] = Advance(
            attempt=action.attempt,
            number=action.number,
            frontier=action.frontier,
            blocks=added,
            total_bytes=plan.total_bytes,
            sealed=work.digest if action.sealed else None,
        )
        outgoing.moved += plan.total_bytes
        if plan.total_bytes:
            exposed = self._leases.let_read(work, key, action.attempt + action.number, plan)
            if exposed is not None:
                outgoing.exposed[action.attempt + action.number] = exposed
        if not action.sealed:
            self._loop.call_soon(self._look_ahead, work, key, outgoing)

    def _look_ahead(self, work: SourceWork, key: Attempt, outgoing: Outgoing) -> None:
        """While its target reads: the likely next increment, and what a seal with it would cover."""
        session = self._sessions.get(key[0])
        if session is None or work.outgoing.get(key) is not outgoing:
            return
        with contextlib.suppress(KVLinkError):  # if it comes to that, it will be said then
            ahead = outgoing.increments.look_ahead()
            if ahead is None:
                return
            frontier, plan = ahead
            session.pump.transport.prepare(plan)
            if not frontier.layers:
                draft_seal(work, self._rank.caches.spec, frontier.tokens, integrity=self._rank.config.integrity)

    def send(self, work: SourceWork, peer: str, attempt: int, number: int) -> None:
        """Tell the target of an increment; nothing, if it has landed or is exposed no more."""
        outgoing = work.outgoing.get((peer, attempt))
        if outgoing is not None and (advance := outgoing.told.get(number)) is not None:
            self._sessions.send(peer, advance)

    @staticmethod
    def landed(work: SourceWork, peer: str, message: Landed | Prepared) -> list[protocol.LandedArrived]:
        """What a target's word says of each increment, with the transport's last word on its lease; it is withdrawn."""
        attempt, increments = message.attempt, message.increments
        outgoing = work.outgoing.get((peer, attempt))
        events: list[protocol.LandedArrived] = []
        while outgoing is not None and outgoing.landed < min(increments, outgoing.landed + len(outgoing.told)):
            number = outgoing.landed = outgoing.landed + 1
            del outgoing.told[number]
            exposed = outgoing.exposed.pop(attempt + number, None)
            if exposed is None:
                events.append(protocol.LandedArrived(peer, attempt, number))
                continue
            pump, wire_name = exposed
            report = pump.transport.withdraw(wire_name, attempt + number)
            root = None if report.root is None else report.root.to_bytes(8, "little")
            events.append(protocol.LandedArrived(peer, attempt, number, report.held, root))
        if not events and isinstance(message, Landed):
            events.append(protocol.LandedArrived(peer, attempt, increments))
        return events

    @staticmethod
    def attempt_of(work: SourceWork, peer: str, number: int) -> int | None:
        """The attempt of this request whose increment a transport knows by this number."""
        for key, outgoing in work.outgoing.items():
            if key[0] == peer and number in outgoing.exposed:
                return key[1]
        return None
