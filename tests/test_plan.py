"""A plan moves exactly the bytes of the naive reference, each once, in an order that block ids do not change."""

from __future__ import annotations

import itertools
from collections import Counter

import msgspec
import numpy as np
import pytest
from geometries import engine_specs, identity_of, rank_spec, scattered
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_reference import maximal_runs, reference_rows, runs_inside_blocks, walk, walk_rows

from kvlink.errors import LayoutError, MismatchError, UnsupportedError
from kvlink.layout import (
    STANDARD_LAYOUTS,
    GroupShare,
    Plane,
    PlaneKind,
    RankShare,
    check_spec,
    share_of,
)
from kvlink.plan import (
    CopyPlan,
    Dim,
    Segment,
    assign_legs,
    check_plan,
    plan_leg,
    readers_of,
    unread_sources,
)

replace = msgspec.structs.replace
layouts = st.sampled_from(STANDARD_LAYOUTS)
head_orders = st.just([0, 1, 2, 3, 4]) | st.permutations(range(5))


def whole(spec):
    return share_of(spec).groups


def plan_and_reference(source, target, groups, first_token, tokens, seed=0):
    blocks = [scattered(source, tokens, seed)], [scattered(target, tokens, seed + 1)]
    plan = plan_leg(
        source, target, groups, source_blocks=blocks[0], target_blocks=blocks[1], first_token=first_token,
        tokens=tokens,
    )  # fmt: skip
    return plan, list(reference_rows(source, target, groups, *blocks, first_token, tokens))


def consecutive(heads, source, target):
    """Whether the heads lie side by side in the same order on both sides."""
    positions = sorted((source.groups[0].heads.index(head), target.groups[0].heads.index(head)) for head in heads)
    return all((b[0] - a[0], b[1] - a[1]) == (1, 1) for a, b in itertools.pairwise(positions))


def check_equal(plan, rows, source, target, *, maximal=True):
    """Same bytes, each once, in runs that could not be longer; no two rows share a target byte."""
    row_bytes = source.groups[0].row_bytes
    assert Counter(walk_rows(plan, row_bytes)) == Counter(row.move for row in rows)
    assert max(Counter(row.move[2:4] for row in rows).values(), default=1) == 1
    assert plan.total_bytes == len(rows) * row_bytes
    assert plan.run_count == sum(1 for _ in walk(plan))
    longest = maximal_runs(rows, source.groups[0].block_size, target.groups[0].block_size)
    runs = runs_inside_blocks(plan)
    assert runs == longest if maximal else runs >= longest


@settings(max_examples=600, deadline=None)
@given(
    layouts=st.tuples(layouts, layouts),
    blocks=st.tuples(st.sampled_from([1, 2, 3, 4, 6, 8]), st.sampled_from([1, 2, 3, 4, 6, 8])),
    span=st.tuples(st.integers(0, 21), st.integers(0, 21)).map(sorted),
    heads=st.tuples(head_orders, head_orders),
    counts=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    layers=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    seed=st.integers(0, 100),
)
def test_any_pair_of_layouts_moves_the_reference_bytes(layouts, blocks, span, heads, counts, layers, seed):
    """D4, and any order of heads: full and partial blocks, sizes up and down, offsets, layer and head subsets."""
    identity = identity_of(num_layers=3, num_kv_heads=5)
    source, target = (
        rank_spec(
            layout, identity=identity, block_size=block_size, num_blocks=24, heads=tuple(order[:count]),
            layers=tuple(range(have)) if side == 0 else tuple(range(3 - have, 3)),
        )
        for side, (layout, block_size, order, count, have) in enumerate(
            zip(layouts, blocks, heads, counts, layers, strict=True)
        )
    )  # fmt: skip
    common_heads = sorted(set(source.groups[0].heads) & set(target.groups[0].heads))
    common_layers = [layer for layer in range(layers[0]) if layer >= 3 - layers[1]]
    if not common_heads or not common_layers:
        return
    groups = (GroupShare(name="full", layers=tuple(common_layers), heads=tuple(common_heads)),)
    plan, rows = plan_and_reference(source, target, groups, *span, seed)
    check_equal(plan, rows, source, target, maximal=consecutive(common_heads, source, target))


