"""Stories of the real link in virtual time, drawn from a seed: requests, retries, resets, crashes; and a judge."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from random import Random

from computing import walk
from engines import Engine, source_engine, target_engine
from virtual import VirtualNet

from kvlink import Identity, Part, State
from kvlink.cli.bench.content import Prompt
from kvlink.errors import KVLinkError
from kvlink.transports.faults import DelayChunk, DropRenewals, FailRead, FlipByte, RefuseReads
from kvlink.transports.loopback_fabric import LoopbackFabric

TINY = Identity(model="tiny", num_layers=1, num_kv_heads=2, head_dim=8, weights_revision="r1")
TOKENS, PER_REQUEST, BLOCKS = 8, 2, 12
SHAPE = {"identity": TINY, "block_size": 4, "num_blocks": BLOCKS}
SETTINGS = {"claim_ttl_seconds": 3.0, "park_seconds": 2.0}
REST_SECONDS = 120.0
SCRUB = Prompt(seed=20_000, tokens=4)


@dataclass(eq=False)
class Side:
    """An engine's latest incarnation, and its free blocks (the same on all its ranks)."""

    engine: Engine
    free: list[int] = field(default_factory=lambda: list(range(BLOCKS)))
    dead: bool = False

    def take(self) -> tuple[int, ...] | None:
        if len(self.free) < PER_REQUEST:
            return None
        return tuple(self.free.pop() for _ in range(PER_REQUEST))


