"""Sessions: one live, authenticated connection to one rank of the other side, with its transport connected.

A session is made by whoever reads (it dials) and serves one direction: the dialer is the target, the other the source.
Two engines that read each other hold two.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from kvlink import limits
from kvlink.errors import (
    ClosedError,
    KVLinkError,
    MismatchError,
    PeerIncompatibleError,
    PeerLostError,
    PeerRestartedError,
    PeerUnreachableError,
    SchemaError,
)
from kvlink.layout import compare_identity
from kvlink.link.control import ControlConnection, connect
from kvlink.link.frames import UNHURRIED
from kvlink.link.planners import Planners
from kvlink.transports.base import Completion, Outcome, RegionKey
from kvlink.wire import AnyMessage, Ask, Chosen, Goodbye, Lease, Prepared

if TYPE_CHECKING:
    from kvlink.layout import CacheSpec, Place
    from kvlink.link.pump import Pump
    from kvlink.link.rank import LocalRank
    from kvlink.link.tasks import TaskSet
    from kvlink.transports.base import Transport
    from kvlink.wire import TransportCard

_log = logging.getLogger("kvlink.link")
_serial = itertools.count(1)


@dataclass(eq=False, slots=True)
class Session:
    """One live connection.

    Attributes:
        peer: the other rank's place, as text: its incarnation is in it.
        spec: its cache.
        connection: the control connection.
        pump: the transport in use.
        wire_name: how the transport calls this session; never used again, so that late words of an old session cannot
            be taken for a new one's.
        reason: why this transport.
        handshake_seconds: what making it took.
        planners: of the legs between the two ranks.
    """

    peer: str
    spec: CacheSpec
    connection: ControlConnection
    pump: Pump
    wire_name: str
    reason: str
    handshake_seconds: float
    planners: Planners
    ended: bool = field(default=False)

    @property
    def place(self) -> Place:
        """The other rank's place."""
        return self.spec.place


OnMessage = Callable[[Session, AnyMessage], None]
OnUp = Callable[[Session], None]
OnDown = Callable[[Session, KVLinkError], None]


