"""Hybrid caches over the link: windows, states, shared memory and prefixes arrive as plain indexing says."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import AsyncExitStack
from dataclasses import dataclass

import numpy as np
import pytest
from geometries import identity_of, rank_spec
from geometry_zoo import Case, draw_case
from number_cases import NUMPY
from number_cases import expected as converted
from test_geometry_pairs import index_all

from kvlink import Caches, Config, Link, Offer, Roster, State, Ticket, open_link
from kvlink.errors import LayoutError
from kvlink.layout import GroupShare
from kvlink.link.planners import Planners
from kvlink.plan import LegPlanner, assign_legs
from kvlink.transports.loopback import LoopbackTransport
from kvlink.transports.loopback_fabric import LoopbackFabric


def drawn(count, want):
    """The first cases of few ranks and several groups that ``want`` picks by the conversions of their legs."""
    cases = (draw_case(seed) for seed in itertools.count(10_000))
    few = (c for c in cases if c.source.tp * c.source.pp <= 4 >= c.target.tp * c.target.pp and len(c.source.groups) > 1)
    return list(itertools.islice((c for c in few if want(c)), count))


def legs_of(case):
    sources, targets = case.source.shares(), case.target.shares()
    for leg in assign_legs(sources, targets):
        one, other = sources[leg.source], targets[leg.target]
        yield leg, case.source.spec(one.pp_rank, one.tp_rank), case.target.spec(other.pp_rank, other.tp_rank)


def converts(case):
    return any(LegPlanner(source, target, leg.groups).conversions for leg, source, target in legs_of(case))


def has_window(case):
    return any(model.window for model, _ in case.source.groups) and not converts(case)


@dataclass
class Opened:
    """An engine of links and its pools."""

    links: list[Link]
    pools: list[list[np.ndarray]]

    @property
    def roster(self) -> Roster:
        return Roster.of(link.card for link in self.links)


async def opened(stack, engine, fabric, random) -> Opened:
    links, pools = [], []
    for pp, tp in itertools.product(range(engine.pp), range(engine.tp)):
        caches = Caches.standard(engine.spec(pp, tp))
        regions = [region.array for region in caches.regions]
        for region in regions:
            region[:] = random.integers(0, 256, region.size, dtype=np.uint8)
        transport = LoopbackTransport(fabric, str(caches.spec.place))
        links.append(await stack.enter_async_context(open_link(Config(), caches, transports=[transport])))
        pools.append(regions)
    made = Opened(links, pools)
    for link in links:
        link.set_siblings(made.roster)
    return made


def by_ml_dtypes(elements, source, target, source_scale, target_scale):
    """Elements as bytes, converted as ml_dtypes does; see `test_geometry_pairs.stand_in`."""
    stored = np.ascontiguousarray(elements).view(NUMPY[source])[..., 0]
    return converted(stored, target, source_scale, target_scale)[..., None].view(np.uint8)


def expected_pools(case: Case, source: Opened, target: Opened) -> list[list[np.ndarray]]:
    expected = [[pool.copy() for pool in pools] for pools in target.pools]
    for leg, source_spec, target_spec in legs_of(case):
        pools = source.pools[leg.source], expected[leg.target]
        index_all(source_spec, target_spec, leg.groups, case.request, *pools, by_ml_dtypes)
    return expected


def assert_pools(target: Opened, expected: list[list[np.ndarray]]) -> None:
    for pools, wanted in zip(target.pools, expected, strict=True):
        for pool, want in zip(pools, wanted, strict=True):
            assert np.array_equal(pool, want)


async def run_case(case: Case, flow: str) -> None:
    request, random = case.request, np.random.default_rng(case.seed)
    async with AsyncExitStack() as stack:
        fabric = LoopbackFabric(seed=case.seed)
        source = await opened(stack, case.source, fabric, random)
        target = await opened(stack, case.target, fabric, random)
        expected = expected_pools(case, source, target)
        starts = tuple(request.starts)
        blocks = tuple(map(tuple, request.source_blocks))
        if flow == "push":
            ticket = Ticket(
                key="1:r", roster=target.roster, blocks=(), tokens=request.tokens, group_first_tokens=starts
            )
            given = [link.announce("1:r", ttl_seconds=20) for link in source.links]
            taken = [
                link.expect(ticket, source.roster, request.target_blocks, deadline_seconds=20) for link in target.links
            ]
            for part in given:
                part.ready(blocks=blocks, tokens=request.tokens, group_first_tokens=starts)
                part.seal()
        else:
            windows = {"group_first_tokens": starts} if flow == "window" else {}
            offer = Offer(key="1:r", roster=source.roster, blocks=blocks, tokens=request.tokens, **windows)
            given = [link.publish(offer) for link in source.links]
            prefix = {"first_token": starts} if flow == "prefix" else {}
            taken = [
                link.start_fetch(offer, request.target_blocks, deadline_seconds=20, **prefix) for link in target.links
            ]
        await asyncio.gather(*(part.wait() for part in (*given, *taken)))
        assert {part.state for part in (*given, *taken)} == {State.DONE}
        assert_pools(target, expected)
        for link in (*source.links, *target.links):
            memory = link.stats().memory
            assert (memory.held, memory.leased, memory.reserved, memory.draining) == (0, 0, 0, 0)


@pytest.mark.parametrize("flow", ["window", "prefix", "push"])
@pytest.mark.parametrize("case", drawn(3, has_window), ids=lambda case: f"seed{case.seed}")
async def test_a_hybrid_request_fills_whole_pools_as_plain_indexing_says(case, flow):
    """By the source's windows, by what the target has already of each group, and by a push's own frontier."""
    await run_case(case, flow)


@pytest.mark.parametrize("case", drawn(2, converts), ids=lambda case: f"seed{case.seed}")
async def test_what_must_be_converted_is_on_its_way(case):
    await run_case(case, "window")


async def test_first_tokens_that_are_not_one_a_group_are_refused():
    (case,) = drawn(1, has_window)
    async with AsyncExitStack() as stack:
        source, target = [
            await opened(stack, engine, LoopbackFabric(seed=1), np.random.default_rng(0))
            for engine in (case.source, case.target)
        ]
        blocks = tuple(map(tuple, case.request.source_blocks))
        offer = Offer(key="1:r", roster=source.roster, blocks=blocks, tokens=case.request.tokens)
        for first in ((0,), (0,) * 9, (case.request.tokens + 1,) * len(case.source.groups)):
            with pytest.raises(LayoutError, match="first_token"):
                target.links[0].start_fetch(offer, case.request.target_blocks, deadline_seconds=5, first_token=first)
        part = source.links[0].announce("1:s", ttl_seconds=5)
        with pytest.raises(LayoutError, match=r"group_first_tokens has 9 entries for"):
            part.ready(blocks=blocks, tokens=case.request.tokens, group_first_tokens=(0,) * 9)
        source.links[0].cancel(part, "seen")


def test_a_session_prepares_a_leg_once_and_remembers_few():
    """A peer that asks for ever other legs costs no memory."""
    spec = rank_spec("nhd", identity=identity_of(num_layers=1, num_kv_heads=64), block_size=2, num_blocks=2)
    planners = Planners(spec, spec)
    legs = [(GroupShare(name="full", layers=(0,), heads=(head,)),) for head in range(64)]
    assert planners.of(legs[0]) is planners.of(list(legs[0]))
    for leg in legs:
        assert planners.of(leg).groups == leg
    assert len(planners._by_leg) <= 8
