"""The real link in virtual time: an event loop whose clock jumps, control connections and alarms that live in it.

`kvlink.link` runs unchanged, from `kvlink.open_link` on; what is replaced is the operating system: sockets become
`VirtualConnection`, a transport's timer becomes `_VirtualAlarm`, and ``select`` becomes a jump to the next timer. So a
seed is one history, and a minute of it costs milliseconds.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from random import Random

import engines
import pytest

from kvlink.errors import ClosedError, KVLinkError, PeerLostError, PeerUnreachableError
from kvlink.link import driver, sessions
from kvlink.link.linger import Linger
from kvlink.transports.loopback import LoopbackTransport
from kvlink.wire import Address


class _Jump:
    """A selector on which nothing ever happens but time."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def select(self, timeout: float | None) -> list:
        if timeout is None:
            raise AssertionError("a dead end: everybody waits, and no timer is set")
        self._loop.now += timeout
        return []

    def close(self) -> None:
        pass


class VirtualLoop(asyncio.BaseEventLoop):
    """An asyncio loop whose time passes only while nobody has anything to do."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self._selector = _Jump(self)
        self._readers: dict[int, Callable[[], None]] = {}
        self._fds = itertools.count(1_000)
        self._clock_resolution = 1e-9
        self.errors: list[str] = []
        self.set_exception_handler(lambda _loop, context: self.errors.append(str(context)))

    def time(self) -> float:
        return self.now

    def new_fd(self) -> int:
        return next(self._fds)

    def add_reader(self, fd, callback, *_args) -> None:
        self._readers[fd] = callback

    def remove_reader(self, fd) -> bool:
        return self._readers.pop(fd, None) is not None

    def readable(self, fd: int) -> None:
        if (callback := self._readers.get(fd)) is not None:
            callback()

    def _process_events(self, event_list) -> None:
        pass

    def _write_to_self(self) -> None:
        pass


class _VirtualAlarm:
    """As `kvlink.transports.alarm.Alarm`. A ring takes a moment, so that what moves takes its time."""

    def __init__(self, loop: VirtualLoop, moment: Callable[[], float]) -> None:
        self._loop = loop
        self._moment = moment
        self._fd = loop.new_fd()
        self._timer: asyncio.TimerHandle | None = None
        self._ringing = False

    def fileno(self) -> int:
        return self._fd

    def ring(self) -> None:
        if not self._ringing:
            self._arm(self._moment())
            self._ringing = True

    def set(self, delay_seconds: float | None) -> None:
        self._ringing = False
        self._arm(delay_seconds)

    def close(self) -> None:
        self._ringing = True
        self._arm(None)

    def _arm(self, seconds: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self._loop.call_later(max(0.0, seconds), self._wake)

    def _wake(self) -> None:
        self._ringing = False
        self._loop.readable(self._fd)


class VirtualNet:
    """Who listens where, what is under way, and what fails.

    Attributes:
        counts: what has happened so far, by kind: ``dial`` and ``send``.
        failing: kind and number of the one that fails, if any.
    """

    def __init__(self, loop: VirtualLoop, dice: Random) -> None:
        self.loop = loop
        self.dice = dice
        self.latency = 0.001
        self.counts: Counter[str] = Counter()
        self.failing: tuple[str, int] | None = None
        self.listeners: dict[str, VirtualListener] = {}
        self.connections: list[VirtualConnection] = []
        self._ports: dict[tuple, int] = {}

    def moment(self) -> float:
        return self.latency * (0.5 + self.dice.random()) * (10.0 if self.dice.random() < 0.05 else 1.0)

    def fails(self, kind: str) -> bool:
        self.counts[kind] += 1
        return (kind, self.counts[kind]) == self.failing

    def port(self, place) -> int:
        """A rank's address outlives its incarnation."""
        return self._ports.setdefault((place.engine, place.pp_rank, place.tp_rank), 5000 + len(self._ports))

    async def connect(self, address: str, *, secret, introduce, timeout_seconds) -> VirtualConnection:
        await asyncio.sleep(self.moment())
        listener = self.listeners.get(address)
        if self.fails("dial") or listener is None or listener.accepted is None:
            raise PeerUnreachableError(f"nobody listens on {address}", peer=address, stage="connect")
        ours, theirs = VirtualConnection(self), VirtualConnection(self)
        for one, other, told in ((ours, theirs, listener.introduce()), (theirs, ours, introduce())):
            one.other, one.peer_introduce, one.peer, other.told = other, told, str(told.spec.place), told
            self.connections.append(one)
        listener.accepted(theirs)
        return ours

    def reset(self, one: str, other: str) -> None:
        """Every connection between two places is reset."""
        for connection in list(self.connections):
            if {connection.peer, connection.other.peer} == {one, other}:
                connection.fail(PeerLostError("connection reset", peer=connection.peer))

    def kill(self, place) -> None:
        """The process at ``place`` is gone: its peers find a reset, and it says nothing more."""
        self.listeners = {at: one for at, one in self.listeners.items() if one.place != str(place)}
        for connection in list(self.connections):
            if connection.other.peer == str(place):
                connection.dead = True
            elif connection.peer == str(place):
                connection.fail(PeerLostError("connection reset", peer=connection.peer))


