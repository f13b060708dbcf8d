"""The plan of one leg: strides of two specs, block tables and a token range folded into a few arrays.

How a group becomes segments: its planes are sorted into families of equal strides, its heads into stretches that are
consecutive on both sides, the token range into pieces that lie in one block of either side. Each combination of
(slots in a piece, family, head stretch) is one segment, and all that lies inside a block becomes its nest.

Runs are as long as a block allows wherever a leg's heads are consecutive on both sides and its layers evenly spaced,
as engines cut them. Any other choice is moved as exactly, in shorter runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvlink import limits
from kvlink.errors import LayoutError, MismatchError, UnsupportedError
from kvlink.layout import CacheSpec, Group, GroupShare, Plane, PlaneKind, touched_blocks
from kvlink.plan.copyplan import CopyPlan, Dim, Segment, check_plan

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Blocks = Sequence[Sequence[int] | NDArray[np.int64]]


class _Strides(NamedTuple):
    """Of one plane, bytes."""

    block: int
    slot: int
    head: int


@dataclass(frozen=True, slots=True)
class _Family:
    """Planes of equal strides. ``cells``: int64 ``[layers, kinds, 4]`` (or ``[planes, 1, 4]``), rows as in bases."""

    cells: NDArray[np.int64]
    source: _Strides
    target: _Strides


@dataclass(frozen=True, slots=True)
class _Heads:
    """Stretches of equally many heads, each consecutive on both sides.

    ``starts``: int64 ``[n, 2]``, positions of each stretch's first head in the two ranks' own orders.
    """

    length: int
    starts: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Stretches of ``slots`` tokens, each inside one block of either side; ``first``: their first positions."""

    slots: int
    first: NDArray[np.int64]


def plan_leg(  # noqa: PLR0913 - two sides' geometry and blocks, and the range
    source: CacheSpec,
    target: CacheSpec,
    leg_groups: Sequence[GroupShare],
    *,
    source_blocks: Blocks,
    target_blocks: Blocks | None,
    first_token: int,
    tokens: int,
) -> CopyPlan:
    """Plan the move of positions ``[first_token, tokens)`` of one leg, as segments in wire order.

    The wire order is a function of the specs, the leg and the range only. Block ids change addresses, nothing else:
    both sides get the same order, and the source gets it without the target's block ids.

    Args:
        source: the source rank's spec, having passed `kvlink.layout.check_spec`.
        target: the target rank's spec, likewise.
        leg_groups: layers and heads to move, groups matched by name; from `kvlink.plan.assign_legs`.
        source_blocks: block ids, one list for each of ``source.groups`` in order; entry i holds the positions from
            ``i * block_size`` on. Entries wholly outside the range may be anything. A block may repeat (it is read).
        target_blocks: the same for ``target.groups``, where no block that is written may repeat. ``None`` makes a
            one-sided plan for the source: target piece offsets are 0 and mean nothing.
        first_token: first position to move: what lies before is at the target already.
        tokens: one past the last position to move. Slots past it are left as they are.

    Returns:
        A plan that has passed `check_plan` against both specs; its size grows with blocks and with planes, never with
        their product.

    Raises:
        LayoutError: the range or a block list is impossible.
        MismatchError: the two sides state a group's channels or kinds differently.
        UnsupportedError: a group, layer or head of the leg is not on both sides, or dtypes differ.
    """
    if not 0 <= first_token <= tokens <= limits.MAX_TOKENS_PER_REQUEST:
        raise LayoutError(
            f"token range [{first_token}, {tokens}) is impossible; it must ascend within "
            f"[0, {limits.MAX_TOKENS_PER_REQUEST}]"
        )
    _check_lists(source, source_blocks, "source")
    if target_blocks is not None:
        _check_lists(target, target_blocks, "target")
    segments: list[Segment] = []
    for share in leg_groups:
        source_index, target_index = _find(source, share.name, "source"), _find(target, share.name, "target")
        leg = _GroupLeg(source, source.groups[source_index], target, target.groups[target_index], share)
        written = None if target_blocks is None else target_blocks[target_index]
        segments += leg.segments(source_blocks[source_index], written, first_token, tokens)
    plan = CopyPlan(segments=tuple(segments), total_bytes=sum(segment.total_bytes for segment in segments))
    check_plan(plan, source.region_bytes, target.region_bytes)
    return plan


