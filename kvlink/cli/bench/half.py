"""A worker's half of a bench: the ranks of one side that live in this process, and what is asked of them."""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final, get_args

import kvlink
from kvlink import limits
from kvlink.cli.bench import messages as m
from kvlink.cli.bench.case import HOST, Case, SideName
from kvlink.cli.bench.content import SOURCE_CANARY, TARGET_CANARY, CacheContent, Fault, Prompt
from kvlink.cli.bench.gpu_pool import GpuPool
from kvlink.cli.bench.probes import LocalProber, Prober, ProbeServer, UcxProber
from kvlink.cli.bench.ranks import Wiring, side_specs
from kvlink.cli.bench.socket_probes import SocketProber, SocketServer
from kvlink.errors import ClosedError, KVLinkError
from kvlink.relayout import Gpu
from kvlink.transports.base import Transport
from kvlink.transports.host import host_id_or_none
from kvlink.transports.loopback import LoopbackTransport
from kvlink.transports.loopback_fabric import LoopbackFabric
from kvlink.wire import Address, ErrorInfo, error_to_info, request_key

DEADLINE_SECONDS: Final = 120.0
"""A request's own clock, far above what the largest one takes anywhere."""
CLAIM_SECONDS: Final = 600.0
"""Time to live of offers and announcements: a conductor that is slow to verify must not expire them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Where a worker's links listen, and how peers prove themselves: without ``secret``, the environment says."""

    host: str
    open_mode: bool = False
    secret: str | None = None


@dataclass(slots=True)
class Commons:
    """What the two halves of a loopback run have in common, being one process."""

    fabric: LoopbackFabric
    caches: dict[SideName, list[kvlink.Caches]] = field(default_factory=dict)


@dataclass(slots=True)
class Rank:
    """One rank: its cache (of a GPU's, the mirror), its content and its link."""

    caches: kvlink.Caches
    content: CacheContent
    link: kvlink.Link
    pool: GpuPool | None

    def publish(self, offer: kvlink.Offer) -> kvlink.Part:
        """On a GPU, what was filled may still be on its way: its event is told."""
        if self.pool is None:
            return self.link.publish(offer)
        with self.pool.written() as event:
            return self.link.publish(offer, event=event)

    def ready(self, part: kvlink.Part, blocks: m.Blocks, tokens: int, layers: int | None = None) -> None:
        """Likewise."""
        with nullcontext() if self.pool is None else self.pool.written() as event:
            part.ready(blocks=(blocks,), tokens=tokens, layers=layers, event=event)

    @property
    def stream(self) -> int | None:
        """On a GPU, whose work on the target's blocks comes before a fetch."""
        return None if self.pool is None else self.pool.stream


@dataclass(slots=True)
class _Opened:
    """What `m.Open` made."""

    case: Case
    side: SideName
    positions: tuple[int, ...]
    ranks: list[Rank]
    wiring: Wiring
    secret: bytes | None
    prober: Prober | None = None
    rosters: dict[SideName, kvlink.Roster] = field(default_factory=dict)
    more_sources: list[kvlink.Roster] = field(default_factory=list)
    engines: dict[int, int] = field(default_factory=dict)
    parts: dict[int, list[kvlink.Part]] = field(default_factory=dict)
    lives: dict[int, int] = field(default_factory=dict)
    computing: dict[int, asyncio.Task[float]] = field(default_factory=dict)


