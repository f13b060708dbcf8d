"""A lane: one source and two targets over one transport, requests between them, and one misfortune a round.

In a round some requests begin, one process falls at its moment (killed, or stopped for longer than the lease), a
successor takes its port or it is resumed, and every request is tried until it is done or may not be tried again. Then
all must be at rest: every part ended, every block back, every byte judged. Some requests are fetched and some pushed,
of which half are streamed, chunk by chunk and layer by layer.

The targets are two engines, of which a request takes one; or the two ranks of one engine, which take it together. An
engine that lost a rank is started anew, at once or when all that its other rank had begun has ended by itself.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import Any, Self

from campaign.life import BLOCK_SLOTS, IDENTITY, GoneError, Held, Life
from campaign.worker import STEPS
from kvlink.cli.bench.content import Prompt

APART = {"prefill": ("prefill",), "decode-a": ("decode-a",), "decode-b": ("decode-b",)}
TOGETHER = {"prefill": ("prefill",), "decode": ("decode/0", "decode/1")}
"""Engines, and a seat for the process of each of their ranks."""
SETTINGS = {
    "lease_seconds": 1.0,
    "heartbeat_seconds": 0.3,
    "peer_lost_seconds": 1.0,
    "commit_ttl_seconds": 1.5,
    "park_seconds": 2.0,
    "handshake_seconds": 2.0,
}
DEADLINE_SECONDS = 8.0
OFFER_SECONDS = 6.0
ENDS_WITHIN_SECONDS = 20.0
"""Of the part's beginning, or of the round's misfortune: the deadline, and the bounds that follow it."""
TRY_SECONDS = 10.0
"""How long a gateway goes on with a request."""
CANCELLED = 0.15
"""Share of tries that the gateway takes back,"""
CANCELLED_WITHIN_SECONDS = 0.03
"""so soon: most of what they move is on its way then, or about to be."""
MAX_TOKENS = 1500
CHUNKS = 3
LAYER_SECONDS = 0.02
"""How a streamed push is computed: in so many chunks, each layer within so long."""
UNLUCKY_MOMENT_SECONDS = 1.0
"""A moment that has not come by then does not come in this round; the process falls as it stands."""


@dataclass(frozen=True)
class Misfortune:
    """Who falls, how, and when: at the ``nth`` passing of ``moment``, ``late_seconds`` after it.

    ``moment`` is "any time", "restart" (the successor is killed while it opens), or a step of `STEPS`.
    """

    kind: str
    seat: str
    moment: str
    nth: int = 1
    late_seconds: float = 0.0
    rest_seconds: float = 0.0
    """Stopped for so long; or until the successor of a killed one opens."""


def draw(kind: str, dice: Random, engines: Mapping[str, Sequence[str]]) -> Misfortune:
    """One, for a lane of these engines."""
    seats = [seat for ranks in engines.values() for seat in ranks]
    seat = dice.choice([*seats, "prefill"])
    steps = STEPS["source" if seat == "prefill" else "target"]
    if engines is TOGETHER and seat != "prefill":
        steps += STEPS["ranks"]
    moment = dice.choice(("any time", *(f"{when} {step}" for step in steps for when in ("before", "after"))))
    if kind == "kill" and dice.random() < 0.1:
        moment = "restart"
    late = dice.choice((0.0, 0.0, dice.uniform(0.0, 0.03)))
    rest = dice.uniform(1.2, 2.5) if kind == "stop" else dice.choice((0.0, 0.0, dice.uniform(0.0, 0.5)))
    return Misfortune(kind, seat, moment, dice.choice((1, 1, 2, 3)), late, rest)


@dataclass
class Tally:
    """What came of it, over all lanes."""

    falls: Counter[str] = field(default_factory=Counter)
    moments: Counter[str] = field(default_factory=Counter)
    requests: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    installs: int = 0
    checked_bytes: int = 0
    slowest_end_seconds: float = 0.0
    ucx_aborts: list[str] = field(default_factory=list)
    """Processes that UCX ended, with its words: a fault of UCX that nobody above it can catch."""
    findings: list[str] = field(default_factory=list)


class Lane:
    """Processes of one transport.

    Args:
        name: for texts.
        transport: settings of it.
        engines: `APART`, or `TOGETHER`.
        tally: shared by all lanes.
        next_process: gives a worker that waits to be opened.
    """

    def __init__(
        self,
        name: str,
        transport: dict[str, Any],
        engines: Mapping[str, Sequence[str]],
        seed: int,
        tally: Tally,
        next_process: Callable[[], Awaitable[asyncio.subprocess.Process]],
    ) -> None:
        self.name = name
        self.engines = engines
        self.tally = tally
        self.dice = Random(f"{seed} {name}")
        self.lives: dict[str, Life] = {}
        self._buried: list[Life] = []
        self._settings = {**SETTINGS, **transport}
        self._next_process = next_process
        self._serial = 0
        self._rounds = 0
        self._fell_at = 0.0

    async def __aenter__(self) -> Self:
        for engine in self.engines:
            await self._start(engine)
        return self

    async def __aexit__(self, *exc: object) -> None:
        for life in (*self.lives.values(), *self._buried):
            await life.close()

    async def round(self, misfortune: Misfortune) -> None:
        """Some requests, one misfortune, and rest."""
        self._rounds += 1
        if misfortune.moment.endswith("handshake"):
            await self._restart(misfortune.seat)
        requests = [Request(self, self._rounds * 10 + number) for number in range(self.dice.randint(3, 5))]
        falling = self._fall(self.lives[misfortune.seat], misfortune)
        await asyncio.gather(falling, *(request.run() for request in requests))
        await self._rest(misfortune)
        self._check_installs(requests)
        while self._buried:
            await self._buried.pop().close()

    def find(self, what: str) -> None:
        self.tally.findings.append(f"{self.name}, round {self._rounds}: {what}")

    def target(self, dice: Random) -> list[Life]:
        """The ranks of an engine that takes requests, any one."""
        engine = dice.choice([name for name in self.engines if name != "prefill"])
        return [self.lives[seat] for seat in self.engines[engine]]

    # --- lives --------------------------------------------------------------------------------------------------------

    async def _start(self, engine: str) -> None:
        """Put the next incarnation of an engine there, on the addresses of the last."""
        seats = self.engines[engine]
        while True:
            self._serial += 1
            lives: list[Life] = []
            try:
                for seat in seats:
                    lives.append(await self._unborn())
                    await self._bear(lives[-1], seat, self._serial)
                for life in lives:
                    await life.join([each.card for each in lives])
            except GoneError:  # a finding, or an end by UCX: all are buried, and others take their place
                for life in lives:
                    await self._bury(life)
            else:
                self.lives |= dict(zip(seats, lives, strict=True))
                return

    async def _unborn(self) -> Life:
        life = Life(await self._next_process(), self.tally.findings, self.dice)
        life.on_end = self._ended
        return life

    async def _bear(self, life: Life, seat: str, incarnation: int) -> None:
        """Open it as the next life of a seat, on the address of the last."""
        (engine, seats) = next(item for item in self.engines.items() if seat in item[1])
        listen = {"listen": self.lives[seat].address} if seat in self.lives else {}
        settings = {**self._settings, "integrity": self.dice.random() < 0.7, **listen}
        await life.open(engine, f"{self.name}.{incarnation}", settings, seats.index(seat), len(seats))

    def _ended(self, life: Life, held: Held) -> None:
        self.tally.ends[f"{'source' if life.is_source else 'target'} {held.state.lower()}"] += 1
        if held.state not in {"DEAD", "REFUSED"}:
            took = held.at - max(held.began, min(self._fell_at, held.at))
            self.tally.slowest_end_seconds = max(self.tally.slowest_end_seconds, took)

    async def _restart(self, seat: str) -> None:
        """Put a successor there, and of the engine's other ranks: it has to connect to its peers, or they to it."""
        (engine, seats) = next(item for item in self.engines.items() if seat in item[1])
        for each in seats:
            if self.lives[each] not in self._buried:
                await self._bury(self.lives[each])
        await self._start(engine)

    async def _bury(self, life: Life) -> None:
        await life.kill()
        self._buried.append(life)
        if life.process.returncode != -signal.SIGKILL:
            told = f"{life.name} ended with {life.process.returncode}: {life.last_words}"
            by_ucx = "uc" in life.last_words and "Fatal" in life.last_words
            (self.tally.ucx_aborts if by_ucx else self.tally.findings).append(told)

    # --- misfortune ---------------------------------------------------------------------------------------------------

    async def _fall(self, life: Life, what: Misfortune) -> None:
        moment = "any time"
        if what.moment in {"any time", "restart"}:
            await asyncio.sleep(self.dice.uniform(0.0, 0.15))
            moment = what.moment
        elif await self._comes(life, what):
            moment = what.moment
            await asyncio.sleep(what.late_seconds)
        self._fell_at = time.monotonic()
        self.tally.falls[what.kind] += 1
        self.tally.moments[f"{what.kind} {'source' if life.is_source else 'target'} {moment}"] += 1
        if what.kind == "stop":
            if moment in {"any time", "restart"} or what.late_seconds > 0:
                life.stop()  # otherwise it does it itself
            await asyncio.sleep(what.rest_seconds)
            life.resume()
            self._fell_at = time.monotonic()
        else:
            await self._kill(life, what)

    async def _comes(self, life: Life, what: Misfortune) -> bool:
        """Whether the moment comes soon. At once means that the process does it to itself."""
        how = what.kind if what.late_seconds == 0 else "tell"
        try:
            await life.call("arm", moment=what.moment, nth=what.nth, how=how)
        except GoneError:  # it has ended by itself: burying it tells
            return False
        fell = asyncio.create_task(life.fell.wait())
        await asyncio.wait([fell], timeout=UNLUCKY_MOMENT_SECONDS)
        if not fell.done():
            disarmed = asyncio.create_task(life.call("arm", moment="", nth=1, how=""))
            await asyncio.wait([fell, disarmed], return_when=asyncio.FIRST_COMPLETED)
            disarmed.add_done_callback(lambda task: task.cancelled() or task.exception())
        fell.cancel()
        came = life.fell.is_set()
        life.fell.clear()
        return came

    async def _kill(self, life: Life, what: Misfortune) -> None:
        await self._bury(life)
        await asyncio.sleep(what.rest_seconds)
        if what.moment == "restart":
            unborn = await self._unborn()
            self._serial += 1
            opening = asyncio.create_task(self._bear(unborn, what.seat, self._serial))
            await asyncio.sleep(self.dice.uniform(0.0, 0.2))
            self.tally.falls["kill"] += 1
            await self._bury(unborn)
            await asyncio.gather(opening, return_exceptions=True)
        for other in next(seats for seats in self.engines.values() if what.seat in seats):
            if other != what.seat and self.dice.random() < 0.5:
                await self._outlive(self.lives[other], what)
        await self._restart(what.seat)

    async def _outlive(self, life: Life, what: Misfortune) -> None:
        """All that it had begun with a rank that is dead must end by itself."""
        await self._all_end([life], what)
        await life.settled()
        with suppress(GoneError):  # it is buried next, which tells
            await self._at_rest(life, what)

    # --- rest ---------------------------------------------------------------------------------------------------------

    async def _rest(self, misfortune: Misfortune) -> None:
        """Everything that lives must come to an end by itself, within its bound."""
        for seat in list(self.lives):
            if self.lives[seat].died:
                await self._restart(seat)
        await self._all_end(self.lives.values(), misfortune)
        for seat in list(self.lives):
            await self.lives[seat].settled()
            try:
                await self._at_rest(self.lives[seat], misfortune)
            except GoneError:  # a finding already
                await self._restart(seat)
        for life in self._buried:
            life.judge_idle()  # not a byte more has landed in the memory of the dead
        for life in (*self.lives.values(), *self._buried):
            self.tally.checked_bytes += life.checked_bytes
            life.checked_bytes = 0

    async def _all_end(self, lives: Iterable[Life], misfortune: Misfortune) -> None:
        waiting = {held.name: held for life in lives for held in life.parts.values()}
        ends = [asyncio.create_task(held.ended.wait(), name=name) for name, held in waiting.items()]
        if ends:
            _, late = await asyncio.wait(ends, timeout=ENDS_WITHIN_SECONDS)
            for end in late:
                end.cancel()
                self.find(f"{end.get_name()} has not ended, after {misfortune}")

    async def _at_rest(self, life: Life, misfortune: Misfortune) -> None:
        for _ in range(100):
            stats = await life.call("stats")
            if not stats["memory"] and not stats["parts_live"]:
                break
            await asyncio.sleep(0.05)
        else:
            self.find(f"{life.name} has {stats['memory']} out at rest, after {misfortune}")
        life.judge_idle()

    def _check_installs(self, requests: list[Request]) -> None:
        """Nothing was installed twice, but where who had it is dead; and both sides agree on the end."""
        lives = (*self.lives.values(), *self._buried)
        for request in requests:
            found = [(at, life, key) for life in lives for key, at in life.installs() if key in request.parts]
            found.sort(key=lambda install: install[0])
            self.tally.installs += len(found)
            for rank in {life.rank for _, life, _ in found}:
                of_rank = [install for install in found if install[1].rank == rank]
                for (_, first, _), (at, second, key) in pairwise(of_rank):
                    if not first.died or first.died > at:
                        self.find(f"{key} was installed by {first.name} and by {second.name}: twice")
            standing = {key for _, life, key in found if not life.died}
            request.check_agreement({key for _, _, key in found}, standing)
            request.check_together()


