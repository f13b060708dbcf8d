"""Groups that share memory: a block that two of them would write is always found, and others are not taken for it."""

from __future__ import annotations

import random

import numpy as np
import pytest
from geometries import identity_of

from kvlink.errors import LayoutError
from kvlink.layout import CacheSpec, DType, Group, Place, Plane, PlaneKind, alias_classes, aliases, check_spec

ORDERS = ("block slot head channel", "block head slot channel", "block slot channel head", "head block slot channel",
          "slot block head channel", "channel head slot block", "head slot block channel")  # fmt: skip
BLOCK_OUTERMOST = ORDERS[:3]


def draw_group(draw, name, order, num_blocks):
    """One group of one to three planes, in one region, each in the same order with the same padding."""
    counts = {"slot": draw.choice((1, 2, 3)), "head": draw.choice((1, 2)), "channel": draw.choice((1, 2, 4))}
    ratio = draw.choice((1, 1, 2)) if counts["slot"] == 2 else 1
    counts |= {"block": num_blocks * ratio, "slot": counts["slot"] // ratio}
    size, strides = 2, {}
    for axis in reversed(order.split()):
        strides[axis] = size
        size = size * counts[axis] + draw.choice((0, 0, 2, 6))
    pitch = size if draw.random() < 0.7 else strides["block"] * 2
    start = draw.choice((0, 0, strides["block"], 2, 7))
    planes = tuple(
        Plane(
            layer, PlaneKind.K, 0, start + layer * pitch, strides["block"], strides["slot"], strides["head"],
            strides["channel"],
        )
        for layer in range(draw.choice((1, 2, 3)))
    )  # fmt: skip
    return Group(
        name=name, heads=tuple(range(counts["head"])), channels=counts["channel"], dtype=DType.BFLOAT16,
        block_size=counts["slot"] * ratio, num_blocks=num_blocks, planes=planes, ratio=ratio,
    )  # fmt: skip


def draw_spec(seed):
    """Two groups over one region: alike, alike but for an offset, or of different make."""
    draw = random.Random(seed)
    while True:
        order = draw.choice(ORDERS)
        one = draw_group(draw, "one", order, draw.choice((3, 5)))
        other = draw_group(draw, "other", order if draw.random() < 0.5 else draw.choice(ORDERS), draw.choice((3, 5)))
        if draw.random() < 0.5:
            shift = draw.choice((0, 0, 2, 4, one.planes[0].block_stride))
            planes = tuple(
                Plane(p.layer, p.kind, 0, p.offset_bytes + shift, *list(plane_strides(p))) for p in one.planes
            )
            other = Group(
                name="other", heads=one.heads, channels=one.channels, dtype=one.dtype, block_size=one.block_size,
                num_blocks=one.num_blocks, planes=planes, ratio=one.ratio,
            )  # fmt: skip
        spec = CacheSpec(
            identity=identity_of(num_layers=3, num_kv_heads=2),
            place=Place(engine="e", incarnation="1"),
            groups=(one, other),
            region_bytes=(20_000,),
        )
        try:
            check_spec(spec)
        except LayoutError:  # a pitch that is too small: planes of one group would overlap
            continue
        return spec


def plane_strides(plane):
    return plane.block_stride, plane.slot_stride, plane.head_stride, plane.channel_stride


def bytes_of(group, tensor_block):
    """Every byte of one tensor block, over all planes, in plain loops."""
    return {
        plane.offset_bytes + tensor_block * plane.block_stride + slot * plane.slot_stride + head * plane.head_stride
        + channel * plane.channel_stride + byte
        for plane in group.planes
        for slot in range(group.tensor_slots)
        for head in range(len(group.heads))
        for channel in range(group.channels)
        for byte in (0, 1)
    }  # fmt: skip


@pytest.mark.parametrize("shard", range(8))
def test_a_shared_block_is_always_found_and_outermost_blocks_exactly(shard):
    for seed in range(shard, 1200, 8):
        spec = draw_spec(seed)
        one, other = spec.groups
        found = aliases(spec)
        bytes_one = [bytes_of(one, block) for block in range(one.tensor_blocks)]
        bytes_other = [bytes_of(other, block) for block in range(other.tensor_blocks)]
        exact = all(
            plane.block_stride >= max(plane_strides(plane)[1:], default=0)
            for group in spec.groups
            for plane in group.planes
        )
        for block, mine in enumerate(bytes_one):
            for other_block, theirs in enumerate(bytes_other):
                told = [a for a in found if a.shared(np.array([block]), np.array([other_block])) is not None]
                if mine & theirs:
                    assert told, f"seed {seed}: blocks {block} and {other_block} share bytes"
                elif exact and plane_strides(one.planes[0]) == plane_strides(other.planes[0]):
                    assert not told, f"seed {seed}: blocks {block} and {other_block} share nothing"
        if alias_classes(spec) == (0, 0):
            assert all(a & b for a, b in zip(bytes_one, bytes_other, strict=False)), (
                f"seed {seed}: same ids, same bytes"
            )


def test_the_shared_blocks_are_named():
    spec = next(s for s in map(draw_spec, range(100)) if alias_classes(s) == (0, 0) and s.groups[0].ratio == 1)
    alias = next(a for a in aliases(spec) if a.distance == 0)
    assert alias.shared(np.array([0, 2]), np.array([1, 2])) == (2, 2)
    assert alias.shared(np.array([0, 2]), np.array([1])) is None
    assert alias.shared(np.array([], dtype=np.int64), np.array([1])) is None
