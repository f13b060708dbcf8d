"""Starts the two halves where they belong, runs the conductor over them, and writes the result."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, get_args

import msgspec

from kvlink.cli.bench import peers, table
from kvlink.cli.bench.blocks import check_memory, pool_blocks
from kvlink.cli.bench.case import Case, SideName
from kvlink.cli.bench.conductor import Conductor, Engine
from kvlink.cli.bench.half import Access, Commons, Half
from kvlink.cli.bench.options import Options
from kvlink.cli.bench.ranks import check_claims
from kvlink.cli.bench.report import Report
from kvlink.cli.bench.screen import Screen
from kvlink.cli.bench.serve import Lender, bench_secret, borrow, split_address
from kvlink.cli.bench.workers import ChildWorker, LocalWorker, Worker, own_environment
from kvlink.cli.output import check_writable, write_result
from kvlink.errors import CancelledError
from kvlink.transports.faults import RandomFaults
from kvlink.transports.loopback_fabric import LoopbackFabric

T = TypeVar("T")
LOOPBACK_HOST = "127.0.0.1"


def run(options: Options) -> bool:
    """Run a bench, or the serving half of one; whether it was done and verified.

    Raises:
        ConfigError: an argument is wrong.
        UnavailableError: the machine lacks something.
        KVLinkError: it could not be run to its end.
    """
    if options.serve is not None:
        return _run_loop(_serve(options, options.serve))
    if options.json not in (None, "-"):
        check_writable("--json", Path(options.json))
    peers.check(options.compare, options.peers_python)
    report = run_case(options)
    try:
        if options.compare:
            report = _beside_peers(report, options)
    finally:  # what was measured is kept, whatever becomes of the comparison
        write_result(report, options.json, partial(table.show, report))
    return report.verified


def _beside_peers(report: Report, options: Options) -> Report:
    compared = peers.compare(
        options.compare, run_bytes=report.runs.bytes, transport=report.case.transport, python=options.peers_python,
        quiet=options.quiet,
    )  # fmt: skip
    return msgspec.structs.replace(report, peers=compared)


def check_case(options: Options) -> None:
    """Refuse what cannot be run before anything is started.

    Raises:
        ConfigError: a claim or a pool would be too large.
        UnavailableError: there is not enough memory.
    """
    pools = {name: pool_blocks(options.case, name) for name in get_args(SideName)}
    check_claims(options.case, pools["source" if options.case.flow == "fetch" else "target"])
    check_memory(options.case, ("source", "target") if options.connect is None else ("target",))


def run_case(options: Options) -> Report:
    """Run one case to its end.

    Raises:
        As `run`.
    """
    check_case(options)
    return _run_loop(_conduct(options))


async def _serve(options: Options, address: str) -> bool:
    lender = Lender(bench_secret(open_mode=options.open_mode), stay=options.stay)
    return await lender.serve(*split_address(address), Screen(0, quiet=options.quiet).say)


async def _conduct(options: Options) -> Report:
    case, environment = options.case, own_environment()
    async with AsyncExitStack() as stack:
        screen = stack.enter_context(Screen(len(case.prompts), quiet=options.quiet))
        if case.transport == "loopback":
            workers = _local_workers(case, stack)
        elif options.connect is not None:
            workers = await _distant_workers(options, options.connect, stack)
        else:
            workers = await _child_workers(options, stack, environment)
        sources, targets = (_engines(case, name, workers[name]) for name in ("source", "target"))
        kill = None if case.kill_target_every is None else partial(_kill_and_spawn, targets[0], stack, environment)
        return await Conductor(case, sources, targets, screen, kill).run()


def _engines(case: Case, name: SideName, workers: Sequence[Worker]) -> list[Engine]:
    """Deal a side's workers to its engines, which have equally many."""
    each = len(workers) // case.engines_of(name)
    return [
        Engine(case, name, workers[number * each : (number + 1) * each], number)
        for number in range(case.engines_of(name))
    ]


_Workers = dict[SideName, list[Worker]]


def _local_workers(case: Case, stack: AsyncExitStack) -> _Workers:
    """Both halves in this process."""
    access = Access(host=LOOPBACK_HOST, secret=secrets.token_hex(32))
    commons = Commons(LoopbackFabric(case.seed, _faults(case)))
    workers: _Workers = {"source": [], "target": []}
    for own in workers.values():
        half = Half(access, commons)
        stack.push_async_callback(half.aclose)
        own.append(LocalWorker(half))
    return workers


def _faults(case: Case) -> list[RandomFaults]:
    if case.fault is None:
        return []
    return [
        RandomFaults(drop=case.fault.drop, corrupt=case.fault.corrupt, delay=case.fault.delay, seed=case.seed),
    ]


async def _kill_and_spawn(engine: Engine, stack: AsyncExitStack, environment: Mapping[str, str]) -> list[Worker]:
    """Kill an engine's children, and start as many anew."""
    for worker in engine.workers:
        if isinstance(worker, ChildWorker):
            worker.process.kill()
            await worker.process.wait()
    workers: list[Worker] = []
    for index in range(len(engine.workers)):
        child = await ChildWorker.spawn(f"{engine.name} process {index}", LOOPBACK_HOST, environment)
        stack.push_async_callback(child.aclose)
        workers.append(child)
    return workers


async def _child_workers(options: Options, stack: AsyncExitStack, environment: Mapping[str, str]) -> _Workers:
    """Each engine in a child of its own, or each rank."""
    workers: _Workers = {"source": [], "target": []}
    for side, own in workers.items():
        for index in range(_count(options, side) * options.case.engines_of(side)):
            child = await ChildWorker.spawn(f"{side} process {index}", LOOPBACK_HOST, environment)
            stack.push_async_callback(child.aclose)
            own.append(child)
    return workers


async def _distant_workers(options: Options, address: str, stack: AsyncExitStack) -> _Workers:
    """The source half at whoever serves on ``address``, the target half in children here."""
    secret = bench_secret(open_mode=options.open_mode)
    host, port = split_address(address)
    workers: _Workers = {"source": [], "target": []}
    own_host = LOOPBACK_HOST
    for index in range(_count(options, "source")):
        worker, own_host = await borrow(f"source process {index}", host, port, secret)
        stack.push_async_callback(worker.aclose)
        workers["source"].append(worker)
    for index in range(_count(options, "target")):
        child = await ChildWorker.spawn(f"target process {index}", own_host, os.environ, open_mode=options.open_mode)
        stack.push_async_callback(child.aclose)
        workers["target"].append(child)
    return workers


def _count(options: Options, side: SideName) -> int:
    return options.case.side(side).ranks if options.process_per_rank else 1


def _run_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work``; being told to end cancels it, so that what it started ends too."""

    async def main() -> T:
        task = asyncio.current_task()
        if task is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await work

    try:
        return asyncio.run(main())
    except asyncio.CancelledError:
        raise CancelledError("ended by a signal before it was done") from None