@pytest.mark.parametrize(("source_tp", "target_tp"), list(itertools.product([1, 2, 4, 8], repeat=2)))
def test_every_tp_pair_fills_every_target_with_the_right_bytes_d1(source_tp, target_tp):
    """D1: TP {1,2,4,8} on either side and {1,2,4,8,16} heads; layouts and block sizes vary along."""
    for index, heads in enumerate([1, 2, 4, 8, 16]):
        identity = identity_of(num_layers=2, num_kv_heads=heads, head_dim=1)
        layout_pair = [STANDARD_LAYOUTS[(index + shift) % 5] for shift in (source_tp, 2 * target_tp)]
        block_sizes = [(4, 4), (2, 6), (6, 2), (3, 4), (4, 1)][index]
        check_engines(identity, layout_pair, (source_tp, target_tp), (1, 1), block_sizes, (3, 8))


@pytest.mark.parametrize(("source_pp", "target_pp"), [(1, 2), (2, 1), (2, 2), (3, 2), (2, 3)])
@pytest.mark.parametrize("tps", [(2, 1), (1, 2), (4, 3)])
def test_pipeline_stages_map_layers_by_global_id_d3(source_pp, target_pp, tps):
    """D3: five layers do not cut evenly; 6 heads over 4 ranks do not either."""
    identity = identity_of(num_layers=5, num_kv_heads=6, head_dim=1)
    for layout_pair in (("nhd", "blockmajor"), ("blockmajor", "fused"), ("apart", "hnd")):
        check_engines(identity, layout_pair, tps, (source_pp, target_pp), (4, 3), (0, 5))


def check_engines(identity, layout_pair, tps, pps, block_sizes, span):
    """Every leg equals its reference, and together they write each byte of every target's range once."""
    sources, targets = (
        engine_specs(layout, identity=identity, tp=tp, pp=pp, block_size=block_size, engine=engine)
        for layout, tp, pp, block_size, engine in zip(layout_pair, tps, pps, block_sizes, "pd", strict=True)
    )
    legs = assign_legs([share_of(spec) for spec in sources], [share_of(spec) for spec in targets])
    written = [Counter() for _ in targets]
    for leg in legs:
        plan, rows = plan_and_reference(sources[leg.source], targets[leg.target], leg.groups, *span)
        check_equal(plan, rows, sources[leg.source], targets[leg.target])
        written[leg.target].update((row.layer, row.kind, row.head, row.token) for row in rows)
    for target, have in zip(targets, written, strict=True):
        group = target.groups[0]
        layers = {plane.layer for plane in group.planes}
        assert have == Counter(itertools.product(layers, "kv", group.heads, range(*span)))


@pytest.mark.parametrize("sizes", [(16, 64), (64, 16), (16, 48), (48, 16), (32, 48), (17, 16)])
def test_block_sizes_up_and_down_with_partial_blocks_d4(sizes):
    """D4: 16 to 64, 64 to 16, 16 to 48 and odd ones; first and last block part-filled."""
    for span in ((0, 128), (5, 100), (63, 65), (7, 7)):
        source, target = (rank_spec("nhd", block_size=size, num_blocks=16, heads=(0, 1)) for size in sizes)
        plan, rows = plan_and_reference(source, target, whole(source), *span)
        check_equal(plan, rows, source, target)
        slots = [segment.run_bytes for segment in plan.segments]
        assert slots == sorted(slots, reverse=True), "larger pieces come first"


def logical_order(plan, rows):
    """The wire order as what moves, not where it lies."""
    names = {row.move[:2]: row[:5] for row in rows}
    return [names[move[:2]] for move in walk_rows(plan, rows[0].nbytes)]


