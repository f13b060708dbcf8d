"""Slots past the last token are zeroed in every plane, and nothing else is."""

from __future__ import annotations

import numpy as np
import pytest
from geometry_zoo import draw_case
from test_geometry_pairs import locate

from kvlink.errors import LayoutError
from kvlink.layout import IndexedBy
from kvlink.relayout import zero_uncovered


@pytest.mark.parametrize("seed", range(60))
def test_exactly_the_uncovered_slots_of_the_last_block_are_zeroed(seed):
    case = draw_case(seed)
    spec = case.target.spec(0, 0)
    pools = [np.full(length, 7, dtype=np.uint8) for length in spec.region_bytes]
    expected = [pool.copy() for pool in pools]
    tokens = case.request.tokens
    for group, blocks in zip(spec.groups, case.request.target_blocks, strict=True):
        if group.indexed_by is IndexedBy.ENTRY:
            continue
        positions = np.arange(tokens, -(-tokens // group.block_size) * group.block_size)
        for layer, kind in {(plane.layer, plane.kind) for plane in group.planes}:
            for channel in range(group.row_of(kind).channels):
                at = locate(group, layer, kind, channel, positions, group.heads, blocks)
                expected[at.region][at.address[..., None] + np.arange(group.row_of(kind).dtype.itemsize)] = 0
    zero_uncovered(spec, pools, case.request.target_blocks, tokens)
    for pool, wanted in zip(pools, expected, strict=True):
        assert np.array_equal(pool, wanted)


def test_a_block_that_is_not_the_caches_is_refused():
    draws = (draw_case(seed) for seed in range(400))
    case = next(
        c for c in draws if c.target.groups[0][0].name == "full" and c.request.tokens % c.target.groups[0][1].block_size
    )
    spec = case.target.spec(0, 0)
    lists = [list(blocks) for blocks in case.request.target_blocks]
    lists[0][-1] = spec.groups[0].num_blocks
    with pytest.raises(LayoutError, match="the cache has blocks 0 to"):
        zero_uncovered(
            spec, [np.zeros(length, dtype=np.uint8) for length in spec.region_bytes], lists, case.request.tokens
        )
