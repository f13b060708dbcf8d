"""Plans moved and converted natively, against the loops: whole pools, every instruction set, odd alignments."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from number_cases import NUMPY
from reference_move import reference_move
from test_native_plan import strides_of

from kvlink.errors import LayoutError
from kvlink.plan import Conversion, CopyPlan, Dim, Segment
from kvlink.relayout import Side, digest_leaves, move_and_digest, move_local, move_variants, native_plan

quick = settings(max_examples=80, deadline=None)


@st.composite
def conversions(draw, counts, bases):
    """Any pair of types, scales of any kind: none, one a plane, one a plane and head."""
    scale_dim = draw(st.integers(-1, len(counts) - 1))
    shape = bases, 1 if scale_dim < 0 else counts[scale_dim]
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    scales = [np.exp(rng.normal(0, 2, shape)).astype(np.float32) if draw(st.booleans()) else None for _ in Side]
    types = st.sampled_from(list(NUMPY))
    return Conversion(draw(types), draw(types), *scales, scale_dim=scale_dim)


@st.composite
def moves(draw):
    """A plan of one to three segments that overlap on neither side, and the lengths of both sides' one region."""
    ends, segments = {Side.SOURCE: 0, Side.TARGET: 0}, []
    for _ in range(draw(st.integers(1, 3))):
        counts = [draw(st.integers(1, 4)) for _ in range(2 + draw(st.integers(0, 4)))]
        convert = draw(st.one_of(st.none(), conversions(counts[2:], counts[0])))
        elements = draw(st.integers(1, max(1, 20_000 // int(np.prod(counts)))))
        run = {Side.SOURCE: elements, Side.TARGET: elements}
        if convert is not None:
            run = {Side.SOURCE: elements * convert.source.itemsize, Side.TARGET: elements * convert.target.itemsize}
        columns = {}
        for side in Side:
            strides, origins, span = strides_of(draw, counts, run[side])
            base = ends[side] + sum(origins) + strides[0] * np.arange(counts[0])
            columns[side] = base, strides[1] * np.arange(counts[1]), strides[2:]
            ends[side] += span + draw(st.sampled_from([0, 3]))
        (s_base, s_piece, s_nest), (t_base, t_piece, t_nest) = columns.values()
        zero = np.zeros_like(s_base)
        segments.append(
            Segment(
                bases=np.stack([zero, s_base, zero, t_base], axis=1),
                pieces=np.stack([s_piece, t_piece], axis=1),
                nest=tuple(Dim(*dim) for dim in zip(counts[2:], s_nest, t_nest, strict=True)),
                run_bytes=run[Side.SOURCE],
                convert=convert,
            )
        )
    return CopyPlan(tuple(segments), sum(segment.total_bytes for segment in segments)), *ends.values()


def memory(nbytes, offset, seed):
    """Random bytes at ``offset`` past a cache line."""
    block = np.empty(nbytes + 128, np.uint8)
    start = -block.ctypes.data % 64 + offset
    block[start : start + nbytes] = np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)
    return block[start : start + nbytes]


def region(array):
    return [(array.ctypes.data, array.nbytes)]


@quick
@given(moves(), st.integers(0, 63), st.integers(0, 63), st.data())
def test_every_variant_writes_what_the_loops_write_and_nothing_else(case, source_offset, target_offset, data):
    plan, source_bytes, target_bytes = case
    source = memory(source_bytes, source_offset, 1)
    untouched = memory(target_bytes, target_offset, 2)
    want = untouched.copy()
    reference_move(plan, [source], [want])
    walker = native_plan(plan)
    cut = data.draw(st.integers(0, plan.total_bytes))
    for variant in move_variants():
        for threads in (1, 2):
            target = memory(target_bytes, target_offset, 2)
            move_local(walker, region(source), region(target), cut, threads=threads, variant=variant)
            move_local(walker, region(source), region(target), 0, cut, threads=threads, variant=variant)
            np.testing.assert_array_equal(target, want)


@quick
@given(moves(), st.data())
def test_a_fused_move_writes_the_same_and_digests_the_wire(case, data):
    plan, source_bytes, target_bytes = case
    source, target = memory(source_bytes, 0, 1), memory(target_bytes, 0, 2)
    walker = native_plan(plan)
    leaves = digest_leaves(walker, Side.SOURCE, region(source))
    want = target.copy()
    reference_move(plan, [source], [want])
    half = data.draw(st.integers(0, len(leaves) // 8))
    got = move_and_digest(walker, region(source), region(target), half, threads=2)
    got = move_and_digest(walker, region(source), region(target), 0, half) + got
    assert got == leaves
    np.testing.assert_array_equal(target, want)


def test_what_no_plan_holds_is_refused_before_a_byte_is_moved():
    source, target = np.ones(64, np.uint8), np.zeros(64, np.uint8)
    segment = Segment(np.zeros((1, 4), np.int64), np.zeros((1, 2), np.int64), (), 64)
    walker = native_plan(CopyPlan((segment,), 64))
    for call in (
        lambda: move_and_digest(walker, region(source), region(target), 1, 1),
        lambda: move_and_digest(walker, region(source), region(target[:63])),
        lambda: move_local(walker, region(source), region(target), threads=0),
        lambda: move_local(walker, region(source), region(target), variant="mmx"),
    ):
        with pytest.raises(LayoutError):
            call()
    assert not target.any()


def test_a_conversion_without_a_column_a_head_is_refused():
    convert = Conversion(*[next(iter(NUMPY))] * 2, np.ones((1, 3), np.float32), None, 0)
    segment = Segment(np.zeros((1, 4), np.int64), np.zeros((1, 2), np.int64), (Dim(2, 64, 64),), 64, convert)
    with pytest.raises(LayoutError, match="scales for"):
        native_plan(CopyPlan((segment,), 128))
