"""The plan of one increment of a leg: what a frontier has let loose since the last one, as one `CopyPlan`.

Both sides make it from the same two frontiers, so it has one wire order, as a whole leg has: the rectangles of
`Frontier.beyond`, each as `LegPlanner` plans its layers and positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from kvlink import limits
from kvlink.layout import NOTHING, CacheSpec, Frontier, GroupShare, IndexedBy, end_layer_of
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

    Attributes:
        end_layer: one past the source rank's last layer.
        moves_states: it has groups that are not indexed by tokens.
    """

    def __init__(self, source: CacheSpec, target: CacheSpec, leg_groups: Sequence[GroupShare]) -> None:
        self._source, self._target = source, target
        by_name = {group.name: group.indexed_by for group in source.groups}
        self._by_token = tuple(share for share in leg_groups if by_name.get(share.name) is not IndexedBy.ENTRY)
        self._by_entry = tuple(share for share in leg_groups if by_name.get(share.name) is IndexedBy.ENTRY)
        self._planners: dict[tuple[GroupShare, ...], LegPlanner] = {}
        self.end_layer = end_layer_of(source)
        self.moves_states = bool(self._by_entry)

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


class Increments:
    """The plans of one stream's increments, one after the other, each from where the last one ended.

    What comes next can mostly be foreseen: an engine goes through its layers in even steps. So it is planned while the
    engine computes it, and costs no time once it is ready.

    Args:
        planner: of its leg.
        source_blocks: as for `IncrementPlanner.plan`; whoever has the stream appends to these lists.
        target_blocks: likewise; ``None`` for the source's own side.
        starts: likewise.
        max_tokens: likewise.

    Attributes:
        frontier: what the increments so far have moved.
    """

    def __init__(
        self,
        planner: IncrementPlanner,
        source_blocks: Sequence[list[int]],
        target_blocks: Blocks | None,
        *,
        starts: Sequence[int],
        max_tokens: int,
    ) -> None:
        self.frontier = NOTHING
        self._planner = planner
        self._blocks = source_blocks, target_blocks
        self._starts, self._max_tokens = starts, max_tokens
        self._before = NOTHING
        self._foreseen: tuple[tuple[object, ...], CopyPlan] | None = None

    def plan(self, after: Frontier, *, sealed: bool) -> CopyPlan:
        """The next increment: what ``after`` adds; raises as `IncrementPlanner.plan` does, and then nothing changed."""
        foreseen = self._foreseen
        if foreseen is not None and foreseen[0] == self._case(after, sealed=sealed):
            plan = foreseen[1]
        else:
            plan = self._plan(after, sealed=sealed)
        self._before, self.frontier, self._foreseen = self.frontier, after, None
        return plan

    def look_ahead(self) -> tuple[Frontier, CopyPlan] | None:
        """Plan the likely next increment while there is nothing else to do.

        Returns:
            What it would come to, and its plan; ``None`` if none is likely.

        Raises:
            LayoutError: as `IncrementPlanner.plan`, if it came to that.
        """
        after = self.frontier.foresee(self._before, self._planner.end_layer)
        if after is None:
            return None
        plan = self._plan(after, sealed=False)
        self._foreseen = self._case(after, sealed=False), plan
        return after, plan

    def _plan(self, after: Frontier, *, sealed: bool) -> CopyPlan:
        return self._planner.plan(
            *self._blocks,
            self.frontier,
            after,
            starts=self._starts,
            max_tokens=self._max_tokens,
            sealed=sealed,
        )

    def _case(self, after: Frontier, *, sealed: bool) -> tuple[object, ...]:
        """All that the next plan depends on and that may yet turn out otherwise; token groups' blocks only come on."""
        if not self._planner.moves_states:
            return (after,)
        layers = _layers_with_states(after, self._max_tokens, sealed=sealed)
        return after, layers, *map(len, self._blocks[0])


def _layers_with_states(frontier: Frontier, max_tokens: int, *, sealed: bool) -> int:
    """One past the last layer whose states are those of the request's last position."""
    if sealed or frontier.tokens == max_tokens:
        return limits.MAX_LAYERS
    return frontier.layers if frontier.next_tokens == max_tokens else 0
