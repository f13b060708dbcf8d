"""One rank in a process of its own: it serves calls, writes down every install, and falls where it is told to.

Calls are lines of JSON on its standard input; on its standard output come their answers, each part's end, and the
moment at which it falls. The cache is a file that its parent has mapped too.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from functools import partial, wraps
from pathlib import Path
from typing import Any

import msgspec
from child import end_with, take_standard_output
from rank_process import MAX_LINE, map_regions

from kvlink import Caches, CacheSpec, Config, Link, Offer, Part, Roster, Ticket, open_link
from kvlink.errors import ClosedError, KVLinkError
from kvlink.link import sessions
from kvlink.link.sessions import Sessions
from kvlink.memory import BlockLedger, Region
from kvlink.transports.engine import NativeTransport
from kvlink.wire import Ack, Announce, Ask, Commit, Decided, Expect, Installed, Lease, NotInstalled, Prepared, Stands

SENT = {
    "source": {Announce: "announce", Lease: "lease", Commit: "commit", Ack: "ack"},
    "target": {
        Expect: "expect",
        Ask: "ask",
        Prepared: "prepared",
        Installed: "installed",
        NotInstalled: "not_installed",
        Stands: "stands",
        Decided: "decided",
    },
}
STEPS = {
    "source": ("handshake", "announce", "lease", "commit", "ack"),
    "target": ("handshake", "expect", "ask", "move", "prepared", "install", "installed", "not_installed"),
    "ranks": ("stands", "decided"),
}
"""Where a rank can fall; each before and after what is named. *ranks*: a target's that has other ranks beside it."""


class Call(msgspec.Struct):
    id: int
    name: str
    arguments: dict[str, Any] = {}


class Said(msgspec.Struct):
    """A line from the worker: the answer of call ``id``, a part's end, or the moment of a fall."""

    id: int = 0
    value: Any = None
    error: str = ""
    ended: str = ""
    state: str = ""
    code: str = ""
    fell: str = ""


class Fate:
    """Where this process falls: it is killed or stopped at once, or its parent is told and does it a little later."""

    def __init__(self, say: Callable[[Said], None]) -> None:
        self._say = say
        self._armed: tuple[str, int, str] | None = None
        self._left = 0

    def arm(self, moment: str, nth: int, how: str) -> None:
        self._armed, self._left = (moment, nth, how), nth

    def passing(self, moment: str) -> None:
        if self._armed is None or self._armed[0] != moment:
            return
        self._left -= 1
        if self._left == 0:
            _, _, how = self._armed
            self._armed = None
            self._say(Said(fell=moment))
            if how != "tell":
                os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)

    def around(self, owner: Any, name: str, step: Callable[..., str | None]) -> None:
        """Fall before or after a call of ``owner.name``, where ``step`` says which step its arguments are."""
        act = getattr(owner, name)

        @wraps(act)
        def acted(*arguments: Any, **named: Any) -> Any:
            which = step(*arguments)
            if which is None:
                return act(*arguments, **named)
            self.passing(f"before {which}")
            done = act(*arguments, **named)
            if asyncio.iscoroutine(done):
                return self._awaited(done, which)
            self.passing(f"after {which}")
            return done

        setattr(owner, name, acted)

    async def _awaited(self, doing: Coroutine[Any, Any, Any], which: str) -> Any:
        done = await doing
        self.passing(f"after {which}")
        return done


def log_installs(log: int) -> None:
    """A line before and a line after every install, in a file that outlives this process."""
    install = BlockLedger.install

    def logged(ledger: BlockLedger, key: str) -> None:
        os.write(log, f"installing {key} {time.monotonic()}\n".encode())
        install(ledger, key)
        os.write(log, f"installed {key} {time.monotonic()}\n".encode())

    BlockLedger.install = logged


