"""The types: a cache is groups, a group is planes, a plane is strides.

A plane is one layer's K, V, latent or state storage as byte strides over (block, slot, head, channel). Every order in
use (NHD, HND, K and V fused or apart, block-major across layers, a latent in parts, recurrent state) is then only a
choice of strides.
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
    OPAQUE = "opaque"
    """Bytes that mean something to the engines only: moved, never converted."""

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _ITEMSIZE[self]

    @property
    def quantised(self) -> bool:
        """Whether an element means nothing without its scale."""
        return self in _QUANTISED


_ITEMSIZE = {
    DType.FLOAT16: 2,
    DType.BFLOAT16: 2,
    DType.FLOAT32: 4,
    DType.FLOAT8_E4M3: 1,
    DType.FLOAT8_E5M2: 1,
    DType.INT8: 1,
    DType.OPAQUE: 1,
}
_QUANTISED = frozenset({DType.FLOAT8_E4M3, DType.FLOAT8_E5M2, DType.INT8})


class PlaneKind(StrEnum):
    """What a plane holds of its layer. A ``..._SCALE`` plane holds the *inline* scales of another kind."""

    K = "k"
    V = "v"
    LATENT = "latent"
    ROPE = "rope"
    """MLA's rotary channels, where they are of another dtype than the latent's."""
    INDEX = "index"
    """Keys of a sparse-attention indexer."""
    CONV = "conv"
    SSM = "ssm"
    ROW = "row"
    """A request's row of an engine's own buffer."""
    K_SCALE = "k_scale"
    V_SCALE = "v_scale"
    LATENT_SCALE = "latent_scale"
    INDEX_SCALE = "index_scale"

    @property
    def scaled(self) -> PlaneKind | None:
        """The kind whose inline scales these are, or ``None`` if these are no scales."""
        name, _, suffix = self.value.rpartition("_")
        return PlaneKind(name) if suffix == "scale" and name else None


class IndexedBy(StrEnum):
    """What entry i of a group's block list is."""

    TOKEN = "token"  # noqa: S105 - a unit, no secret
    """Positions ``[i * block_size, (i + 1) * block_size)``."""
    ENTRY = "entry"
    """Just the i-th block of the request (a state, a row): moved whole, whatever the token range."""


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
    """Where a rank sits. All TP and PP ranks of one engine share one incarnation.

    ``dcp_size`` over 1 says that the engine shards tokens over ranks (decode context parallelism), which is refused.
    """

    engine: str
    incarnation: str
    pp_rank: int = 0
    pp_size: int = 1
    tp_rank: int = 0
    tp_size: int = 1
    dcp_size: int = 1

    def __str__(self) -> str:
        return f"{self.engine}/{self.pp_rank}/{self.tp_rank}@{self.incarnation}"


class Plane(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One layer's storage of one kind. Strides and offsets are bytes; head i is the i-th of the group's ``heads``.

    ``channels`` elements from channel ``first_channel`` on, ``channel_stride`` apart. The planes of one layer and kind
    tile the kind's channels: a latent of 512 + 64 may be one plane on one side and two on the other.

    Attributes:
        block_stride: between *tensor* blocks, see `Group.ratio`.
        channel_stride: 0 for contiguous channels.
        channels: 0 for all from ``first_channel`` on.
    """

    layer: int
    kind: PlaneKind
    region: int
    offset_bytes: int
    block_stride: int
    slot_stride: int
    head_stride: int
    channel_stride: int = 0
    first_channel: int = 0
    channels: int = 0


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One kind's row of one token (or slot) and head: so many elements of a type."""

    kind: PlaneKind
    channels: int
    dtype: DType

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return self.channels * self.dtype.itemsize


class Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Planes that share heads, block size and block table.

    Attributes:
        name: groups of two sides are matched by it.
        heads: global ids, in memory order.
        channels: of a row, except for the kinds in ``rows``.
        dtype: of a row, except for the kinds in ``rows``.
        block_size: slots in one of the engine's blocks: what a block list counts in.
        num_blocks: the engine's blocks.
        planes: one or more for each layer and kind; none on a pipeline stage that holds no layer of the group.
        indexed_by: what an entry of a block list is.
        ratio: tensor blocks in one of the engine's blocks: block b is tensor blocks ``[b * ratio, (b + 1) * ratio)``,
            each of ``block_size // ratio`` slots.
        num_heads: heads of the whole model in this group, where it is not the identity's ``num_kv_heads``.
        window: sliding-window attention: tokens that a token looks back on, itself included.
        rows: kinds whose rows are not ``channels`` of ``dtype`` (rotary part, indexer, inline scales).
        scales: what a stored quantised element is multiplied by to be a value: one row for all planes, or a row each;
            a row has one scale for all heads, or one a head. Empty: not stated. Kinds that are not quantised, and
            those with inline scales, have none.
    """

    name: str
    heads: tuple[int, ...]
    channels: int
    dtype: DType
    block_size: int
    num_blocks: int
    planes: tuple[Plane, ...]
    indexed_by: IndexedBy = IndexedBy.TOKEN
    ratio: int = 1
    num_heads: int | None = None
    window: int | None = None
    rows: tuple[Row, ...] = ()
    scales: tuple[tuple[float, ...], ...] = ()

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's row of one head, of the kinds that are not in ``rows``."""
        return self.channels * self.dtype.itemsize

    @property
    def tensor_slots(self) -> int:
        """Slots in a tensor block."""
        return self.block_size // self.ratio

    @property
    def tensor_blocks(self) -> int:
        """Tensor blocks of the cache."""
        return self.num_blocks * self.ratio

    def row_of(self, kind: PlaneKind) -> Row:
        """The row of a kind, all of its channels."""
        for row in self.rows:
            if row.kind is kind:
                return row
        return Row(kind, self.channels, self.dtype)

    def row_of_plane(self, plane: Plane) -> Row:
        """The part of a row that lies in one plane."""
        row = self.row_of(plane.kind)
        return Row(plane.kind, plane.channels or row.channels - plane.first_channel, row.dtype)


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
