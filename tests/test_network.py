"""C7: a network that goes away and comes back, loudly or in silence, between ranks in namespaces of their own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from network import ENDS, Wire, why_no_wire
from rank_process import RankProcess

from kvlink import Identity
from kvlink.cli.bench.content import TARGET_CANARY, Prompt

REASON = why_no_wire()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

IDENTITY = Identity(model="tiny", num_layers=2, num_kv_heads=8, head_dim=32)
SMALL = Prompt(seed=8, tokens=300)
NUM_BLOCKS = 620
LOST_WITHIN_SECONDS = 3.0
ENDS_WITHIN_SECONDS = 5.0


@dataclass(frozen=True)
class Case:
    """A transport, and how many blocks of 128 KiB, in runs of 64 bytes, it takes a while to move."""

    settings: dict[str, Any]
    blocks: int

    @property
    def prompt(self) -> Prompt:
        return Prompt(seed=7, tokens=self.blocks * 64)

    @property
    def source(self) -> tuple[int, ...]:
        return tuple(range(self.blocks))

    @property
    def into(self) -> tuple[int, ...]:
        return tuple(range(10, self.blocks + 10))


OVER_TCP = {"transports": ("ucx",), "ucx_tls": "tcp"}
CASES = [
    Case({"transports": ("stream",)}, 600),
    Case({**OVER_TCP, "path": "direct"}, 60),
    Case({**OVER_TCP, "path": "packed"}, 600),
]
TRANSPORTS = pytest.mark.parametrize("case", CASES, ids=["stream", "ucx-tcp", "ucx-tcp-packed"])
Pair = tuple[RankProcess, RankProcess]


@pytest.fixture
def wire() -> Iterator[Wire]:
    with Wire() as made:
        yield made


@pytest.fixture
def processes(wire: Wire) -> Iterator[Pair]:
    pair = RankProcess(wire.inside[0]), RankProcess(wire.inside[1])
    yield pair
    for rank in pair:
        rank.close()


async def opened(pair: Pair, case: Case) -> Pair:
    """A source and a target, with default clocks, each at its end of the wire."""
    for rank, engine, layout, end in zip(pair, ("prefill", "decode"), ("nhd", "hnd"), ENDS, strict=True):
        shape = {"identity": IDENTITY, "block_size": 64, "num_blocks": NUM_BLOCKS}
        settings = {"listen": f"tcp://{end}:0", "open_mode": True, **case.settings}
        await rank.open(engine, "i", layout=layout, **shape, **settings)
    return pair


def landed(target: RankProcess, case: Case) -> tuple[bool, bool]:
    """Whether the first and the last of what moves is there."""
    planes = target.spec.groups[0].planes
    found = []
    for plane, block in ((planes[0], case.into[0]), (planes[-1], case.into[-1])):
        start = plane.offset_bytes + block * plane.block_stride
        found.append(bool((target.regions[plane.region][start : start + 64] != TARGET_CANARY).any()))
    return found[0], found[1]


async def caught_in_its_middle(source: RankProcess, target: RankProcess, case: Case) -> None:
    source.content.fill(case.prompt, case.source)
    offer = source.offer("i:cut", case.source, case.prompt.tokens)
    await source.publish(offer)
    await target.start_fetch(offer, case.into)
    async with asyncio.timeout(10):
        while not landed(target, case)[0]:
            await asyncio.sleep(0.001)


async def ended(source: RankProcess, target: RankProcess, case: Case, since: float) -> None:
    """Both sides came to an end by themselves, in time, and gave every block back."""
    for rank in (target, source):
        end = await rank.end_of("i:cut")
        assert end.state in {"FAILED", "EXPIRED"}
        assert end.retryable
        assert end.at - since < ENDS_WITHIN_SECONDS
        assert await rank.blocks_out() == {}
    assert landed(target, case) == (True, False), "too short to be caught in its middle"
    assert target.content.check_wiped(sorted(set(range(NUM_BLOCKS)) - set(case.into))) is None


async def served(source: RankProcess, target: RankProcess) -> None:
    """A later request works, with the same processes."""
    source.content.wipe()
    target.content.wipe()
    source.content.fill(SMALL, range(5))
    offer = source.offer("i:next", range(5), SMALL.tokens)
    await source.publish(offer)
    await target.start_fetch(offer, range(5))
    for rank in (target, source):
        assert (await rank.end_of("i:next")).state == "DONE"
    assert target.content.check(SMALL, range(5)) is None
    assert target.content.check_wiped(range(5, NUM_BLOCKS)) is None


@TRANSPORTS
async def test_c7_a_link_that_goes_down_in_mid_transfer_and_comes_back(case: Case, wire: Wire, processes: Pair) -> None:
    source, target = await opened(processes, case)
    await caught_in_its_middle(source, target, case)
    wire.down()
    await ended(source, target, case, time.monotonic())
    wire.up()
    await served(source, target)


@TRANSPORTS
async def test_c7_a1_a_silent_partition_is_found_within_3_s_and_nothing_lands_when_it_heals(
    case: Case, wire: Wire, processes: Pair
) -> None:
    source, target = await opened(processes, case)
    await caught_in_its_middle(source, target, case)
    wire.swallow()
    began = time.monotonic()
    await ended(source, target, case, began)
    for rank in (source, target):
        assert 0 < min(await rank.lost_at()) - began < LOST_WITHIN_SECONDS
    for region in target.regions:
        region.fill(0x77)  # the blocks are another request's now
    wire.heal()
    await asyncio.sleep(0.5)
    assert all(bool(np.all(region == 0x77)) for region in target.regions)
    await served(source, target)


@TRANSPORTS
async def test_c7_a_partition_shorter_than_the_lease_is_no_loss(case: Case, wire: Wire, processes: Pair) -> None:
    source, target = await opened(processes, case)
    await caught_in_its_middle(source, target, case)
    wire.swallow()
    await asyncio.sleep(0.7)
    wire.heal()
    for rank in (target, source):
        assert (await rank.end_of("i:cut", 30)).state == "DONE"
        assert await rank.lost_at() == []
    assert target.content.check(case.prompt, case.into) is None