class Half:
    """Answers commands, one method each. Its links live until `m.Close` or `aclose`.

    Args:
        access: how its links listen.
        commons: what both halves share, where they live in one process.
    """

    def __init__(self, access: Access, commons: Commons | None = None) -> None:
        self.verified = False
        self._access = access
        self._commons = commons
        self._state: _Opened | None = None
        self._stack = AsyncExitStack()
        self._cpu_at_begin = 0.0
        self._methods: dict[type[m.Command], Callable[[Any], Awaitable[m.AnyReply]]] = {
            m.Open: self._open,
            m.Meet: self._meet,
            m.Prepare: self._prepare,
            m.Begin: self._begin,
            m.End: self._end,
            m.Provide: self._provide,
            m.Settle: self._settle,
            m.Move: self._move,
            m.Abandon: self._abandon,
            m.Verify: self._verify,
            m.Wipe: self._wipe,
            m.Sweep: self._sweep,
            m.ProbeAddresses: self._probe_addresses,
            m.ProbeConnect: self._probe_connect,
            m.Probe: self._probe,
            m.Close: self._close,
        }

    async def answer(self, command: m.AnyCommand) -> m.AnyReply:
        """Do what ``command`` asks.

        Raises:
            KVLinkError: it could not be done. A request that failed is no error here; its reply says so.
        """
        return await self._methods[type(command)](command)

    async def aclose(self) -> None:
        """Close the links. Idempotent."""
        for computing in () if self._state is None else self._state.computing.values():
            computing.cancel()
        await self._stack.aclose()

    @property
    def _opened(self) -> _Opened:
        if self._state is None:
            raise ClosedError("the worker was told to do something before it was told to open")
        return self._state

    # --- opening and closing --------------------------------------------------------------------------------------

    async def _open(self, command: m.Open) -> m.Opened:
        case, blocks = command.case, command.num_blocks
        wiring = Wiring(
            *(
                side_specs(case, side, blocks[side], command.incarnation, command.engine)
                for side in ("source", "target")
            )
        )
        specs = wiring.sources if command.side == "source" else wiring.targets
        config = self._config(command.case)
        canary = SOURCE_CANARY if command.side == "source" else TARGET_CANARY
        engines_own = case.path in ("pulled", "ring")  # as memory is that KVLink did not allocate
        shareable = case.transport == "shared" and not engines_own and command.side == "source"
        gpu = None if case.device == HOST else Gpu(case.device, config.cuda_library)
        ranks = []
        seconds = 0.0
        for position in command.ranks:
            pool = None if gpu is None else GpuPool(gpu, specs[position])
            caches = kvlink.Caches.standard(specs[position], shareable=shareable) if pool is None else pool.mirror
            stored = case.dtype("source") if case.converts else None
            content = CacheContent(caches.spec, [region.array for region in caches.regions], canary, stored)
            with nullcontext() if pool is None else pool.shown():
                await asyncio.to_thread(content.wipe)
            start = time.monotonic()
            cache = caches if pool is None else pool.caches
            opening = kvlink.open_link(config, cache, transports=self._transports(command.side))
            link = await self._stack.enter_async_context(opening)
            seconds += time.monotonic() - start
            ranks.append(Rank(caches, content, link, pool))
        self._state = _Opened(case, command.side, command.ranks, ranks, wiring, config.secret)
        if self._commons is not None:
            self._commons.caches[command.side] = [rank.caches for rank in ranks]
        cards = tuple(rank.link.card for rank in ranks)
        if case.transport != "ucx":
            return m.Opened(cards=cards, seconds=seconds, clock=host_id_or_none())
        (ucx,) = ranks[0].link.capabilities
        return m.Opened(
            cards=cards,
            seconds=seconds,
            clock=host_id_or_none(),
            ucx_version=ucx.version,
            ucx_origin=ucx.origin,
            ucx_transports=ucx.detail,
            gpu=None if gpu is None else f"{gpu.name} ({gpu.arch})",
            stand_in=gpu is not None and gpu.stand_in,
        )

    def _transports(self, side: SideName) -> list[Transport] | None:
        """A loopback's end, which only the caller of a link can make; otherwise the configuration says what to use."""
        return None if self._commons is None else [LoopbackTransport(self._commons.fabric, side)]

    def _config(self, case: Case) -> kvlink.Config:
        stated = {
            "listen": str(Address(host=self._access.host, port=0)),
            "open_mode": self._access.open_mode,
            "secret": self._access.secret,
            "ucx_tls": case.ucx_tls,
            "ucx_origin": case.ucx_origin,
            "transports": None if case.transport == "loopback" else (case.transport,),
            "stream_lanes": case.stream_lanes,
            "max_bytes_per_second": None if case.max_gbps is None else case.max_gbps * 1e9 / 8,
            "path": case.path,
            "integrity": case.integrity,
        }
        return kvlink.Config.load(arguments={name: value for name, value in stated.items() if value is not None})

    async def _meet(self, command: m.Meet) -> m.Done:
        opened = self._opened
        opened.rosters["source"] = kvlink.Roster.of(command.source)
        opened.rosters["target"] = kvlink.Roster.of(command.target)
        opened.more_sources = [kvlink.Roster.of(cards) for cards in command.more_sources]
        for rank in opened.ranks:
            rank.link.set_siblings(opened.rosters[opened.side])
        return m.Done()

    async def _close(self, command: m.Close) -> m.Done:
        self.verified = command.verified
        await self.aclose()
        return m.Done()

    # --- content ----------------------------------------------------------------------------------------------------

    async def _prepare(self, command: m.Prepare) -> m.Checked:
        if self._opened.side == "target":
            return await self._judge(lambda content: content.check_wiped(command.blocks))
        prompt = self._prompt(command.request)
        return await self._judge(lambda content: content.fill(prompt, command.blocks))

    async def _verify(self, command: m.Verify) -> m.Checked:
        prompt = self._prompt(command.request)
        return await self._judge(lambda content: content.check(prompt, command.blocks))

    async def _wipe(self, command: m.Wipe) -> m.Done:
        opened = self._opened
        opened.parts.pop(command.request, None)
        for rank in opened.ranks:
            rank.link.release(self._key(command.request))
        await self._judge(lambda content: content.wipe_blocks(command.blocks))
        return m.Done()

    async def _sweep(self, _command: m.Sweep) -> m.Checked:
        return await self._judge(lambda content: content.check_all_wiped())

    async def _judge(self, act: Callable[[CacheContent], Fault | None]) -> m.Checked:
        """Run ``act`` over the ranks in turn, off the loop, until one finds a fault."""
        for index, rank in enumerate(self._opened.ranks):
            with nullcontext() if rank.pool is None else rank.pool.shown():
                fault = await asyncio.to_thread(act, rank.content)
            if fault is not None:
                return m.Checked(fault=f"{self._opened.side} rank {rank.caches.spec.place} ({index}): {fault}")
        return m.Checked(fault=None)

    def _prompt(self, request: int) -> Prompt:
        case = self._opened.case
        return Prompt(seed=case.seed + request, tokens=case.prompts[request])

    # --- transfers --------------------------------------------------------------------------------------------------

    async def _begin(self, _command: m.Begin) -> m.Done:
        self._cpu_at_begin = _cpu_seconds()
        return m.Done()

    async def _end(self, _command: m.End) -> m.Spent:
        if self._commons is not None and self._opened.side == "source":
            return m.Spent(cpu_seconds=0.0)  # one process: all of its time is counted, once, at the target
        return m.Spent(cpu_seconds=_cpu_seconds() - self._cpu_at_begin)

    async def _provide(self, command: m.Provide) -> m.Done:
        opened = self._opened
        opened.lives[command.request] = command.life
        case, tokens = opened.case, opened.case.prompts[command.request]
        parts = opened.parts[command.request] = []
        offer = self._offer(command.request, command.blocks) if case.flow == "fetch" else None
        for rank in opened.ranks:
            if offer is not None:
                parts.append(rank.publish(offer))
            else:
                part = rank.link.announce(self._key(command.request), max_tokens=tokens, ttl_seconds=CLAIM_SECONDS)
                parts.append(part)
                if case.layer_seconds is None:
                    rank.ready(part, command.blocks, tokens)
                    part.seal()
        if case.layer_seconds is not None:
            computing = self._compute(parts, command.blocks, tokens, case.layer_seconds)
            opened.computing[command.request] = asyncio.create_task(computing)
        return m.Done()

    async def _compute(
        self, parts: Sequence[kvlink.Part], blocks: m.Blocks, tokens: int, layer_seconds: float
    ) -> float:  # fmt: skip
        """Pretend to compute the prompt as one chunk, layer after layer, on all ranks alike; when the last one was."""
        layers = self._opened.case.geometry.layers
        begun = computed = time.monotonic()
        for layer in range(1, layers + 1):
            await asyncio.sleep(max(0.0, begun + layer * layer_seconds - time.monotonic()))
            computed = time.monotonic()
            for rank, part in zip(self._opened.ranks, parts, strict=True):
                if part.state.ended:
                    continue
                rank.ready(part, blocks, tokens, layer)
                if layer == layers:
                    part.seal()
        return computed

    async def _settle(self, command: m.Settle) -> m.Settled:
        parts = self._opened.parts.pop(command.request, [])
        _, error = await _ends(parts)
        heard = time.monotonic()
        computing = self._opened.computing.pop(command.request, None)
        computed = None if computing is None else await computing
        return m.Settled(error=error, computed_at_seconds=computed, heard_at_seconds=heard)

    async def _move(self, command: m.Move) -> m.Moved:
        opened = self._opened
        opened.lives[command.request] = command.life
        opened.engines[command.request] = command.engine
        start_on = self._fetching(command) if opened.case.flow == "fetch" else self._expecting(command)
        start = time.monotonic()
        parts = opened.parts[command.request] = [start_on(rank) for rank in opened.ranks]
        results, error = await _ends(parts)
        end = time.monotonic()
        ranks = tuple(_rank_move(result) for result in results)
        return m.Moved(start_seconds=start, end_seconds=end, ranks=ranks, error=error)

    def _fetching(self, command: m.Move) -> Callable[[Rank], kvlink.Part]:
        offer = self._offer(command.request, command.source_blocks)
        into = (command.target_blocks,)
        return lambda rank: rank.link.start_fetch(offer, into, deadline_seconds=DEADLINE_SECONDS, stream=rank.stream)

    def _expecting(self, command: m.Move) -> Callable[[Rank], kvlink.Part]:
        ticket = self._ticket(command.request)
        source, into = self._opened.rosters["source"], (command.target_blocks,)
        return lambda rank: rank.link.expect(
            ticket, source, into, deadline_seconds=DEADLINE_SECONDS, stream=rank.stream
        )

    # --- the limit --------------------------------------------------------------------------------------------------

    async def _probe_addresses(self, _command: m.ProbeAddresses) -> m.Addresses:
        opened = self._opened
        if opened.case.transport in {"loopback", "shared"}:
            return m.Addresses(addresses=())
        server = (
            await SocketServer.start(self._access.host, len(opened.ranks))
            if opened.case.transport == "stream"
            else ProbeServer(opened.case, [rank.caches for rank in opened.ranks])
        )
        self._stack.callback(server.close)
        return m.Addresses(addresses=server.addresses())

    async def _probe_connect(self, command: m.ProbeConnect) -> m.Done:
        opened = self._opened
        caches = {position: rank.caches for position, rank in zip(opened.positions, opened.ranks, strict=True)}
        prober: Prober
        if self._commons is not None:
            sources, targets = (dict(enumerate(self._commons.caches[side])) for side in get_args(SideName))
            prober = LocalProber(sources, targets)
        elif opened.case.transport == "shared":
            prober = LocalProber(await asyncio.to_thread(_stand_ins, opened, caches), caches)
        elif opened.case.transport == "stream":
            prober = await SocketProber.connect(opened.case, opened.wiring.legs, caches, command.source)
        else:
            prober = UcxProber(opened.case, opened.wiring.legs, caches, command.source)
        self._stack.callback(prober.close)
        opened.prober = prober
        return m.Done()

    async def _probe(self, command: m.Probe) -> m.Probed:
        opened = self._opened
        if opened.prober is None:
            raise ClosedError("the worker was told to probe before it was told to connect its probes")
        tokens = opened.case.prompts[command.request]
        plans = opened.wiring.plans(tokens, command.source_blocks, command.target_blocks)
        own = [(leg, plan) for leg, plan in plans if leg.target in opened.positions]
        return m.Probed(seconds=await opened.prober.move(own))

    async def _abandon(self, command: m.Abandon) -> m.Done:
        opened = self._opened
        for rank, part in zip(opened.ranks, opened.parts.get(command.request, ()), strict=False):
            rank.link.cancel(part, command.why)
        return m.Done()

    def _key(self, request: int) -> str:
        """Named by whoever makes the claim: the source in fetch, the target in push."""
        opened = self._opened
        roster = self._source_roster(request) if opened.case.flow == "fetch" else opened.rosters["target"]
        life = opened.lives.get(request, 0)
        return request_key(roster.incarnation, f"bench-{request}" + f".{life}" * (life > 0))

    def _source_roster(self, request: int) -> kvlink.Roster:
        """Of the engine that the request is read from."""
        opened = self._opened
        engine = opened.engines.get(request, 0)
        return opened.more_sources[engine - 1] if engine else opened.rosters["source"]

    def _offer(self, request: int, blocks: m.Blocks) -> kvlink.Offer:
        opened = self._opened
        offer = kvlink.Offer(
            key=self._key(request),
            roster=self._source_roster(request),
            blocks=(blocks,),
            tokens=opened.case.prompts[request],
            ttl_seconds=CLAIM_SECONDS,
        )
        return offer if opened.secret is None else offer.sign(opened.secret)

    def _ticket(self, request: int) -> kvlink.Ticket:
        """Names no blocks: a source is not told where its target puts the bytes."""
        opened = self._opened
        ticket = kvlink.Ticket(
            key=self._key(request),
            roster=opened.rosters["target"],
            blocks=(),
            tokens=opened.case.prompts[request],
            ttl_seconds=CLAIM_SECONDS,
        )
        return ticket if opened.secret is None else ticket.sign(opened.secret)


