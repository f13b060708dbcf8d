"""Caches drawn from a seed, and what the CPU makes of them: the oracle that a GPU's bytes are compared with."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from kvlink.layout import STANDARD_LAYOUTS, CacheSpec, DType, Identity, Place, share_of, standard_spec
from kvlink.plan import CopyPlan, assign_legs, plan_leg

HEAD_DIMS = (1, 2, 3, 8, 16, 64, 96)
BLOCK_SIZES = (1, 5, 16, 32, 48)
TYPES = (DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32, DType.FLOAT8_E4M3, DType.FLOAT8_E5M2, DType.INT8)


@dataclass(frozen=True)
class Case:
    """One conversion: its plan, and both sides' specs."""

    seed: int
    source: CacheSpec
    target: CacheSpec
    plan: CopyPlan

    def pool(self, spec: CacheSpec) -> list[np.ndarray]:
        """Random bytes for a side's regions."""
        rng = np.random.default_rng((self.seed, spec is self.target))
        return [rng.integers(0, 256, length, np.uint8) for length in spec.region_bytes]


def draw(seed: int) -> Case:
    """Two layouts, block sizes and element types, some heads and tokens."""
    dice = random.Random(seed)
    identity = Identity(model="check", num_layers=dice.choice((1, 3)), num_kv_heads=dice.choice((1, 2, 4, 6)),
                        head_dim=dice.choice(HEAD_DIMS))  # fmt: skip
    same = dice.random() < 0.5
    first = dice.choice(TYPES)
    dtypes = first, first if same else dice.choice(TYPES)
    tokens = dice.randint(1, 150)
    sides = []
    for engine, dtype in zip("pd", dtypes, strict=True):
        block_size = dice.choice(BLOCK_SIZES)
        scales = ()
        if dtype.quantised:  # the same on both sides where the type is
            rows = np.random.default_rng(seed).uniform(0.1, 8, (identity.num_layers * 2, identity.num_kv_heads))
            scales = tuple(map(tuple, rows.astype(np.float32).tolist()))
        sides.append(
            standard_spec(
                dice.choice(STANDARD_LAYOUTS), identity=identity, place=Place(engine=engine, incarnation="1"),
                layers=range(identity.num_layers), heads=range(identity.num_kv_heads), block_size=block_size,
                num_blocks=-(-tokens // block_size) + dice.randint(0, 4), dtype=dtype, scales=scales,
            )
        )  # fmt: skip
    return Case(seed, *sides, plan_of(*sides, tokens, dice))


def plan_of(source: CacheSpec, target: CacheSpec, tokens: int, dice: random.Random) -> CopyPlan:
    """A plan between scattered blocks."""
    (leg,) = assign_legs([share_of(source)], [share_of(target)])
    blocks = [
        [dice.sample(range(group.num_blocks), -(-tokens // group.block_size)) for group in spec.groups]
        for spec in (source, target)
    ]
    return plan_leg(
        source, target, leg.groups, source_blocks=blocks[0], target_blocks=blocks[1], first_token=0, tokens=tokens
    )
