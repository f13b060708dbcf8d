"""What the caches of a bench hold, and the slow, independent check that they hold it.

Every byte a prompt owns is a function of where it means to be (prompt, layer, K or V, head, token position, channel),
never of where it lies, so the target can judge its cache from coordinates alone: it asks neither the plan nor the
source. Every byte nobody owns holds a canary, a different one on each side, so that a byte that strays, one that
was read from past the last token, and one that was never moved are all seen.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvlink.cli.bench.numbers import Converter, head_scale, lane_of, tame
from kvlink.layout import CacheSpec, DType, Group, Plane, PlaneKind

SOURCE_CANARY: Final = 0xA5
TARGET_CANARY: Final = 0x5A

_CHUNK_BYTES: Final = 512 * 1024
"""Bytes made or compared at a time: stays in the second-level cache."""
_KIND_SALT: Final = {PlaneKind.K: 1, PlaneKind.V: 2, PlaneKind.LATENT: 3}

Lanes = NDArray[np.unsignedinteger]
Bytes = NDArray[np.uint8]


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser: every output bit depends on every input bit (Steele, Lea, Flood 2014)."""
    z = values + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _rows(keys: NDArray[np.uint64], row_bytes: int) -> Lanes:
    """One pseudo-random row of ``row_bytes`` a key, in the widest lanes that divide a row: ``[len(keys), lanes]``."""
    words = np.arange(-(-row_bytes // 8), dtype=np.uint64)
    table = _mix(_mix(keys)[:, None] + words[None, :]).astype("<u8")
    octets = np.ascontiguousarray(table.view(np.uint8)[:, :row_bytes])
    return octets.view(_lane(row_bytes))


def _lane(row_bytes: int) -> np.dtype[np.unsignedinteger]:
    return np.dtype(f"<u{math.gcd(row_bytes, 8)}")


@dataclass(frozen=True, slots=True)
class Prompt:
    """The content of one request: ``tokens`` positions of pseudo-random KV under ``seed``."""

    seed: int
    tokens: int

    def positions(self, start: int, stop: int, row_bytes: int) -> Lanes:
        """The part of each row that depends on the token position: ``[stop - start, lanes]``."""
        salt = np.uint64((self.seed << 32) & 0xFFFF_FFFF_FFFF_FFFF)
        return _rows(np.arange(start, stop, dtype=np.uint64) + salt, row_bytes)

    def heads(self, plane: Plane, heads: Sequence[int], row_bytes: int) -> Lanes:
        """The part that depends on layer, kind and global head id: ``[len(heads), lanes]``."""
        place = (((self.seed & 0xFFFF) << 16 | plane.layer) << 2 | _KIND_SALT[plane.kind]) << 30
        return _rows(np.array(heads, dtype=np.uint64) + np.uint64(place), row_bytes)


@dataclass(frozen=True, slots=True)
class Fault:
    """The first byte found wrong, in words."""

    where: str

    def __str__(self) -> str:
        return self.where


class CacheContent:
    """Fills and judges one rank's cache memory.

    Args:
        spec: the cache's geometry.
        regions: its memory, ``uint8``, one array a region, as long as ``spec.region_bytes`` says.
        canary: the byte that every byte nobody owns holds.
        source_dtype: what the source stores, where the target stores another type: then contents are elements of it,
            and this cache's are what becomes of them under `head_scale`'s scales. ``None``: contents are just bytes.
    """

    def __init__(
        self, spec: CacheSpec, regions: Sequence[Bytes], canary: int, source_dtype: DType | None = None
    ) -> None:
        self._spec = spec
        self._source_dtype = source_dtype
        self._regions = regions
        self._canary = canary

    def wipe(self) -> None:
        """Set every byte of every region to the canary."""
        for region in self._regions:
            region.fill(self._canary)

    def fill(self, prompt: Prompt, blocks: Sequence[int]) -> None:
        """Write the prompt's KV into ``blocks``; slots past its last token are left as they are."""
        for group in self._spec.groups:
            for part in _parts(group, prompt.tokens, blocks):
                positions = prompt.positions(part.first, part.last, self._content_bytes(group))
                for plane in group.planes:
                    rows = self._expected(group, plane, prompt, part, positions)
                    self._view(group, plane)[part.ids, : part.slots] = rows

    def check(self, prompt: Prompt, blocks: Sequence[int]) -> Fault | None:
        """Compare every byte of ``blocks`` with what its coordinates say, past the last token with the canary."""
        for group in self._spec.groups:
            for part in _parts(group, prompt.tokens, blocks):
                positions = prompt.positions(part.first, part.last, self._content_bytes(group))
                for plane in group.planes:
                    found = self._view(group, plane)[part.ids]
                    body, tail = found[:, : part.slots], found[:, part.slots :]
                    np.bitwise_xor(body, self._expected(group, plane, prompt, part, positions), out=body)
                    np.bitwise_xor(tail, self._canary_lane(group), out=tail)
                    if found.any():
                        return _fault(group, plane, part, found)
        return None

    def wipe_blocks(self, blocks: Sequence[int]) -> None:
        """Set every byte of ``blocks`` to the canary."""
        for group in self._spec.groups:
            for part in _parts(group, len(blocks) * group.block_size, blocks):
                for plane in group.planes:
                    self._view(group, plane)[part.ids] = self._canary_lane(group)

    def check_wiped(self, blocks: Sequence[int]) -> Fault | None:
        """Compare every byte of ``blocks`` with the canary: nothing strayed into them since they were wiped."""
        for group in self._spec.groups:
            for part in _parts(group, len(blocks) * group.block_size, blocks):
                for plane in group.planes:
                    found = self._view(group, plane)[part.ids]
                    np.bitwise_xor(found, self._canary_lane(group), out=found)
                    if found.any():
                        return _fault(group, plane, part, found)
        return None

    def check_all_wiped(self) -> Fault | None:
        """Compare every byte of every region, padding too, with the canary."""
        for index, region in enumerate(self._regions):
            for start in range(0, region.size, _CHUNK_BYTES):
                wrong = region[start : start + _CHUNK_BYTES] != self._canary
                if wrong.any():
                    offset = start + int(wrong.argmax())
                    return Fault(f"region {index} byte {offset}: {region[offset]:#04x}, where nothing was written")
        return None

    def _view(self, group: Group, plane: Plane) -> Lanes:
        """The plane in place, as ``[block, slot, head, lane]``."""
        lane = _lane(group.row_bytes)
        return np.lib.stride_tricks.as_strided(
            self._regions[plane.region][plane.offset_bytes :][: lane.itemsize].view(lane),
            (group.num_blocks, group.block_size, len(group.heads), group.row_bytes // lane.itemsize),
            (plane.block_stride, plane.slot_stride, plane.head_stride, lane.itemsize),
        )

    def _expected(self, group: Group, plane: Plane, prompt: Prompt, part: _Part, positions: Lanes) -> Lanes:
        """The rows of ``part``, ``[block, slot, head, lane]``."""
        heads = prompt.heads(plane, group.heads, self._content_bytes(group))
        by_block = positions.reshape(len(part.ids), part.slots, 1, heads.shape[-1])
        rows = by_block ^ heads[None, None]
        return rows if self._source_dtype is None else self._converted(group, rows, self._source_dtype)

    def _content_bytes(self, group: Group) -> int:
        """Bytes of a row as the source stores it."""
        return group.row_bytes if self._source_dtype is None else group.channels * self._source_dtype.itemsize

    @staticmethod
    def _converted(group: Group, rows: Lanes, source: DType) -> Lanes:
        stored = tame(rows.view(lane_of(source)), source)
        if group.dtype is not source:
            convert = Converter(source, group.dtype)
            by_head = [
                convert(stored[:, :, index], head_scale(source, head), head_scale(group.dtype, head))
                for index, head in enumerate(group.heads)
            ]
            stored = np.stack(by_head, axis=2)
        return np.ascontiguousarray(stored).view(_lane(group.row_bytes))

    def _canary_lane(self, group: Group) -> np.unsignedinteger:
        lane = _lane(group.row_bytes)
        value: np.unsignedinteger = np.full(lane.itemsize, self._canary, np.uint8).view(lane)[0]
        return value


@dataclass(frozen=True, slots=True)
class _Part:
    """Some blocks of a request whose first ``slots`` slots hold positions ``first .. last``."""

    ids: NDArray[np.int64]
    slots: int
    first: int
    last: int


def _parts(group: Group, tokens: int, blocks: Sequence[int]) -> Iterator[_Part]:
    """Cut a request's blocks into parts of equal slot counts and about `_CHUNK_BYTES` a plane."""
    size = group.block_size
    if tokens > len(blocks) * size:
        msg = f"{tokens} tokens do not fit in {len(blocks)} blocks of {size}"
        raise ValueError(msg)
    ids = np.array(blocks, dtype=np.int64)
    full = tokens // size
    step = max(1, _CHUNK_BYTES // (size * len(group.heads) * group.row_bytes))
    for start in range(0, full, step):
        stop = min(start + step, full)
        yield _Part(ids[start:stop], size, start * size, stop * size)
    if tokens % size:
        yield _Part(ids[full : full + 1], tokens % size, full * size, tokens)


def _fault(group: Group, plane: Plane, part: _Part, difference: Lanes) -> Fault:
    """Name the first lane that is not zero in ``difference``, ``[block, slot, head, lane]``."""
    block, slot, head, lane = (int(i) for i in np.argwhere(difference)[0])
    return Fault(
        f"layer {plane.layer} {plane.kind} head {group.heads[head]} block {int(part.ids[block])} slot {slot} "
        f"byte {lane * difference.itemsize}: position {part.first + block * part.slots + slot}"
        f"{' (past the last token)' if slot >= part.slots else ''} does not hold what its coordinates say"
    )
