"""Whole engines for link tests: every rank a link in this process, caches full of known bytes."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

from kvlink import Caches, Config, Identity, Link, Offer, Place, Roster, Ticket, open_link
from kvlink.cli.bench.content import SOURCE_CANARY, TARGET_CANARY, CacheContent, Prompt
from kvlink.layout import DType, heads_of_rank, layers_of_stage, standard_spec
from kvlink.transports.base import Transport
from kvlink.transports.loopback import LoopbackTransport
from kvlink.transports.loopback_fabric import LoopbackFabric

IDENTITY = Identity(model="tiny", num_layers=3, num_kv_heads=4, head_dim=32, weights_revision="r1")
_incarnations = itertools.count(1)


@dataclass
class Rank:
    """One rank: its link and its memory."""

    link: Link
    caches: Caches
    content: CacheContent


@dataclass
class Engine:
    """One engine of links in this process, over a loopback fabric or (``fabric=None``) over UCX."""

    name: str
    fabric: LoopbackFabric | None
    tp: int = 1
    pp: int = 1
    layout: str = "nhd"
    block_size: int = 16
    num_blocks: int = 32
    identity: Identity = IDENTITY
    canary: int = SOURCE_CANARY
    shareable: bool = False
    settings: dict[str, object] = field(default_factory=dict)
    incarnation: str = ""
    ranks: list[Rank] = field(default_factory=list)

    async def __aenter__(self) -> Self:
        self.incarnation = self.incarnation or f"i{next(_incarnations)}"
        for pp_rank in range(self.pp):
            for tp_rank in range(self.tp):
                self.ranks.append(await self._open(pp_rank, tp_rank))
        for rank in self.ranks:
            rank.link.set_siblings(self.roster)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.gather(*(rank.link.close() for rank in self.ranks))

    @property
    def links(self) -> list[Link]:
        return [rank.link for rank in self.ranks]

    @property
    def roster(self) -> Roster:
        return Roster.of(rank.link.card for rank in self.ranks)

    def offer(self, key: str, blocks: Sequence[int], tokens: int, **fields: object) -> Offer:
        return Offer(key=key, roster=self.roster, blocks=(tuple(blocks),), tokens=tokens, **fields)  # type: ignore[arg-type]

    def ticket(self, key: str, tokens: int, **fields: object) -> Ticket:
        return Ticket(key=key, roster=self.roster, blocks=((),), tokens=tokens, **fields)  # type: ignore[arg-type]

    def fill(self, prompt: Prompt, blocks: Sequence[int]) -> None:
        for rank in self.ranks:
            rank.content.fill(prompt, blocks)

    def assert_holds(self, prompt: Prompt, blocks: Sequence[int]) -> None:
        """``blocks`` hold the prompt, and every other byte the canary."""
        others = sorted(set(range(self.num_blocks)) - set(blocks))
        for rank in self.ranks:
            assert rank.content.check(prompt, blocks) is None
            assert rank.content.check_wiped(others) is None

    def assert_untouched(self) -> None:
        for rank in self.ranks:
            assert rank.content.check_all_wiped() is None

    def assert_no_block_out(self) -> None:
        for rank in self.ranks:
            memory = rank.link.stats().memory
            assert (memory.held, memory.leased, memory.reserved, memory.landed, memory.draining) == (0, 0, 0, 0, 0)

    async def _open(self, pp_rank: int, tp_rank: int) -> Rank:
        place = Place(
            engine=self.name,
            incarnation=self.incarnation,
            pp_rank=pp_rank,
            pp_size=self.pp,
            tp_rank=tp_rank,
            tp_size=self.tp,
        )
        spec = standard_spec(
            self.layout,
            identity=self.identity,
            place=place,
            layers=layers_of_stage(self.identity.num_layers, self.pp, pp_rank),
            heads=heads_of_rank(self.identity.num_kv_heads, self.tp, tp_rank),
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            dtype=DType.BFLOAT16,
        )
        caches = Caches.standard(spec, shareable=self.shareable)
        content = CacheContent(spec, [region.array for region in caches.regions], self.canary)
        content.wipe()
        transports: list[Transport] | None = None
        if self.fabric is not None:
            transports = [LoopbackTransport(self.fabric, str(place))]
        link = await open_link(Config(**self.settings), caches, transports=transports)  # type: ignore[arg-type]
        return Rank(link, caches, content)


def source_engine(fabric: LoopbackFabric | None, **fields: object) -> Engine:
    return Engine("prefill", fabric, **fields)  # type: ignore[arg-type]


def target_engine(fabric: LoopbackFabric | None, **fields: object) -> Engine:
    return Engine("decode", fabric, canary=TARGET_CANARY, **fields)  # type: ignore[arg-type]


async def until(condition: Callable[[], bool], timeout_seconds: float = 5.0) -> None:
    """Wait for something that is not ours to await."""
    async with asyncio.timeout(timeout_seconds):
        while not condition():
            await asyncio.sleep(0.005)