@settings(max_examples=100, deadline=None)
@given(pair=st.tuples(layouts, layouts), sizes=st.tuples(st.sampled_from([2, 4, 6]), st.sampled_from([2, 4, 6])))
def test_the_wire_order_does_not_depend_on_block_ids(pair, sizes):
    source, target = (rank_spec(name, block_size=size) for name, size in zip(pair, sizes, strict=True))
    plans = [plan_and_reference(source, target, whole(source), 3, 15, seed) for seed in (0, 50)]
    assert logical_order(*plans[0]) == logical_order(*plans[1])


@settings(max_examples=100, deadline=None)
@given(pair=st.tuples(layouts, layouts), sizes=st.tuples(st.sampled_from([2, 4, 6]), st.sampled_from([2, 4, 6])))
def test_the_source_walks_the_same_order_without_the_targets_blocks(pair, sizes):
    source, target = (rank_spec(name, block_size=size) for name, size in zip(pair, sizes, strict=True))
    groups = whole(source)
    plan, _ = plan_and_reference(source, target, groups, 3, 15)
    alone = plan_leg(
        source, target, groups, source_blocks=[scattered(source, 15, 0)], target_blocks=None, first_token=3, tokens=15
    )
    assert [(run[0], run[1], run[4]) for run in walk(alone)] == [(run[0], run[1], run[4]) for run in walk(plan)]
    assert all((segment.pieces[:, 1] == 0).all() for segment in alone.segments)


def test_the_wire_order_does_not_depend_on_how_the_leg_lists_layers_and_heads():
    source, target = rank_spec("blockmajor"), rank_spec("hnd")
    forwards = (GroupShare(name="full", layers=(0, 1), heads=(0, 1, 3)),)
    backwards = (GroupShare(name="full", layers=(1, 0), heads=(3, 0, 1)),)
    one, other = (plan_and_reference(source, target, groups, 0, 9)[0] for groups in (forwards, backwards))
    assert list(walk(one)) == list(walk(other))


def test_matched_layouts_fold_into_whole_blocks():
    for name in ("nhd", "hnd", "apart", "fused", "blockmajor"):
        source, target = rank_spec(name, block_size=8, num_blocks=4), rank_spec(name, block_size=8, num_blocks=4)
        plan, _ = plan_and_reference(source, target, whole(source), 0, 24)
        (segment,) = plan.segments
        planes = {"nhd": 1, "apart": 1, "hnd": 2, "fused": 2, "blockmajor": 4}[name]
        assert segment.run_bytes == planes * 8 * 4 * source.groups[0].row_bytes
        assert segment.nest == ()


def flip_kinds(spec):
    other = {PlaneKind.K: PlaneKind.V, PlaneKind.V: PlaneKind.K}
    planes = tuple(replace(plane, kind=other[plane.kind]) for plane in spec.groups[0].planes)
    return replace(spec, groups=(replace(spec.groups[0], planes=planes),))


def test_matched_layouts_fold_whatever_the_order_of_planes_in_memory():
    source = flip_kinds(rank_spec("blockmajor", block_size=8, num_blocks=4))
    plan, _ = plan_and_reference(source, source, whole(source), 0, 24)
    (segment,) = plan.segments
    assert segment.run_bytes == 4 * 8 * 4 * source.groups[0].row_bytes


def test_planes_that_rise_evenly_in_different_regions_are_not_one_progression():
    """K and V of the target lie in regions of their own, V 8 bytes further in: that is no stride of 8."""
    source, target = rank_spec("hnd"), rank_spec("apart")
    group = target.groups[0]
    planes = tuple(replace(plane, offset_bytes=8 if plane.kind is PlaneKind.V else 0) for plane in group.planes)
    target = replace(
        target,
        groups=(replace(group, planes=planes),),
        region_bytes=tuple(length + 8 for length in target.region_bytes),
    )
    check_spec(target)
    for one, other in ((source, target), (target, source)):
        plan, rows = plan_and_reference(one, other, whole(source), 0, 11)
        check_equal(plan, rows, one, other)


