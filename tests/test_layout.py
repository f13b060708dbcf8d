"""A spec that passes is possible; one that is not is refused with its path, its value and how to mend it."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from geometries import identity_of, rank_spec
from hypothesis import given
from hypothesis import strategies as st

from kvlink import limits
from kvlink.errors import LayoutError, MismatchError
from kvlink.layout import (
    STANDARD_LAYOUTS,
    CacheSpec,
    DType,
    Identity,
    PlaneKind,
    Rope,
    check_spec,
    compare_identity,
    fingerprint,
    heads_of_rank,
    layers_of_stage,
    share_of,
    touched_blocks,
)

replace = msgspec.structs.replace


def with_group(spec, **changes):
    return replace(spec, groups=(replace(spec.groups[0], **changes),))


def with_plane(spec, index, **changes):
    planes = list(spec.groups[0].planes)
    planes[index] = replace(planes[index], **changes)
    return with_group(spec, planes=tuple(planes))


def plane_rows(group, plane):
    """Every row of a plane as (region, offset), in plain loops."""
    return [
        (plane.region, plane.offset_bytes + b * plane.block_stride + s * plane.slot_stride + h * plane.head_stride)
        for b in range(group.num_blocks)
        for s in range(group.block_size)
        for h in range(len(group.heads))
    ]


@pytest.mark.parametrize("layout", STANDARD_LAYOUTS)
def test_standard_layouts_tile_their_regions_exactly(layout):
    spec = rank_spec(layout, block_size=3, num_blocks=2)
    group = spec.groups[0]
    covered = [np.zeros(length, dtype=np.int64) for length in spec.region_bytes]
    for plane in group.planes:
        for region, offset in plane_rows(group, plane):
            covered[region][offset : offset + group.row_bytes] += 1
    assert all((region == 1).all() for region in covered)


def test_standard_layouts_place_rows_as_documented():
    sizes = {"block_size": 8, "num_blocks": 5, "heads": (0, 1, 2, 3), "layers": (0, 1)}
    row = 2 * 2
    first, second, third = (rank_spec(name, **sizes).groups[0].planes for name in ("nhd", "hnd", "fused"))
    assert (first[0].slot_stride, first[0].head_stride, first[0].block_stride) == (4 * row, row, 32 * row)
    assert first[1].kind is PlaneKind.V
    assert first[1].offset_bytes == 5 * 32 * row
    assert (second[0].slot_stride, second[0].head_stride, second[0].block_stride) == (row, 8 * row, 2 * 32 * row)
    assert second[1].offset_bytes == 32 * row
    assert (third[0].slot_stride, third[0].head_stride) == (2 * row, 8 * 2 * row)
    assert third[1].offset_bytes == row
    assert len(rank_spec("apart", **sizes).region_bytes) == 4
    assert rank_spec("blockmajor", **sizes).groups[0].planes[2].offset_bytes == 2 * 32 * row


def test_unknown_layout_is_refused_by_name():
    with pytest.raises(LayoutError, match=r"'nhwc'.*nhd, hnd, fused, apart, blockmajor"):
        rank_spec("nhwc")


@pytest.mark.parametrize(
    ("broken", "path"),
    [
        (lambda s: replace(s, identity=replace(s.identity, num_layers=0)), r"identity\.num_layers is 0"),
        (lambda s: replace(s, identity=replace(s.identity, model="")), r"identity\.model"),
        (lambda s: replace(s, identity=replace(s.identity, rope=Rope(theta=-1.0))), r"identity\.rope\.theta"),
        (lambda s: replace(s, identity=replace(s.identity, rope=Rope(theta=float("nan")))), r"rope\.theta"),
        (lambda s: replace(s, place=replace(s.place, tp_rank=1)), r"place\.tp_rank is 1"),
        (lambda s: replace(s, place=replace(s.place, pp_size=2000)), r"place\.pp_size is 2000"),
        (lambda s: replace(s, region_bytes=()), "region_bytes is 0 regions"),
        (lambda s: replace(s, region_bytes=(1 << 60, 1 << 60)), r"region_bytes\[0\]"),
        (lambda s: replace(s, groups=()), "groups is 0 groups"),
        (lambda s: replace(s, groups=s.groups * 2), "repeat a name"),
        (lambda s: with_group(s, heads=()), r"groups\.full\.heads is 0 heads"),
        (lambda s: with_group(s, heads=(0, 1, 1, 2)), "repeats a head"),
        (lambda s: with_group(s, heads=(0, 1, 2, 4)), r"groups\.full\.heads\[3\] is 4"),
        (lambda s: with_group(s, channels=0), r"groups\.full\.channels is 0"),
        (lambda s: with_group(s, block_size=-4), r"groups\.full\.block_size is -4"),
        (lambda s: with_group(s, num_blocks=17), r"planes\[1\] ends at byte 2112 of region 0, which has 2048"),
        (lambda s: with_group(s, planes=()), r"groups\.full\.planes is 0 planes"),
        (lambda s: with_plane(s, 0, layer=2), r"planes\[0\]\.layer is 2"),
        (lambda s: with_plane(s, 0, region=2), r"planes\[0\]\.region is 2"),
        (lambda s: with_plane(s, 0, offset_bytes=-1), r"planes\[0\]\.offset_bytes is -1"),
        (lambda s: with_plane(s, 0, offset_bytes=1.5), r"planes\[0\]\.offset_bytes is 1\.5"),
        (lambda s: with_plane(s, 1, offset_bytes=1025), r"planes\[1\] ends at byte 2049"),
        (lambda s: with_plane(s, 0, head_stride=3), r"planes\[0\]\.head_stride is 3 bytes.*takes 4"),
        (lambda s: with_plane(s, 0, slot_stride=8), r"planes\[0\]\.slot_stride is 8 bytes.*takes 16"),
        (lambda s: with_plane(s, 0, block_stride=0), r"planes\[0\]\.block_stride is 0"),
        (lambda s: with_plane(s, 1, kind=PlaneKind.K), "layer 0 k states channel 0 twice"),
        (lambda s: with_plane(s, 1, kind=PlaneKind.LATENT), "layer 1 has"),
        (lambda s: with_group(s, planes=s.groups[0].planes[:-1]), r"layer 1 has.*layer 0 has"),
        (lambda s: with_plane(s, 1, offset_bytes=0), "layer 0 k and layer 0 v share bytes"),
        (lambda s: with_plane(s, 1, offset_bytes=1022), "share bytes"),
        (lambda s: with_plane(s, 2, region=0), "share bytes"),
    ],
)  # fmt: skip
def test_an_impossible_spec_is_refused_with_its_path(broken, path):
    spec = rank_spec("nhd")
    check_spec(spec)
    with pytest.raises(LayoutError, match=path):
        check_spec(broken(spec))


def test_a_local_head_or_layer_id_outside_the_model_is_refused_d2_d3():
    """D2, D3: ids are global; a rank of two heads of a two-head model cannot hold head 2."""
    identity = identity_of(num_layers=4, num_kv_heads=2)
    with pytest.raises(LayoutError, match=r"heads\[1\] is 2"):
        rank_spec(identity=identity, heads=(1, 2))
    with pytest.raises(LayoutError, match=r"layer is 4"):
        rank_spec(identity=identity, layers=(3, 4))


def test_strides_of_single_steps_mean_nothing():
    """A tensor library may give any stride to an axis of one element."""
    spec = rank_spec(identity=identity_of(num_kv_heads=1), block_size=1)
    plane = spec.groups[0].planes[0]
    check_spec(with_plane(spec, 0, head_stride=1, slot_stride=limits.MAX_OFFSET_BYTES))
    assert plane.head_stride != 1


def test_padded_pages_are_possible_d5():
    """D5: padding between blocks is a stride like any other."""
    spec = rank_spec("apart")
    plane = spec.groups[0].planes[0]
    padded = with_plane(spec, 0, block_stride=plane.block_stride + 100)
    check_spec(replace(padded, region_bytes=tuple(length + 15 * 100 for length in spec.region_bytes)))


@given(distance=st.integers(0, 700), layout=st.sampled_from(["nhd", "hnd", "fused"]))
def test_neighbouring_planes_are_refused_exactly_when_they_share_a_byte(distance, layout):
    spec = rank_spec(layout, block_size=3, num_blocks=3, heads=(0, 1), layers=(0,))
    spec = replace(spec, region_bytes=(10_000,))
    spec = with_plane(spec, 1, offset_bytes=distance)
    group = spec.groups[0]
    used = [
        {offset + byte for _, offset in plane_rows(group, plane) for byte in range(group.row_bytes)}
        for plane in group.planes
    ]
    if used[0] & used[1]:
        with pytest.raises(LayoutError, match="share bytes"):
            check_spec(spec)
    else:
        check_spec(spec)


def test_a_spec_survives_the_wire_unchanged():
    spec = rank_spec("fused")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=CacheSpec) == spec


def test_share_of_names_global_layers_and_heads_ascending():
    spec = rank_spec(identity=identity_of(num_layers=4, num_kv_heads=4), heads=(3, 2), layers=(3, 2), pp=(1, 2))
    share = share_of(spec)
    assert (share.pp_rank, share.tp_rank) == (1, 0)
    assert [(group.name, group.layers, group.heads) for group in share.groups] == [("full", (2, 3), (2, 3))]


@pytest.mark.parametrize(
    ("heads", "tp", "expected"),
    [
        (8, 2, [(0, 1, 2, 3), (4, 5, 6, 7)]),
        (6, 4, [(0, 1), (2, 3), (4,), (5,)]),
        (2, 4, [(0,), (0,), (1,), (1,)]),
        (1, 3, [(0,), (0,), (0,)]),
        (2, 3, [(0,), (0,), (1,)]),
    ],
)
def test_heads_are_cut_evenly_unevenly_or_replicated(heads, tp, expected):
    assert [heads_of_rank(heads, tp, rank) for rank in range(tp)] == expected


@given(heads=st.integers(1, 64), tp=st.integers(1, 64))
def test_every_head_is_held_and_replicas_differ_by_at_most_one(heads, tp):
    held = [head for rank in range(tp) for head in heads_of_rank(heads, tp, rank)]
    counts = [held.count(head) for head in range(heads)]
    assert min(counts) >= 1
    assert max(counts) - min(counts) <= 1


@given(layers=st.integers(1, 90), pp=st.integers(1, 12))
def test_stages_cut_the_layers_once_in_order(layers, pp):
    if layers < pp:
        with pytest.raises(LayoutError, match="fewer than pp_size"):
            layers_of_stage(layers, pp, 0)
        return
    stages = [layers_of_stage(layers, pp, rank) for rank in range(pp)]
    assert [layer for stage in stages for layer in stage] == list(range(layers))
    assert max(map(len, stages)) - min(map(len, stages)) <= 1


@pytest.mark.parametrize("bad", [(0, 1, 0), (4, 0, 0), (4, 2, 2), (4, 2, -1)])
def test_impossible_parts_are_refused(bad):
    with pytest.raises(LayoutError):
        heads_of_rank(*bad)


def test_fingerprint_is_the_same_in_every_process_and_differs_with_any_field():
    base = identity_of(rope=Rope(theta=1e4), weights_revision="a")
    assert fingerprint(base) == fingerprint(replace(base))
    assert fingerprint(Identity(model="m", num_layers=1, num_kv_heads=1, head_dim=1)) == (
        "fb6954b41dbb945e879abf546bb8b2b1139a69b44791f12d7e6af7af915b12a6"
    )
    changed = [
        replace(base, model="other"),
        replace(base, weights_revision="b"),
        replace(base, weights_revision=None),
        replace(base, attention="mla"),
        replace(base, rope=Rope(theta=1e4, scaling="yarn")),
    ]
    assert len({fingerprint(identity) for identity in [base, *changed]}) == 6


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model": "other"}, "identity.model"),
        ({"num_kv_heads": 8}, "identity.num_kv_heads"),
        ({"weights_revision": "b"}, "identity.weights_revision"),
        ({"rope": Rope(theta=5e5)}, "identity.rope.theta"),
        ({"rope": Rope(theta=1e4, scaling="yarn")}, "identity.rope.scaling"),
    ],
)
def test_another_model_is_refused_naming_field_values_and_peers_k4(change, field):
    """K4: a weights revision that both sides state must be equal; so must everything else."""
    source = identity_of(rope=Rope(theta=1e4), weights_revision="a")
    target = replace(source, **change)
    with pytest.raises(MismatchError) as caught:
        compare_identity(source, target, source_peer="p/0/0@1", target_peer="d/0/0@7")
    assert caught.value.field == field
    assert caught.value.source_value != caught.value.target_value
    for part in (field, "p/0/0@1", "d/0/0@7", repr(caught.value.source_value), repr(caught.value.target_value)):
        assert part in str(caught.value)


def test_what_one_side_does_not_state_is_not_compared():
    compare_identity(identity_of(weights_revision="a"), identity_of(rope=Rope(theta=1.0)))


def test_touched_blocks_looks_only_at_the_range():
    group = rank_spec(block_size=4, num_blocks=10).groups[0]
    assert touched_blocks(group, [-1, 99, 3, 9, 4, -7], 9, 17, "blocks").tolist() == [3, 9, 4]
    assert touched_blocks(group, np.array([5, 5]), 0, 8, "blocks").tolist() == [5, 5]
    assert touched_blocks(group, [99], 2, 2, "blocks").tolist() == []


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ([1, 2], "2 blocks of 4 slots hold fewer than 9 tokens; pass at least 3"),
        ([1, 2, 10], r"blocks\[2\] is block 10; the cache has blocks 0 to 9"),
        ([1, -2, 3], r"blocks\[1\] is block -2"),
        ([1, 2.0, 3], "must be integers"),
        ([1, 1 << 70, 3], "must be integers"),
        ([True, False, True], "must be integers"),
    ],
)
def test_a_wrong_block_list_is_refused(blocks, message):
    group = rank_spec(block_size=4, num_blocks=10).groups[0]
    with pytest.raises(LayoutError, match=message):
        touched_blocks(group, blocks, 0, 9, "blocks")


def test_dtypes_know_their_size():
    assert {dtype.value: dtype.itemsize for dtype in DType} == {
        "float16": 2, "bfloat16": 2, "float32": 4, "float8_e4m3": 1, "float8_e5m2": 1, "int8": 1,
        "opaque": 1,
    }  # fmt: skip