class Request:
    """What a gateway does with one request: a source, a target at a time, and again while that may help.

    Attributes:
        parts: the source's parts, by key.
    """

    def __init__(self, lane: Lane, number: int) -> None:
        self.parts: dict[str, Held] = {}
        self._lane = lane
        self._number = number
        self._dice = Random(lane.dice.random())
        self._prompt = Prompt(seed=number, tokens=self._dice.randint(1, MAX_TOKENS))
        self._push = self._dice.random() < 0.4
        self._streamed = self._dice.random() < 0.5  # if pushed
        self._patience_seconds = self._dice.choice((0.5, 1.0, 30.0))
        self._asked: list[list[Held]] = []  # each a try: a part on every rank of a target
        self._sealed: set[str] = set()

    async def run(self) -> None:
        """Until it is done, or must not be tried again, or was tried often enough."""
        await asyncio.sleep(self._dice.uniform(0.0, 0.1))
        until = time.monotonic() + TRY_SECONDS
        while time.monotonic() < until and not self._done and not self._unknown:
            with suppress(GoneError):
                await self._try()
            if not self._done:
                await asyncio.sleep(self._dice.uniform(0.02, 0.4))
        if not self._done:
            await self._give_up()
        outcome = "indeterminate" if self._unknown else "given up"
        if self._done:
            outcome = "done at once" if len(self._asked) == 1 else "done later"
        self._lane.tally.requests[outcome] += 1

    def check_together(self) -> None:
        """Of each try, all ranks show it or none does; but a rank that died says nothing."""
        for ranks in self._asked:
            first, *others = (held.state for held in ranks)
            shown = "DONE" in (first, *others)
            # the first rank decides, and shows it last: whoever cannot know what others show says *indeterminate*
            agreed = set(others) <= {"DONE", "DEAD"} and first in {"DONE", "DEAD", "INDETERMINATE"}
            if shown and not agreed:
                self._lane.find(f"{ranks[0].key} ended as {', '.join(held.state for held in ranks)} on its ranks")

    def check_agreement(self, installed: set[str], standing: set[str]) -> None:
        """A source that lived says *done* only of what was installed, and never *not done* of what stands."""
        lost = {held.key for ranks in self._asked for held in ranks if held.state == "DEAD" and len(ranks) > 1}
        for key, held in self.parts.items():
            if held.state == "DONE" and key not in installed | lost:  # a rank may die between its word and its showing
                self._lane.find(f"the source says that {key} is done, and nobody installed it")
            if held.state in {"FAILED", "CANCELLED", "EXPIRED", "REFUSED"} and key in standing:
                self._lane.find(f"the source says that {key} is {held.state}, and it stands installed")

    @property
    def _done(self) -> bool:
        return any(all(held.state == "DONE" for held in ranks) for ranks in self._asked)

    @property
    def _unknown(self) -> bool:
        parts = [*self.parts.values(), *(held for ranks in self._asked for held in ranks)]
        return any(held.state == "INDETERMINATE" for held in parts) and not self._done

    async def _try(self) -> None:
        """One try at one target, on all its ranks; it may outlast the gateway's patience."""
        source, held = await self._published()
        target = self._lane.target(self._dice)
        if held is None or any(life.died for life in target):
            return
        if any(part.key == held.key for life in target for part in life.parts.values()):
            return
        taken = [life.take(held.key, self._prompt) for life in target]
        if any(one is None for one in taken):
            for life, one in zip(target, taken, strict=True):
                if one is not None:
                    life.refused(one, "no room there")
            return
        self._asked.append(taken)
        await asyncio.gather(
            *(self._ask(source, held, target, life, one) for life, one in zip(target, taken, strict=True))
        )
        if self._push:
            await self._seal(source, held)
        if self._dice.random() < CANCELLED:
            await asyncio.sleep(self._dice.uniform(0.0, CANCELLED_WITHIN_SECONDS))
            life, one = self._dice.choice(list(zip(target, taken, strict=True)))
            await life.call("cancel", name=one.name, why="the gateway thought again")
        with suppress(TimeoutError):
            async with asyncio.timeout(self._patience_seconds):
                for one in taken:
                    await one.ended.wait()

    async def _published(self) -> tuple[Life, Held | None]:
        """The source part that stands; or a new one, once nobody can install the old any more."""
        source = self._lane.lives["prefill"]
        if self.parts and (held := list(self.parts.values())[-1]).name in source.parts:
            return source, held
        await asyncio.gather(*(held.ended.wait() for ranks in self._asked for held in ranks))
        if self._done or self._unknown:
            return source, None
        key = f"{source.name.rpartition('@')[2]}:r{self._number}.{len(self.parts)}"
        fresh = source.take(key, self._prompt)
        if fresh is None:
            return source, None
        self.parts[key] = fresh
        try:
            if self._push:
                await source.call("announce", name=fresh.name, key=key, ttl_seconds=OFFER_SECONDS)
            else:
                await source.call("publish", name=fresh.name, offer=source.offer(fresh, OFFER_SECONDS))
        except RuntimeError as error:
            source.refused(fresh, str(error))
            return source, None
        return source, fresh

    async def _ask(self, source: Life, held: Held, target: Sequence[Life], life: Life, taken: Held) -> None:
        """One rank of the target; that it has died is told by its parts' end."""
        where = {"name": taken.name, "into": taken.blocks}
        how = {"deadline_seconds": DEADLINE_SECONDS, "together": len(target) > 1}
        try:
            if self._push:
                ticket = life.ticket(taken, OFFER_SECONDS)
                await life.call("expect", ticket=ticket, card=source.card, **where, **how)
            else:
                await life.call("fetch", offer=source.offer(held, OFFER_SECONDS), **where, **how)
        except RuntimeError as error:
            if not life.died:
                life.refused(taken, str(error))
        except GoneError:
            pass

    async def _seal(self, source: Life, held: Held) -> None:
        if held.key not in self._sealed:
            self._sealed.add(held.key)
            with suppress(RuntimeError):  # it has ended already
                if self._streamed:
                    await self._stream(source, held)
                await source.call("seal", name=held.name, blocks=held.blocks, tokens=self._prompt.tokens)

    async def _stream(self, source: Life, held: Held) -> None:
        """Chunk by chunk, and of each chunk layer by layer, as an engine computes it."""
        tokens = self._prompt.tokens
        for chunk in sorted({-(-tokens * part // CHUNKS) for part in range(1, CHUNKS + 1)}):
            blocks = held.blocks[: -(-chunk // BLOCK_SLOTS)]
            for layers in range(1, IDENTITY.num_layers + 1):
                await source.call("ready", name=held.name, blocks=blocks, tokens=chunk, layers=layers)
                await asyncio.sleep(self._dice.uniform(0.0, LAYER_SECONDS))

    async def _give_up(self) -> None:
        """The source need not keep what nobody will ask for any more."""
        source = self._lane.lives["prefill"]
        for held in self.parts.values():
            if held.name in source.parts:
                with suppress(GoneError):
                    await source.call("cancel", name=held.name, why="the request is given up")