class Served:
    """What the worker answers; each public method is a call."""

    def __init__(self, say: Callable[[Said], None]) -> None:
        self._say = say
        self._fate = Fate(say)
        self._link: Link
        self._parts: dict[str, Part] = {}

    async def open(self, role: str, file: str, log: str, spec: dict[str, Any], settings: dict[str, Any]) -> dict:
        self._watch(role)
        log_installs(os.open(log, os.O_WRONLY | os.O_APPEND))
        cache = msgspec.convert(spec, CacheSpec)
        arrays = map_regions(Path(file), cache.region_bytes)
        regions = tuple(Region(array.ctypes.data, array.size, array) for array in arrays)
        self._link = await open_link(Config(**settings), Caches(cache, regions))
        return {"card": self._link.card.hex(), "address": self._link.address}

    def join(self, cards: list[str]) -> None:
        self._link.set_siblings(Roster.of([bytes.fromhex(card) for card in cards]))

    def arm(self, moment: str, nth: int, how: str) -> None:
        self._fate.arm(moment, nth, how)

    def publish(self, name: str, offer: dict[str, Any]) -> None:
        self._keep(name, self._link.publish(Offer.from_params(offer)))

    def announce(self, name: str, key: str, ttl_seconds: float) -> None:
        self._keep(name, self._link.announce(key, ttl_seconds=ttl_seconds))

    def ready(self, name: str, **frontier: Any) -> None:
        part = self._parts.get(name)
        if part is None:
            raise ClosedError(f"{name} has ended")
        blocks = frontier.pop("blocks")
        part.ready(blocks=(tuple(blocks),), **frontier)

    def seal(self, name: str, blocks: list[int], tokens: int) -> None:
        self.ready(name, blocks=blocks, tokens=tokens)
        self._parts[name].seal()

    def fetch(self, name: str, offer: dict[str, Any], into: list[int], **how: Any) -> None:
        self._keep(name, self._link.start_fetch(Offer.from_params(offer), (into,), **how))

    def expect(self, name: str, ticket: dict[str, Any], card: str, into: list[int], **how: Any) -> None:
        source = Roster.of([bytes.fromhex(card)])
        self._keep(name, self._link.expect(Ticket.from_params(ticket), source, (into,), **how))

    def cancel(self, name: str, why: str) -> None:
        if (part := self._parts.get(name)) is not None:
            self._link.cancel(part, why)

    def release(self, key: str) -> None:
        self._link.release(key)

    def stats(self) -> dict[str, Any]:
        """Blocks out by state, without zeros; parts that have not ended; and counters."""
        stats = self._link.stats()
        memory = {state: count for state, count in msgspec.to_builtins(stats.memory).items() if count}
        return {"memory": memory, "parts_live": stats.parts_live, "counters": dict(stats.counters)}

    def _keep(self, name: str, part: Part) -> None:
        self._parts[name] = part
        part.when_ended(partial(self._tell_end, name))

    def _tell_end(self, name: str, part: Part) -> None:
        assert part.result is not None
        del self._parts[name]
        error = part.result.error
        self._say(Said(ended=name, state=part.state.name, code="" if error is None else error.code))

    def _watch(self, role: str) -> None:
        """The steps of this side are seen where messages go out, reads start, blocks change hands, and peers come."""
        around, sent = self._fate.around, SENT[role]
        around(Sessions, "send", lambda _sessions, _peer, message: sent.get(type(message)))
        around(Sessions, "adopt", lambda *_: "handshake")
        around(sessions, "connect", lambda *_: "handshake")
        around(NativeTransport, "read", lambda *_: "move")
        around(BlockLedger, "install", lambda *_: "install")


async def serve(answers: int) -> None:
    def say(said: Said) -> None:
        os.write(answers, msgspec.json.encode(said) + b"\n")

    calls = asyncio.StreamReader(limit=MAX_LINE)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(calls), sys.stdin)
    served = Served(say)
    while line := await calls.readline():
        call = msgspec.json.decode(line, type=Call)
        try:
            value = getattr(served, call.name)(**call.arguments)
            say(Said(id=call.id, value=await value if asyncio.iscoroutine(value) else value))
        except KVLinkError as error:
            say(Said(id=call.id, error=f"{error.code}: {error}"))


if __name__ == "__main__":
    end_with(int(sys.argv[1]))
    asyncio.run(serve(take_standard_output()))