def test_the_size_of_a_plan_does_not_grow_with_its_runs_i1():
    """I1: 128k tokens of an 80-layer model, TP 8 to TP 2: ten million runs a target, under a megabyte of plan."""
    identity = identity_of(num_layers=80, num_kv_heads=8, head_dim=128)
    source = rank_spec("nhd", identity=identity, tp=(0, 8), block_size=16, num_blocks=8192)
    target = rank_spec("nhd", identity=identity, tp=(0, 2), block_size=16, num_blocks=8192, engine="d")
    blocks = [np.arange(8192)[::-1]]
    plan = plan_leg(
        source, target, whole(source), source_blocks=blocks, target_blocks=blocks, first_token=0, tokens=131_072
    )
    assert plan.run_count == 160 * 131_072
    assert plan.nbytes < 1_000_000


def test_planes_of_different_strides_are_moved_by_their_own_d5():
    """D5: V lies in padded pages of its own order; only its strides say so."""
    source, target = rank_spec("apart"), rank_spec("nhd")
    planes = [
        plane
        if plane.kind is PlaneKind.K
        else replace(plane, block_stride=100, slot_stride=5, head_stride=24, offset_bytes=7)
        for plane in source.groups[0].planes
    ]
    source = replace(
        source,
        groups=(replace(source.groups[0], planes=tuple(planes)),),
        region_bytes=tuple(2000 for _ in source.region_bytes),
    )
    check_spec(source)
    plan, rows = plan_and_reference(source, target, whole(source), 1, 14)
    check_equal(plan, rows, source, target)
    assert len({segment.run_bytes for segment in plan.segments}) > 1


def test_irregular_layers_and_reversed_planes_are_moved_right():
    """Layers 0, 1, 3 of a block-major cache are no progression, and V may lie before K."""
    identity = identity_of(num_layers=4)
    source = rank_spec("blockmajor", identity=identity)
    flipped = flip_kinds(source)
    groups = (GroupShare(name="full", layers=(0, 1, 3), heads=(0, 1, 2, 3)),)
    for target in (source, flipped, rank_spec("nhd", identity=identity)):
        for one, other in ((flipped, target), (target, flipped)):
            plan, rows = plan_and_reference(one, other, groups, 2, 13)
            assert Counter(walk_rows(plan, 4)) == Counter(row.move for row in rows)
            assert all(dim.source_stride > 0 and dim.target_stride > 0 for s in plan.segments for dim in s.nest)


def latent_spec(block_size, num_blocks, tp):
    spec = rank_spec(identity=identity_of(num_kv_heads=1, attention="mla"), tp=tp, num_blocks=num_blocks)
    row = 9 * 2
    group = replace(
        spec.groups[0],
        name="latent",
        channels=9,
        block_size=block_size,
        planes=tuple(
            Plane(layer, PlaneKind.LATENT, 0, layer * num_blocks * block_size * row, block_size * row, row, row)
            for layer in (0, 1)
        ),
    )
    spec = replace(spec, groups=(group,), region_bytes=(2 * num_blocks * block_size * row,))
    check_spec(spec)
    return spec


def test_latents_are_replicated_and_read_from_one_source_each_d7():
    """D7: four targets share two sources evenly; each gets the whole latent once."""
    sources = [latent_spec(16, 4, (rank, 2)) for rank in range(2)]
    targets = [latent_spec(48, 3, (rank, 4)) for rank in range(4)]
    legs = assign_legs([share_of(spec) for spec in sources], [share_of(spec) for spec in targets])
    assert Counter(leg.source for leg in legs) == {0: 2, 1: 2}
    assert sorted(leg.target for leg in legs) == [0, 1, 2, 3]
    plan, rows = plan_and_reference(sources[0], targets[0], legs[0].groups, 5, 60)
    check_equal(plan, rows, sources[0], targets[0])


