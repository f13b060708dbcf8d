"""Runs a case over the workers of two sides: chooses blocks, carries claims, decides when, and keeps the tally.

Each round: the source writes its prompts and the target's blocks are checked to be untouched; the timed window, in
which nothing else runs; then every byte is compared and the blocks go back. With one request in flight, a raw move
of the same bytes is timed before or after each transfer, in turn.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, Final, Protocol, TypeVar

from kvlink.cli.bench import messages as m
from kvlink.cli.bench.blocks import BlockPool, pool_blocks
from kvlink.cli.bench.case import Case, Round, SideName
from kvlink.cli.bench.ranks import Wiring, count_runs, side_specs
from kvlink.cli.bench.report import Report, Runs, make_report
from kvlink.cli.bench.tally import Pair, Span, Tally, Transfer, Window, median
from kvlink.cli.bench.workers import Worker
from kvlink.errors import KVLinkError, PeerLostError
from kvlink.protocol import Again, RetryPolicy, again
from kvlink.wire import error_to_info, info_to_error

T = TypeVar("T")

USUAL_SECONDS: Final = 0.05
"""What a transfer is taken to last while none has been measured."""
LIMITS: Final = {
    "ucx": ("ucx_get", "raw gets of the same runs: same error mode, progress mode and pages, alternating"),
    "stream": (
        "socket",
        "plain sockets, as many as lanes, between memory in one piece: same bytes and pages, alternating",
    ),
    "shared": ("memcpy", "the same plan copied by one thread within one process, from ordinary pools, alternating"),
    "loopback": ("memcpy", "the same plan copied by one thread, alternating"),
}
"""What a transfer is paired with, by transport: name and how."""


class Screen(Protocol):
    """Who watches."""

    def stage(self, doing: str, finished: int) -> None:
        """What is being done now, and how many requests are finished."""

    def fault(self, words: str) -> None:
        """Something is wrong; the bench goes on and will fail."""


class Engine:
    """One engine of a side: its workers, and the block pool that all its ranks share. ``number`` tells it apart."""

    def __init__(self, case: Case, name: SideName, workers: Sequence[Worker], number: int = 0) -> None:
        self.name = name
        self.number = number
        self.incarnation = secrets.token_hex(8)
        self.pool = BlockPool(pool_blocks(case, name), case.seed + number)
        self.workers = tuple(workers)
        self.ranks_of = _deal(case.side(name).ranks, len(workers))
        self.specs = side_specs(case, name, self.pool.num_blocks, self.incarnation, number)

    async def ask(self, command: m.AnyCommand, reply: type[m.ReplyT]) -> list[m.ReplyT]:
        """Have every worker do ``command`` at once; the first error ends the wait for all."""
        return await together(worker.call(command, reply) for worker in self.workers)

    async def open(self, case: Case, num_blocks: dict[SideName, int]) -> list[m.Opened]:
        """Open the links of all ranks; ``num_blocks`` are both pools'."""
        return await together(
            worker.call(
                m.Open(
                    case=case, side=self.name, ranks=ranks, num_blocks=num_blocks, incarnation=self.incarnation,
                    engine=self.number,
                ),
                m.Opened,
            )
            for worker, ranks in zip(self.workers, self.ranks_of, strict=True)
        )  # fmt: skip


class _Request:
    """One request under way: its two engines, and its blocks on both."""

    def __init__(self, index: int, tokens: int, case: Case, source: Engine, target: Engine) -> None:
        self.index = index
        self.source = source
        self.target = target
        self.source_blocks = source.pool.take(case.source.blocks_for(tokens))
        self.target_blocks = target.pool.take(case.target.blocks_for(tokens))
        self.transfer: Transfer | None = None
        self.verified = False
        self.life = 0


KillAndSpawn = Callable[[], Awaitable[Sequence[Worker]]]
"""Kills an engine's processes; returns those started in their place."""


