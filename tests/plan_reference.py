"""What a plan must mean, in plain loops: one row at a time, nothing folded, nothing shared with the planner."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class Row(NamedTuple):
    """One token's row of one head of one plane: what it is, and where it lies on both sides."""

    group: str
    layer: int
    kind: str
    head: int
    token: int
    source_region: int
    source_offset: int
    target_region: int
    target_offset: int
    nbytes: int

    @property
    def move(self):
        return self[5:]


def row_address(group, plane, head, token, blocks):
    block = blocks[token // group.block_size]
    return plane.region, (
        plane.offset_bytes
        + block * plane.block_stride
        + token % group.block_size * plane.slot_stride
        + group.heads.index(head) * plane.head_stride
    )


def reference_rows(source, target, leg_groups, source_blocks, target_blocks, first_token, tokens) -> Iterator[Row]:
    for share in leg_groups:
        for source_group, source_list in zip(source.groups, source_blocks, strict=True):
            for target_group, target_list in zip(target.groups, target_blocks, strict=True):
                if source_group.name == target_group.name == share.name:
                    yield from group_rows(
                        share, source_group, target_group, source_list, target_list, first_token, tokens
                    )


def group_rows(share, source_group, target_group, source_list, target_list, first_token, tokens) -> Iterator[Row]:
    for one in source_group.planes:
        for other in target_group.planes:
            if (one.layer, one.kind) != (other.layer, other.kind) or one.layer not in share.layers:
                continue
            for head in share.heads:
                for token in range(first_token, tokens):
                    source = row_address(source_group, one, head, token, source_list)
                    target = row_address(target_group, other, head, token, target_list)
                    what = share.name, one.layer, one.kind.value, head, token
                    yield Row(*what, *source, *target, source_group.row_bytes)


def walk(plan) -> Iterator[tuple[int, int, int, int, int]]:
    """(source region, source offset, target region, target offset, bytes) of each run, in wire order."""
    for segment in plan.segments:
        for source_region, source_base, target_region, target_base in segment.bases.tolist():
            for source_piece, target_piece in segment.pieces.tolist():
                for source_step, target_step in nest_offsets(segment.nest):
                    yield (
                        source_region,
                        source_base + source_piece + source_step,
                        target_region,
                        target_base + target_piece + target_step,
                        segment.run_bytes,
                    )


def nest_offsets(nest) -> Iterator[tuple[int, int]]:
    if not nest:
        yield 0, 0
        return
    (count, source_stride, target_stride), *inner = nest
    for index in range(count):
        for source_step, target_step in nest_offsets(inner):
            yield index * source_stride + source_step, index * target_stride + target_step


def runs_inside_blocks(plan) -> int:
    """Runs left when those that follow each other inside one (base, piece) and touch on both sides are one."""
    runs = 0
    for segment in plan.segments:
        end = None
        inside = 0
        for source_step, target_step in nest_offsets(segment.nest):
            inside += (source_step, target_step) != end
            end = source_step + segment.run_bytes, target_step + segment.run_bytes
        runs += len(segment.bases) * len(segment.pieces) * inside
    return runs


def walk_rows(plan, row_bytes) -> Iterator[tuple[int, int, int, int, int]]:
    """The walk, each run cut into rows."""
    for source_region, source_offset, target_region, target_offset, nbytes in walk(plan):
        assert nbytes % row_bytes == 0
        for at in range(0, nbytes, row_bytes):
            yield source_region, source_offset + at, target_region, target_offset + at, row_bytes


def maximal_runs(rows, source_block, target_block) -> int:
    """How many runs are left when rows of one (source block, target block) pair that touch on both sides are merged."""
    by_blocks = {}
    for row in rows:
        pair = row.group, row.token // source_block, row.token // target_block
        by_blocks.setdefault(pair, []).append(row.move)
    runs = 0
    for moves in by_blocks.values():
        ends = set()
        for source_region, source_offset, target_region, target_offset, nbytes in moves:
            ends.add((source_region, source_offset + nbytes, target_region, target_offset + nbytes))
        runs += sum(move[:4] not in ends for move in moves)
    return runs
