"""The common orders, by name, for benches, tests and whoever allocates a cache through KVLink.

======== ==================================================== =================== ================================
name     one layer's bytes, outermost first                   regions             seen in
======== ==================================================== =================== ================================
nhd      ``[kv, block, slot, head, channel]``                 one a layer         vLLM with FlashAttention
hnd      ``[block, kv, head, slot, channel]``                 one a layer         vLLM with FlashInfer (HND)
fused    ``[block, head, slot, 2 * channel]``, K then V       one a layer         vLLM on CPU
apart    ``[block, slot, head, channel]``, K and V each       two a layer         SGLang
blockmajor ``[block, layer, kv, slot, head, channel]``        one a rank          cross-layer allocators
======== ==================================================== =================== ================================

Real caches are described by their true strides (`kvlink.memory.Caches.from_tensors`), never by such a name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kvlink.errors import LayoutError
from kvlink.layout.check import check_spec
from kvlink.layout.geometry import CacheSpec, DType, Group, Identity, Place, Plane, PlaneKind


@dataclass(frozen=True, slots=True)
class _Shape:
    """Counts of one rank's cache; ``row`` is bytes."""

    layers: Sequence[int]
    blocks: int
    slots: int
    heads: int
    row: int
    kinds: tuple[PlaneKind, ...]

    @property
    def block_bytes(self) -> int:
        """One layer's K (or V) of one block."""
        return self.slots * self.heads * self.row

    @property
    def plane_bytes(self) -> int:
        """One layer's K (or V) of all blocks."""
        return self.blocks * self.block_bytes


_Built = tuple[list[Plane], list[int]]
"""Planes and region lengths."""


def _nhd(shape: _Shape) -> _Built:
    planes = [
        Plane(
            layer=layer, kind=kind, region=region, offset_bytes=which * shape.plane_bytes,
            block_stride=shape.block_bytes, slot_stride=shape.heads * shape.row, head_stride=shape.row,
        )
        for region, layer in enumerate(shape.layers)
        for which, kind in enumerate(shape.kinds)
    ]  # fmt: skip
    return planes, [len(shape.kinds) * shape.plane_bytes] * len(shape.layers)


def _hnd(shape: _Shape) -> _Built:
    planes = [
        Plane(
            layer=layer, kind=kind, region=region, offset_bytes=which * shape.block_bytes,
            block_stride=len(shape.kinds) * shape.block_bytes, slot_stride=shape.row,
            head_stride=shape.slots * shape.row,
        )
        for region, layer in enumerate(shape.layers)
        for which, kind in enumerate(shape.kinds)
    ]  # fmt: skip
    return planes, [len(shape.kinds) * shape.plane_bytes] * len(shape.layers)


def _fused(shape: _Shape) -> _Built:
    planes = [
        Plane(
            layer=layer, kind=kind, region=region, offset_bytes=which * shape.row,
            block_stride=len(shape.kinds) * shape.block_bytes, slot_stride=len(shape.kinds) * shape.row,
            head_stride=len(shape.kinds) * shape.slots * shape.row,
        )
        for region, layer in enumerate(shape.layers)
        for which, kind in enumerate(shape.kinds)
    ]  # fmt: skip
    return planes, [len(shape.kinds) * shape.plane_bytes] * len(shape.layers)


def _apart(shape: _Shape) -> _Built:
    planes = [
        Plane(
            layer=layer, kind=kind, region=which * len(shape.layers) + index, offset_bytes=0,
            block_stride=shape.block_bytes, slot_stride=shape.heads * shape.row, head_stride=shape.row,
        )
        for which, kind in enumerate(shape.kinds)
        for index, layer in enumerate(shape.layers)
    ]  # fmt: skip
    return planes, [shape.plane_bytes] * (len(shape.kinds) * len(shape.layers))


def _blockmajor(shape: _Shape) -> _Built:
    planes = [
        Plane(
            layer=layer, kind=kind, region=0, offset_bytes=(len(shape.kinds) * index + which) * shape.block_bytes,
            block_stride=len(shape.kinds) * len(shape.layers) * shape.block_bytes, slot_stride=shape.heads * shape.row,
            head_stride=shape.row,
        )
        for index, layer in enumerate(shape.layers)
        for which, kind in enumerate(shape.kinds)
    ]  # fmt: skip
    return planes, [len(shape.kinds) * len(shape.layers) * shape.plane_bytes]


_BUILDERS: Final[dict[str, Callable[[_Shape], _Built]]] = {
    "nhd": _nhd,
    "hnd": _hnd,
    "fused": _fused,
    "apart": _apart,
    "blockmajor": _blockmajor,
}

STANDARD_LAYOUTS: Final = tuple(_BUILDERS)
"""The names `standard_spec` knows."""


def standard_spec(  # noqa: PLR0913 - a cache has this many independent sizes, all keyword-only
    layout: str,
    *,
    identity: Identity,
    place: Place,
    layers: Sequence[int],
    heads: Sequence[int],
    block_size: int,
    num_blocks: int,
    dtype: DType,
    group: str = "full",
    scales: tuple[tuple[float, ...], ...] | None = None,
    kinds: tuple[PlaneKind, ...] = (PlaneKind.K, PlaneKind.V),
) -> CacheSpec:
    """A rank's cache in one of the common orders: one full-attention group, ``identity.head_dim`` channels.

    Args:
        layout: one of `STANDARD_LAYOUTS`; see the module for what each means.
        identity: the model.
        place: the rank.
        layers: global layer ids this rank holds (`layers_of_stage`).
        heads: global head ids this rank holds (`heads_of_rank`), in memory order.
        block_size: slots in a block.
        num_blocks: blocks in the cache.
        dtype: element type.
        group: the group's name.
        kinds: what a layer stores, one row of ``head_dim`` each; ``(PlaneKind.LATENT,)`` for MLA.
        scales: as in `Group`; by default a quantised dtype is stated to have a scale of 1.

    Raises:
        LayoutError: the layout is unknown, or the sizes make no valid spec.
    """
    build = _BUILDERS.get(layout)
    if build is None:
        raise LayoutError(f"layout is {layout!r}; the standard ones are {', '.join(STANDARD_LAYOUTS)}")
    if scales is None:
        scales = ((1.0,),) if dtype.quantised else ()
    row = identity.head_dim * dtype.itemsize
    shape = _Shape(layers=layers, blocks=num_blocks, slots=block_size, heads=len(heads), row=row, kinds=kinds)
    planes, region_bytes = build(shape)
    spec = CacheSpec(
        identity=identity,
        place=place,
        groups=(
            Group(
                name=group,
                heads=tuple(heads),
                channels=identity.head_dim,
                dtype=dtype,
                block_size=block_size,
                num_blocks=num_blocks,
                planes=tuple(planes),
                scales=scales,
            ),
        ),
        region_bytes=tuple(region_bytes),
    )
    check_spec(spec)
    return spec