class Conductor:
    """Runs one case, once."""

    def __init__(
        self,
        case: Case,
        sources: Sequence[Engine],
        targets: Sequence[Engine],
        screen: Screen,
        kill_target: KillAndSpawn | None = None,
    ) -> None:
        self._kill_target = kill_target
        self._source_cards: list[tuple[bytes, ...]] = []
        self._case = case
        self._sources = sources
        self._targets = targets
        self._engines = (*sources, *targets)
        self._screen = screen
        self._wiring = Wiring(sources[0].specs, targets[0].specs)
        self._slots = asyncio.Semaphore(case.concurrency)
        self._policy = RetryPolicy(max_tries=case.tries)
        self._chance = random.Random(case.seed)  # noqa: S311 - spreads retries; keeps no secret
        self.tally = Tally()

    async def run(self) -> Report:
        """Run the case to its end. A request that fails is counted; the rest go on.

        Raises:
            KVLinkError: a worker could not do what it was told, or is gone.
        """
        opened = await self._open()
        finished = 0
        for batch in self._case.rounds():
            self._screen.stage("warming up" if batch.warmup else "moving", finished)
            await self._round(batch)
            finished += len(batch.requests)
        self._screen.stage("checking what must be untouched", finished)
        for target in self._targets:
            self._note(await target.ask(m.Sweep(), m.Checked))
        report = make_report(self._case, self.tally, opened, self._runs(), LIMITS[self._case.transport])
        for engine in reversed(self._engines):
            await engine.ask(m.Close(verified=self.tally.sound), m.Done)
        return report

    async def _open(self) -> m.Opened:
        self._screen.stage("opening", 0)
        num_blocks = self._num_blocks()
        opened = await together(engine.open(self._case, num_blocks) for engine in self._engines)
        self.tally.open_seconds = max(worker.seconds for workers in opened for worker in workers)
        clocks = {worker.clock for workers in opened for worker in workers}
        self.tally.one_clock = len(clocks) == 1 and "" not in clocks
        cards = [_cards(workers) for workers in opened]
        self._source_cards, target_cards = cards[: len(self._sources)], cards[len(self._sources) :]
        await together(
            source.ask(m.Meet(source=own, target=target_cards[number % len(target_cards)]), m.Done)
            for number, (source, own) in enumerate(zip(self._sources, self._source_cards, strict=True))
        )
        await together(
            self._meet_sources(target, own) for target, own in zip(self._targets, target_cards, strict=True)
        )  # fmt: skip
        if self._case.limit_check:
            addresses = await self._sources[0].ask(m.ProbeAddresses(), m.Addresses)
            flat = tuple(address for worker in addresses for address in worker.addresses)
            await self._targets[0].ask(m.ProbeConnect(source=flat), m.Done)
        return opened[-1][0]

    async def _meet_sources(self, target: Engine, own: tuple[bytes, ...]) -> None:
        """Tell a target of all sources. It reads one, its number's, unless it is the only target."""
        first, *more = self._source_cards if len(self._targets) == 1 else [self._source_of(target.number)]
        await target.ask(m.Meet(source=first, target=own, more_sources=tuple(more)), m.Done)

    def _source_of(self, index: int) -> tuple[bytes, ...]:
        return self._source_cards[index % len(self._source_cards)]

    def _num_blocks(self) -> dict[SideName, int]:
        return {engine.name: engine.pool.num_blocks for engine in (self._sources[0], self._targets[0])}

    # --- one round --------------------------------------------------------------------------------------------------

    async def _round(self, batch: Round) -> None:
        requests = [self._take_blocks(index) for index in batch.requests]
        for request in requests:
            source = request.source.ask(m.Prepare(request=request.index, blocks=request.source_blocks), m.Checked)
            target = request.target.ask(m.Prepare(request=request.index, blocks=request.target_blocks), m.Checked)
            _, checked = await together([source, target])
            self._note(checked)
        raw_first = requests[0].index % 2 == 0
        raw = await self._raw(requests[0]) if self._case.limit_check and raw_first else None
        window = await self._window(requests)
        for request in requests:
            await self._finish(request)
        if self._case.limit_check and not raw_first:
            raw = await self._raw(requests[0])
        for request in requests:
            request.source.pool.give_back(request.source_blocks)
            request.target.pool.give_back(request.target_blocks)
        self._record(batch, requests, window, raw)

    def _take_blocks(self, index: int) -> _Request:
        source, target = self._sources[index % len(self._sources)], self._targets[index % len(self._targets)]
        return _Request(index, self._case.prompts[index], self._case, source, target)

    async def _raw(self, request: _Request) -> float:
        """Seconds of a raw move of the request's bytes into its own blocks, which hold the canary again afterwards."""
        probe = m.Probe(request=request.index, source_blocks=request.source_blocks, target_blocks=request.target_blocks)
        probed = await request.target.ask(probe, m.Probed)
        await request.target.ask(m.Wipe(request=request.index, blocks=request.target_blocks), m.Done)
        return max(worker.seconds for worker in probed)

    async def _window(self, requests: Sequence[_Request]) -> Window | None:
        """Move all requests, at most ``concurrency`` at a time; ``None`` if none of them came through."""
        await together(engine.ask(m.Begin(), m.Done) for engine in self._engines)
        for request in requests:
            provide = m.Provide(request=request.index, blocks=request.source_blocks)
            await request.source.ask(provide, m.Done)
        await together(self._move(request) for request in requests)
        settled = await together(request.source.ask(m.Settle(request=request.index), m.Settled) for request in requests)
        source = await together(engine.ask(m.End(), m.Spent) for engine in self._sources)
        target = await together(engine.ask(m.End(), m.Spent) for engine in self._targets)
        transfers = tuple(request.transfer for request in requests if request.transfer is not None)
        if not transfers:
            return None
        return Window(
            transfers=transfers,
            exposed_seconds=tuple(
                self._exposed(request.transfer, workers)
                for request, workers in zip(requests, settled, strict=True)
                if request.transfer is not None and self._case.layer_seconds is not None
            ),
            source_cpu_seconds=sum(spent.cpu_seconds for workers in source for spent in workers),
            target_cpu_seconds=sum(spent.cpu_seconds for workers in target for spent in workers),
        )

    def _exposed(self, transfer: Transfer, settled: Sequence[m.Settled]) -> float:
        """From the last layer of all ranks to the last rank's install or, on two clocks, its source's knowing of it."""
        computed = max(worker.computed_at_seconds or 0.0 for worker in settled)
        heard = max(worker.heard_at_seconds for worker in settled)
        return (transfer.span.end_seconds if self.tally.one_clock else heard) - computed

    async def _move(self, request: _Request) -> None:
        """Try until it is installed on every rank, or the policy ends it. Its time is over all tries."""
        tries: list[m.Moved] = []
        async with self._slots:
            while request.transfer is None:
                moved = await self._try(request)
                tries += moved
                error = next((info_to_error(worker.error) for worker in moved if worker.error is not None), None)
                if error is not None:
                    pause = self._pause(error, tries)
                    await request.source.ask(m.Abandon(request=request.index, why="the target failed"), m.Done)
                    if pause is None:
                        self._fault(f"request {request.index} failed: {error}")
                        return
                    await asyncio.sleep(pause)
                    await self._start_over(request)
                    continue
                request.transfer = Transfer(
                    request=request.index,
                    payload_bytes=self._case.request_bytes(request.index),
                    span=Span.over(tries),
                    moves=tuple(move for worker in moved for move in worker.ranks),
                )

    async def _try(self, request: _Request) -> list[m.Moved]:
        command = m.Move(
            request=request.index,
            source_blocks=request.source_blocks,
            target_blocks=request.target_blocks,
            life=request.life,
            engine=request.source.number if len(self._targets) == 1 else 0,
        )
        every = self._case.kill_target_every
        if self._kill_target is None or every is None or request.life or (request.index + 1) % every:
            return await request.target.ask(command, m.Moved)
        return await self._try_and_die(request, command, self._kill_target)

    async def _try_and_die(self, request: _Request, command: m.Move, kill: KillAndSpawn) -> list[m.Moved]:
        """Kill the target's processes at some moment of the move; one that is done before gets away."""
        usual = median(transfer.span.seconds for transfer in self.tally.transfers) or USUAL_SECONDS
        start = time.monotonic()
        moving = asyncio.create_task(request.target.ask(command, m.Moved))
        await asyncio.wait({moving}, timeout=usual * self._chance.random())
        if moving.done():
            return await moving
        workers = await kill()
        await asyncio.gather(moving, return_exceptions=True)
        request.life += 1
        target, source = request.target, request.source
        target.workers, target.incarnation = tuple(workers), secrets.token_hex(8)
        opened = await target.open(self._case, self._num_blocks())
        meet = m.Meet(source=self._source_cards[0], target=_cards(opened))
        await together([source.ask(meet, m.Done), target.ask(meet, m.Done)])
        lost = error_to_info(PeerLostError("the target was killed, as asked for"))
        dead = m.Moved(start_seconds=start, end_seconds=time.monotonic(), ranks=(), error=lost)
        return [dead] * len(workers)

    def _pause(self, error: KVLinkError, tries: Sequence[m.Moved]) -> float | None:
        """Before the next try, or ``None`` if there is none: the source stays the same."""
        if again(error) is not Again.HERE:
            return None
        elapsed, count = Span.over(tries).seconds, len(tries) // len(self._targets[0].workers)
        return self._policy.pause(error, tries=count, elapsed_seconds=elapsed, draw=self._chance.random())

    async def _start_over(self, request: _Request) -> None:
        """A request is tried again whole, on all ranks, as an engine would: siblings that installed let go of it.

        Every part has ended, so every try is cut off: its blocks go back, and fresh ones are taken.
        """
        self.tally.retried += 1
        await request.source.ask(m.Settle(request=request.index), m.Settled)
        await request.target.ask(m.Wipe(request=request.index, blocks=request.target_blocks), m.Done)
        request.target.pool.give_back(request.target_blocks)
        request.target_blocks = request.target.pool.take(len(request.target_blocks))
        provide = m.Provide(request=request.index, blocks=request.source_blocks, life=request.life)
        await request.source.ask(provide, m.Done)

    async def _finish(self, request: _Request) -> None:
        """Compare every byte of what was installed, then give the blocks back to the canary."""
        if request.transfer is not None:
            verify = m.Verify(request=request.index, blocks=request.target_blocks)
            request.verified = self._note(await request.target.ask(verify, m.Checked))
        await request.target.ask(m.Wipe(request=request.index, blocks=request.target_blocks), m.Done)

    # --- the tally --------------------------------------------------------------------------------------------------

    def _record(self, batch: Round, requests: Sequence[_Request], window: Window | None, raw: float | None) -> None:
        done = [request.transfer for request in requests if request.transfer is not None]
        if not batch.warmup:
            self.tally.completed += len(done)
            self.tally.verified += sum(request.verified for request in requests)
            self.tally.failed += len(requests) - len(done)
        if self.tally.cold is None:
            self.tally.cold = done[0] if done else None
            if len(requests) == 1:
                return
        if batch.warmup or window is None:
            return
        self.tally.windows.append(window)
        self.tally.exposed += window.exposed_seconds
        if raw is not None:
            pair = Pair(
                payload_bytes=window.payload_bytes,
                transfer_seconds=window.transfers[0].span.seconds,
                raw_seconds=raw,
            )
            self.tally.pairs.append(pair)

    def _note(self, checked: Sequence[m.Checked]) -> bool:
        """Record the faults found; whether there were none."""
        faults = [answer.fault for answer in checked if answer.fault is not None]
        for fault in faults:
            self._fault(fault)
        return not faults

    def _fault(self, words: str) -> None:
        self.tally.faults.append(words)
        self._screen.fault(words)

    def _runs(self) -> Runs:
        """Runs of the measured requests, from their plans over blocks that do not touch."""
        count = payload = 0
        lengths = self._case.prompts[self._case.warmup :]
        counted: dict[int, tuple[int, int]] = {}
        for tokens in lengths:
            if tokens not in counted:
                counted[tokens] = self._runs_of(tokens)
            count += counted[tokens][0]
            payload += counted[tokens][1]
        return Runs(count=count // len(lengths), bytes=payload // count)

    def _runs_of(self, tokens: int) -> tuple[int, int]:
        source = tuple(range(self._case.source.blocks_for(tokens)))
        target = tuple(range(self._case.target.blocks_for(tokens)))
        plans = [plan for _, plan in self._wiring.plans(tokens, source, target)]
        return sum(map(count_runs, plans)), sum(plan.total_bytes for plan in plans)


async def together(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all at once and return what each returned; the first error ends the others and is raised bare."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in work]
    except BaseExceptionGroup as errors:
        first: BaseException = errors
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from None
    return [task.result() for task in tasks]


def _deal(ranks: int, workers: int) -> list[tuple[int, ...]]:
    """Rank positions of each worker: all in one, or one in each."""
    return [tuple(range(ranks))] if workers == 1 else [(position,) for position in range(ranks)]


def _cards(opened: Sequence[m.Opened]) -> tuple[bytes, ...]:
    return tuple(card for worker in opened for card in worker.cards)
