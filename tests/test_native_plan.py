"""The native walker, copies and digests against the reference walk, and refusals of plans that cannot be true."""

import importlib
import sys

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlink import limits
from kvlink._native import _kvlink
from kvlink.errors import LayoutError, UnavailableError
from kvlink.plan import CopyPlan, Dim, Segment
from kvlink.relayout import Side, digest_leaves, leaf_digests, move_local, native_plan
from kvlink.relayout.reference import copy, gather, walk

REGIONS = 2
SEGMENT_BYTES = 5 * limits.LEAF_BYTES
"""A segment is at most about this long, which keeps the reference walk quick and crosses leaves at any run length."""
quick = settings(max_examples=60, deadline=None)


def strides_of(draw, counts, run_bytes):
    """Byte strides that lay out an index space without overlap: a random axis order, with random gaps.

    Also each axis's origin, which is not 0 where the axis runs backwards, and the bytes spanned.
    """
    strides, origins, span = [0] * len(counts), [0] * len(counts), run_bytes
    for axis in draw(st.permutations(range(len(counts)))):
        strides[axis] = span + draw(st.sampled_from([0, 0, 1, 64]))
        span = strides[axis] * (counts[axis] - 1) + span
        if draw(st.integers(0, 4)) == 0:
            origins[axis] = strides[axis] * (counts[axis] - 1)
            strides[axis] = -strides[axis]
    return strides, origins, span


@st.composite
def plans(draw):
    """A plan whose bytes overlap on neither side, with the lengths of both sides' regions."""
    ends = {Side.SOURCE: [0] * REGIONS, Side.TARGET: [0] * REGIONS}
    segments, total = [], 0
    for _ in range(draw(st.integers(1, 3))):
        depth = draw(st.integers(0, 3))
        counts = [draw(st.integers(1, 4)) for _ in range(2 + depth)]
        longest = max(1, SEGMENT_BYTES // int(np.prod(counts)))
        run_bytes = draw(st.one_of(st.integers(1, min(8, longest)), st.integers(1, longest), st.just(longest)))
        columns = {}
        for side in Side:
            strides, origins, span = strides_of(draw, counts, run_bytes)
            start = [end + draw(st.sampled_from([0, 3])) for end in ends[side]]
            region = np.array(draw(st.lists(st.integers(0, REGIONS - 1), min_size=counts[0], max_size=counts[0])))
            base = np.array(start)[region] + sum(origins) + strides[0] * np.arange(counts[0])
            order = np.array(draw(st.one_of(st.just(list(range(counts[1]))), st.permutations(range(counts[1])))))
            columns[side] = region, base, strides[1] * order, strides[2:]
            ends[side] = [s + span for s in start]
        (s_region, s_base, s_piece, s_nest), (t_region, t_base, t_piece, t_nest) = columns.values()
        segments.append(
            Segment(
                bases=np.stack([s_region, s_base, t_region, t_base], axis=1).astype(np.int64),
                pieces=np.stack([s_piece, t_piece], axis=1).astype(np.int64),
                nest=tuple(Dim(*dim) for dim in zip(counts[2:], s_nest, t_nest, strict=True)),
                run_bytes=run_bytes,
            )
        )
        total += int(np.prod(counts)) * run_bytes
    return CopyPlan(segments=tuple(segments), total_bytes=total), ends[Side.SOURCE], ends[Side.TARGET]


def places(runs):
    """Where every wire byte lies: [bytes, 4] of source region and offset, target region and offset."""
    runs = np.array(list(runs), np.int64).reshape(-1, 5)
    nbytes = runs[:, 4]
    where = np.repeat(runs[:, :4], nbytes, axis=0)
    within = np.arange(len(where)) - np.repeat(np.cumsum(nbytes) - nbytes, nbytes)
    where[:, 1] += within
    where[:, 3] += within
    return where


def touching(runs):
    """Whether each run but the last is continued by the next on both sides."""
    before, after = runs[:-1], runs[1:]
    same = (before[:, 0] == after[:, 0]) & (before[:, 2] == after[:, 2])
    return same & (before[:, 1] + before[:, 4] == after[:, 1]) & (before[:, 3] + before[:, 4] == after[:, 3])


def random_regions(lengths, seed):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, length, np.uint8) for length in lengths]


def native(regions):
    return [(region.ctypes.data, region.nbytes) for region in regions]