class Story:
    """One seed."""

    def __init__(self, seed: int, net: VirtualNet) -> None:
        self.dice = Random(seed)
        self.net = net
        net.latency = self.dice.choice((0.001, 0.01, 0.1))
        self.fabric = LoopbackFabric(seed, self._faults(), clock=net.loop.time, chunks_per_poll=1)
        self.findings: list[str] = []
        self.tps = {"prefill": self.dice.choice((1, 1, 2)), "decode": self.dice.choice((1, 1, 2))}
        self.max_legs = self.dice.choice((2, 64, 64, 64))
        self.sides: dict[str, Side] = {}
        self.whole = 0
        self.quiet = False
        self._serial = 0
        self._open: list[tuple[Side, Part]] = []
        self._tries: list[tuple[Side, list[Part]]] = []

    def _faults(self) -> list:
        dice = self.dice
        menu = [
            FlipByte(chunk=0, on_try=dice.choice((1, None)), read=dice.randint(1, 4)),
            FailRead(nth=dice.randint(1, 4)),
            DelayChunk(steps=dice.choice((30, 3000)), read=dice.randint(1, 4)),
        ]
        if dice.random() < 0.3:
            menu.append(RefuseReads(active=1))
        return [fault for fault in menu if dice.random() < 0.2 or isinstance(fault, RefuseReads)]

    # --- the world ----------------------------------------------------------------------------------------------------

    async def start(self, name: str) -> Side:
        make = source_engine if name == "prefill" else target_engine
        settings = SETTINGS | {"max_legs": self.max_legs}
        engine = make(self.fabric, tp=self.tps[name], settings=settings, **SHAPE)
        await engine.__aenter__()
        self.sides[name] = side = Side(engine)
        return side

    async def crash(self, name: str) -> None:
        """All its ranks die at once; a successor starts at the same addresses after a while."""
        side = self.sides[name]
        side.dead = True
        for rank in side.engine.ranks:
            place = rank.caches.spec.place
            self.net.kill(place)
            self.fabric.kill(str(place))
            for task in list(rank.link._driver._tasks._tasks):
                task.cancel()
        await asyncio.sleep(self.dice.random() * 3.0)
        await self.start(name)

    async def tell(self) -> None:
        """Everything, to the end."""
        for name in ("prefill", "decode"):
            await self.start(name)
        requests = [self.request(self.dice.random() * 2.0) for _ in range(self.dice.choice((1, 1, 2, 3)))]
        strikes = [self.strike(self.dice.random() * 3.0) for _ in range(self.dice.choice((0, 1, 2, 3)))]
        await asyncio.gather(*requests, *strikes)
        await asyncio.sleep(REST_SECONDS)
        self.judge_rest()
        last = self.whole
        self.fabric.script._faults.clear()
        self.net.latency, self.quiet = 0.001, True
        await self.request(0.0)
        if self.whole == last:
            self.findings.append("5: a dead end: a request after all faults does not succeed")
        for side in self.sides.values():
            await side.engine.__aexit__(None, None, None)

    # --- requests -----------------------------------------------------------------------------------------------------

    async def request(self, delay: float) -> None:
        await asyncio.sleep(delay)
        self._serial += 1
        key, prompt = f"i:{self._serial}", Prompt(seed=self._serial, tokens=TOKENS)
        source = self.sides["prefill"]
        blocks = source.take()
        if blocks is None or source.dead:
            return
        source.engine.fill(prompt, blocks)
        with contextlib.suppress(KVLinkError):
            if self.dice.random() < 0.5:
                await self._fetch_flow(key, prompt, source, blocks)
            else:
                await self._push_flow(key, prompt, source, blocks)

    async def _fetch_flow(self, key: str, prompt: Prompt, source: Side, blocks) -> None:
        offer = source.engine.offer(key, blocks, TOKENS, ttl_seconds=self.dice.choice((1.0, 3.0)))
        held: list[Part] = []

        def publish() -> None:
            if not source.dead:
                held.extend(self._source_part(source, blocks, link.publish(offer)) for link in source.engine.links)

        early = not self.quiet and self.dice.random() < 0.2
        if early:
            self.net.loop.call_later(self.dice.random(), publish)
        else:
            publish()
        for attempt in range(1 if self.quiet else self.dice.choice((1, 2, 3))):
            target = self.sides["decode"]
            begun = await self._take_in(
                target,
                prompt,
                lambda link, into: link.start_fetch(offer, (into,), deadline_seconds=5.0),
            )
            if begun is not False or target.dead:
                return
            self._meddle(held, target, offer)
            await asyncio.sleep(0.05 * 2**attempt)

    async def _push_flow(self, key: str, prompt: Prompt, source: Side, blocks) -> None:
        target = self.sides["decode"]
        ticket = target.engine.ticket(key, TOKENS, ttl_seconds=3.0)
        parts: list[Part] = []
        words = list(walk(self.dice, TOKENS, 3)) if self.dice.random() < 0.6 else []

        def announce() -> None:
            if not source.dead:
                parts.extend(link.announce(key, ttl_seconds=3.0, max_tokens=TOKENS) for link in source.engine.links)
                for part in parts:
                    self._source_part(source, blocks, part)
                    said = [*(ready for _, ready in words), {"tokens": TOKENS}]
                    pause = 0.0 if self.quiet else self.dice.random() / len(said) * 2.0
                    self.net.loop.call_later(pause, say, part, said, pause)

        def say(part: Part, said: list[dict[str, int]], pause: float) -> None:
            """What becomes ready, one thing after the other; the seal comes with the last."""
            if not part.state.ended and not source.dead:
                part.ready(blocks=(blocks,), **said[0])
                if said[1:]:
                    self.net.loop.call_later(pause, say, part, said[1:], pause)
                else:
                    part.seal()

        if self.quiet or self.dice.random() < 0.6:
            announce()
        else:
            self.net.loop.call_later(self.dice.random(), announce)
        roster = source.engine.roster
        await self._take_in(
            target, prompt, lambda link, into: link.expect(ticket, roster, (into,), deadline_seconds=5.0)
        )

    async def _take_in(self, target: Side, prompt: Prompt, begin) -> bool | None:
        """A part on each rank; whole or not, or ``None`` if there was no room."""
        into = target.take()
        if into is None or target.dead:
            return None
        parts: list[Part] = []
        try:
            parts = [
                self._target_part(target, index, begin(link, into)) for index, link in enumerate(target.engine.links)
            ]
            self._tries.append((target, parts))
            for part in parts:
                part.when_ended(lambda ended: self._judge_end(target, parts, prompt, into, ended))
            if not self.quiet and self.dice.random() < 0.2:
                self._again(target, prompt, begin, into)
            if not self.quiet and self.dice.random() < 0.2:
                victim = self.dice.choice(parts)
                self.net.loop.call_later(self.dice.random(), target.engine.links[0].cancel, victim, "meddled")
            await self._ended(target, parts)
        finally:
            self._give_back(target, parts, into)
        done = bool(parts) and all(part.state is State.DONE for part in parts) and not target.dead
        self.whole += done
        return done

    def _again(self, target: Side, prompt: Prompt, begin, into) -> None:
        """The same words once more: it joins."""
        for link in target.engine.links:
            with contextlib.suppress(KVLinkError):
                self._open.append((target, begin(link, into)))

    async def _ended(self, side: Side, parts: list[Part]) -> None:
        bound = self.net.loop.now + 60.0
        while not all(part.state.ended for part in parts) and not side.dead:
            if self.net.loop.now > bound:
                self.findings.append(f"5: {parts} did not end")
                return
            await asyncio.sleep(0.05)

    def _source_part(self, side: Side, blocks, part: Part) -> Part:
        self._open.append((side, part))

        def ended(_part: Part) -> None:
            """The blocks get other content at once: whoever reads on, reads that."""
            if all(other.state.ended for owner, other in self._open if owner is side and other.key == part.key):
                side.engine.fill(Prompt(seed=10_000, tokens=TOKENS), blocks)
                side.free.extend(blocks)

        part.when_ended(ended)
        return part

    def _target_part(self, side: Side, _index: int, part: Part) -> Part:
        self._open.append((side, part))
        return part

    def _give_back(self, side: Side, parts: list[Part], into) -> None:
        """The engine releases what is installed; then the blocks are anybody's."""
        if side.dead or not all(part.state.ended for part in parts):
            return
        for link, part in zip(side.engine.links, parts, strict=False):
            if part.state is State.DONE:
                link.release(part.key)
        for block in into:
            side.engine.fill(SCRUB, [block])
        side.free.extend(into)

    # --- faults -------------------------------------------------------------------------------------------------------

    async def strike(self, delay: float) -> None:
        await asyncio.sleep(delay)
        source, target = self.sides["prefill"], self.sides["decode"]
        if source.dead or target.dead:
            return
        places = [str(self.dice.choice(side.engine.ranks).caches.spec.place) for side in (source, target)]
        match self.dice.choice(("reset", "reset", "crash decode", "crash prefill", "cancel", "deaf", "stop", "fabric")):
            case "reset":
                self.net.reset(*places)
            case "crash decode":
                await self.crash("decode")
            case "crash prefill":
                await self.crash("prefill")
            case "cancel":
                for side, part in self._open:
                    if not part.state.ended and not side.dead and self.dice.random() < 0.3:
                        for link in side.engine.links:
                            link.cancel(part, "meddled")
            case "deaf":
                self.fabric.inject(DropRenewals(end=places[1]))
            case "stop":
                name = self.dice.choice(places)
                self.fabric.stop(name)
                await asyncio.sleep(self.dice.random() * 4.0)
                with contextlib.suppress(KeyError, LookupError):
                    self.fabric.resume(name)
            case "fabric":
                self.net.latency = 0.3
                await asyncio.sleep(self.dice.random() * 3.0)
                self.net.latency = 0.01

    def _meddle(self, held: list[Part], target: Side, offer) -> None:
        match self.dice.random():
            case chance if chance < 0.05 and not target.dead:
                target.engine.links[0].decline(offer, "full local hit")
            case chance if chance < 0.1 and not target.dead:
                target.engine.links[0].renew([offer])

    # --- judging ------------------------------------------------------------------------------------------------------

    def _judge_end(self, side: Side, parts: list[Part], prompt: Prompt, into, part: Part) -> None:
        if side.dead:
            return
        if part.state is State.DONE:
            rank = side.engine.ranks[parts.index(part)]
            if (wrong := rank.content.check(prompt, into)) is not None:
                self.findings.append(f"3: {part.key} is installed, and {wrong}")

    def judge_rest(self) -> None:
        """Every part has ended, nothing is out, nothing is remembered but ledgers, nothing has strayed."""
        for side, part in self._open:
            if not part.state.ended and not side.dead:
                self.findings.append(f"5: {part} has not ended")
        self._judge_ends()
        for name, side in self.sides.items():
            if sorted(side.free) != list(range(BLOCKS)):
                self.findings.append(f"4: {name} has {sorted(side.free)} back, not {BLOCKS}")
            for rank in side.engine.ranks:
                stats = rank.link.stats()
                memory = stats.memory
                out = memory.held + memory.leased + memory.reserved + memory.landed + memory.draining + memory.installed
                if out or stats.parts_live:
                    self.findings.append(f"5: {name} rests with {stats.parts_live} parts and {memory}")
                source = rank.link._driver.source
                if len(source.early.asks) or len(source.early.tickets):
                    self.findings.append(f"5: {name} rests with {len(source.early.asks)} asks parked")
                target = rank.link._driver.target
                if source._works or len(source._leases) or target._works or target._of_attempt:
                    works = (source._works, target._works, target._of_attempt)
                    self.findings.append(f"5: {name} rests with {works}, {len(source._leases)} attempts leased")
            if name == "decode":
                self._judge_strays(side)

    def _judge_ends(self) -> None:
        """The two sides agree: whoever is not sure says *indeterminate*."""
        for side, part in self._open:
            tries = [(target, parts) for target, parts in self._tries if parts[0].key == part.key]
            if side.dead or side.engine.name != "prefill" or any(target.dead for target, _ in tries):
                continue
            whole = any(all(one.state is State.DONE for one in parts) for _, parts in tries)
            some = any(one.state is State.DONE for _, parts in tries for one in parts)
            if (whole and part.state not in (State.DONE, State.INDETERMINATE)) or (
                part.state is State.DONE and not some
            ):
                self.findings.append(f"A: {part} on the source, and {tries} on the targets")

    def _judge_strays(self, side: Side) -> None:
        """What was given back still holds what it was wiped with."""
        for rank in side.engine.ranks:
            for block in range(BLOCKS):
                if rank.content.check_wiped([block]) is not None and rank.content.check(SCRUB, [block]) is not None:
                    self.findings.append(f"1: bytes have strayed into block {block} of {rank.caches.spec.place}")
