"""The specs and legs of a bench, computed alike wherever they are needed: a case says all there is to know."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from kvlink import limits
from kvlink.cli.bench.case import Case, SideName
from kvlink.cli.bench.numbers import head_scale
from kvlink.errors import ConfigError, FrameError
from kvlink.layout import (
    CacheSpec,
    GroupShare,
    Identity,
    Place,
    RankShare,
    heads_of_rank,
    layers_of_stage,
    share_of,
    standard_spec,
)
from kvlink.plan import CopyPlan, Leg, assign_legs, plan_leg
from kvlink.wire import Address, Offer, Roster, RosterRank, Ticket

_GROUP: Final = "full"
"""Name of the specs' one group."""
_KEY_BYTES: Final = 64
"""What a bench's request keys stay below."""


def side_specs(case: Case, name: SideName, num_blocks: int, incarnation: str, engine: int = 0) -> list[CacheSpec]:
    """One spec a rank of an engine of a side, pipeline stage by pipeline stage: the side's rank order."""
    engine_name = f"{name}-{engine}" if engine else name
    side, geometry = case.side(name), case.geometry
    identity = _identity(case)
    return [
        standard_spec(
            side.layout,
            identity=identity,
            place=Place(
                engine=engine_name, incarnation=incarnation, pp_rank=pp, pp_size=side.pp, tp_rank=tp, tp_size=side.tp
            ),
            layers=layers_of_stage(geometry.layers, side.pp, pp),
            heads=heads_of_rank(geometry.kv_heads, side.tp, tp),
            block_size=side.block_size,
            num_blocks=num_blocks,
            dtype=case.dtype(name),
            group=_GROUP,
            scales=_scales(case, name, heads_of_rank(geometry.kv_heads, side.tp, tp)),
            kinds=geometry.kinds,
        )
        for pp in range(side.pp)
        for tp in range(side.tp)
    ]


def _scales(case: Case, name: SideName, heads: Sequence[int]) -> tuple[tuple[float, ...], ...] | None:
    """One a head where elements are converted to or from a quantised type, so that a mixed-up head shows."""
    dtype = case.dtype(name)
    if not case.converts or not dtype.quantised:
        return None
    return (tuple(head_scale(dtype, head) for head in heads),)


def check_claims(case: Case, num_blocks: int) -> None:
    """Refuse a case whose largest claim no peer would read, before anything is started.

    The claim is made as a worker would make it, with what takes most bytes where that is not known yet: addresses,
    and the highest of the ``num_blocks`` block ids of the claiming side's pool.

    Raises:
        ConfigError: it is larger than `limits.MAX_CLAIM_BYTES`; says which flags to change.
    """
    side: SideName = "source" if case.flow == "fetch" else "target"
    tokens = max(case.prompts)
    roster = _roster(case, side)
    key, secret = "k" * _KEY_BYTES, b"s" * limits.MIN_SECRET_BYTES
    blocks = tuple(range(num_blocks - case.side(side).blocks_for(tokens), num_blocks))
    claim: Offer | Ticket
    if case.flow == "fetch":
        claim = Offer(key=key, roster=roster, blocks=(blocks,), tokens=tokens)
    else:
        claim = Ticket(key=key, roster=roster, blocks=(), tokens=tokens)
    try:
        claim.sign(secret).to_bytes()
    except FrameError as error:
        blocks_too = "raise --source-block-size, lower --tokens or " if case.flow == "fetch" else ""
        msg = f"the {side}'s claim for {tokens} tokens is too large ({error}): {blocks_too}lower --{side}-tp"
        raise ConfigError(msg) from error


def _roster(case: Case, name: SideName) -> Roster:
    """A side's roster as its cards will make it, but for what only its processes know: the longest address instead.

    Made of shares alone: the specs of a thousand ranks with a thousand layers would take a while.
    """
    side, geometry = case.side(name), case.geometry
    address = str(Address(host="ffff:" * 7 + "ffff", port=65535))
    return Roster(
        engine=name,
        incarnation="i" * 16,
        identity=_identity(case),
        pp_size=side.pp,
        tp_size=side.tp,
        ranks=tuple(
            RosterRank(
                address,
                RankShare(
                    pp_rank=pp,
                    tp_rank=tp,
                    groups=(
                        GroupShare(
                            name=_GROUP,
                            layers=tuple(layers_of_stage(geometry.layers, side.pp, pp)),
                            heads=tuple(heads_of_rank(geometry.kv_heads, side.tp, tp)),
                        ),
                    ),
                ),
            )
            for pp in range(side.pp)
            for tp in range(side.tp)
        ),
    )


def _identity(case: Case) -> Identity:
    geometry = case.geometry
    return Identity(
        model=geometry.model,
        num_layers=geometry.layers,
        num_kv_heads=geometry.kv_heads,
        head_dim=geometry.head_dim,
        attention="mla" if geometry.latent else "gqa",
    )


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
