"""The types: a cache is groups, a group is planes, a plane is strides.

A plane is one layer's K, V or latent storage as byte strides over (block, slot, head) above a contiguous row of
channels. Every order in use (NHD, HND, K and V fused or apart, block-major across layers) is then only a choice of
strides.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class DType(StrEnum):
    """Element type of a cache."""

    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"
    FLOAT8_E4M3 = "float8_e4m3"
    FLOAT8_E5M2 = "float8_e5m2"
    INT8 = "int8"

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _ITEMSIZE[self]


_ITEMSIZE = {
    DType.FLOAT16: 2,
    DType.BFLOAT16: 2,
    DType.FLOAT32: 4,
    DType.FLOAT8_E4M3: 1,
    DType.FLOAT8_E5M2: 1,
    DType.INT8: 1,
}


class PlaneKind(StrEnum):
    """What a plane holds of its layer."""

    K = "k"
    V = "v"
    LATENT = "latent"


class Rope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rotary embedding: it is baked into K, so it is identity."""

    theta: float
    scaling: str = "none"
    rotary_fraction: float = 1.0


class Identity(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which model's KV this is. ``None`` means explicitly not stated; fields both sides state must be equal."""

    model: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    attention: str = "gqa"
    weights_revision: str | None = None
    rope: Rope | None = None


class Place(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where a rank sits. All TP and PP ranks of one engine share one incarnation."""

    engine: str
    incarnation: str
    pp_rank: int = 0
    pp_size: int = 1
    tp_rank: int = 0
    tp_size: int = 1

    def __str__(self) -> str:
        return f"{self.engine}/{self.pp_rank}/{self.tp_rank}@{self.incarnation}"


class Plane(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One layer's K, V or latent. Strides and offsets are bytes; head i is the i-th of the group's ``heads``."""

    layer: int
    kind: PlaneKind
    region: int
    offset_bytes: int
    block_stride: int
    slot_stride: int
    head_stride: int


class Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Planes that share heads, block size, dtype and block table."""

    name: str
    heads: tuple[int, ...]
    channels: int
    dtype: DType
    block_size: int
    num_blocks: int
    planes: tuple[Plane, ...]

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's row of one head: ``channels * itemsize``."""
        return self.channels * self.dtype.itemsize


class CacheSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One rank's cache. ``region_bytes[i]`` is the length of region i; planes lie inside regions."""

    identity: Identity
    place: Place
    groups: tuple[Group, ...]
    region_bytes: tuple[int, ...]


class GroupShare(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Layers and heads (global ids) of one group: what a rank holds, or what a leg moves."""

    name: str
    layers: tuple[int, ...]
    heads: tuple[int, ...]


class RankShare(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one rank holds, without geometry: enough to assign legs."""

    pp_rank: int
    tp_rank: int
    groups: tuple[GroupShare, ...]
