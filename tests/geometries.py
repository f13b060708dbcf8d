"""Small engines to test geometry with: every rank's spec, in a standard layout."""

from __future__ import annotations

import random

from kvlink.layout import (
    DType,
    Identity,
    Place,
    Rope,
    heads_of_rank,
    layers_of_stage,
    standard_spec,
)


def identity_of(num_layers=2, num_kv_heads=4, head_dim=2, **stated):
    return Identity(
        model="tiny", num_layers=num_layers, num_kv_heads=num_kv_heads, head_dim=head_dim, **stated
    )  # fmt: skip


def rank_spec(
    layout="nhd", *, identity=None, tp=(0, 1), pp=(0, 1), block_size=4, num_blocks=16, dtype=DType.BFLOAT16, engine="p",
    heads=None, layers=None,
):  # fmt: skip
    identity = identity or identity_of(rope=Rope(theta=10000.0))
    return standard_spec(
        layout,
        identity=identity,
        place=Place(engine=engine, incarnation="1", tp_rank=tp[0], tp_size=tp[1], pp_rank=pp[0], pp_size=pp[1]),
        layers=layers_of_stage(identity.num_layers, pp[1], pp[0]) if layers is None else layers,
        heads=heads_of_rank(identity.num_kv_heads, tp[1], tp[0]) if heads is None else heads,
        block_size=block_size,
        num_blocks=num_blocks,
        dtype=dtype,
    )


def engine_specs(layout, *, identity, tp, pp=1, block_size=4, num_blocks=16, engine="p"):
    return [
        rank_spec(
            layout, identity=identity, tp=(tp_rank, tp), pp=(pp_rank, pp), block_size=block_size,
            num_blocks=num_blocks, engine=engine,
        )
        for pp_rank in range(pp)
        for tp_rank in range(tp)
    ]  # fmt: skip


def scattered(spec, tokens, seed):
    """A block list of the first group: distinct blocks in random order, enough for ``tokens``."""
    group = spec.groups[0]
    return random.Random(seed).sample(range(group.num_blocks), -(-tokens // group.block_size))
