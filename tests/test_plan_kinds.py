"""What is converted and what is refused; windows, entries, shared memory, latents in parts: one behaviour each."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from geometries import identity_of, rank_spec
from plan_reference import walk

from kvlink.errors import LayoutError, MismatchError, UnsupportedError
from kvlink.layout import (
    CacheSpec,
    DType,
    Group,
    IndexedBy,
    Place,
    Plane,
    PlaneKind,
    Row,
    alias_classes,
    aliases,
    check_spec,
    share_of,
)
from kvlink.plan import LegPlanner, plan_leg

replace = msgspec.structs.replace
BF16, E4M3, INT8 = DType.BFLOAT16, DType.FLOAT8_E4M3, DType.INT8


def with_groups(spec, *groups, region_bytes=None):
    made = replace(spec, groups=tuple(groups), region_bytes=region_bytes or spec.region_bytes)
    check_spec(made)
    return made


def with_group(spec, **changes):
    return with_groups(spec, replace(spec.groups[0], **changes))


def plan_of(source, target, *, source_blocks=((0, 1, 2),), target_blocks=((5, 4, 3),), first_token=0, tokens=12):
    return plan_leg(
        source, target, share_of(target).groups, source_blocks=source_blocks, target_blocks=target_blocks,
        first_token=first_token, tokens=tokens,
    )  # fmt: skip


# --- conversion -----------------------------------------------------------------------------------------------------


def test_one_scale_for_all_leaves_planes_in_the_nest():
    source = rank_spec("hnd")
    target = with_group(rank_spec("hnd", dtype=E4M3), scales=((0.5,),))
    plan = plan_of(source, target)
    (segment,) = plan.segments[:1]
    assert plan.converts
    assert (segment.convert.source, segment.convert.target, segment.convert.scale_dim) == (BF16, E4M3, -1)
    assert segment.convert.source_scales is None
    assert segment.convert.target_scales.tolist() == [[0.5]] * len(segment.bases)
    assert len(segment.bases) == 2, "K and V stay one dimension of a layer's block"
    assert segment.target_run_bytes * 2 == segment.run_bytes
    assert plan.total_bytes == 12 * 4 * 4 * 4, "wire bytes are the source's"


def test_scales_by_head_pin_the_dimension_of_heads():
    source = with_group(rank_spec("nhd", dtype=E4M3), scales=((1.0, 2.0, 3.0, 4.0),))
    target = rank_spec("nhd")
    for segment in plan_of(source, target).segments:
        assert segment.nest[segment.convert.scale_dim].count == 4
        assert segment.convert.source_scales.tolist() == [[1.0, 2.0, 3.0, 4.0]] * len(segment.bases)
        assert segment.convert.target_scales is None
        assert segment.run_bytes == 2, "a run does not reach over two heads"


def test_heads_in_another_order_take_their_scales_along():
    source = with_group(rank_spec("nhd", dtype=E4M3, heads=(3, 1, 0, 2)), scales=((3.0, 1.5, 0.5, 2.0),))
    target = rank_spec("nhd", heads=(0, 2))
    segments = plan_of(source, target).segments
    assert {segment.convert.source_scales.ravel().tolist()[0] for segment in segments} == {0.5}
    (segment,) = segments[:1]
    assert [segment.convert.scale_dim >= 0, segment.convert.source_scales[0].tolist()] == [True, [0.5, 2.0]]


def test_scales_by_plane_make_bases_of_planes():
    count = len(rank_spec("blockmajor").groups[0].planes)
    scales = tuple((float(2**index),) for index in range(count))
    source = with_group(rank_spec("blockmajor", dtype=INT8), scales=scales)
    (segment, *_) = plan_of(source, rank_spec("blockmajor")).segments
    assert segment.convert.source_scales.tolist() == [list(row) for row in scales]


def test_equal_scales_are_copied_and_others_are_converted():
    source, target = (with_group(rank_spec(dtype=E4M3), scales=((0.5, 0.5, 0.5, 0.5),)) for _ in range(2))
    assert not plan_of(source, target).converts
    assert not plan_of(source, with_group(target, scales=((0.5,),))).converts
    requantised = plan_of(source, with_group(target, scales=((0.25,),))).segments[0].convert
    assert (requantised.source, requantised.target) == (E4M3, E4M3)
    assert (requantised.source_scales[0, 0], requantised.target_scales[0, 0]) == (0.5, 0.25)
    only_v = [((0.5,) if plane.kind is PlaneKind.K else (1.0,)) for plane in target.groups[0].planes]
    plan = plan_of(source, with_group(target, scales=tuple(only_v)))
    assert {segment.convert is None for segment in plan.segments} == {True, False}


@pytest.mark.parametrize("side", ["source", "target"])
def test_quantised_kv_whose_scales_are_left_behind_is_refused_e2(side):
    """E2: naming the rank that states none, also where both store the same dtype."""
    stated = rank_spec(dtype=E4M3)
    missing = with_group(stated, scales=())
    source, target = (missing, stated) if side == "source" else (stated, missing)
    with pytest.raises(UnsupportedError, match=rf"groups.full.scales: .*\({side}\) stores k as float8_e4m3 and states"):
        plan_of(source, target)
    with pytest.raises(UnsupportedError, match="states no scales"):
        plan_of(missing, missing)


def inline(dtype=E4M3, scale=DType.FLOAT32):
    """Per-token indexer keys under inline scales: 8 channels, then one scale, in one row."""
    row = 8 + scale.itemsize
    group = Group(
        name="index", heads=(0,), channels=8, dtype=dtype, block_size=4, num_blocks=6, num_heads=1,
        rows=(Row(PlaneKind.INDEX_SCALE, 1, scale),),
        planes=(
            Plane(0, PlaneKind.INDEX, 0, 0, 4 * row, row, 0),
            Plane(0, PlaneKind.INDEX_SCALE, 0, 8, 4 * row, row, 0),
        ),
    )  # fmt: skip
    return with_groups(rank_spec(), group, region_bytes=(6 * 4 * row,))


def test_inline_scales_travel_beside_what_they_scale_e2():
    """E2: as bytes, with no scale stated."""
    plan = plan_of(inline(), inline())
    assert not plan.converts
    assert plan.total_bytes == 12 * 12


def test_inline_scales_are_not_converted_nor_left_behind_e2():
    """E2: another dtype of keys or scales, or a side that stores none, is refused by name."""
    for target in (inline(dtype=INT8), inline(scale=DType.FLOAT16)):
        with pytest.raises(
            UnsupportedError, match=r"groups.index.dtype of index.*inline scales can be moved, not conv"
        ):
            plan_of(inline(), target)
    group = inline().groups[0]
    plain = replace(group, planes=group.planes[:1], rows=(), dtype=BF16)
    bare = with_groups(
        inline(), replace(plain, planes=(Plane(0, PlaneKind.INDEX, 0, 0, 64, 16, 0),)), region_bytes=(384,)
    )
    with pytest.raises(MismatchError, match=r"planes.kind.*'index\+index_scale'.*'index'"):
        plan_of(inline(), bare)


def test_opaque_bytes_are_not_converted():
    source = rank_spec(dtype=DType.OPAQUE)
    with pytest.raises(UnsupportedError, match="bytes that only the engines understand can be moved, not converted"):
        plan_of(source, rank_spec(dtype=DType.FLOAT16))
    assert not plan_of(source, source).converts


def test_sharded_tokens_are_refused_by_name():
    sharded = rank_spec()
    sharded = replace(sharded, place=replace(sharded.place, dcp_size=2))
    with pytest.raises(
        UnsupportedError, match=r"place.dcp_size is 2 at p/0/0@1 \(target\): decode context parallelism"
    ):
        plan_of(rank_spec(), sharded)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"window": 128}, "window"),
        ({"num_heads": 8}, "num_heads"),
        ({"indexed_by": IndexedBy.ENTRY}, "indexed_by"),
    ],
)
def test_groups_that_mean_something_else_are_refused_by_field_d2(changes, field):
    """D2: the number of heads in all is part of what a group means."""
    source = with_group(rank_spec(), window=64)
    with pytest.raises(MismatchError, match=rf"groups\.full\.{field} differs"):
        plan_of(source, with_group(source, **changes))


# --- windows, prefixes, entries -------------------------------------------------------------------------------------


def hybrid(engine="p", *, block_size=4, layouts=("nhd", "nhd")):
    """A full and a sliding-window group, each in regions of its own."""
    parts = [rank_spec(layout, block_size=block_size, engine=engine) for layout in layouts]
    count = len(parts[0].region_bytes)
    windowed = replace(
        parts[1].groups[0],
        name="swa",
        window=8,
        planes=tuple(replace(plane, region=plane.region + count) for plane in parts[1].groups[0].planes),
    )
    return with_groups(
        parts[0], parts[0].groups[0], windowed, region_bytes=(*parts[0].region_bytes, *parts[1].region_bytes)
    )


def test_each_group_begins_where_its_positions_do():
    """The null block 0 before a window is not looked at, neither read nor written."""
    source, target = hybrid(), hybrid("d")
    plan = plan_of(
        source, target, source_blocks=((1, 2, 3), (0, 0, 4)), target_blocks=((3, 4, 5), (0, 0, 6)), first_token=(3, 9)
    )
    row, group = 4 * 4, source.groups[1]
    assert plan.total_bytes == 4 * row * ((12 - 3) + (12 - 9))
    block_bytes = group.planes[0].block_stride
    windowed = [move for move in walk(plan) if move[0] >= len(rank_spec().region_bytes)]
    assert {move[1] % (16 * block_bytes) // block_bytes for move in windowed} == {4}
    assert {move[3] % (16 * block_bytes) // block_bytes for move in windowed} == {6}


@pytest.mark.parametrize("first", [(0,), (0, 0, 0), (0, 13), (-1, 0)])
def test_impossible_first_tokens_are_refused(first):
    lists = ((1, 2, 3), (4, 5, 6))
    with pytest.raises(LayoutError, match=r"first tokens are given for 2 groups|token range \[(13|-1), 12\)"):
        plan_of(hybrid(), hybrid("d"), source_blocks=lists, target_blocks=lists, first_token=first)


def states(num_blocks=6, *, slots=3):
    """A recurrent state in two groups over one row: a part cut over 4 heads, and one that all ranks hold."""
    row = 4 * 2 * 2 + 2 * 2
    block = slots * row
    common = {
        "channels": 2,
        "dtype": BF16,
        "block_size": slots,
        "num_blocks": num_blocks,
        "indexed_by": IndexedBy.ENTRY,
    }
    cut = Group(
        name="conv_x",
        heads=(0, 1, 2, 3),
        num_heads=4,
        planes=(Plane(0, PlaneKind.CONV, 0, 0, block, row, 4),),
        **common,
    )
    whole = Group(
        name="conv_b", heads=(0,), num_heads=1, planes=(Plane(0, PlaneKind.CONV, 0, 16, block, row, 4),), **common
    )
    return with_groups(rank_spec(), cut, whole, region_bytes=(num_blocks * block,))


def test_states_move_entry_by_entry_whatever_the_tokens():
    plan = plan_of(states(), states(), source_blocks=((1, 4), (1, 4)), target_blocks=((3, 2), (3, 2)), tokens=10_000)
    assert plan.total_bytes == 2 * 3 * 20
    assert plan_of(states(), states(), source_blocks=((), ()), target_blocks=((), ())).total_bytes == 0
    with pytest.raises(LayoutError, match=r"groups\.conv_x is moved entry by entry: the source has 2, the target 1"):
        plan_of(states(), states(), source_blocks=((1, 4), (1, 4)), target_blocks=((3,), (3, 2)))
    with pytest.raises(LayoutError, match=r"source blocks of groups.conv_b\[1\] is block 6"):
        plan_of(states(), states(), source_blocks=((1, 4), (1, 6)), target_blocks=((3, 2), (3, 2)))
    with pytest.raises(MismatchError, match="block_size differs"):
        plan_of(states(), states(slots=2), source_blocks=((1,), (1,)), target_blocks=((3,), (3,)))


# --- shared memory --------------------------------------------------------------------------------------------------


def sharing(engine="p", *, ratio=1, shift=0):
    """Two groups of one layer each over the same memory, as a hybrid allocator gives them; the second may differ."""
    spec = rank_spec("hnd", layers=(0,), num_blocks=8, engine=engine)
    full = spec.groups[0]
    planes = tuple(replace(plane, layer=1, offset_bytes=plane.offset_bytes + shift) for plane in full.planes)
    if ratio > 1:
        planes = tuple(replace(plane, block_stride=plane.block_stride // 2) for plane in planes)
    other = replace(full, name="swa", planes=planes, num_blocks=full.num_blocks - (shift > 0))
    return with_groups(spec, full, other)


def test_two_groups_do_not_write_one_block_of_shared_memory_i2():
    """I2: shared memory is one region; blocks 3 and 3 of the two groups are the same bytes."""
    source, target = sharing(), sharing("d")
    assert len(target.region_bytes) == 1
    assert alias_classes(target) == (0, 0)
    lists = {"source_blocks": ((0, 1, 2), (3, 4, 5)), "tokens": 12}
    plan_of(source, target, target_blocks=((1, 2, 3), (4, 5, 6)), **lists)
    with pytest.raises(LayoutError, match=r"block 3 of groups.full and block 3 of groups.swa are the same memory"):
        plan_of(source, target, target_blocks=((1, 2, 3), (3, 5, 6)), **lists)


def test_shared_memory_that_is_offset_is_told_by_bytes():
    """Half a block further: block 3 of one group lies over blocks 3 and 4 of the other."""
    block = rank_spec("hnd", layers=(0,)).groups[0].planes[0].block_stride
    source, target = sharing(), sharing("d", shift=block // 2)
    lists = {"source_blocks": ((0, 1, 2), (3, 4, 5)), "tokens": 12}
    for second in ((3, 5, 6), (2, 5, 6)):
        with pytest.raises(LayoutError, match=rf"block 3 of groups.full and block {second[0]} of groups.swa"):
            plan_of(source, target, target_blocks=((0, 1, 3), second), **lists)
    plan_of(source, target, target_blocks=((0, 1, 3), (4, 5, 6)), **lists)


def test_parts_of_one_row_share_no_byte():
    """conv_x and conv_b lie in the same blocks of the same region, side by side in every row."""
    assert aliases(states()) == ()
    assert alias_classes(states()) == (0, 1)
    plan_of(states(), states(), source_blocks=((1,), (1,)), target_blocks=((2,), (2,)))


# --- blocks of several tensor blocks, latents in parts --------------------------------------------------------------


def test_a_block_of_several_tensor_blocks_is_as_many_runs():
    whole = rank_spec("hnd", block_size=8, num_blocks=4, heads=(0,), layers=(0,))
    tensor = rank_spec("hnd", block_size=4, num_blocks=8, heads=(0,), layers=(0,)).groups[0]
    cut = with_groups(whole, replace(tensor, block_size=8, num_blocks=4, ratio=2))
    plan = plan_of(cut, whole, source_blocks=((1, 3),), target_blocks=((2, 0),), tokens=16)
    block = 2 * 4 * 4
    assert sorted({move[1] // block for move in walk(plan)}) == [2, 3, 6, 7]
    assert {move[4] for move in walk(plan)} == {4 * 4}
    with pytest.raises(LayoutError, match=r"ratio is 3, which does not divide the block_size of 8"):
        with_group(cut, ratio=3)


def latent(*widths, apart=False):
    """A latent of 6 channels in parts: side by side in one row, or in regions of their own."""
    starts = np.cumsum((0, *widths)).tolist()
    row = [2 * width if apart else 12 for width in widths]
    planes = tuple(
        Plane(0, PlaneKind.LATENT, index if apart else 0, 0 if apart else 2 * first, 4 * step, step, 0, 0, first, width)
        for index, (first, width, step) in enumerate(zip(starts, widths, row, strict=False))
    )
    group = Group(
        name="mla", heads=(0,), channels=6, dtype=BF16, block_size=4, num_blocks=6, num_heads=1, planes=planes
    )
    regions = tuple(6 * 4 * step for step in row) if apart else (6 * 4 * 12,)
    return with_groups(rank_spec(identity=identity_of(attention="mla")), group, region_bytes=regions)


def test_a_latent_in_parts_is_cut_where_either_side_is():
    """512 + 64 on one side, one tensor of 576 on the other; d7 of its kind: every channel once."""
    assert {move[4] for move in walk(plan_of(latent(4, 2, apart=True), latent(6)))} == {8, 4}
    assert {move[4] for move in walk(plan_of(latent(6), latent(4, 2, apart=True)))} == {8, 4}
    assert {move[4] for move in walk(plan_of(latent(2, 4, apart=True), latent(4, 2, apart=True)))} == {4}
    assert {move[4] for move in walk(plan_of(latent(6), latent(6)))} == {48}
    spec = latent(6)
    part = replace(spec.groups[0].planes[0], channels=4)
    with pytest.raises(LayoutError, match=r"lacks channels \[4, ...\) of 6"):
        with_groups(spec, replace(spec.groups[0], planes=(part,)))


# --- the planner ----------------------------------------------------------------------------------------------------


def test_a_planner_plans_every_request_as_if_it_were_the_first():
    source, target = rank_spec("nhd", block_size=8, num_blocks=64), rank_spec("hnd", block_size=12, num_blocks=64)
    groups = share_of(source).groups
    planner = LegPlanner(source, target, groups)
    blocks = (tuple(range(63, 0, -1)),)
    for first, tokens in ((0, 40), (3, 41), (39, 40), (7, 7), (0, 40), (1, 2)):
        plan = planner.plan(blocks, blocks, first_token=first, tokens=tokens)
        fresh = plan_leg(
            source, target, groups, source_blocks=blocks, target_blocks=blocks, first_token=first, tokens=tokens
        )
        assert list(walk(plan)) == list(walk(fresh))


def test_plans_of_all_ranks_of_a_long_prompt_are_small_i1():
    """I1: 128k tokens, 80 layers, TP 8 to TP 2, both target ranks: under 10 MB, also from pages of one token."""
    identity = identity_of(num_layers=80, num_kv_heads=8, head_dim=128)
    for source_block, bound in ((16, 2_000_000), (1, 10_000_000)):
        source = rank_spec(
            "nhd", identity=identity, tp=(0, 8), block_size=source_block, num_blocks=131_072 // source_block
        )
        target = rank_spec("hnd", identity=identity, tp=(0, 2), block_size=64, num_blocks=2048, engine="d")
        blocks = [(np.arange(spec.groups[0].num_blocks)[::-1],) for spec in (source, target)]
        groups = share_of(source).groups
        plan = plan_leg(
            source, target, groups, source_blocks=blocks[0], target_blocks=blocks[1], first_token=0, tokens=131_072
        )
        assert 4 * plan.nbytes < bound, "a target rank has four legs"


def test_a_planner_of_a_cache_that_lies_about_its_length_is_refused_d6():
    """D6: no piece leaves its region, even if the spec was never checked."""
    source = rank_spec("nhd")
    target = replace(source, region_bytes=tuple(length - 1 for length in source.region_bytes))
    with pytest.raises(LayoutError, match="leaves its region"):
        plan_of(source, target, target_blocks=((13, 14, 15),))


def test_conversions_are_named():
    source, target = rank_spec(), rank_spec(dtype=E4M3)
    assert LegPlanner(source, target, share_of(source).groups).conversions == ("groups.full: bfloat16 to float8_e4m3",)
    assert LegPlanner(source, source, share_of(source).groups).conversions == ()


def test_specs_of_all_kinds_survive_the_wire():
    for spec in (states(), inline(), latent(4, 2), hybrid(), sharing()):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=CacheSpec) == spec
        assert msgspec.json.decode(msgspec.json.encode(spec), type=CacheSpec) == spec
    assert Place(engine="e", incarnation="1", dcp_size=2).dcp_size == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scales": ((1.0,),) * 3}, "scales has 3 rows for 4 planes"),
        ({"scales": ((1.0, 2.0),)}, r"rows of \[2\] scales for 4 heads"),
        ({"scales": ((1.0,), (1.0,), (1.0, 1.0, 1.0, 1.0), (1.0,))}, r"rows of \[1, 4\] scales"),
        ({"scales": ((0.0,),)}, r"scales\[0\]\[0\] is 0.0"),
        ({"scales": ((float("nan"),),)}, "positive float32"),
        ({"scales": ((1e-60,),)}, "positive float32"),
        ({"scales": ((0.1,),)}, "the positive float32 that it is, exactly"),
        ({"rows": (Row(PlaneKind.K, 2, E4M3),) * 2}, "states a kind twice"),
        ({"rows": (Row(PlaneKind.K, 0, E4M3),)}, r"rows\.k\.channels is 0"),
        ({"num_heads": 3}, r"heads\[3\] is 3"),
        ({"window": 0}, "window is 0"),
        ({"ratio": 0}, "ratio is 0"),
    ],
)
def test_an_impossible_group_is_refused_with_its_path(changes, message):
    with pytest.raises(LayoutError, match=message):
        with_group(rank_spec(dtype=E4M3), **changes)


def test_inline_scales_of_what_is_not_there_or_not_quantised_are_refused():
    group = inline().groups[0]
    with pytest.raises(LayoutError, match="has index_scale, but index is not there in a quantised dtype"):
        with_groups(inline(), replace(group, dtype=BF16, channels=4))
    with pytest.raises(LayoutError, match="has index_scale, but index is not there"):
        with_groups(inline(), replace(group, planes=group.planes[1:]))
