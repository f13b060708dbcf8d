"""Conversions of elements, bit by bit: equal to ml_dtypes but for saturation and one NaN, on every instruction set."""

from itertools import pairwise

import numpy as np
import pytest
from number_cases import NAN, NUMPY, PAIR_IDS, PAIRS, bits_of, every_pattern, expected, flat_plan

from kvlink import limits
from kvlink._native import _kvlink
from kvlink.errors import LayoutError
from kvlink.layout import DType
from kvlink.relayout import Side, digest_leaves, leaf_digests, move_local, move_variants, native_plan

SCALES = [(None, None), (0.37, None), (None, 1.7), (3.0e-3, 0.0101)]


def convert(stored, source, target, source_scale=None, target_scale=None, variant=None):
    plan = native_plan(flat_plan(len(stored), source, target, source_scale, target_scale))
    stored = np.ascontiguousarray(stored)
    out = np.zeros(len(stored), NUMPY[target])
    move_local(plan, [(stored.ctypes.data, stored.nbytes)], [(out.ctypes.data, out.nbytes)], variant=variant)
    return bits_of(out)


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=PAIR_IDS)
def test_every_pattern_converts_as_ml_dtypes_says(source, target):
    stored = every_pattern(source, np.random.default_rng(1))
    for source_scale, target_scale in SCALES:
        want = expected(stored, target, source_scale, target_scale)
        for variant in move_variants():
            got = convert(stored, source, target, source_scale, target_scale, variant)
            wrong = np.flatnonzero(got != want)
            assert not len(wrong), (
                f"{variant}, scales {source_scale} and {target_scale}: {len(wrong)} differ, the first from "
                f"{bits_of(stored)[wrong[0]]:#x}: {got[wrong[0]]:#x}, ml_dtypes has {want[wrong[0]]:#x}"
            )


@pytest.mark.parametrize("target", list(NUMPY), ids=lambda target: target.value)
def test_random_floats_by_the_million_convert_as_ml_dtypes_says(target):
    values = np.random.default_rng(2).standard_normal(1 << 20).astype(np.float32) * np.float32(100)
    np.testing.assert_array_equal(convert(values, DType.FLOAT32, target), expected(values, target))


@pytest.mark.parametrize("target", list(NUMPY), ids=lambda target: target.value)
def test_there_is_one_nan(target):
    quiet, signalling, negative = 0x7FC0_0000, 0x7F80_0001, 0xFFFF_FFFF
    nans = np.array([quiet, signalling, negative], np.uint32).view(np.float32)
    assert set(convert(nans, DType.FLOAT32, target).tolist()) == {NAN[target]}


def test_what_is_too_large_saturates_or_becomes_infinity():
    huge = np.array([1e30, -1e30, np.inf, -np.inf], np.float32)
    assert convert(huge, DType.FLOAT32, DType.FLOAT8_E4M3).tolist() == [0x7E, 0xFE] * 2
    assert convert(huge, DType.FLOAT32, DType.FLOAT8_E5M2).tolist() == [0x7B, 0xFB] * 2
    assert convert(huge, DType.FLOAT32, DType.INT8).view(np.int8).tolist() == [127, -128] * 2
    assert convert(huge, DType.FLOAT32, DType.FLOAT16).tolist() == [0x7C00, 0xFC00] * 2
    infinite = np.array([0x7C, 0xFC], np.uint8).view(NUMPY[DType.FLOAT8_E5M2])
    assert convert(infinite, DType.FLOAT8_E5M2, DType.BFLOAT16).tolist() == [0x7F80, 0xFF80]


def test_the_scale_is_inverted_once_in_float32():
    values = np.arange(1, 20_000, dtype=np.float32)
    scale = np.float32(0.3)
    got = convert(values, DType.FLOAT32, DType.FLOAT32, target_scale=scale).view(np.float32)
    np.testing.assert_array_equal(got, values * (np.float32(1) / scale))
    assert (got != values / scale).any()


def test_the_target_of_a_conversion_has_no_digests_and_the_source_has():
    stored = np.random.default_rng(3).integers(0, 1 << 16, 20_000, np.uint16)
    plan = native_plan(flat_plan(len(stored), DType.BFLOAT16, DType.FLOAT8_E4M3, target_scale=1.0))
    assert plan.converts
    assert plan.total_bytes == stored.nbytes
    region = (stored.ctypes.data, stored.nbytes)
    assert digest_leaves(plan, Side.SOURCE, [region]) == leaf_digests(stored.tobytes())
    with pytest.raises(LayoutError, match="does not hold its wire bytes"):
        digest_leaves(plan, Side.TARGET, [region])


def test_a_scale_without_an_inverse_is_refused():
    with pytest.raises(LayoutError, match="no float32 inverse"):
        native_plan(flat_plan(8, DType.BFLOAT16, DType.INT8, target_scale=1e-42))


def test_element_types_are_those_of_layout():
    convertible = [(dtype.value, dtype.itemsize) for dtype in DType if dtype is not DType.OPAQUE]
    assert [(name, nbytes) for name, nbytes, _ in _kvlink.element_types()] == convertible


def test_a_plan_may_be_cut_anywhere():
    stored = every_pattern(DType.BFLOAT16, None)[: 3 * limits.LEAF_BYTES]
    plan = native_plan(flat_plan(len(stored), DType.BFLOAT16, DType.FLOAT32, source_scale=0.5))
    out = np.zeros(len(stored), np.float32)
    cuts = [0, 1, 2, 7, 8, 4095, 4096, 4097, 50_001, plan.total_bytes]
    for begin, end in pairwise(cuts):
        move_local(plan, [(stored.ctypes.data, stored.nbytes)], [(out.ctypes.data, out.nbytes)], begin, end)
    np.testing.assert_array_equal(bits_of(out), expected(stored, DType.FLOAT32, 0.5))
