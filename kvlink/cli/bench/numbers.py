"""What a conversion must come to, by another road than the product's: tables of values, and the nearest of them.

Where both sides of a bench store other element types, the target's bytes are a function of the source's. Here it is
numpy on float32 and a search among the target's representable values; it shares no line with the native kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvlink.layout import DType

Stored = NDArray[np.unsignedinteger]
Floats = NDArray[np.float32]

_LANE: Final[dict[int, np.dtype[np.unsignedinteger]]] = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4")}
_NAN: Final = {
    DType.FLOAT16: 0x7E00, DType.BFLOAT16: 0x7FC0, DType.FLOAT32: 0x7FC00000, DType.FLOAT8_E4M3: 0x7F,
    DType.FLOAT8_E5M2: 0x7F, DType.INT8: 0,
}  # fmt: skip
"""The one pattern that every NaN becomes."""
_LARGEST: Final = {DType.FLOAT8_E4M3: 0x7E, DType.FLOAT8_E5M2: 0x7B}
"""Largest finite value of the types that saturate."""
_FIELDS: Final = {DType.FLOAT8_E4M3: (4, 3, 7), DType.FLOAT8_E5M2: (5, 2, 15)}
"""Exponent bits, mantissa bits, bias."""
CONVERTED: Final = tuple(_NAN)
"""Types that a bench converts between."""


def head_scale(dtype: DType, head: int) -> float:
    """The scale that a bench states for a head of a converted side; heads next to each other have different ones."""
    if not dtype.quantised:
        return 1.0
    return (1 + head % 3) / 64 if dtype is DType.INT8 else 0.75 + 0.125 * (head % 4)


def lane_of(dtype: DType) -> np.dtype[np.unsignedinteger]:
    """The unsigned type that holds a stored element."""
    return _LANE[dtype.itemsize]


def tame(stored: Stored, dtype: DType) -> Stored:
    """Random patterns as magnitudes near and below 2: those of the wider types would mostly saturate or vanish."""
    if dtype is DType.BFLOAT16:
        return stored & np.uint16(0x87FF) | np.uint16(0x3800)
    if dtype is DType.FLOAT32:
        return stored & np.uint32(0x87FFFFFF) | np.uint32(0x38000000)
    if dtype is DType.FLOAT16:
        return stored & np.uint16(0xBFFF)
    return stored


@dataclass(frozen=True, slots=True)
class Converter:
    """From one stored type into another: ``value = source * source_scale * (1 / target_scale)``, in float32."""

    source: DType
    target: DType

    def __call__(self, stored: Stored, source_scale: float, target_scale: float) -> Stored:
        """Convert elements of any shape."""
        if self.source.itemsize > 2:
            return self._compute(stored, source_scale, target_scale)
        every = np.arange(1 << 8 * self.source.itemsize).astype(lane_of(self.source))
        table: Stored = _table(self, source_scale, target_scale, every.tobytes())[stored]
        return table

    def _compute(self, stored: Stored, source_scale: float, target_scale: float) -> Stored:
        with np.errstate(all="ignore"):
            factor = np.float32(1) / np.float32(target_scale)
            return encode(decode(stored, self.source) * np.float32(source_scale) * factor, self.target)


@cache
def _table(converter: Converter, source_scale: float, target_scale: float, every: bytes) -> Stored:
    stored = np.frombuffer(every, lane_of(converter.source))
    return converter._compute(stored, source_scale, target_scale)  # noqa: SLF001 - its own cache


def decode(stored: Stored, dtype: DType) -> Floats:
    """Stored elements as float32, which holds every value of every type."""
    if dtype is DType.FLOAT32:
        return stored.view(np.float32)
    if dtype is DType.BFLOAT16:
        return (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype is DType.FLOAT16:
        return stored.view(np.float16).astype(np.float32)
    if dtype is DType.INT8:
        return stored.view(np.int8).astype(np.float32)
    return _float8_values(dtype)[stored]


def encode(values: Floats, dtype: DType) -> Stored:
    """The nearest representable values, ties to even; fp8 and int8 saturate. Every NaN is one pattern."""
    if dtype is DType.FLOAT32:
        stored: Stored = values.view(np.uint32).copy()
    elif dtype is DType.FLOAT16:
        stored = values.astype(np.float16).view(np.uint16)
    elif dtype is DType.BFLOAT16:
        bits = values.view(np.uint32)
        stored = ((bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)).astype("<u2")
    elif dtype is DType.INT8:
        stored = np.clip(np.rint(np.nan_to_num(values, nan=0.0)), -128, 127).astype(np.int8).view(np.uint8)
    else:
        stored = _nearest_float8(values, dtype)
    return np.where(np.isnan(values), stored.dtype.type(_NAN[dtype]), stored)


def _nearest_float8(values: Floats, dtype: DType) -> Stored:
    positive = _float8_values(dtype)[: _LARGEST[dtype] + 1].astype(np.float64)  # ascending with their patterns
    middles = (positive[1:] + positive[:-1]) / 2
    sizes = np.abs(values).astype(np.float64)
    below = np.searchsorted(middles, sizes, side="left")  # a tie goes to the lower one
    tie = below < len(middles)
    tie &= middles[np.minimum(below, len(middles) - 1)] == sizes
    below += tie & (below % 2 == 1)  # whose pattern is odd: then to the upper one
    return (below | np.signbit(values) << 7).astype(np.uint8)


@cache
def _float8_values(dtype: DType) -> Floats:
    exponent_bits, mantissa_bits, bias = _FIELDS[dtype]
    values = []
    for pattern in range(256):
        exponent = pattern >> mantissa_bits & (1 << exponent_bits) - 1
        mantissa = pattern & (1 << mantissa_bits) - 1
        size = (mantissa / 2**mantissa_bits + (exponent > 0)) * 2.0 ** (max(exponent, 1) - bias)
        if dtype is DType.FLOAT8_E5M2 and exponent == 31:
            size = np.nan if mantissa else np.inf
        elif dtype is DType.FLOAT8_E4M3 and pattern & 0x7F == 0x7F:
            size = np.nan
        values.append(-size if pattern >> 7 else size)
    return np.array(values, np.float32)
