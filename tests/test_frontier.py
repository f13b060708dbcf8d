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
from kvlink.link.source_outgoing import Outgoing
from kvlink.plan import CopyPlan, IncrementPlanner, Increments, LegPlanner, assign_legs

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


@pytest.mark.parametrize(
    ("before", "now", "comes"),
    [
        (Frontier(), Frontier(0, 1, 64), Frontier(0, 2, 64)),
        (Frontier(0, 1, 64), Frontier(0, 3, 64), Frontier.whole(64)),
        (Frontier(0, 2, 64), Frontier(0, 3, 80), Frontier(0, 4, 80)),
        (Frontier(0, 4, 64), Frontier(64, 1, 80), Frontier(64, 2, 80)),
        (Frontier(0, 2, 64), Frontier(0, 2, 80), None),
        (Frontier(0, 4, 64), Frontier.whole(64), None),
        (Frontier(), Frontier(), None),
    ],
    ids=[
        "by ones",
        "by twos to the end",
        "a chunk that grew",
        "another chunk",
        "no layer more",
        "between chunks",
        "not begun",
    ],
)
def test_an_engine_is_foreseen_to_go_on_in_even_steps_within_a_chunk(before, now, comes):
    assert now.foresee(before, 5) == comes


def test_an_increment_that_was_foreseen_is_planned_before_it_is_ready(monkeypatch):
    case = draw_case(20_000)
    source, target, request = case.source, case.target, case.request
    leg = assign_legs(source.shares(), target.shares())[0]
    own, other = source.shares()[leg.source], target.shares()[leg.target]
    specs = source.spec(own.pp_rank, own.tp_rank), target.spec(other.pp_rank, other.tp_rank)
    planner = IncrementPlanner(*specs, leg.groups)
    planned = []
    plan = planner.plan
    monkeypatch.setattr(planner, "plan", lambda *args, **words: planned.append(args[3]) or plan(*args, **words))
    blocks = [list(ids) for ids in request.source_blocks]
    tokens, end = request.tokens, planner.end_layer
    stream = Increments(planner, blocks, request.target_blocks, starts=request.starts, max_tokens=tokens)
    for layer in range(1, end + 1):
        ready = Frontier(0, layer, tokens) if layer < end else Frontier.whole(tokens)
        stream.look_ahead()
        ahead = list(planned)
        stream.plan(ready, sealed=layer == end)
        assert layer == 1 or planned == ahead, "nothing is left to be planned once it is ready"


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
    told = [[] for _ in request.source_blocks]
    foreseen = Increments(planner, told, request.target_blocks, starts=request.starts, max_tokens=max_tokens)
    outgoing = Outgoing(foreseen, told)
    blocks = tuple(tuple(map(int, ids)) for ids in request.source_blocks)
    for after, sealed in walk(draw, request.tokens, source.num_layers):
        words = {"starts": request.starts, "max_tokens": max_tokens, "sealed": sealed}
        plan = planner.plan(request.source_blocks, request.target_blocks, before, after, **words)
        own = planner.plan(request.source_blocks, None, before, after, **words)
        assert own.total_bytes == plan.total_bytes
        last = after.next_tokens == max_tokens
        outgoing.add_blocks(blocks, specs[0], after.next_tokens, last=last, sealed=sealed)
        assert moves(foreseen.plan(after, sealed=sealed)) == moves(plan), "what was foreseen is what there is to do"
        if draw.random() < 0.7:
            foreseen.look_ahead()
        assert [segment.run_bytes for segment in own.segments] == [segment.run_bytes for segment in plan.segments]
        run_natively(plan, *pools)
        moved, before = moved + plan.total_bytes, after
    assert moved == whole.total_bytes, "nothing moves twice"
    for pool, reference in zip(pools[1], wanted, strict=True):
        np.testing.assert_array_equal(pool, reference)


def moves(plan: CopyPlan):
    return plan.total_bytes, [
        (segment.bases.tolist(), segment.pieces.tolist(), segment.nest, segment.run_bytes) for segment in plan.segments
    ]


def walk(draw, tokens, layers):
    """Frontiers up to ``tokens``: chunks of any size, whole or by layers, in even steps or in any."""
    done, end_layer = 0, max(layers, 100)
    while done < tokens:
        chunk = min(tokens, done + draw.randrange(1, max(2, tokens)))
        uneven = sorted(draw.sample(range(1, end_layer), draw.randrange(4)))
        for layer in draw.choice((uneven, range(1, layers), range(2, layers, 2))):
            yield Frontier(done, layer, chunk), False
        done = chunk
        if done < tokens or draw.random() < 0.5:
            yield Frontier.whole(done), False
    yield Frontier.whole(done), True
