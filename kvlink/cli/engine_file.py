"""Engines in files: the specs of all ranks, written out or by the name of a standard layout."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from kvlink import limits
from kvlink.errors import ConfigError, LayoutError
from kvlink.layout import (
    CacheSpec,
    DType,
    Identity,
    Place,
    check_spec,
    heads_of_rank,
    layers_of_stage,
    standard_spec,
)
from kvlink.layout.bounds import within

Size = Annotated[int, msgspec.Meta(ge=1, le=limits.MAX_WORLD_RANKS)]


class Standard(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An engine whose ranks all have one of the standard layouts; heads and layers are cut as engines cut them."""

    identity: Identity
    layout: str
    dtype: DType
    block_size: int
    num_blocks: int
    tp: Size = 1
    pp: Size = 1
    scale: float | None = None


class EngineFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a file holds: exactly one of the two.

    ``ranks`` are `CacheSpec` objects as ``msgspec.json.encode(caches.spec)`` writes them, one of each rank.
    """

    standard: Standard | None = None
    ranks: Annotated[tuple[CacheSpec, ...], msgspec.Meta(max_length=limits.MAX_WORLD_RANKS)] = ()


def read_engine(path: Path) -> list[CacheSpec]:
    """The specs of all ranks in a file, in (pp, tp) order, each checked.

    Args:
        path: a JSON file of at most `limits.MAX_FRAME_BYTES`. A standard engine is called by its name.

    Raises:
        ConfigError: the file cannot be read, or is not such a file.
        LayoutError: a spec is impossible, or the ranks are not those of one engine.
    """
    try:
        with path.open("rb") as file:
            data = file.read(limits.MAX_FRAME_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    if len(data) > limits.MAX_FRAME_BYTES:
        raise ConfigError(f"{path} has more than {limits.MAX_FRAME_BYTES} bytes; an engine's specs take less")
    try:
        engine = msgspec.json.decode(data, type=EngineFile)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is no engine file: {error}") from error
    if (engine.standard is None) == (not engine.ranks):
        raise ConfigError(f"{path} must have either 'standard' or 'ranks'")
    specs = list(engine.ranks) if engine.standard is None else _standard_ranks(engine.standard, path.stem)
    for spec in specs:
        check_spec(spec)
    return _one_engine(specs, path)


def _standard_ranks(engine: Standard, name: str) -> list[CacheSpec]:
    identity = engine.identity
    # Before anything of that size is made.
    within("standard.identity.num_layers", identity.num_layers, 1, limits.MAX_LAYERS)
    within("standard.identity.num_kv_heads", identity.num_kv_heads, 1, limits.MAX_HEADS)
    within("standard: tp times pp", engine.tp * engine.pp, 1, limits.MAX_WORLD_RANKS)
    return [
        standard_spec(
            engine.layout,
            identity=identity,
            place=Place(engine=name, incarnation="1", pp_rank=pp, pp_size=engine.pp, tp_rank=tp, tp_size=engine.tp),
            layers=layers_of_stage(identity.num_layers, engine.pp, pp),
            heads=heads_of_rank(identity.num_kv_heads, engine.tp, tp),
            block_size=engine.block_size,
            num_blocks=engine.num_blocks,
            dtype=engine.dtype,
            scales=None if engine.scale is None else ((engine.scale,),),
        )
        for pp in range(engine.pp)
        for tp in range(engine.tp)
    ]


def _one_engine(specs: list[CacheSpec], path: Path) -> list[CacheSpec]:
    first = specs[0]
    specs.sort(key=lambda spec: (spec.place.pp_rank, spec.place.tp_rank))
    ranks = [(spec.place.pp_rank, spec.place.tp_rank) for spec in specs]
    expected = [(pp, tp) for pp in range(first.place.pp_size) for tp in range(first.place.tp_size)]
    if ranks != expected:
        raise LayoutError(f"{path} has ranks (pp, tp) {ranks[:8]}; give each of pp_size x tp_size once")
    for spec in specs:
        if spec.identity != first.identity or [g.name for g in spec.groups] != [g.name for g in first.groups]:
            raise LayoutError(f"{path}: {spec.place} has another identity or other groups than {first.place}")
    return specs
