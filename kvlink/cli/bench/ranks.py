"""The specs and legs of a bench, computed alike wherever they are needed: a case says all there is to know."""

from __future__ import annotations

from collections.abc import Iterator

from kvlink.cli.bench.case import Case, SideName
from kvlink.layout import CacheSpec, Identity, Place, heads_of_rank, layers_of_stage, share_of, standard_spec
from kvlink.plan import CopyPlan, Leg, assign_legs, plan_leg


def side_specs(case: Case, name: SideName, num_blocks: int, incarnation: str) -> list[CacheSpec]:
    """One spec a rank of a side, pipeline stage by pipeline stage: the side's rank order."""
    side, geometry = case.side(name), case.geometry
    identity = Identity(
        model=geometry.model, num_layers=geometry.layers, num_kv_heads=geometry.kv_heads, head_dim=geometry.head_dim
    )
    return [
        standard_spec(
            side.layout,
            identity=identity,
            place=Place(engine=name, incarnation=incarnation, pp_rank=pp, pp_size=side.pp, tp_rank=tp, tp_size=side.tp),
            layers=layers_of_stage(geometry.layers, side.pp, pp),
            heads=heads_of_rank(geometry.kv_heads, side.tp, tp),
            block_size=side.block_size,
            num_blocks=num_blocks,
            dtype=geometry.dtype,
        )
        for pp in range(side.pp)
        for tp in range(side.tp)
    ]


class Wiring:
    """Who reads whom between two sides, and what one request's copies look like."""

    def __init__(self, sources: list[CacheSpec], targets: list[CacheSpec]) -> None:
        self.sources = sources
        self.targets = targets
        self.legs: tuple[Leg, ...] = tuple(assign_legs(list(map(share_of, sources)), list(map(share_of, targets))))

    def plans(
        self, tokens: int, source_blocks: tuple[int, ...], target_blocks: tuple[int, ...]
    ) -> Iterator[tuple[Leg, CopyPlan]]:
        """The plan of every leg of a request."""
        for leg in self.legs:
            plan = plan_leg(
                self.sources[leg.source],
                self.targets[leg.target],
                leg.groups,
                source_blocks=(source_blocks,),
                target_blocks=(target_blocks,),
                tokens=tokens,
                first_token=0,
            )
            yield leg, plan


def count_runs(plan: CopyPlan) -> int:
    """Runs of a plan: maximal stretches contiguous on both sides, before neighbouring block ids merge any."""
    total = 0
    for segment in plan.segments:
        runs = len(segment.bases) * len(segment.pieces)
        for dim in segment.nest:
            runs *= dim.count
        total += runs
    return total