class VirtualListener:
    """As `kvlink.link.listener.Listener`."""

    def __init__(self, net: VirtualNet, introduce) -> None:
        self.introduce = introduce
        place = introduce().spec.place
        self.place = str(place)
        self.address = Address(host="127.0.0.1", port=net.port(place))
        self.refused: Counter[str] = Counter()
        self.accepted: Callable | None = None
        self._net = net
        net.listeners[str(self.address)] = self

    async def serve(self, accepted: Callable) -> None:
        self.accepted = accepted
        await asyncio.Event().wait()

    def close(self) -> None:
        if self._net.listeners.get(str(self.address)) is self:
            del self._net.listeners[str(self.address)]


class _Channel:
    def detach(self) -> None:
        return None

    def close(self) -> None:
        """Nothing to close."""


class VirtualConnection:
    """One side of a control connection: in order and whole until it ends, as TCP is."""

    other: VirtualConnection
    descriptor = -1

    def __init__(self, net: VirtualNet) -> None:
        self.error: KVLinkError | None = None
        self.dead = False
        self.peer = ""
        self._net = net
        self._inbox: deque = deque()
        self._arrived = asyncio.Event()
        self._on_message: Callable | None = None
        self._on_end: Callable | None = None
        self._last = 0.0

    def send(self, message) -> None:
        if self.error is not None:
            raise self.error
        if self.dead:
            return
        if self._net.fails("send"):
            self.fail(PeerLostError("the send failed", peer=self.peer, stage="send"))
            raise self.error  # type: ignore[misc]
        self._later(self.other._arrive, message)

    async def receive(self):
        """The next message, before `listen`."""
        while not self._inbox:
            if self.error is not None:
                raise self.error
            self._arrived.clear()
            await self._arrived.wait()
        return self._inbox.popleft()

    def listen(self, on_message: Callable, on_end: Callable) -> None:
        self._on_message, self._on_end = on_message, on_end
        while self._inbox:
            self._hear(self._inbox.popleft())
        if self.error is not None:
            self._net.loop.call_soon(on_end, self.error)

    def _hear(self, message) -> None:
        try:
            self._on_message(message)
        except KVLinkError as error:
            self.fail(error)

    async def channel(self, index: int = 0, *, path: str | None = None, timeout_seconds: float) -> _Channel:
        assert (index, path) == (0, None)
        await asyncio.sleep(self._net.moment())
        if self.error is not None:
            raise self.error
        return _Channel()

    def close(self) -> None:
        self.fail(ClosedError("the control connection was closed", peer=self.peer))

    def fail(self, error: KVLinkError) -> None:
        if self._end(error) and not self.dead:
            self._later(self.other._end, PeerLostError("the control connection ended", peer=self.other.peer))

    def _later(self, do: Callable, what: object) -> None:
        self._last = max(self._last + 1e-7, self._net.loop.now + self._net.moment())
        self._net.loop.call_at(self._last, do, what)

    def _arrive(self, message) -> None:
        if self.error is None and not self.dead:
            if self._on_message is None:
                self._inbox.append(message)
                self._arrived.set()
            else:
                self._hear(message)

    def _end(self, error: KVLinkError) -> bool:
        if self.error is not None:
            return False
        self.error = error
        self._arrived.set()
        if self._on_end is not None:
            self._net.loop.call_soon(self._on_end, error)
        if self in self._net.connections:
            self._net.connections.remove(self)
        return True


def run(seed: int, patch: pytest.MonkeyPatch, story: Callable[[VirtualNet], Coroutine]) -> VirtualLoop:
    """Tell one story in virtual time; the loop it ran in, with what nobody caught."""
    loop = VirtualLoop()
    net = VirtualNet(loop, Random(seed))

    class VirtualTransport(LoopbackTransport):
        def __init__(self, fabric, name: str) -> None:
            super().__init__(fabric, name)
            self._alarm.close()
            self._alarm = _VirtualAlarm(loop, net.moment)

    class Bind:
        @staticmethod
        async def bind(_listen, *, secret, introduce, handshake_seconds):
            return VirtualListener(net, introduce)

    patch.setattr(driver, "Listener", Bind)
    patch.setattr(driver, "Linger", lambda **_: Linger(enabled=False))  # time stands still while it looks
    patch.setattr(sessions, "connect", net.connect)
    patch.setattr(engines, "LoopbackTransport", VirtualTransport)
    try:
        loop.run_until_complete(story(net))
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0.01))
        loop.close()
    return loop
