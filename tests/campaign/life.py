"""One life of a rank's process, seen from outside: its calls, its memory, its parts, and how they are judged.

The memory is a file that this process holds, so that it can be judged after its owner was killed. Every block has an
owner here: nobody (it holds the canary), or one part. A part that ends gives its blocks back at once, and they are
wiped at once: a byte that lands or is read afterwards is found.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import msgspec
from rank_process import MAX_LINE, map_regions

from campaign.worker import Call, Said
from kvlink import Identity, Offer, Place, Roster, Ticket
from kvlink.cli.bench.content import SOURCE_CANARY, TARGET_CANARY, CacheContent, Prompt
from kvlink.layout import DType, heads_of_rank, standard_spec

IDENTITY = Identity(model="tiny", num_layers=2, num_kv_heads=8, head_dim=32)
BLOCK_SLOTS, NUM_BLOCKS = 64, 160
"""Blocks of 128 KiB in runs of 32 KiB or of 64 bytes."""
ANSWER_SECONDS = 60.0
"""Far more than any answer takes, also on a machine that others load."""
TESTS = Path(__file__).resolve().parent.parent


class GoneError(Exception):
    """The process died."""


@dataclass(eq=False)
class Held:
    """One part of a life, and the blocks it may touch."""

    name: str
    key: str
    blocks: tuple[int, ...]
    prompt: Prompt
    began: float
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    state: str = ""
    code: str = ""
    at: float = 0.0


def begin_process() -> Any:
    """A worker that waits to be opened: starting one takes longer than most of what it is for."""
    # A run's own settings of UCX must not leak in by the environment.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
    paths = [str(TESTS), *filter(None, [inherited.get("PYTHONPATH")])]
    return asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "campaign.worker",
        str(os.getpid()),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**inherited, "PYTHONPATH": os.pathsep.join(paths)},
        limit=MAX_LINE,
    )


class Life:
    """One process, from its opening to its end.

    Attributes:
        findings: what is wrong, in words; shared by the whole campaign.
        rank: which of its engine's ranks it is.
        died: when it was killed, by the monotonic clock; 0 while it lives.
        fell: set once the process has said that it falls.
        last_words: the last line that it printed, once it is dead.
    """

    def __init__(self, process: asyncio.subprocess.Process, findings: list[str], dice: Random) -> None:
        self.process = process
        self.findings = findings
        self.parts: dict[str, Held] = {}
        self.checked_bytes = 0
        self.died = 0.0
        self.fell = asyncio.Event()
        self.roster: Roster
        self.card = ""
        self.address = ""
        self.name = ""
        self._dice = dice
        self._free = list(range(NUM_BLOCKS))
        dice.shuffle(self._free)
        self._releasing: dict[str, asyncio.Task[None]] = {}
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._files: tuple[int, ...] = (os.memfd_create("pool"), os.memfd_create("installs"))
        self.last_words = ""
        self._listening = asyncio.create_task(self._listen())
        self._printed = asyncio.create_task(process.stderr.read())
        self.on_end: Callable[[Life, Held], None] = lambda _life, _held: None

    async def open(
        self, engine: str, incarnation: str, settings: dict[str, Any], rank: int = 0, ranks: int = 1
    ) -> None:
        """Give it a cache and a link over it, as one of the ranks of an engine."""
        self.rank, self.is_source = rank, engine == "prefill"
        self.name = f"{engine}@{incarnation}" if ranks == 1 else f"{engine}/{rank}@{incarnation}"
        place = Place(engine=engine, incarnation=incarnation, pp_rank=0, pp_size=1, tp_rank=rank, tp_size=ranks)
        heads = heads_of_rank(IDENTITY.num_kv_heads, ranks, rank)
        # A target of the source's layout takes long runs, straight into its blocks; of another, packed ones.
        direct = self.is_source or self._dice.random() < 0.5
        spec = standard_spec(
            "nhd" if direct else "hnd",
            identity=IDENTITY,
            place=place,
            layers=tuple(range(IDENTITY.num_layers)),
            heads=heads,
            block_size=BLOCK_SLOTS,
            num_blocks=NUM_BLOCKS,
            dtype=DType.BFLOAT16,
        )
        file, log = (f"/proc/{os.getpid()}/fd/{descriptor}" for descriptor in self._files)
        self._regions = map_regions(Path(file), spec.region_bytes)
        self._content = CacheContent(spec, self._regions, SOURCE_CANARY if self.is_source else TARGET_CANARY)
        self._content.wipe()
        role = "source" if self.is_source else "target"
        seen = msgspec.to_builtins(spec)
        opened = await self.call("open", role=role, file=file, log=log, spec=seen, settings=settings)
        self.address, self.card = opened["address"], opened["card"]
        self._token_bytes = 2 * IDENTITY.num_layers * len(heads) * IDENTITY.head_dim * 2

    async def join(self, cards: list[str]) -> None:
        """Tell it of all ranks of its engine, itself among them."""
        self.roster = Roster.of([bytes.fromhex(card) for card in cards])
        await self.call("join", cards=cards)

    # --- parts ------------------------------------------------------------------------------------------------------

    def take(self, key: str, prompt: Prompt) -> Held | None:
        """Blocks for a part of this prompt, and the part's record; ``None`` if there are not enough, or it is dead."""
        needed = -(-prompt.tokens // BLOCK_SLOTS)
        if self.died or len(self._free) < needed:
            return None
        blocks = tuple(self._free.pop() for _ in range(needed))
        held = Held(f"{key}/{next(self._ids)}", key, blocks, prompt, time.monotonic())
        self.parts[held.name] = held
        if self.is_source:
            self._content.fill(prompt, blocks)
        return held

    def offer(self, held: Held, ttl_seconds: float) -> dict[str, Any]:
        tokens = held.prompt.tokens
        offer = Offer(key=held.key, roster=self.roster, blocks=(held.blocks,), tokens=tokens, ttl_seconds=ttl_seconds)
        return offer.to_params()

    def ticket(self, held: Held, ttl_seconds: float) -> dict[str, Any]:
        tokens = held.prompt.tokens
        ticket = Ticket(key=held.key, roster=self.roster, blocks=((),), tokens=tokens, ttl_seconds=ttl_seconds)
        return ticket.to_params()

    def refused(self, held: Held, why: str) -> None:
        """The verb raised: nothing began, and the blocks are ours again."""
        self._end(held, "REFUSED", why.split(":", 1)[0])

    def _end(self, held: Held, state: str, code: str) -> None:
        held.state, held.code, held.at = state, code, time.monotonic()
        del self.parts[held.name]
        self._judge(held, installed=state == "DONE")
        if state == "DONE" and not self.is_source:
            self._releasing[held.name] = asyncio.create_task(self._release(held))
        else:
            self._give_back(held)
        held.ended.set()
        self.on_end(self, held)

    async def _release(self, held: Held) -> None:
        """What is installed is the engine's until it says that it is done with it."""
        with contextlib.suppress(GoneError):
            await self.call("release", key=held.key)
        self._give_back(held)
        del self._releasing[held.name]

    def _give_back(self, held: Held) -> None:
        self._content.wipe_blocks(held.blocks)
        self._free.extend(held.blocks)

    async def settled(self) -> None:
        """Whatever is being released has been."""
        await asyncio.gather(*self._releasing.values())

    def _judge(self, held: Held, *, installed: bool) -> None:
        if self.is_source:
            fault = self._content.check(held.prompt, held.blocks)
            if fault is not None:
                self.findings.append(f"{self.name}: source blocks of {held.key} were written: {fault}")
        elif installed:
            self.checked_bytes += held.prompt.tokens * self._token_bytes
            fault = self._content.check(held.prompt, held.blocks)
            if fault is not None:
                self.findings.append(f"{self.name}: {held.key} is installed and wrong: {fault}")

    def installs(self) -> list[tuple[str, float]]:
        """(key, when) of each install that the process wrote down before it began it, in order."""
        log = self._files[1]
        lines = os.pread(log, os.fstat(log).st_size, 0).decode().splitlines()
        return [(key, float(at)) for what, key, at in map(str.split, lines) if what == "installing"]

    # --- judgement --------------------------------------------------------------------------------------------------

    def judge_idle(self) -> None:
        """Nobody owns a block: every byte of the memory is the canary."""
        fault = self._content.check_all_wiped()
        if fault is not None:
            self.findings.append(f"{self.name}: idle, and {fault}")

    def judge_dead(self) -> None:
        """What a killed process left: what it installed is right, and what no part of it owned holds the canary."""
        installing = {key for key, _ in self.installs()}
        for held in list(self.parts.values()):
            del self.parts[held.name]
            self._judge(held, installed=held.key in installing)
            self._content.wipe_blocks(held.blocks)
            held.state, held.code, held.at = "DEAD", "", self.died
            held.ended.set()
            self.on_end(self, held)
        self.judge_idle()

    # --- the process ------------------------------------------------------------------------------------------------

    async def call(self, verb: str, /, **arguments: object) -> Any:
        """Raises GoneError if the process is dead or dies, RuntimeError with the text of a typed refusal."""
        call = Call(next(self._ids), verb, arguments)
        answer = self._waiting[call.id] = asyncio.get_running_loop().create_future()
        try:
            if self.died:
                raise GoneError
            self.process.stdin.write(msgspec.json.encode(call) + b"\n")
            async with asyncio.timeout(ANSWER_SECONDS):
                return await answer
        except TimeoutError:
            self.findings.append(f"{self.name} did not answer {verb} within {ANSWER_SECONDS:g} s")
            self._doom()
            raise GoneError from None
        finally:
            self._waiting.pop(call.id, None)

    async def _listen(self) -> None:
        while line := await self.process.stdout.readline():
            said = msgspec.json.decode(line, type=Said)
            if said.fell:
                self.fell.set()
            elif said.ended:
                if (held := self.parts.get(said.ended)) is not None:
                    self._end(held, said.state, said.code)
            elif (answer := self._waiting.get(said.id)) is not None and not answer.done():
                if said.error:
                    answer.set_exception(RuntimeError(said.error))
                else:
                    answer.set_result(said.value)
        self.died = time.monotonic()
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(GoneError())

    async def kill(self) -> None:
        """SIGKILL, if it has not killed itself, and the judgement of what it left."""
        await self._end_process()
        await self.settled()
        self.judge_dead()

    def stop(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    async def close(self) -> None:
        """End the process, whatever state it is in, and let go of its memory."""
        await self._end_process()
        self._regions = []
        for file in self._files:
            os.close(file)
        self._files = ()

    async def _end_process(self) -> None:
        self._doom()
        await self.process.wait()
        await self._listening  # what it said before it died counts
        self.last_words = (await self._printed).decode(errors="replace").strip().rpartition("\n")[2]

    def _doom(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        """Past `asyncio`, which would reap a dead child behind its own back."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, number)
