"""The judge of a bench must see every kind of wrong byte, and owe nothing to the planner."""

from __future__ import annotations

import numpy as np
import pytest

from kvlink.cli.bench.content import SOURCE_CANARY, TARGET_CANARY, CacheContent, Prompt
from kvlink.layout import STANDARD_LAYOUTS, CacheSpec, DType, Identity, Place, standard_spec

BLOCKS = (5, 0, 7, 2)


def make(layout="nhd", *, heads=(0, 1, 2), layers=(0, 1), block_size=4, head_dim=8, dtype=DType.FLOAT16, canary=0x5A):
    spec = standard_spec(
        layout,
        identity=Identity(model="tiny", num_layers=8, num_kv_heads=8, head_dim=head_dim),
        place=Place(engine="e", incarnation="i"),
        layers=layers,
        heads=heads,
        block_size=block_size,
        num_blocks=9,
        dtype=dtype,
    )
    regions = [np.empty(length, np.uint8) for length in spec.region_bytes]
    content = CacheContent(spec, regions, canary)
    content.wipe()
    return spec, regions, content


def rows_by_coordinates(spec: CacheSpec, regions, blocks, tokens):
    """Every row, byte by byte from the strides, as {(layer, kind, head, position): bytes}."""
    (group,) = spec.groups
    found = {}
    for plane in group.planes:
        for position in range(tokens):
            block, slot = blocks[position // group.block_size], position % group.block_size
            for index, head in enumerate(group.heads):
                at = plane.offset_bytes + block * plane.block_stride + slot * plane.slot_stride
                at += index * plane.head_stride
                found[plane.layer, plane.kind, head, position] = bytes(regions[plane.region][at : at + group.row_bytes])
    return found


@pytest.mark.parametrize("layout", STANDARD_LAYOUTS)
@pytest.mark.parametrize("tokens", [1, 4, 13, 16])
def test_what_was_filled_is_found_right_and_nothing_else_was_touched(layout, tokens):
    blocks = BLOCKS[: -(-tokens // 4)]
    _, _, content = make(layout)
    prompt = Prompt(seed=3, tokens=tokens)
    content.fill(prompt, blocks)
    assert content.check(prompt, blocks) is None
    assert content.check_wiped([1, 3, 4, 6, 8]) is None
    assert "rank" not in str(content.check_wiped(blocks[:1]))
    content.wipe_blocks(blocks)
    assert content.check_all_wiped() is None


@pytest.mark.parametrize("head_dim", [1, 3, 4, 12])
def test_content_is_the_same_in_every_layout_and_block_size(head_dim):
    prompt = Prompt(seed=1, tokens=13)
    spec, regions, content = make("nhd", head_dim=head_dim, dtype=DType.INT8)
    content.fill(prompt, BLOCKS)
    other_spec, other_regions, other = make("fused", block_size=7, head_dim=head_dim, dtype=DType.INT8)
    other.fill(prompt, (8, 3))
    assert rows_by_coordinates(spec, regions, BLOCKS, 13) == rows_by_coordinates(other_spec, other_regions, (8, 3), 13)


def test_no_two_rows_are_alike():
    """A copy from the wrong layer, kind, head, position or prompt can never pass."""
    rows = []
    for seed in (0, 1, 65_536):
        spec, regions, content = make(head_dim=16)
        content.fill(Prompt(seed=seed, tokens=16), BLOCKS)
        rows += rows_by_coordinates(spec, regions, BLOCKS, 16).values()
    assert len(set(rows)) == len(rows) == 3 * 2 * 2 * 3 * 16


@pytest.mark.parametrize("layout", STANDARD_LAYOUTS)
def test_any_flipped_byte_is_found(layout):
    """Every single byte of the memory, in and out of the prompt, past its last token too."""
    _, regions, content = make(layout, heads=(0, 1), layers=(0,), head_dim=2)
    prompt = Prompt(seed=0, tokens=13)
    content.fill(prompt, BLOCKS)
    rest = [b for b in range(9) if b not in BLOCKS]
    for region in regions:
        for offset in range(region.size):
            region[offset] ^= 1
            assert content.check(prompt, BLOCKS) or content.check_wiped(rest), offset
            region[offset] ^= 1
    assert content.check(prompt, BLOCKS) is None


def test_a_fault_is_named_by_its_coordinates():
    spec, regions, content = make("nhd", head_dim=8, dtype=DType.INT8)
    prompt = Prompt(seed=0, tokens=13)
    content.fill(prompt, BLOCKS)
    plane = spec.groups[0].planes[3]  # layer 1, V
    regions[plane.region][plane.offset_bytes + 7 * plane.block_stride + 2 * plane.slot_stride + plane.head_stride] ^= 1
    fault = str(content.check(prompt, BLOCKS))
    assert "layer 1 v head 1 block 7 slot 2 byte 0: position 10" in fault


def test_a_source_slot_past_the_end_that_was_moved_is_found():
    """The two sides' canaries differ: a whole-block copy of a partial block does not pass for an untouched slot."""
    _, source_regions, source = make(canary=SOURCE_CANARY)
    _, target_regions, target = make(canary=TARGET_CANARY)
    prompt = Prompt(seed=0, tokens=13)
    source.fill(prompt, BLOCKS)
    for from_region, to_region in zip(source_regions, target_regions, strict=True):
        to_region[:] = from_region
    assert "past the last token" in str(target.check(prompt, BLOCKS))


def test_a_stray_byte_between_planes_is_found_by_the_sweep():
    _, regions, content = make()
    regions[1][17] = 0
    assert "region 1 byte 17" in str(content.check_all_wiped())
