"""The element types as ml_dtypes knows them, and what KVLink decided where it differs: saturation and one NaN."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np

from kvlink.layout import DType
from kvlink.plan import Conversion, CopyPlan, Segment

NUMPY = {
    DType.FLOAT16: np.dtype(np.float16),
    DType.BFLOAT16: np.dtype(ml_dtypes.bfloat16),
    DType.FLOAT32: np.dtype(np.float32),
    DType.FLOAT8_E4M3: np.dtype(ml_dtypes.float8_e4m3fn),
    DType.FLOAT8_E5M2: np.dtype(ml_dtypes.float8_e5m2),
    DType.INT8: np.dtype(np.int8),
}
BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32}
NAN = {
    DType.FLOAT16: 0x7E00,
    DType.BFLOAT16: 0x7FC0,
    DType.FLOAT32: 0x7FC0_0000,
    DType.FLOAT8_E4M3: 0x7F,
    DType.FLOAT8_E5M2: 0x7F,
    DType.INT8: 0,
}
LARGEST = {DType.FLOAT8_E4M3: 448.0, DType.FLOAT8_E5M2: 57344.0}
PAIRS = list(itertools.product(NUMPY, NUMPY))
PAIR_IDS = [f"{source.value}-{target.value}" for source, target in PAIRS]


def bits_of(array):
    return array.view(BITS[array.dtype.itemsize])


def expected(stored, target, source_scale=None, target_scale=None):
    """What a converted element is: `stored` in its own ml_dtypes type, scales as numbers; the target's bits."""
    with np.errstate(all="ignore"):
        value = stored.astype(np.float32)
        if source_scale is not None:
            value = value * np.float32(source_scale)
        if target_scale is not None:
            value = value * (np.float32(1) / np.float32(target_scale))
        if target is DType.INT8:
            out = np.nan_to_num(np.clip(np.rint(value), -128, 127)).astype(np.int8)
        elif target in LARGEST:
            out = np.clip(value, -LARGEST[target], LARGEST[target]).astype(NUMPY[target])
        else:
            out = value.astype(NUMPY[target])
    bits = bits_of(out).copy()
    bits[np.isnan(value)] = NAN[target]
    return bits


def every_pattern(dtype, rng):
    """All values of a type; for float32 all that 16 leading bits can say, and 2**20 random ones."""
    if dtype.itemsize < 4:
        return np.arange(1 << 8 * dtype.itemsize, dtype=BITS[dtype.itemsize]).view(NUMPY[dtype])
    leading = np.arange(1 << 16, dtype=np.uint32) << 16
    anything = rng.integers(0, 1 << 32, 1 << 19, dtype=np.uint32)
    sized = np.exp2(rng.uniform(-26, 18, 1 << 19)).astype(np.float32) * rng.choice([-1, 1], 1 << 19).astype(np.float32)
    # Halves of the last place of every narrower type: where ties are.
    ties = (np.arange(1 << 16, dtype=np.uint32) << 16 | 0x8000)[:, None] + np.array([-1, 0, 1], np.int64)
    steps = (np.arange(1 << 16, dtype=np.uint32) * 0x8000)[:, None] + np.array([-1, 0, 1], np.int64) + 0x3700_0000
    parts = leading, anything, bits_of(sized), ties.astype(np.uint32).ravel(), steps.astype(np.uint32).ravel()
    return np.concatenate(parts).view(np.float32)


def flat_plan(count, source, target, source_scale=None, target_scale=None):
    """`count` elements in a row, all of one scale."""
    scales = [None if scale is None else np.array([[scale]], np.float32) for scale in (source_scale, target_scale)]
    segment = Segment(
        bases=np.zeros((1, 4), np.int64),
        pieces=np.zeros((1, 2), np.int64),
        nest=(),
        run_bytes=count * source.itemsize,
        convert=Conversion(source, target, *scales),
    )
    return CopyPlan((segment,), segment.total_bytes)