@quick
@given(plans(), st.data())
def test_runs_cover_the_reference_walk_and_are_maximal(case, data):
    plan, _, _ = case
    walker = native_plan(plan)
    assert walker.total_bytes == plan.total_bytes
    runs = walker.runs()
    np.testing.assert_array_equal(places(runs), places(walk(plan)))
    assert not touching(runs).any()
    assert walker.count_runs() == len(runs)

    begin, end = sorted(data.draw(st.tuples(*[st.integers(0, plan.total_bytes)] * 2)))
    part = walker.runs(begin, end)
    np.testing.assert_array_equal(places(part), places(walk(plan))[begin:end])
    assert not touching(part).any()

    limit = data.draw(st.integers(3, 5000))
    cut = walker.runs(begin, end, limit)
    np.testing.assert_array_equal(places(cut), places(part))
    assert cut[:, 4].max(initial=0) <= limit
    assert (cut[:-1, 4][touching(cut)] == limit).all(), "cut only where the limit was reached"


@quick
@given(plans(), st.data())
def test_leaves_of_either_side_are_those_of_its_gathered_bytes(case, data):
    plan, *lengths = case
    walker = native_plan(plan)
    for side in Side:
        regions = random_regions(lengths[side], seed=7)
        expected = leaf_digests(gather(plan, side, regions), xxhash.xxh3_64_intdigest)
        assert digest_leaves(walker, side, native(regions)) == expected
        first, last = sorted(data.draw(st.tuples(*[st.integers(0, len(expected) // 8)] * 2)))
        assert digest_leaves(walker, side, native(regions), first, last - first) == expected[8 * first : 8 * last]


@quick
@given(plans(), st.data())
def test_a_move_writes_what_the_reference_writes_and_nothing_else(case, data):
    plan, source_lengths, target_lengths = case
    walker = native_plan(plan)
    sources, targets = random_regions(source_lengths, 1), random_regions(target_lengths, 2)
    expected = [target.copy() for target in targets]
    copy(plan, sources, expected)
    cut = data.draw(st.integers(0, plan.total_bytes))
    before = [target.copy() for target in targets]
    move_local(walker, native(sources), native(targets), cut, cut)
    for got, want in zip(targets, before, strict=True):
        np.testing.assert_array_equal(got, want)
    move_local(walker, native(sources), native(targets), cut)
    move_local(walker, native(sources), native(targets), 0, cut)
    for got, want in zip(targets, expected, strict=True):
        np.testing.assert_array_equal(got, want)


@quick
@given(plans())
def test_bounds_are_exact_to_the_byte(case):
    plan, *lengths = case
    walker = native_plan(plan)
    for side in Side:
        where = places(walk(plan))[:, 2 * side : 2 * side + 2]
        for region in np.unique(where[:, 0]):
            needed = int(where[where[:, 0] == region, 1].max()) + 1
            enough = list(lengths[side])
            enough[region] = needed
            walker.check_bounds(side, enough)
            enough[region] = needed - 1
            with pytest.raises(ValueError, match=f"region {region}, which has {needed - 1}"):
                walker.check_bounds(side, enough)


def test_adjacent_blocks_merge_into_one_run():
    pieces = np.array([[0, 4096], [4096, 8192], [8192, 0]], np.int64)
    plan = native_plan(segment_plan(pieces=pieces, run_bytes=4096))
    assert plan.runs().tolist() == [[0, 0, 0, 4096, 8192], [0, 8192, 0, 0, 4096]]


def test_neighbours_in_different_regions_stay_apart():
    plan = native_plan(segment_plan(bases=np.array([[0, 0, 0, 0], [1, 8, 0, 8], [1, 16, 1, 16]], np.int64)))
    assert plan.runs().tolist() == [[0, 0, 0, 0, 8], [1, 8, 0, 8, 8], [1, 16, 1, 16, 8]]


def test_a_refused_range_moves_nothing():
    walker = native_plan(segment_plan(run_bytes=16))
    source, target = np.ones(16, np.uint8), np.zeros(16, np.uint8)
    for begin, end in [(-1, 4), (5, 4), (0, 17), (2**63 - 1, 2**63 - 1), (-(2**63), 0)]:
        with pytest.raises(LayoutError, match="outside the plan"):
            move_local(walker, native([source]), native([target]), begin, end)
    with pytest.raises(LayoutError, match="target region 0, which has 15"):
        move_local(walker, native([source]), native([target[:15]]))
    assert not target.any()


def segment_plan(**changes):
    fields = {
        "bases": np.zeros((1, 4), np.int64),
        "pieces": np.zeros((1, 2), np.int64),
        "nest": (),
        "run_bytes": 8,
        **changes,
    }
    return CopyPlan(segments=(Segment(**fields),), total_bytes=0)


def one_base(*row):
    return {"bases": np.array([row], np.int64)}


HOSTILE = {
    "no bases": {"bases": np.zeros((0, 4), np.int64)},
    "no pieces": {"pieces": np.zeros((0, 2), np.int64)},
    "bases of three columns": {"bases": np.zeros((1, 3), np.int64)},
    "bases flat": {"bases": np.zeros(4, np.int64)},
    "pieces of text": {"pieces": np.array([["a", "b"]])},
    "pieces absent": {"pieces": None},
    "nest ragged": {"nest": ((1, 2),)},
    "nest too deep": {"nest": ((1, 0, 0),) * 9},
    "nest count zero": {"nest": ((0, 1, 1),)},
    "nest count negative": {"nest": ((-2, 1, 1),)},
    "nest count past int64": {"nest": ((2**64, 1, 1),)},
    "nest product overflows": {"nest": ((2**40, 0, 0), (2**40, 0, 0))},
    "stride past bounds": {"nest": ((2, 2**60, 0),)},
    "stride spans too far": {"nest": ((2**30, 2**40, 0),)},
    "stride leads below zero": {"nest": ((2, -1, 0),)},
    "run empty": {"run_bytes": 0},
    "run negative": {"run_bytes": -1},
    "run past bounds": {"run_bytes": 2**50},
    "run past int64": {"run_bytes": 2**63},
    "run fractional": {"run_bytes": 1.5},
    "source region negative": one_base(-1, 0, 0, 0),
    "target region past bounds": one_base(0, 0, limits.MAX_REGIONS, 0),
    "source offset negative": one_base(0, -1, 0, 0),
    "target offset past bounds": one_base(0, 0, 0, 2**62),
    "source offset lowest": one_base(0, -(2**63), 0, 0),
    "piece leads below zero": {"pieces": np.array([[0, 0], [0, -8]], np.int64)},
}


@pytest.mark.parametrize("changes", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_plan_that_cannot_be_true_is_refused(changes):
    with pytest.raises(LayoutError, match="not a plan the native core can walk"):
        native_plan(segment_plan(**changes))


def test_the_refusal_names_the_segment_and_the_term():
    plan = CopyPlan(segments=(*segment_plan().segments, *segment_plan(run_bytes=0).segments), total_bytes=0)
    with pytest.raises(LayoutError, match=r"segment 1: run_bytes is 0"):
        native_plan(plan)


def test_sums_over_segments_are_bounded_too():
    huge = segment_plan(run_bytes=limits.MAX_TRANSFER_BYTES).segments[0]
    assert native_plan(CopyPlan(segments=(huge,), total_bytes=0)).total_bytes == limits.MAX_TRANSFER_BYTES
    with pytest.raises(LayoutError, match="segment 1: moves more than"):
        native_plan(CopyPlan(segments=(huge, huge), total_bytes=0))


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=4, max_size=4),
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=2, max_size=2),
    st.lists(st.tuples(*[st.integers(-(2**63), 2**63 - 1)] * 3), max_size=9),
    st.integers(-(2**63), 2**63 - 1),
)
def test_any_numbers_are_walked_or_refused(base, piece, nest, run_bytes):
    plan = segment_plan(
        bases=np.array([base], np.int64), pieces=np.array([piece], np.int64), nest=tuple(nest), run_bytes=run_bytes
    )
    try:
        walker = native_plan(plan)
    except LayoutError:
        return
    assert 0 < walker.total_bytes <= limits.MAX_TRANSFER_BYTES
    walker.runs(0, 1)


def test_tables_are_copied_so_that_a_later_change_does_not_reach_the_plan():
    bases = np.zeros((1, 4), np.int64)
    plan = native_plan(segment_plan(bases=bases))
    bases[:] = -1
    assert plan.runs().tolist() == [[0, 0, 0, 0, 8]]


def test_native_bounds_are_those_of_limits():
    for name in ("MAX_OFFSET_BYTES", "MAX_TRANSFER_BYTES", "MAX_REGIONS", "LEAF_BYTES"):
        assert getattr(_kvlink, name) == getattr(limits, name), name


def test_a_side_is_source_or_target():
    plan = native_plan(segment_plan())
    for side in (-1, 2):
        with pytest.raises(ValueError, match="side must be"):
            plan.check_bounds(side, [8])


def test_a_missing_extension_is_reported_with_its_remedy(monkeypatch):
    monkeypatch.delitem(sys.modules, "kvlink._native")
    monkeypatch.setitem(sys.modules, "kvlink._native._kvlink", None)
    with pytest.raises(UnavailableError, match="scripts/build-native"):
        importlib.import_module("kvlink._native")


def test_a_source_tree_without_the_extension_is_said_to_hide_the_installed_package(monkeypatch):
    class Blind:
        @staticmethod
        def find_spec(name, _path=None, _target=None):
            if name == "kvlink._native._kvlink":
                raise ModuleNotFoundError(name, name=name)

    for name in ("kvlink._native", "kvlink._native._kvlink"):
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Blind, *sys.meta_path])
    with pytest.raises(UnavailableError, match=r"_native has none\).*leave the source tree") as told:
        importlib.import_module("kvlink._native")
    assert "circular" not in str(told.value)