class _GroupLeg:
    """One group of a leg, matched: what the two sides must agree on is checked on construction."""

    def __init__(
        self, source_spec: CacheSpec, source: Group, target_spec: CacheSpec, target: Group, share: GroupShare
    ) -> None:
        self.source, self.target, self.share = source, target, share
        self.source_place, self.target_place = str(source_spec.place), str(target_spec.place)
        self.path = f"groups.{share.name}"
        self._check_agreement()
        self.families = self._plane_families()
        self.heads = self._head_stretches()

    def segments(
        self,
        source_blocks: Sequence[int] | NDArray[np.int64],
        target_blocks: Sequence[int] | NDArray[np.int64] | None,
        first_token: int,
        tokens: int,
    ) -> Iterator[Segment]:
        """In wire order: pieces with more slots first, then families, then longer head stretches."""
        source_name, target_name = f"source blocks of {self.path}", f"target blocks of {self.path}"
        source_ids = touched_blocks(self.source, source_blocks, first_token, tokens, source_name)
        target_ids = None
        if target_blocks is not None:
            target_ids = touched_blocks(self.target, target_blocks, first_token, tokens, target_name)
            _check_unique(target_ids, target_name)
        elif -(-tokens // self.target.block_size) > limits.MAX_BLOCKS_PER_REQUEST:
            raise LayoutError(f"{target_name}: {tokens} tokens need over {limits.MAX_BLOCKS_PER_REQUEST} blocks")
        for pieces in _cut(self.source.block_size, self.target.block_size, first_token, tokens):
            for family in self.families:
                offsets = np.zeros((len(pieces.first), 2), dtype=np.int64)
                offsets[:, 0] = _piece_offsets(pieces, source_ids, self.source.block_size, family.source, first_token)
                if target_ids is not None:
                    offsets[:, 1] = _piece_offsets(
                        pieces, target_ids, self.target.block_size, family.target, first_token
                    )
                for heads in self.heads:
                    yield _segment(family, heads, offsets, pieces.slots, self.source.row_bytes)

    def _check_agreement(self) -> None:
        source, target = self.source, self.target
        peers = {"source": self.source_place, "target": self.target_place}
        if source.channels != target.channels:
            raise MismatchError(f"{self.path}.channels", source.channels, target.channels, **peers)
        source_kinds, target_kinds = _kinds(source), _kinds(target)
        if source_kinds != target_kinds:
            raise MismatchError(f"{self.path}.planes.kind", "+".join(source_kinds), "+".join(target_kinds), **peers)
        if source.dtype != target.dtype:
            raise UnsupportedError(
                f"{self.path}.dtype: {self.source_place} (source) has {source.dtype.value}, {self.target_place} "
                f"(target) has {target.dtype.value}; KV is moved, not converted: serve both in one dtype"
            )
        for side, place, group in (
            ("source", self.source_place, source),
            ("target", self.target_place, target),
        ):
            layers = {plane.layer for plane in group.planes}
            for name, wanted, have in (
                ("layer", self.share.layers, layers),
                ("head", self.share.heads, set(group.heads)),
            ):
                lacking = [item for item in wanted if item not in have]
                if lacking or len(set(wanted)) != len(wanted) or not wanted:
                    raise UnsupportedError(
                        f"{self.path}: the leg moves {name}s {wanted}, {place} ({side}) holds {sorted(have)}; "
                        f"assign legs from what the ranks hold, each {name} once"
                    )

    def _plane_families(self) -> list[_Family]:
        source_planes, target_planes = _planes_by_key(self.source), _planes_by_key(self.target)
        members: dict[tuple[_Strides, _Strides], dict[tuple[int, PlaneKind], list[int]]] = defaultdict(dict)
        kinds = _kinds(self.source)
        keys = [(layer, kind) for layer in self.share.layers for kind in kinds]
        # The order of the source's memory, so that neither families nor their planes depend on how the leg lists them.
        for key in sorted(keys, key=lambda key: (source_planes[key].region, source_planes[key].offset_bytes, key)):
            one, other = source_planes[key], target_planes[key]
            strides = _strides(one), _strides(other)
            members[strides][key] = [one.region, one.offset_bytes, other.region, other.offset_bytes]
        return [_Family(_grid(cells), *strides) for strides, cells in members.items()]

    def _head_stretches(self) -> list[_Heads]:
        source_at = {head: position for position, head in enumerate(self.source.heads)}
        target_at = {head: position for position, head in enumerate(self.target.heads)}
        positions = sorted((source_at[head], target_at[head]) for head in self.share.heads)
        breaks = [
            index
            for index, (one, other) in enumerate(pairwise(positions), start=1)
            if (other[0] - one[0], other[1] - one[1]) != (1, 1)
        ]
        starts: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for begin, end in pairwise([0, *breaks, len(positions)]):
            starts[end - begin].append(positions[begin])
        return [_Heads(length, np.array(starts[length], dtype=np.int64)) for length in sorted(starts, reverse=True)]


def _segment(family: _Family, heads: _Heads, offsets: NDArray[np.int64], slots: int, row_bytes: int) -> Segment:
    head_strides = (family.source.head, family.target.head)
    dims = [Dim(slots, family.source.slot, family.target.slot), Dim(heads.length, *head_strides)]
    cells = family.cells
    for axis in (0, 1):
        step = _uniform_step(cells, axis, family.source.block)
        if step is not None:
            dims.append(step)
            cells = cells.take([0], axis=axis)
    bases = cells.reshape(-1, 1, 4)
    head_cells = np.zeros((len(heads.starts), 4), dtype=np.int64)
    head_cells[:, 1] = heads.starts[:, 0] * head_strides[0]
    head_cells[:, 3] = heads.starts[:, 1] * head_strides[1]
    step = _uniform_step(head_cells, 0, family.source.block)
    if step is not None:
        dims.append(step)
        head_cells = head_cells[:1]
    nest, run_bytes = _fold(dims, row_bytes)
    bases = np.ascontiguousarray((bases + head_cells).reshape(-1, 4))
    return Segment(bases=bases, pieces=offsets, nest=nest, run_bytes=run_bytes)


def _uniform_step(cells: NDArray[np.int64], axis: int, source_block_stride: int) -> Dim | None:
    """The axis as one dimension inside a block, or ``None`` if it is not uniform or does not lie inside a block."""
    count = cells.shape[axis]
    if count == 1:
        return None
    steps = np.diff(cells, axis=axis).reshape(-1, 4)
    if (steps != steps[0]).any():
        return None
    source_region, source_step, target_region, target_step = (int(value) for value in steps[0])
    if source_region or target_region or not 0 < source_step < source_block_stride or target_step <= 0:
        return None
    return Dim(count, source_step, target_step)


def _fold(dims: Iterable[Dim], row_bytes: int) -> tuple[tuple[Dim, ...], int]:
    """Sort by source stride, then merge what is contiguous on both sides into the run or into one dimension."""
    run_bytes = row_bytes
    nest: list[Dim] = []
    for dim in sorted((dim for dim in dims if dim.count > 1), key=lambda dim: dim.source_stride):
        if not nest and dim.source_stride == dim.target_stride == run_bytes:
            run_bytes *= dim.count
            continue
        inner = nest[-1] if nest else None
        if inner is not None and dim[1:] == (inner.count * inner.source_stride, inner.count * inner.target_stride):
            nest[-1] = inner._replace(count=inner.count * dim.count)
        else:
            nest.append(dim)
    return tuple(reversed(nest)), run_bytes


def _cut(source_block: int, target_block: int, first_token: int, tokens: int) -> list[_Pieces]:
    """Cut the range at every block edge of either side; pieces of equal size together, larger first, then in order."""
    if first_token == tokens:
        return []
    edges = [
        np.arange(first_token // size * size + size, tokens, size, dtype=np.int64)
        for size in {source_block, target_block}
    ]
    cuts = np.unique(np.concatenate([np.array([first_token, tokens], dtype=np.int64), *edges]))
    first, slots = cuts[:-1], np.diff(cuts)
    order = np.argsort(-slots, kind="stable")
    sizes, begins = np.unique(-slots[order], return_index=True)
    return [
        _Pieces(slots=-int(size), first=first[members])
        for size, members in zip(sizes, np.split(order, begins[1:]), strict=True)
    ]


def _piece_offsets(
    pieces: _Pieces, ids: NDArray[np.int64], block_size: int, strides: _Strides, first_token: int
) -> NDArray[np.int64]:
    """Where each piece begins, relative to its plane. ``ids`` starts at the block that holds ``first_token``."""
    entry, slot = np.divmod(pieces.first, block_size)
    offsets: NDArray[np.int64] = ids[entry - first_token // block_size] * strides.block + slot * strides.slot
    return offsets


def _grid(members: dict[tuple[int, PlaneKind], list[int]]) -> NDArray[np.int64]:
    """``[layers, kinds, 4]`` if every layer has every kind, else ``[planes, 1, 4]``; in the order given."""
    layers = list(dict.fromkeys(layer for layer, _ in members))
    kinds = list(dict.fromkeys(kind for _, kind in members))
    if len(members) == len(layers) * len(kinds):
        return np.array([[members[layer, kind] for kind in kinds] for layer in layers], dtype=np.int64)
    return np.array(list(members.values()), dtype=np.int64).reshape(-1, 1, 4)


def _strides(plane: Plane) -> _Strides:
    return _Strides(plane.block_stride, plane.slot_stride, plane.head_stride)


def _planes_by_key(group: Group) -> dict[tuple[int, PlaneKind], Plane]:
    return {(plane.layer, plane.kind): plane for plane in group.planes}


def _kinds(group: Group) -> tuple[PlaneKind, ...]:
    present = {plane.kind for plane in group.planes}
    return tuple(kind for kind in PlaneKind if kind in present)


def _find(spec: CacheSpec, name: str, side: str) -> int:
    names = [group.name for group in spec.groups]
    if name not in names:
        raise UnsupportedError(f"group {name!r} of the leg is not on the {side}: {spec.place} has {names}")
    return names.index(name)


def _check_lists(spec: CacheSpec, blocks: Blocks, side: str) -> None:
    if len(blocks) != len(spec.groups):
        raise LayoutError(
            f"{side} blocks: {len(blocks)} lists for {len(spec.groups)} groups of {spec.place}; pass one list a group"
        )


def _check_unique(ids: NDArray[np.int64], where: str) -> None:
    values, counts = np.unique(ids, return_counts=True)
    if len(values) != len(ids):
        raise LayoutError(
            f"{where}: block {int(values[counts > 1][0])} is listed twice; each block that is written holds one "
            "stretch of tokens"
        )
