"""The plan of one increment of a leg: what a frontier has let loose since the last one, as one `CopyPlan`.

Both sides make it from the same two frontiers, so it has one wire order, as a whole leg has: the rectangles of
`Frontier.beyond`, each as `LegPlanner` plans its layers and positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from kvlink import limits
from kvlink.layout import CacheSpec, Frontier, GroupShare, IndexedBy
from kvlink.plan.copyplan import CopyPlan, Segment
from kvlink.plan.planner import LegPlanner, in_wire_order

if TYPE_CHECKING:
    from kvlink.plan.planner import Blocks

_MAX_PLANNERS: Final = 512
"""Stretches of layers that are remembered: each layer by itself, all of them, and what lay between two frontiers."""


class IncrementPlanner:
    """Plans the increments of one leg. Immutable but for what it remembers; for one thread at a time.

    Args:
        source: the source rank's spec, having passed `kvlink.layout.check_spec`.
        target: the target rank's spec, likewise.
        leg_groups: layers and heads of the whole leg.
    """

    def __init__(self, source: CacheSpec, target: CacheSpec, leg_groups: Sequence[GroupShare]) -> None:
        self._source, self._target = source, target
        by_name = {group.name: group.indexed_by for group in source.groups}
        self._by_token = tuple(share for share in leg_groups if by_name.get(share.name) is not IndexedBy.ENTRY)
        self._by_entry = tuple(share for share in leg_groups if by_name.get(share.name) is IndexedBy.ENTRY)
        self._planners: dict[tuple[GroupShare, ...], LegPlanner] = {}

    def plan(  # noqa: PLR0913 - two frontiers, two sides' blocks, and what ends them
        self,
        source_blocks: Blocks,
        target_blocks: Blocks | None,
        before: Frontier,
        after: Frontier,
        *,
        starts: Sequence[int],
        max_tokens: int,
        sealed: bool,
    ) -> CopyPlan:
        """Plan what ``after`` adds to ``before``.

        Groups that are not indexed by tokens (states, an engine's own rows) hold the last position's: a layer of
        theirs moves once it holds ``max_tokens`` positions, or with the seal.

        Args:
            source_blocks: as `LegPlanner.plan` takes them; lists must hold the positions of ``after``, no more.
            target_blocks: likewise; ``None`` for the source's own side of the plan.
            before: what earlier increments have moved.
            after: what is ready; it covers ``before``.
            starts: first position to move, for each of the source's groups.
            max_tokens: the most positions that the request can come to have.
            sealed: no more will become ready.

        Raises:
            MismatchError, UnsupportedError: as `LegPlanner`.
            LayoutError: as `LegPlanner.plan`.
        """
        segments: list[Segment] = []
        total = 0
        for first_layer, end_layer, first_token, tokens in after.beyond(before):
            firsts = [min(max(start, first_token), tokens) for start in starts]
            found = self._stretch(self._by_token, first_layer, end_layer, source_blocks, target_blocks, firsts, tokens)
            segments += found.segments
            total += found.total_bytes
        first_layer = _layers_with_states(before, max_tokens, sealed=False)
        end_layer = _layers_with_states(after, max_tokens, sealed=sealed)
        if first_layer < end_layer and self._by_entry:
            none = [0] * len(starts)
            found = self._stretch(self._by_entry, first_layer, end_layer, source_blocks, target_blocks, none, 0)
            segments += found.segments
            total += found.total_bytes
        return CopyPlan(in_wire_order(segments), total)

    def _stretch(  # noqa: PLR0913, PLR0917 - a rectangle of two sides
        self,
        shares: tuple[GroupShare, ...],
        first_layer: int,
        end_layer: int,
        source_blocks: Blocks,
        target_blocks: Blocks | None,
        firsts: list[int],
        tokens: int,
    ) -> CopyPlan:
        within = (
            replace(share, layers=tuple(layer for layer in share.layers if first_layer <= layer < end_layer))
            for share in shares
        )
        leg = tuple(share for share in within if share.layers)
        planner = self._planners.get(leg)
        if planner is None:
            if len(self._planners) >= _MAX_PLANNERS:
                self._planners.clear()
            planner = self._planners[leg] = LegPlanner(self._source, self._target, leg)
        return planner.plan(source_blocks, target_blocks, first_token=firsts, tokens=tokens)


def _layers_with_states(frontier: Frontier, max_tokens: int, *, sealed: bool) -> int:
    """One past the last layer whose states are those of the request's last position."""
    if sealed or frontier.tokens == max_tokens:
        return limits.MAX_LAYERS
    return frontier.layers if frontier.next_tokens == max_tokens else 0