class Sessions:
    """All sessions of one direction, by peer. A newer session to the same incarnation replaces the older.

    Args:
        rank: ourselves.
        tasks: where readers run.
        reading: whether we are the side that reads (and dials).
        on_message: each message, in order, once the session is up.
        on_up: a session is there.
        on_down: a session ended: reset, silence, violation or goodbye.

    Attributes:
        shut: why none is made now, or ``None``.
        watch: is told of each session that is up, and, with the error, of each that ended.
    """

    def __init__(
        self,
        rank: LocalRank,
        tasks: TaskSet,
        *,
        reading: bool,
        on_message: OnMessage,
        on_up: OnUp,
        on_down: OnDown,
    ) -> None:
        self._rank = rank
        self._tasks = tasks
        self._reading = reading
        self._on_message = on_message
        self._on_up = on_up
        self._on_down = on_down
        self.shut: str | None = None
        self.watch: Callable[[Session, KVLinkError | None], None] = lambda _session, _error: None
        self._live: dict[str, Session] = {}
        self._by_wire_name: dict[str, Session] = {}
        self._dialling: dict[str, asyncio.Future[Session]] = {}

    def __len__(self) -> int:
        return len(self._live)

    def get(self, peer: str) -> Session | None:
        """The live session to ``peer``, if there is one."""
        return self._live.get(peer)

    @property
    def only(self) -> Session | None:
        """The live session, if there is just one."""
        return next(iter(self._live.values())) if len(self._live) == 1 else None

    def of_wire_name(self, wire_name: str) -> Session | None:
        """The session that a transport speaks of, if it still lives."""
        return self._by_wire_name.get(wire_name)

    def send(self, peer: str, message: AnyMessage) -> bool:
        """Send if there is a session; what must arrive is repeated by the protocol."""
        session = self._live.get(peer)
        if session is None:
            return False
        try:
            session.connection.send(message)
        except KVLinkError as error:
            _log.debug("a message to %s was not sent: %s", peer, error)
            return False
        if _answered_soon(message):
            self._rank.linger.on(session.connection)
        return True

    async def dial(self, address: str, place: Place) -> Session:
        """The live session to ``place``, made if need be; callers at the same time share one attempt.

        Raises:
            PeerRestartedError: another incarnation answers at ``address``.
            PeerUnreachableError, PeerLostError: nobody answers; retryable.
            MismatchError, PeerIncompatibleError, AuthenticationError, WireError: it cannot be worked with.
            ClosedError: no session is made now.

        Cancelling one caller leaves the attempt to the others, and to whoever comes next.
        """
        peer = str(place)
        if (live := self._live.get(peer)) is not None:
            return live
        pending = self._dialling.get(peer)
        if pending is None:
            pending = asyncio.get_running_loop().create_future()
            self._dialling[peer] = pending
            pending.add_done_callback(_looked_at)
            self._tasks.start(self._dial(address, place, pending), f"dial {peer}")
        return await asyncio.shield(pending)

    async def adopt(self, connection: ControlConnection) -> None:
        """Bring an accepted connection up; typed failures close it and are logged, nobody waits for them."""
        try:
            await self._bring_up(connection, asyncio.get_running_loop().time())
        except KVLinkError as error:
            _log.info("a peer was turned away: %s", error)
            connection.fail(error)
        except BaseException:
            connection.close()
            raise

    def lost(self, wire_name: str, detail: str) -> None:
        """The transport's PEER_LOST: reset or silence on the native channel.

        It counts when this turn's sockets have been read: what a peer said before it left has come by then.
        """
        session = self._by_wire_name.get(wire_name)
        if session is not None:
            error = PeerLostError(f"peer lost: {detail or 'no word from it'}", peer=session.peer)
            asyncio.get_running_loop().call_later(0, self._lost, session, error)

    def _lost(self, session: Session, error: PeerLostError) -> None:
        if self._by_wire_name.get(session.wire_name) is session:
            self._down(session, error)

    async def close(self, why: str) -> None:
        """Say goodbye to everyone, disconnect the transports, close."""
        sessions = list(self._live.values())
        waits = []
        for session in sessions:
            self.send(session.peer, Goodbye(why=why))
            self._forget(session)
            self.watch(session, ClosedError(why))
            waits.append(session.pump.ended(session.pump.transport.disconnect(session.wire_name)))
        if waits:
            _, late = await asyncio.wait(waits, timeout=2 * limits.CUT_OFF_GRACE_SECONDS)
            if late:
                _log.warning("the transport did not finish disconnecting %d of %d peers in time", len(late), len(waits))
        for session in sessions:
            session.connection.close()

    async def _dial(self, address: str, place: Place, pending: asyncio.Future[Session]) -> None:
        peer = str(place)
        try:
            session = await self._connect(address, place)
        except KVLinkError as error:
            if not pending.done():
                pending.set_exception(error)
        except asyncio.CancelledError:
            if not pending.done():
                pending.set_exception(ClosedError("the link was closed", peer=peer))
            raise
        except Exception as error:  # noqa: BLE001 - our own fault: whoever waits must hear of it all the same
            _log.exception("connecting to %s failed", peer)
            if not pending.done():
                text = f"connecting failed inside: {type(error).__name__}: {error}"
                pending.set_exception(PeerUnreachableError(text, peer=peer, stage="connect"))
        else:
            if not pending.done():
                pending.set_result(session)
        finally:
            del self._dialling[peer]

    async def _connect(self, address: str, place: Place) -> Session:
        config = self._rank.config
        started = asyncio.get_running_loop().time()
        connection = await connect(
            address,
            secret=config.secret,
            introduce=self._rank.introduce,
            timeout_seconds=config.handshake_seconds,
        )
        try:
            _check_place(connection.peer_introduce.spec.place, place)
            return await self._bring_up(connection, started)
        except BaseException:
            connection.close()
            raise

    async def _bring_up(self, connection: ControlConnection, started: float) -> Session:
        """From introduced to usable: compare, choose, channel, transport, keys."""
        spec = connection.peer_introduce.spec
        peer = str(spec.place)
        self._compare(connection)
        pump, card, reason = await self._choose(connection, peer)
        channel, *lanes = await self._open_sockets(connection, pump.transport, card.address)
        wire_name = f"{'source' if self._reading else 'target'} {next(_serial)} {peer}"
        op = pump.transport.connect(wire_name, card.address, channel, lanes)
        try:
            _check_connected(await pump.ended(op), peer)
            self._check_open(connection)
            for key in card.keys if self._reading else ():
                known = RegionKey(region=key.region, address=key.address, length=key.length, key=key.key)
                pump.transport.import_key(wire_name, known)
        except BaseException:
            pump.transport.disconnect(wire_name)
            raise
        took = asyncio.get_running_loop().time() - started
        ours = self._rank.caches.spec
        planners = Planners(spec, ours) if self._reading else Planners(ours, spec)
        session = Session(peer, spec, connection, pump, wire_name, reason, took, planners)
        older = self._live.get(peer)
        if older is not None:
            self._down(older, PeerLostError("replaced by a newer connection of the same incarnation", peer=peer))
        self._live[peer] = session
        self._by_wire_name[wire_name] = session
        self.watch(session, None)
        self._on_up(session)
        connection.listen(partial(self._heard, session), partial(self._down, session))
        return session

    async def _choose(self, connection: ControlConnection, peer: str) -> tuple[Pump, TransportCard, str]:
        """Who reads chooses the transport, and says so before it opens a socket for it; the other waits to be told."""
        theirs = connection.peer_introduce
        if self._reading:
            pump, card, reason = self._rank.choose(theirs, peer)
            connection.send(Chosen(transport=card.name, reason=reason[: limits.MAX_REASON_CHARS]))
            return pump, card, reason
        try:
            async with asyncio.timeout(self._rank.config.handshake_seconds):
                message = await connection.receive()
        except TimeoutError:
            raise PeerLostError("the peer did not say which transport it reads by", peer=peer) from None
        if not isinstance(message, Chosen):
            msg = f"a transport is chosen before anything is asked; the peer sent {type(message).__name__}"
            raise SchemaError(msg, peer=peer, stage="handshake")
        return self._rank.chosen(message, theirs, peer)

    def _check_open(self, connection: ControlConnection) -> None:
        """A session must not come up when all others were closed, nor on what was true before the link slept."""
        if self.shut is not None:
            raise ClosedError(self.shut)
        if not self._rank.stands_by(connection.told):
            raise PeerLostError("this link woke up over another cache while the connection was made")

    async def _open_sockets(self, connection: ControlConnection, transport: Transport, address: bytes) -> list[int]:
        """Descriptors of the channel and its lanes, in this order; none is left open if one does not come."""
        seconds = self._rank.config.handshake_seconds
        with contextlib.ExitStack() as undo:
            opened = []
            for index in range(1 + transport.lanes(address)):
                path = transport.lane_path(address) if index > 0 else None
                opened.append(await connection.channel(index, path=path, timeout_seconds=seconds))
                undo.callback(opened[-1].close)  # which does nothing to one that is detached
            return [sock.detach() for sock in opened]

    def _compare(self, connection: ControlConnection) -> None:
        """Identity and digest scheme must agree before anything is read."""
        theirs, ours = connection.peer_introduce.spec, self._rank.caches.spec
        source, target = (theirs, ours) if self._reading else (ours, theirs)
        compare_identity(source.identity, target.identity, source_peer=str(source.place), target_peer=str(target.place))
        scheme = connection.peer_introduce.digest_scheme
        if scheme != limits.DIGEST_SCHEME:
            raise MismatchError(
                "digest_scheme",
                scheme if self._reading else limits.DIGEST_SCHEME,
                limits.DIGEST_SCHEME if self._reading else scheme,
                source=str(source.place),
                target=str(target.place),
                stage="handshake",
            )

    def _heard(self, session: Session, message: AnyMessage) -> None:
        if isinstance(message, Goodbye):
            raise PeerLostError(f"the peer said goodbye: {message.why}", peer=session.peer)
        if not isinstance(message, UNHURRIED):  # which is not what is waited for
            self._rank.linger.forget(session.connection)
        self._on_message(session, message)

    def _down(self, session: Session, error: KVLinkError) -> None:
        if session.ended:
            return
        self._forget(session)
        session.connection.fail(error)
        session.pump.transport.disconnect(session.wire_name)
        self.watch(session, error)
        self._on_down(session, error)

    def _forget(self, session: Session) -> None:
        session.ended = True
        self._rank.linger.forget(session.connection)
        self._by_wire_name.pop(session.wire_name, None)
        if self._live.get(session.peer) is session:
            del self._live[session.peer]


