"""The frontier of KV that is being computed: it only advances, and its increments move what the whole leg moves."""

from __future__ import annotations

import random

import numpy as np
import pytest
from geometry_zoo import draw_case
from hypothesis import given
from hypothesis import strategies as st
from test_geometry_pairs import run_natively

from kvlink.errors import LayoutError
from kvlink.layout import Frontier
from kvlink.plan import IncrementPlanner, LegPlanner, assign_legs

LAYERS, TOKENS = 5, 12


def frontiers():
    chunk = st.tuples(st.integers(0, TOKENS), st.integers(1, TOKENS), st.integers(0, LAYERS - 1))
    return chunk.map(lambda c: Frontier(c[0], c[2], c[0] + c[1]) if c[2] else Frontier.whole(c[0]))


def held(frontier):
    return {(layer, token) for layer in range(LAYERS) for token in range(frontier.of_layer(layer))}


@given(frontiers(), frontiers())
def test_what_lies_beyond_a_frontier_is_what_it_adds_once(one, other):
    assert one.covers(other) == (held(one) >= held(other))
    if one.covers(other):
        cells = [
            (layer, token)
            for rectangle in one.beyond(other)
            for layer in range(rectangle.first_layer, min(rectangle.end_layer, LAYERS))
            for token in range(rectangle.first_token, rectangle.tokens)
        ]
        assert len(cells) == len(set(cells))
        assert set(cells) == held(one) - held(other)
        assert len(list(one.beyond(other))) <= 3


def said(frontier, tokens=None, layers=None):
    return frontier.advance(tokens, layers, max_tokens=100, end_layer=LAYERS)


def test_an_engine_says_chunk_by_chunk_and_layer_by_layer():
    frontier = Frontier()
    for layer in range(1, LAYERS):
        frontier = said(frontier, 64, layer) if layer == 1 else said(frontier, layers=layer)
        assert frontier == Frontier(0, layer, 64)
    frontier = said(frontier, layers=LAYERS)
    assert frontier == Frontier.whole(64)
    assert said(frontier, 64) == said(frontier) == frontier, "what is repeated changes nothing"
    assert said(frontier, 100, 0) == frontier, "no layer of the next chunk is done"
    assert said(frontier, 100, 7) == Frontier.whole(100), "a rank's last layer is the last of which it can say anything"
    assert said(Frontier(64, 2, 80), 90, 3) == Frontier(64, 3, 90), "a chunk may grow"


@pytest.mark.parametrize(
    ("before", "tokens", "layers"),
    [
        (Frontier.whole(64), 63, None),
        (Frontier.whole(64), 60, 2),
        (Frontier.whole(64), 101, None),
        (Frontier.whole(64), -1, None),
        (Frontier.whole(64), None, 2),
        (Frontier(64, 2, 80), None, 1),
        (Frontier(64, 2, 80), None, 0),
        (Frontier(64, 2, 80), 79, 3),
        (Frontier(64, 2, 80), 96, 1),
        (Frontier(64, 2, 80), 70, None),
        (Frontier(64, 2, 80), 96, -1),
        (Frontier(), None, 3),
    ],
)
def test_a_frontier_that_goes_backwards_or_too_far_is_refused(before, tokens, layers):
    with pytest.raises(LayoutError, match=r"ready\("):
        said(before, tokens, layers)


@pytest.mark.parametrize("shard", range(6))
def test_increments_fill_whole_pools_as_the_whole_leg_does_d1_d2_d3_d4_d5_d7(shard):
    """D1 to D5, D7: any pair of layouts, cut at random positions and layers, also in mid-block."""
    for seed in range(20_000 + shard, 20_240, 6):
        try:
            check_case(draw_case(seed), random.Random(seed))
        except Exception as error:
            error.add_note(f"zoo seed {seed}")
            raise


def check_case(case, draw):
    source, target, request = case.source, case.target, case.request
    shares = source.shares(), target.shares()
    legs = assign_legs(*shares)
    fill = np.random.default_rng(case.seed)
    leg = draw.choice(legs)
    one, other = shares[0][leg.source], shares[1][leg.target]
    specs = source.spec(one.pp_rank, one.tp_rank), target.spec(other.pp_rank, other.tp_rank)
    pools = [[fill.integers(0, 256, length, dtype=np.uint8) for length in spec.region_bytes] for spec in specs]
    wanted = [pool.copy() for pool in pools[1]]
    whole = LegPlanner(*specs, leg.groups).plan(
        request.source_blocks, request.target_blocks, first_token=request.starts, tokens=request.tokens
    )
    run_natively(whole, pools[0], wanted)
    planner = IncrementPlanner(*specs, leg.groups)
    moved, before = 0, Frontier()
    max_tokens = request.tokens + draw.choice((0, 0, 5))
    for after, sealed in walk(draw, request.tokens, source.num_layers):
        words = {"starts": request.starts, "max_tokens": max_tokens, "sealed": sealed}
        plan = planner.plan(request.source_blocks, request.target_blocks, before, after, **words)
        own = planner.plan(request.source_blocks, None, before, after, **words)
        assert own.total_bytes == plan.total_bytes
        assert [segment.run_bytes for segment in own.segments] == [segment.run_bytes for segment in plan.segments]
        run_natively(plan, *pools)
        moved, before = moved + plan.total_bytes, after
    assert moved == whole.total_bytes, "nothing moves twice"
    for pool, reference in zip(pools[1], wanted, strict=True):
        np.testing.assert_array_equal(pool, reference)


def walk(draw, tokens, layers):
    """Frontiers up to ``tokens``: chunks of any size, whole or layer by layer, some layers at a time."""
    done, end_layer = 0, max(layers, 100)
    while done < tokens:
        chunk = min(tokens, done + draw.randrange(1, max(2, tokens)))
        for layer in sorted(draw.sample(range(1, end_layer), draw.randrange(4))):
            yield Frontier(done, layer, chunk), False
        done = chunk
        if done < tokens or draw.random() < 0.5:
            yield Frontier.whole(done), False
    yield Frontier.whole(done), True