def _stand_ins(opened: _Opened, targets: Mapping[int, kvlink.Caches]) -> dict[int, kvlink.Caches]:
    """Caches of this process in place of the source ranks that ``targets`` read, with every page there."""
    read = {leg.source for leg in opened.wiring.legs if leg.target in targets}
    made = {position: kvlink.Caches.standard(opened.wiring.sources[position]) for position in read}
    for caches in made.values():
        for region in caches.regions:
            region.array[:: limits.LEAF_BYTES // 4] = 1
    return made


async def _ends(parts: Iterable[kvlink.Part]) -> tuple[list[kvlink.Result], ErrorInfo | None]:
    """Wait for every part's end: the results of those that are done, and why the first of the others is not."""
    ends = await asyncio.gather(*(part.wait() for part in parts), return_exceptions=True)
    results, error = [], None
    for end in ends:
        if isinstance(end, KVLinkError):
            error = error or error_to_info(end)
        elif isinstance(end, BaseException):
            raise end
        else:
            results.append(end)
    return results, error


def _rank_move(result: kvlink.Result) -> m.RankMove:
    return m.RankMove(
        bytes=result.bytes,
        rereads=result.rereads,
        transport=result.transport,
        transport_reason=result.transport_reason,
        path=result.path,
        path_reason=result.path_reason,
        phases=dict(result.phases),
    )


def _cpu_seconds() -> float:
    """User and system time of this process, native threads included."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