def _answered_soon(message: AnyMessage) -> bool:
    """Whether the next word is as far as a round trip, or a short read, and no further."""
    if isinstance(message, Lease):
        return 0 < message.total_bytes <= limits.LINGER_BYTES
    return isinstance(message, Ask | Prepared)


def _looked_at(pending: asyncio.Future[Session]) -> None:
    """The error of an attempt whose callers have all gone is nobody's to see."""
    if not pending.cancelled():
        pending.exception()


def _check_place(actual: Place, expected: Place) -> None:
    if actual == expected:
        return
    if (actual.engine, actual.pp_rank, actual.tp_rank) == (expected.engine, expected.pp_rank, expected.tp_rank):
        raise PeerRestartedError(
            f"{actual} answers where {expected} was: it has restarted, and what the old one held is gone",
            peer=str(expected),
            stage="handshake",
        )
    raise PeerUnreachableError(
        f"{actual} answers where {expected} was expected; the roster is stale or wrong",
        peer=str(expected),
        stage="handshake",
    )


def _check_connected(completion: Completion, peer: str) -> None:
    if completion.outcome is not Outcome.OK:
        kind = PeerIncompatibleError if completion.outcome is Outcome.INCOMPATIBLE else PeerUnreachableError
        raise kind(f"the transport could not connect: {completion.detail}", peer=peer, stage="handshake")