def two_groups(block_sizes):
    parts = [rank_spec("nhd", block_size=size, layers=(index,)) for index, size in enumerate(block_sizes)]
    groups = [
        replace(
            part.groups[0],
            name=name,
            planes=tuple(replace(plane, region=index) for plane in part.groups[0].planes),
        )
        for index, (part, name) in enumerate(zip(parts, ("one", "two"), strict=True))
    ]
    spec = replace(
        parts[0], groups=tuple(groups), region_bytes=tuple(length for part in parts for length in part.region_bytes)
    )
    check_spec(spec)
    return spec


def test_groups_are_matched_by_name_each_with_its_block_list():
    source = two_groups((4, 2))
    target = two_groups((2, 8))
    target = replace(target, groups=target.groups[::-1])
    lists = [[3, 1, 2], [9, 8, 1, 2, 4]], [[5, 6], [7, 3, 1, 15, 0]]
    groups = whole(source)
    plan = plan_leg(
        source, target, groups, source_blocks=lists[0], target_blocks=lists[1], first_token=1, tokens=9
    )  # fmt: skip
    rows = list(reference_rows(source, target, groups, *lists, 1, 9))
    assert {row.group for row in rows} == {"one", "two"}
    assert Counter(walk_rows(plan, 4)) == Counter(row.move for row in rows)


# --- refusals -------------------------------------------------------------------------------------------------------


def plan_default(source=None, target=None, groups=None, **arguments):
    source, target = source or rank_spec(), target or rank_spec(engine="d")
    defaults = {"source_blocks": [[0, 1, 2]], "target_blocks": [[5, 4, 3]], "first_token": 0, "tokens": 12}
    return plan_leg(source, target, groups or whole(source), **{**defaults, **arguments})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"source_blocks": [[0, 1]]}, "source blocks of groups.full: 2 blocks of 4 slots hold fewer than 12"),
        ({"target_blocks": [[5, 4]]}, "target blocks of groups.full: 2 blocks"),
        ({"target_blocks": [[5, 4, 16]]}, r"target blocks of groups.full\[2\] is block 16"),
        ({"target_blocks": [[5, 4, 5]]}, "block 5 is listed twice"),
        ({"target_blocks": [[5, 4, 3], [1]]}, "2 lists for 1 groups"),
        ({"source_blocks": []}, "0 lists for 1 groups"),
        ({"first_token": 13}, r"\[13, 12\)"),
        ({"first_token": -1}, r"\[-1, 12\)"),
        ({"tokens": 1 << 40}, "impossible"),
    ],
)
def test_impossible_blocks_and_ranges_are_refused(arguments, message):
    with pytest.raises(LayoutError, match=message):
        plan_default(**arguments)


def test_null_blocks_outside_the_range_and_shared_source_blocks_are_fine():
    plan = plan_default(source_blocks=[[0, 2, 2]], target_blocks=[[0, 4, 3, 0, 0]], first_token=4)
    assert plan.total_bytes == plan_default(first_token=4).total_bytes


def test_an_empty_range_is_an_empty_plan():
    plan = plan_default(first_token=12)
    assert (plan.segments, plan.total_bytes, plan.nbytes) == ((), 0, 0)


def test_channels_and_kinds_that_differ_are_refused_naming_both_sides():
    with pytest.raises(MismatchError, match=r"groups\.full\.channels differs: p/0/0@1 has 2, d/0/0@1 has 4"):
        plan_default(target=rank_spec(identity=identity_of(head_dim=4), engine="d"))
    source = rank_spec()
    keys_only = replace(
        source, groups=(replace(source.groups[0], planes=tuple(p for p in source.groups[0].planes if p.kind == "k")),)
    )
    with pytest.raises(MismatchError, match=r"planes\.kind.*'k'.*'k\+v'"):
        plan_default(source=keys_only)


