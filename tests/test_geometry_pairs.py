"""Any engine to any engine: a plan leaves every pool exactly as plain indexing says, byte for byte.

Cases are drawn by seed (`geometry_zoo.draw_case`); a failure prints its seed, and ``KVLINK_ZOO_SEED=N`` runs that case
alone. ``KVLINK_ZOO_CASES`` sets how many are drawn.

Half of the cases walk the plan in numpy, with a stand-in for conversions that shows whatever goes into one; the other
half run it natively, with conversions by ml_dtypes beside them.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
from geometry_zoo import draw_case
from number_cases import NUMPY, expected

from kvlink.layout import IndexedBy
from kvlink.plan import LegPlanner, assign_legs, check_plan
from kvlink.relayout import move_local, native_plan

CASES = int(os.environ.get("KVLINK_ZOO_CASES", "2400"))
SHARDS = 24
ONLY = os.environ.get("KVLINK_ZOO_SEED")
TARGETS_A_CASE = 2
"""Target ranks that are filled and compared in a case, all of their legs."""


@pytest.mark.parametrize("shard", range(SHARDS))
def test_any_pair_fills_whole_pools_as_plain_indexing_says_d1_d2_d3_d4_d5_d7(shard):
    """D1 to D5, D7: kinds, TP, PP, heads, blocks, tokens, offsets, strides, dtypes and scales at random."""
    for seed in [int(ONLY)] if ONLY else range(shard, CASES, SHARDS):
        try:
            check_case(draw_case(seed))
        except Exception as error:
            error.add_note(f"zoo seed {seed}: KVLINK_ZOO_SEED={seed} runs it alone")
            raise
        if ONLY:
            return


def check_case(case):
    source, target, request = case.source, case.target, case.request
    sources, targets = source.shares(), target.shares()
    legs = assign_legs(sources, targets)
    random = np.random.default_rng(case.seed)
    native = case.seed % 2 == 1
    for index in random.choice(len(targets), min(TARGETS_A_CASE, len(targets)), replace=False):
        spec = target.spec(targets[index].pp_rank, targets[index].tp_rank)
        pools = [random.integers(0, 256, length, dtype=np.uint8) for length in spec.region_bytes]
        wanted = [pool.copy() for pool in pools]
        for leg in [leg for leg in legs if leg.target == index]:
            share = sources[leg.source]
            source_spec = source.spec(share.pp_rank, share.tp_rank)
            source_pools = [random.integers(0, 256, length, dtype=np.uint8) for length in source_spec.region_bytes]
            planner = LegPlanner(source_spec, spec, leg.groups)
            plan = planner.plan(
                request.source_blocks, request.target_blocks, first_token=request.starts, tokens=request.tokens
            )
            check_plan(plan, source_spec.region_bytes, spec.region_bytes)
            (run_natively if native else run)(plan, source_pools, pools)
            convert = by_ml_dtypes if native else stand_in
            moved = index_all(source_spec, spec, leg.groups, request, source_pools, wanted, convert)
            assert plan.total_bytes == moved
            check_one_sided(planner, plan, request)
        for pool, want in zip(pools, wanted, strict=True):
            assert np.array_equal(pool, want), f"first differing byte: {int((pool != want).argmax())}"


def check_one_sided(planner, plan, request):
    """The source walks the same bytes in the same order without the target's blocks."""
    alone = planner.plan(request.source_blocks, None, first_token=request.starts, tokens=request.tokens)
    assert len(alone.segments) == len(plan.segments)
    for one, other in zip(alone.segments, plan.segments, strict=True):
        assert np.array_equal(one.bases[:, :2], other.bases[:, :2])
        assert np.array_equal(one.pieces[:, 0], other.pieces[:, 0])
        assert not one.pieces[:, 1].any()
        assert (one.nest, one.run_bytes) == (other.nest, other.run_bytes)


# --- what a stored element becomes ----------------------------------------------------------------------------------


def stand_in(elements, source, target, source_scale, target_scale):
    """In place of a conversion: bytes that depend on everything a conversion depends on.

    ``elements``: uint8 ``[..., source itemsize]``; scales broadcast against ``[...]``. Returns uint8
    ``[..., target itemsize]``.
    """
    mixed = np.zeros(elements.shape[:-1], dtype=np.uint64)
    for at in range(elements.shape[-1]):
        mixed = mixed * np.uint64(0x100000001B3) + elements[..., at]
    for word in (source_scale, target_scale):
        bits = np.ascontiguousarray(np.broadcast_to(word, mixed.shape), dtype=np.float32).view(np.uint32)
        mixed = mixed * np.uint64(0x100000001B3) + bits
    mixed += np.uint64(sum(map(ord, source.value + ">" + target.value)))
    mixed ^= mixed >> np.uint64(29)
    return mixed[..., None].view(np.uint8)[..., : target.itemsize]


def by_ml_dtypes(elements, source, target, source_scale, target_scale):
    """The conversion itself, as `stand_in` takes it."""
    stored = np.ascontiguousarray(elements).view(NUMPY[source])[..., 0]
    return expected(stored, target, source_scale, target_scale)[..., None].view(np.uint8)


# --- the plan, walked ------------------------------------------------------------------------------------------------


