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
    """One side: its workers, and the block pool that all its ranks share."""

    def __init__(self, case: Case, name: SideName, workers: Sequence[Worker]) -> None:
        self.name = name
        self.incarnation = secrets.token_hex(8)
        self.pool = BlockPool(pool_blocks(case, name), case.seed)
        self.workers = tuple(workers)
        self.ranks_of = _deal(case.side(name).ranks, len(workers))
        self.specs = side_specs(case, name, self.pool.num_blocks, self.incarnation)

    async def ask(self, command: m.AnyCommand, reply: type[m.ReplyT]) -> list[m.ReplyT]:
        """Have every worker do ``command`` at once; the first error ends the wait for all."""
        return await together(worker.call(command, reply) for worker in self.workers)

    async def open(self, case: Case, num_blocks: dict[SideName, int]) -> list[m.Opened]:
        """Open the links of all ranks; ``num_blocks`` are both pools'."""
        return await together(
            worker.call(
                m.Open(
                    case=case, side=self.name, ranks=ranks, num_blocks=num_blocks, incarnation=self.incarnation
                ),
                m.Opened,
            )
            for worker, ranks in zip(self.workers, self.ranks_of, strict=True)
        )  # fmt: skip


class _Request:
    """One request under way: its blocks on both sides."""

    def __init__(self, index: int, source_blocks: tuple[int, ...], target_blocks: tuple[int, ...]) -> None:
        self.index = index
        self.source_blocks = source_blocks
        self.target_blocks = target_blocks
        self.transfer: Transfer | None = None
        self.verified = False
        self.life = 0


KillAndSpawn = Callable[[], Awaitable[Sequence[Worker]]]
"""Kills an engine's processes; returns those started in their place."""