@pytest.mark.parametrize(
    ("share", "message"),
    [
        (GroupShare(name="swa", layers=(0,), heads=(0,)), "group 'swa' of the leg is not on the source"),
        (GroupShare(name="full", layers=(0,), heads=(1, 4)), r"heads \(1, 4\).*\[0, 1, 2, 3\]"),
        (GroupShare(name="full", layers=(7,), heads=(1,)), r"layers \(7,\)"),
        (GroupShare(name="full", layers=(0, 0), heads=(1,)), "each layer once"),
        (GroupShare(name="full", layers=(0,), heads=()), r"heads \(\)"),
    ],
)
def test_a_leg_that_the_sides_do_not_hold_is_refused(share, message):
    with pytest.raises(UnsupportedError, match=message):
        plan_default(groups=(share,))


# --- bounds ---------------------------------------------------------------------------------------------------------


def segment_of(bases=((0, 0, 0, 0),), pieces=((0, 0),), nest=(), run_bytes=8):
    return Segment(np.array(bases, dtype=np.int64), np.array(pieces, dtype=np.int64), nest, run_bytes)


@pytest.mark.parametrize(
    ("segment", "message"),
    [
        (segment_of(run_bytes=65), "source region 0, which has 64"),
        (segment_of(bases=((0, 57, 0, 0),)), "bytes 57 to 65 of source region 0"),
        (segment_of(pieces=((0, 0), (0, 60))), "bytes 0 to 68 of target region 0"),
        (segment_of(pieces=((0, -1),)), "bytes -1 to 7 of target"),
        (segment_of(nest=(Dim(2, 8, 60),)), "bytes 0 to 68 of target"),
        (segment_of(nest=(Dim(3, -8, 8),)), "bytes -16 to 8 of source"),
        (segment_of(nest=(Dim(1 << 40, 1 << 40, 1),)), "source region 0"),
        (segment_of(bases=((1, 0, 0, 0),)), "names source region 1; the source has 1"),
        (segment_of(bases=((0, 0, -1, 0),)), "target region"),
        (segment_of(bases=np.empty((0, 4))), "bases is empty"),
        (segment_of(run_bytes=0), "must be positive"),
        (segment_of(pieces=((0, 0, 0),)), r"must be C-contiguous int64 \[n, 2\]"),
    ],
)
def test_a_plan_that_leaves_its_regions_is_refused_before_use_d6(segment, message):
    """D6: by its extremes, whoever made it."""
    plan = CopyPlan((segment,), segment.total_bytes)
    with pytest.raises(LayoutError, match=message):
        check_plan(plan, [64], [64])


def test_a_plan_that_touches_the_last_byte_passes_and_a_lying_total_does_not():
    segment = segment_of(bases=((0, 0, 0, 32),), pieces=((0, 0), (8, 8)), nest=(Dim(2, 48, 16),))
    check_plan(CopyPlan((segment,), 32), [64], [64])
    with pytest.raises(LayoutError, match="total_bytes is 33"):
        check_plan(CopyPlan((segment,), 33), [64], [64])


def test_a_plan_built_for_another_cache_does_not_pass_its_bounds_d6():
    source = rank_spec()
    plan = plan_default(source=source, source_blocks=[[0, 1, 15]])
    small = rank_spec(num_blocks=8)
    with pytest.raises(LayoutError, match="source region"):
        check_plan(plan, small.region_bytes, source.region_bytes)


# --- legs -----------------------------------------------------------------------------------------------------------


def shares(tp, heads, layers=2, pp=1):
    identity = identity_of(num_layers=layers, num_kv_heads=heads)
    return [share_of(spec) for spec in engine_specs("nhd", identity=identity, tp=tp, pp=pp, num_blocks=1)]


def cells(groups):
    return Counter((g.name, layer, head) for g in groups for layer in g.layers for head in g.heads)