def run(plan, sources, targets):
    """Walk a plan as docs/architecture.md says; every target byte is written at most once."""
    for segment in plan.segments:
        convert = segment.convert
        source_item, target_item = (1, 1) if convert is None else (convert.source.itemsize, convert.target.itemsize)
        elements = np.arange(segment.run_bytes // source_item)
        for row, (source_region, source_base, target_region, target_base) in enumerate(segment.bases.tolist()):
            at = segment.pieces + np.array([source_base, target_base])
            column = np.zeros(len(at), dtype=np.int64)
            for index, dim in enumerate(segment.nest):
                steps = np.arange(dim.count)
                at = at[:, None, :] + steps[None, :, None] * np.array(dim[1:])
                walks_scales = convert is not None and index == convert.scale_dim
                column = column[:, None] + (steps if walks_scales else 0 * steps)
                at, column = at.reshape(-1, 2), column.reshape(-1)
            source_at = at[:, :1] + elements * source_item
            target_at = at[:, 1:] + elements * target_item
            moved = sources[source_region][source_at[..., None] + np.arange(source_item)]
            if convert is not None:
                scales = [
                    np.ones((len(column), 1), dtype=np.float32) if table is None else table[row, column][:, None]
                    for table in (convert.source_scales, convert.target_scales)
                ]
                moved = stand_in(moved, convert.source, convert.target, *scales)
            targets[target_region][target_at[..., None] + np.arange(target_item)] = moved


def run_natively(plan, sources, targets):
    """The native mover, on the pools where they are."""
    regions = [[(pool.__array_interface__["data"][0], pool.size) for pool in pools] for pools in (sources, targets)]
    move_local(native_plan(plan), *regions)


# --- plain indexing --------------------------------------------------------------------------------------------------


def index_all(source, target, leg_groups, request, sources, targets, convert=stand_in):
    """Move what the leg's groups mean, by address of every element; returns source bytes moved."""
    moved = 0
    for share in leg_groups:
        at = [[group.name for group in spec.groups].index(share.name) for spec in (source, target)]
        one, other = source.groups[at[0]], target.groups[at[1]]
        source_blocks, target_blocks = request.source_blocks[at[0]], request.target_blocks[at[1]]
        positions = np.arange(request.starts[at[0]], request.tokens)
        if one.indexed_by is IndexedBy.ENTRY:
            positions = np.arange(len(source_blocks) * one.block_size)
        for layer in share.layers:
            for kind in {plane.kind for plane in one.planes}:
                find = layer, kind, positions, share.heads
                moved += index_kind(one, other, *find, (source_blocks, target_blocks), sources, targets, convert)
    return moved


def index_kind(one, other, layer, kind, positions, heads, blocks, sources, targets, convert):
    inline = any(plane.kind.scaled is kind for plane in one.planes)
    dtypes = one.row_of(kind).dtype, other.row_of(kind).dtype
    moved = 0
    for channel in range(one.row_of(kind).channels):
        mine = locate(one, layer, kind, channel, positions, heads, blocks[0])
        theirs = locate(other, layer, kind, channel, positions, heads, blocks[1])
        elements = sources[mine.region][mine.address[..., None] + np.arange(dtypes[0].itemsize)]
        moved += elements.size
        same_scales = inline or not dtypes[0].quantised or plane_scales_equal(one, other, layer, kind, channel, heads)
        if dtypes[0] != dtypes[1] or not same_scales:
            elements = convert(elements, *dtypes, mine.scale, theirs.scale)
        targets[theirs.region][theirs.address[..., None] + np.arange(dtypes[1].itemsize)] = elements
    return moved


def plane_scales_equal(one, other, layer, kind, channel, heads):
    scales = [locate(group, layer, kind, channel, np.arange(0), heads, []).scale for group in (one, other)]
    return np.array_equal(*scales)


class locate:
    """Where one channel of a layer's kind lies, for ``[positions, heads]``, and how it is scaled, ``[heads]``."""

    def __init__(self, group, layer, kind, channel, positions, heads, blocks):
        row = group.row_of(kind)
        planes = [
            (index, plane)
            for index, plane in enumerate(group.planes)
            if (plane.layer, plane.kind) == (layer, kind)
            and plane.first_channel <= channel < plane.first_channel + group.row_of_plane(plane).channels
        ]
        ((index, plane),) = planes
        head_at = np.array([group.heads.index(head) for head in heads])
        engine_block = np.array(blocks, dtype=np.int64)[positions // group.block_size]
        slot = positions % group.block_size
        tensor_block = engine_block * group.ratio + slot // (group.block_size // group.ratio)
        tensor_slot = slot % (group.block_size // group.ratio)
        self.region = plane.region
        self.address = (
            plane.offset_bytes
            + (tensor_block * plane.block_stride + tensor_slot * plane.slot_stride)[:, None]
            + (head_at * plane.head_stride)[None, :]
            + (channel - plane.first_channel) * (plane.channel_stride or row.dtype.itemsize)
        )
        scales = np.ones(len(group.heads), dtype=np.float32)
        if row.dtype.quantised and group.scales:
            stated = group.scales[index if len(group.scales) > 1 else 0]
            scales = np.broadcast_to(np.array(stated, dtype=np.float32), len(group.heads))
        self.scale = scales[head_at]
