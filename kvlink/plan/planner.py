"""The plan of one leg: what depends on two specs is prepared once, what depends on a request is a few small arrays.

How a group becomes segments: its planes are sorted into families of equal strides, its heads into stretches that are
consecutive on both sides, the token range into pieces that lie in one block of either side. Each combination of
(slots in a piece, family, head stretch) is one segment, and all that lies inside a block becomes its nest.

Runs are as long as a block allows wherever a leg's heads are consecutive on both sides and its layers evenly spaced,
as engines cut them. Any other choice is moved as exactly, in shorter runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from kvlink import limits
from kvlink.errors import LayoutError
from kvlink.layout import Alias, CacheSpec, Group, GroupShare, IndexedBy, aliases, touched_blocks
from kvlink.plan.copyplan import CopyPlan, Segment
from kvlink.plan.families import Steps, families_of, stretches_of
from kvlink.plan.match import GroupPair, check_agreement, find_group
from kvlink.plan.pieces import Pieces, cut
from kvlink.plan.template import Template, template_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    BlockIds = Sequence[int] | NDArray[np.int64]
    Blocks = Sequence[BlockIds]

_MAX_TEMPLATES: Final = 256
"""Sizes of pieces that are remembered: full blocks, and each size of a part-filled one as it comes up."""


class LegPlanner:
    """Plans the requests of one leg. Immutable but for what it remembers; for one thread at a time.

    Args:
        source: the source rank's spec, having passed `kvlink.layout.check_spec`.
        target: the target rank's spec, likewise.
        leg_groups: layers and heads to move, groups matched by name; from `kvlink.plan.assign_legs`.

    Raises:
        MismatchError: the two sides state a group's channels, kinds, heads or indexing differently.
        UnsupportedError: a group, layer or head of the leg is not on both sides, or a pair of dtypes, scales or
            shardings cannot be converted without losing meaning.
    """

    def __init__(self, source: CacheSpec, target: CacheSpec, leg_groups: Sequence[GroupShare]) -> None:
        self.source, self.target = source, target
        self.groups = tuple(leg_groups)
        self._legs = [_GroupLeg(source, target, share) for share in leg_groups]
        self._aliases: list[Alias] | None = None

    @property
    def conversions(self) -> tuple[str, ...]:
        """What of the leg is converted, such as ``groups.full: bfloat16 to float8_e4m3``; empty if bytes are copied."""
        return tuple(dict.fromkeys(text for leg in self._legs for text in leg.conversions()))

    def plan(
        self, source_blocks: Blocks, target_blocks: Blocks | None, *, first_token: int | Sequence[int], tokens: int
    ) -> CopyPlan:
        """Plan the move of positions ``[first_token, tokens)``, as segments in wire order.

        The wire order is a function of the specs, the leg and the range only (and of how many entries there are, for
        groups that are not indexed by tokens). Block ids change addresses, nothing else: both sides get the same
        order, and the source gets it without the target's block ids.

        Args:
            source_blocks: block ids, one list for each of ``source.groups`` in order; entry i holds the positions from
                ``i * block_size`` on. Entries wholly outside the range may be anything. A block may repeat (it is
                read).
            target_blocks: the same for ``target.groups``, where no block that is written may repeat. ``None`` makes a
                one-sided plan for the source: target piece offsets are 0 and mean nothing.
            first_token: first position to move: what lies before is at the target already, or has left its window.
                One for all groups, or one for each of ``source.groups``.
            tokens: one past the last position to move. Slots past it are left as they are.

        Returns:
            A plan whose bytes lie inside both specs' regions, by the same extremes as `check_plan` looks at; its size
            grows with blocks and with planes, never with their product.

        Raises:
            LayoutError: the range or a block list is impossible, or two groups would write one block.
        """
        starts = self._starts(first_token, tokens)
        _check_lists(self.source, source_blocks, "source")
        if target_blocks is not None:
            _check_lists(self.target, target_blocks, "target")
        segments: list[Segment] = []
        written: dict[int, NDArray[np.int64]] = {}
        total = 0
        for leg in self._legs:
            into = None if target_blocks is None else target_blocks[leg.target_index]
            found = leg.request(source_blocks[leg.source_index], into, starts[leg.source_index], tokens)
            written[leg.target_index] = found.target_ids
            for nbytes, segment in found.segments():
                total += nbytes
                segments.append(segment)
        if target_blocks is not None and len(written) > 1:
            self._check_aliases(written)
        if total > limits.MAX_TRANSFER_BYTES:
            raise LayoutError(f"plan moves {total} bytes, over the bound of {limits.MAX_TRANSFER_BYTES}; split it")
        return CopyPlan(in_wire_order(segments), total)

    def _starts(self, first_token: int | Sequence[int], tokens: int) -> Sequence[int]:
        count = len(self.source.groups)
        starts = [first_token] * count if isinstance(first_token, int) else first_token
        if len(starts) != count:
            raise LayoutError(f"{len(starts)} first tokens are given for {count} groups; give one, or one a group")
        for first in starts:
            if not 0 <= first <= tokens <= limits.MAX_TOKENS_PER_REQUEST:
                raise LayoutError(
                    f"token range [{first}, {tokens}) is impossible; it must ascend within "
                    f"[0, {limits.MAX_TOKENS_PER_REQUEST}]"
                )
        return starts

    def _check_aliases(self, written: dict[int, NDArray[np.int64]]) -> None:
        # Of its own cache only does a side look for shared memory: the search is not bounded by a peer's good will.
        if self._aliases is None:
            self._aliases = [alias for alias in aliases(self.target) if written.keys() >= set(alias.groups)]
        for alias in self._aliases:
            one, other = alias.groups
            shared = alias.shared(written[one], written[other])
            if shared is not None:
                names = [self.target.groups[index].name for index in alias.groups]
                blocks = [block // self.target.groups[at].ratio for block, at in zip(shared, alias.groups, strict=True)]
                raise LayoutError(
                    f"target blocks: block {blocks[0]} of groups.{names[0]} and block {blocks[1]} of groups.{names[1]} "
                    "are the same memory; give the groups of one request blocks of their own"
                )


def plan_leg(  # noqa: PLR0913 - two sides' geometry and blocks, and the range
    source: CacheSpec,
    target: CacheSpec,
    leg_groups: Sequence[GroupShare],
    *,
    source_blocks: Blocks,
    target_blocks: Blocks | None,
    first_token: int | Sequence[int],
    tokens: int,
) -> CopyPlan:
    """`LegPlanner` for a single request; see there, and `LegPlanner.plan`."""
    planner = LegPlanner(source, target, leg_groups)
    return planner.plan(source_blocks, target_blocks, first_token=first_token, tokens=tokens)


class _GroupLeg:
    """One group of a leg, matched: what the two sides must agree on is checked on construction."""

    def __init__(self, source: CacheSpec, target: CacheSpec, share: GroupShare) -> None:
        self.source_index = find_group(source, share.name, "source")
        self.target_index = find_group(target, share.name, "target")
        pair = GroupPair(source, source.groups[self.source_index], target, target.groups[self.target_index], share)
        check_agreement(pair)
        self.source, self.target, self.path = pair.source, pair.target, pair.path
        self._families, self._heads = families_of(pair), stretches_of(pair)
        self._regions = source.region_bytes, target.region_bytes
        self._templates: dict[int, list[tuple[tuple[Steps, Steps], list[Template]]]] = {}

    def conversions(self) -> Iterator[str]:
        """In words, a family each."""
        for shape in (family.shape for family in self._families if family.shape.converts):
            scales = " of another scale" if shape.source_dtype is shape.target_dtype else ""
            yield f"{self.path}: {shape.source_dtype.value} to {shape.target_dtype.value}{scales}"

    def request(
        self, source_blocks: BlockIds, target_blocks: BlockIds | None, first_token: int, tokens: int
    ) -> _GroupRequest:
        """Check one request's block lists."""
        if self.source.indexed_by is IndexedBy.ENTRY:
            first_token, tokens = 0, len(source_blocks) * self.source.block_size
            if target_blocks is not None and len(target_blocks) != len(source_blocks):
                raise LayoutError(
                    f"{self.path} is moved entry by entry: the source has {len(source_blocks)}, the target "
                    f"{len(target_blocks)}; give as many blocks as there are to come"
                )
        where = f"target blocks of {self.path}"
        source_ids = touched_blocks(self.source, source_blocks, first_token, tokens, f"source blocks of {self.path}")
        if target_blocks is not None:
            target_ids = touched_blocks(self.target, target_blocks, first_token, tokens, where)
            _check_unique(target_ids, where)
        elif -(-tokens // self.target.block_size) > limits.MAX_BLOCKS_PER_REQUEST:
            raise LayoutError(f"{where}: {tokens} tokens need over {limits.MAX_BLOCKS_PER_REQUEST} blocks")
        else:
            target_ids = None
        return _GroupRequest(self, source_ids, target_ids, first_token, tokens)

    def templates(self, slots: int) -> list[tuple[tuple[Steps, Steps], list[Template]]]:
        """For each family, in order: its strides, and a template a length of head stretches."""
        known = self._templates.get(slots)
        if known is None:
            known = [
                (family.shape[:2], [template_of(family, heads, slots, *self._regions) for heads in self._heads])
                for family in self._families
            ]
            if len(self._templates) >= _MAX_TEMPLATES:
                self._templates.clear()
            self._templates[slots] = known
        return known


class _GroupRequest:
    """One request's share of a group's leg. ``target_ids`` are tensor blocks, empty in a one-sided plan."""

    def __init__(
        self,
        leg: _GroupLeg,
        source_ids: NDArray[np.int64],
        target_ids: NDArray[np.int64] | None,
        first_token: int,
        tokens: int,
    ) -> None:
        self._leg = leg
        self._range = first_token, tokens
        self._source = _Side(leg.source, source_ids, first_token)
        self._target = None if target_ids is None else _Side(leg.target, target_ids, first_token)
        self.target_ids = np.empty(0, dtype=np.int64) if self._target is None else self._target.ids

    def segments(self) -> Iterator[tuple[int, Segment]]:
        """With their source bytes, in wire order: larger pieces first, then families, then longer head stretches."""
        leg = self._leg
        for pieces in cut(leg.source.tensor_slots, leg.target.tensor_slots, *self._range):
            tables: dict[tuple[int, ...], NDArray[np.int64]] = {}
            source_at = self._source.find(pieces)
            target_at = None if self._target is None else self._target.find(pieces)
            for (source, target), templates in leg.templates(pieces.slots):
                strides = source.block, source.slot, target.block, target.slot
                table = tables.get(strides)
                if table is None:
                    offset = source_at[0] * source.block + source_at[1] * source.slot
                    into = 0 if target_at is None else target_at[0] * target.block + target_at[1] * target.slot
                    table = tables[strides] = _table(offset, into, len(pieces.first))
                for template in templates:
                    yield template.piece_bytes * len(table), template.segment(table)


def _table(source: NDArray[np.int64] | int, target: NDArray[np.int64] | int, count: int) -> NDArray[np.int64]:
    """Offsets of pieces side by side; those of a single piece are plain numbers."""
    if count == 1:
        return np.array([(source, target)], dtype=np.int64)
    table = np.empty((count, 2), dtype=np.int64)
    table[:, 0] = source
    table[:, 1] = target
    return table


class _Side:
    """One side's tensor blocks, from the one that holds ``first_token``'s engine block on."""

    def __init__(self, group: Group, ids: NDArray[np.int64], first_token: int) -> None:
        self.slots = group.tensor_slots
        self.first_entry = first_token // group.block_size * group.ratio
        self.ids = ids
        if group.ratio > 1:
            self.ids = (ids[:, None] * group.ratio + np.arange(group.ratio, dtype=np.int64)).reshape(-1)

    def find(self, pieces: Pieces) -> tuple[NDArray[np.int64] | int, NDArray[np.int64] | int]:
        """Tensor block and slot of each piece's first position; of a single piece as plain numbers."""
        if len(pieces.first) == 1:
            entry, slot = divmod(int(pieces.first[0]), self.slots)
            return int(self.ids[entry - self.first_entry]), slot
        entries = pieces.first // self.slots
        return self.ids[entries - self.first_entry], pieces.first - entries * self.slots


def in_wire_order(segments: list[Segment]) -> tuple[Segment, ...]:
    """Larger elements go first: then each segment begins on the wire at a multiple of its own, and no leaf cuts one."""
    if any(segment.convert for segment in segments):
        segments.sort(key=_element_bytes, reverse=True)  # stable: else as they came
    return tuple(segments)


def _element_bytes(segment: Segment) -> int:
    return 0 if segment.convert is None else segment.convert.source.itemsize


def _check_lists(spec: CacheSpec, blocks: Blocks, side: str) -> None:
    if len(blocks) != len(spec.groups):
        raise LayoutError(
            f"{side} blocks: {len(blocks)} lists for {len(spec.groups)} groups of {spec.place}; pass one list a group"
        )


def _check_unique(ids: NDArray[np.int64], where: str) -> None:
    if len(ids) < 2:
        return
    ordered = np.sort(ids)
    repeats = ordered[1:] == ordered[:-1]
    if repeats.any():
        raise LayoutError(
            f"{where}: block {int(ordered[1:][repeats][0])} is listed twice; each block that is written holds one "
            "stretch of tokens"
        )