class Conductor:
    """Runs one case, once."""

    def __init__(
        self, case: Case, source: Engine, target: Engine, screen: Screen, kill_target: KillAndSpawn | None = None
    ) -> None:
        self._kill_target = kill_target
        self._source_cards: tuple[bytes, ...] = ()
        self._case = case
        self._source = source
        self._target = target
        self._screen = screen
        self._wiring = Wiring(source.specs, target.specs)
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
        self._note(await self._target.ask(m.Sweep(), m.Checked))
        report = make_report(self._case, self.tally, opened, self._runs(), LIMITS[self._case.transport])
        for engine in (self._target, self._source):
            await engine.ask(m.Close(verified=self.tally.sound), m.Done)
        return report

    async def _open(self) -> m.Opened:
        self._screen.stage("opening", 0)
        engines = (self._source, self._target)
        num_blocks = {engine.name: engine.pool.num_blocks for engine in engines}
        source, target = await together(engine.open(self._case, num_blocks) for engine in engines)
        self.tally.open_seconds = max(opened.seconds for opened in (*source, *target))
        self._source_cards = _cards(source)
        meet = m.Meet(source=self._source_cards, target=_cards(target))
        await together([self._source.ask(meet, m.Done), self._target.ask(meet, m.Done)])
        if self._case.limit_check:
            addresses = await self._source.ask(m.ProbeAddresses(), m.Addresses)
            flat = tuple(address for worker in addresses for address in worker.addresses)
            await self._target.ask(m.ProbeConnect(source=flat), m.Done)
        return target[0]

    # --- one round --------------------------------------------------------------------------------------------------

    async def _round(self, batch: Round) -> None:
        requests = [self._take_blocks(index) for index in batch.requests]
        for request in requests:
            source = self._source.ask(m.Prepare(request=request.index, blocks=request.source_blocks), m.Checked)
            target = self._target.ask(m.Prepare(request=request.index, blocks=request.target_blocks), m.Checked)
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
            self._source.pool.give_back(request.source_blocks)
            self._target.pool.give_back(request.target_blocks)
        self._record(batch, requests, window, raw)

    def _take_blocks(self, index: int) -> _Request:
        tokens = self._case.prompts[index]
        source = self._source.pool.take(self._case.source.blocks_for(tokens))
        return _Request(index, source, self._target.pool.take(self._case.target.blocks_for(tokens)))

    async def _raw(self, request: _Request) -> float:
        """Seconds of a raw move of the request's bytes into its own blocks, which hold the canary again afterwards."""
        probe = m.Probe(request=request.index, source_blocks=request.source_blocks, target_blocks=request.target_blocks)
        probed = await self._target.ask(probe, m.Probed)
        await self._target.ask(m.Wipe(request=request.index, blocks=request.target_blocks), m.Done)
        return max(worker.seconds for worker in probed)

    async def _window(self, requests: Sequence[_Request]) -> Window | None:
        """Move all requests, at most ``concurrency`` at a time; ``None`` if none of them came through."""
        await together([self._source.ask(m.Begin(), m.Done), self._target.ask(m.Begin(), m.Done)])
        for request in requests:
            provide = m.Provide(request=request.index, blocks=request.source_blocks)
            await self._source.ask(provide, m.Done)
        await together(self._move(request) for request in requests)
        await together(self._source.ask(m.Settle(request=request.index), m.Settled) for request in requests)
        source, target = await together([self._source.ask(m.End(), m.Spent), self._target.ask(m.End(), m.Spent)])
        transfers = tuple(request.transfer for request in requests if request.transfer is not None)
        if not transfers:
            return None
        return Window(
            transfers=transfers,
            source_cpu_seconds=sum(spent.cpu_seconds for spent in source),
            target_cpu_seconds=sum(spent.cpu_seconds for spent in target),
        )

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
                    await self._source.ask(m.Abandon(request=request.index, why="the target failed"), m.Done)
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
        )
        every = self._case.kill_target_every
        if self._kill_target is None or every is None or request.life or (request.index + 1) % every:
            return await self._target.ask(command, m.Moved)
        return await self._try_and_die(request, command, self._kill_target)

    async def _try_and_die(self, request: _Request, command: m.Move, kill: KillAndSpawn) -> list[m.Moved]:
        """Kill the target's processes at some moment of the move; one that is done before gets away."""
        usual = median(transfer.span.seconds for transfer in self.tally.transfers) or USUAL_SECONDS
        start = time.monotonic()
        moving = asyncio.create_task(self._target.ask(command, m.Moved))
        await asyncio.wait({moving}, timeout=usual * self._chance.random())
        if moving.done():
            return await moving
        workers = await kill()
        await asyncio.gather(moving, return_exceptions=True)
        request.life += 1
        self._target.workers, self._target.incarnation = tuple(workers), secrets.token_hex(8)
        num_blocks = {engine.name: engine.pool.num_blocks for engine in (self._source, self._target)}
        opened = await self._target.open(self._case, num_blocks)
        meet = m.Meet(source=self._source_cards, target=_cards(opened))
        await together([self._source.ask(meet, m.Done), self._target.ask(meet, m.Done)])
        lost = error_to_info(PeerLostError("the target was killed, as asked for"))
        dead = m.Moved(start_seconds=start, end_seconds=time.monotonic(), ranks=(), error=lost)
        return [dead] * len(workers)

    def _pause(self, error: KVLinkError, tries: Sequence[m.Moved]) -> float | None:
        """Before the next try, or ``None`` if there is none: the source stays the same."""
        if again(error) is not Again.HERE:
            return None
        elapsed, count = Span.over(tries).seconds, len(tries) // len(self._target.workers)
        return self._policy.pause(error, tries=count, elapsed_seconds=elapsed, draw=self._chance.random())

    async def _start_over(self, request: _Request) -> None:
        """A request is tried again whole, on all ranks, as an engine would: siblings that installed let go of it.

        Every part has ended, so every try is cut off: its blocks go back, and fresh ones are taken.
        """
        self.tally.retried += 1
        await self._source.ask(m.Settle(request=request.index), m.Settled)
        await self._target.ask(m.Wipe(request=request.index, blocks=request.target_blocks), m.Done)
        self._target.pool.give_back(request.target_blocks)
        request.target_blocks = self._target.pool.take(len(request.target_blocks))
        provide = m.Provide(request=request.index, blocks=request.source_blocks, life=request.life)
        await self._source.ask(provide, m.Done)

    async def _finish(self, request: _Request) -> None:
        """Compare every byte of what was installed, then give the blocks back to the canary."""
        if request.transfer is not None:
            verify = m.Verify(request=request.index, blocks=request.target_blocks)
            request.verified = self._note(await self._target.ask(verify, m.Checked))
        await self._target.ask(m.Wipe(request=request.index, blocks=request.target_blocks), m.Done)

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
