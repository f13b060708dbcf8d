"""The digest scheme: frozen vectors, an independent implementation, every instruction set, any fragmentation."""

import json
from pathlib import Path

import numpy as np
import pytest
import xxhash

from kvlink.errors import LayoutError
from kvlink.limits import LEAF_BYTES
from kvlink.plan import CopyPlan, Dim, Segment
from kvlink.relayout import SCHEME, Side, digest_leaves, digest_root, leaf_digests, native_plan, root_digest
from kvlink.relayout.digest import _kvlink

VECTORS = json.loads((Path(__file__).parent / "vectors" / "digest.json").read_text())
VARIANTS = _kvlink.hash_variants()


def input_bytes(length):
    index = np.arange(1, length + 1, dtype=np.uint64)
    return ((index * np.uint64(2_654_435_761) >> np.uint64(24)) & np.uint64(0xFF)).astype(np.uint8)


def rows(*table):
    return np.array(table, np.int64)


def plan_of(bases, pieces, nest, run_bytes):
    total = len(bases) * len(pieces) * int(np.prod([d.count for d in nest], dtype=np.int64)) * run_bytes
    return native_plan(CopyPlan(segments=(Segment(bases, pieces, tuple(nest), run_bytes),), total_bytes=total))


def contiguous(length):
    return plan_of(rows([0, 0, 0, 0]), rows([0, 0]), [], length)


def region(array):
    return (array.ctypes.data, array.nbytes)


def hexes(leaves):
    return [f"{leaf:016x}" for leaf in np.frombuffer(leaves, "<u8").tolist()]


def test_vectors_are_of_this_scheme():
    assert VECTORS["scheme"] == SCHEME


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_instruction_set_hashes_to_the_frozen_vectors(variant):
    for length, expected in VECTORS["xxh3_64"].items():
        assert f"{_kvlink.xxh3_64(input_bytes(int(length)), variant):016x}" == expected, length


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_instruction_set_agrees_with_another_implementation_at_every_short_length(variant):
    data = input_bytes(1200).tobytes()
    for length in range(1200):
        assert _kvlink.xxh3_64(data[:length], variant) == xxhash.xxh3_64_intdigest(data[:length]), length


@pytest.mark.parametrize("case", VECTORS["transfers"], ids=lambda case: f"{case['bytes']}B")
@pytest.mark.parametrize("xxh3_64", [_kvlink.xxh3_64, xxhash.xxh3_64_intdigest], ids=["native", "pypi-xxhash"])
def test_the_definition_gives_the_frozen_vectors(case, xxh3_64):
    leaves = leaf_digests(input_bytes(case["bytes"]).tobytes(), xxh3_64)
    assert hexes(leaves) == case["leaves"]
    assert f"{root_digest(leaves, xxh3_64):016x}" == case["root"]


@pytest.mark.parametrize("case", [c for c in VECTORS["transfers"] if c["bytes"]], ids=lambda c: f"{c['bytes']}B")
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_contiguous_plan_gives_the_frozen_vectors(case, variant):
    data = input_bytes(case["bytes"])
    leaves = _kvlink.digest_leaves(contiguous(len(data)), Side.SOURCE, [region(data)], variant=variant)
    assert hexes(leaves) == case["leaves"]
    assert f"{digest_root(leaves):016x}" == case["root"]


def test_an_empty_plan_has_no_leaves_and_the_root_of_zero_bytes():
    empty = native_plan(CopyPlan(segments=(), total_bytes=0))
    leaves = digest_leaves(empty, Side.SOURCE, [])
    assert leaves == b""
    assert digest_root(leaves) == xxhash.xxh3_64_intdigest(b"")


@pytest.mark.parametrize("run_bytes", [1, 24, 256, 1024, 4096, 5000, LEAF_BYTES, 3 * LEAF_BYTES + 1])
def test_fragments_on_one_side_hash_as_the_contiguous_bytes_of_the_other(run_bytes):
    count = max(1, 150_000 // run_bytes)
    total, gap = count * run_bytes, 7
    data = input_bytes(total)
    scattered = np.zeros(count * (run_bytes + gap), np.uint8)
    scattered.reshape(count, -1)[:, :run_bytes] = data.reshape(count, run_bytes)
    plan = plan_of(rows([0, 0, 0, 0]), rows([0, 0]), [Dim(count, run_bytes, run_bytes + gap)], run_bytes)
    expected = leaf_digests(data.tobytes(), xxhash.xxh3_64_intdigest)
    assert digest_leaves(plan, Side.SOURCE, [region(data)]) == expected
    for variant in VARIANTS:
        assert _kvlink.digest_leaves(plan, Side.TARGET, [region(scattered)], variant=variant) == expected


def test_leaves_digested_in_slices_are_those_digested_at_once():
    data = input_bytes(10 * LEAF_BYTES + 5)
    plan = contiguous(len(data))
    whole = digest_leaves(plan, Side.SOURCE, [region(data)])
    slices = [digest_leaves(plan, Side.SOURCE, [region(data)], first, 3) for first in (0, 3, 6)]
    assert b"".join([*slices, digest_leaves(plan, Side.SOURCE, [region(data)], 9)]) == whole
    assert digest_leaves(plan, Side.SOURCE, [region(data)], 11, 0) == b""


def test_one_flipped_bit_changes_its_leaf_and_no_other():
    data = input_bytes(4 * LEAF_BYTES)
    plan = contiguous(len(data))
    before = hexes(digest_leaves(plan, Side.SOURCE, [region(data)]))
    data[2 * LEAF_BYTES] ^= 1
    after = hexes(digest_leaves(plan, Side.SOURCE, [region(data)]))
    assert [i for i in range(4) if before[i] != after[i]] == [2]


@pytest.mark.parametrize(("first", "count"), [(-1, 1), (0, 5), (4, 1), (5, None), (0, -1), (2**62, 2**62)])
def test_leaves_outside_the_plan_are_refused(first, count):
    data = input_bytes(4 * LEAF_BYTES)
    with pytest.raises(LayoutError, match="outside the plan"):
        digest_leaves(contiguous(len(data)), Side.SOURCE, [region(data)], first, count)


def test_a_region_too_short_is_refused_before_it_is_read():
    with pytest.raises(LayoutError, match="source region 0, which has 99"):
        digest_leaves(contiguous(100), Side.SOURCE, [(0, 99)])
    with pytest.raises(LayoutError, match="source region 0 of 0"):
        digest_leaves(contiguous(100), Side.SOURCE, [])


def test_a_ragged_list_of_leaves_has_no_root():
    with pytest.raises(LayoutError, match="8 bytes each"):
        digest_root(b"\0" * 9)


def test_an_unknown_instruction_set_is_refused():
    with pytest.raises(ValueError, match="no hash variant"):
        _kvlink.xxh3_64(b"", "mmx")