@settings(max_examples=200, deadline=None)
@given(
    tps=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    pps=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    heads=st.integers(1, 9),
    order=st.randoms(use_true_random=False),
)
def test_every_head_of_every_target_is_read_once_whatever_the_order_of_ranks(tps, pps, heads, order):
    sources, targets = (shares(tp, heads, layers=3, pp=pp) for tp, pp in zip(tps, pps, strict=True))
    legs = assign_legs(sources, targets)
    for index, target in enumerate(targets):
        mine = [leg for leg in legs if leg.target == index]
        assert cells(group for leg in mine for group in leg.groups) == cells(target.groups)
        for leg in mine:
            assert not cells(leg.groups) - cells(sources[leg.source].groups)
    shuffled_sources, shuffled_targets = list(sources), list(targets)
    order.shuffle(shuffled_sources)
    order.shuffle(shuffled_targets)
    again = assign_legs(shuffled_sources, shuffled_targets)
    named = [(sources[leg.source], targets[leg.target], leg.groups) for leg in legs]
    assert named == [(shuffled_sources[leg.source], shuffled_targets[leg.target], leg.groups) for leg in again]


@pytest.mark.parametrize(("source_tp", "target_tp", "heads"), [(8, 4, 2), (8, 8, 1), (4, 8, 1), (3, 8, 1), (8, 2, 2)])
def test_replicas_are_read_evenly_d7(source_tp, target_tp, heads):
    """D7: no source of a head has two readers more than another."""
    sources, targets = shares(source_tp, heads), shares(target_tp, heads)
    legs = assign_legs(sources, targets)
    for head in range(heads):
        loads = [
            readers_of(legs, index) for index, rank in enumerate(sources) if head in rank.groups[0].heads
        ]  # fmt: skip
        assert max(loads) - min(loads) <= 1


def test_unread_sources_and_readers_are_counted():
    legs = assign_legs(shares(8, 2), shares(2, 2))
    assert [readers_of(legs, index) for index in range(8)] == [1, 0, 0, 0, 1, 0, 0, 0]
    assert unread_sources(legs, 8) == (1, 2, 3, 5, 6, 7)
    assert readers_of(assign_legs(shares(1, 4), shares(4, 4)), 0) == 4


def test_one_target_alone_spreads_by_its_own_rank():
    sources = shares(4, 1)
    chosen = [assign_legs(sources, [target])[0].source for target in shares(8, 1)]
    assert chosen == [0, 1, 2, 3, 0, 1, 2, 3]


def test_irregular_shares_become_products_that_cover_exactly():
    def rank(tp_rank, *groups):
        return RankShare(
            pp_rank=0,
            tp_rank=tp_rank,
            groups=tuple(GroupShare(name=n, layers=layers, heads=heads) for n, layers, heads in groups),
        )

    sources = [
        rank(0, ("full", (0, 1, 2), (0, 1)), ("swa", (3,), (0, 1))),
        rank(1, ("full", (1, 2), (1, 2)), ("swa", (4,), (0, 1))),
        rank(2, ("full", (0,), (2,))),
    ]
    targets = [rank(0, ("full", (0, 1, 2), (0, 1, 2)), ("swa", (3, 4), (0, 1))), rank(1, ("full", (1,), (1,)))]
    legs = assign_legs(sources, targets)
    for index, target in enumerate(targets):
        read = cells(group for leg in legs if leg.target == index for group in leg.groups)
        assert read == cells(target.groups)


def test_what_no_source_holds_is_refused_naming_group_layer_head_and_sides():
    sources = [rank for rank in shares(4, 4) if rank.tp_rank != 2]
    with pytest.raises(UnsupportedError, match=r"group 'full' layer 0 head 2: target rank pp 0 tp 1.*3 source ranks"):
        assign_legs(sources, shares(2, 4))
    stage = shares(1, 4, layers=4, pp=2)[:1]
    with pytest.raises(UnsupportedError, match=r"layer 2 head 0.*pp 0 tp 0"):
        assign_legs(stage, shares(1, 4, layers=4))


def test_a_rank_listed_twice_is_refused():
    with pytest.raises(LayoutError, match="sources list a"):
        assign_legs(shares(1, 4) * 2, shares(1, 4))
