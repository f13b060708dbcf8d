"""Whether a spec can be true: every bound, every reference, every byte inside its region.

A peer's spec is checked here once, in the handshake; everything behind (plans, transports) relies on it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from kvlink import limits
from kvlink.errors import LayoutError
from kvlink.layout.geometry import CacheSpec, Group, Identity, Place, Plane, PlaneKind

if TYPE_CHECKING:
    from numpy.typing import NDArray

_KINDS_OF_A_LAYER = (
    frozenset({PlaneKind.K, PlaneKind.V}),
    frozenset({PlaneKind.K}),
    frozenset({PlaneKind.V}),
    frozenset({PlaneKind.LATENT}),
)

Axis = tuple[int, int]
"""(count, stride in bytes)."""


def check_spec(spec: CacheSpec) -> None:
    """Check that a spec is possible in itself; says nothing about another side.

    Checked: bounds of `kvlink.limits`; ranks below sizes; names unique; heads and layers are global ids inside the
    identity's counts; every layer of a group has the same kinds, once; planes lie inside their regions for all blocks,
    slots, heads and channels; rows of a plane do not overlap, nor do planes that are neighbours in address order.

    Raises:
        LayoutError: with the dotted path of the field, its value, and how to mend it.
    """
    _check_identity(spec.identity)
    _check_place(spec.place)
    _within("region_bytes", len(spec.region_bytes), 1, limits.MAX_REGIONS, "regions")
    for index, length in enumerate(spec.region_bytes):
        _within(f"region_bytes[{index}]", length, 1, limits.MAX_OFFSET_BYTES)
    _within("groups", len(spec.groups), 1, limits.MAX_GROUPS, "groups")
    names = [group.name for group in spec.groups]
    if len(set(names)) != len(names):
        raise LayoutError(f"groups repeat a name: {names}; groups of two sides are matched by name, so name each once")
    for group in spec.groups:
        _check_group(spec, group, f"groups.{group.name}")


def touched_blocks(
    group: Group, blocks: Sequence[int] | NDArray[np.int64], first_token: int, tokens: int, where: str
) -> NDArray[np.int64]:
    """The block ids that hold token positions ``[first_token, tokens)``, checked against the group.

    Entries outside that range may be anything (a null block, say) and are not looked at.

    Args:
        group: whose blocks they are.
        blocks: entry i holds positions ``[i * block_size, (i + 1) * block_size)``.
        first_token: first position.
        tokens: one past the last position.
        where: what to call the list in an error, such as ``target blocks of groups.full``.

    Returns:
        int64, entries ``first_token // block_size`` to ``ceil(tokens / block_size)``; empty for an empty range.

    Raises:
        LayoutError: the list is too short or too long, or an id is no integer or not below ``num_blocks``.
    """
    needed = -(-tokens // group.block_size)
    if len(blocks) < needed:
        raise LayoutError(
            f"{where}: {len(blocks)} blocks of {group.block_size} slots hold fewer than {tokens} tokens; "
            f"pass at least {needed}"
        )
    _within(where, len(blocks), 0, limits.MAX_BLOCKS_PER_REQUEST, "blocks")
    start = first_token // group.block_size
    if first_token >= tokens:
        return np.empty(0, dtype=np.int64)
    ids = np.asarray(blocks[start:needed])
    if ids.dtype.kind not in "iu" or ids.ndim != 1:
        raise LayoutError(f"{where}: block ids must be integers below 2**63; got {ids.dtype} of shape {ids.shape}")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= group.num_blocks:
        bad = low if low < 0 else high
        entry = start + int(np.flatnonzero(ids == bad)[0])
        raise LayoutError(f"{where}[{entry}] is block {bad}; the cache has blocks 0 to {group.num_blocks - 1}")
    return ids.astype(np.int64)


def _check_identity(identity: Identity) -> None:
    _within("identity.model", len(identity.model.encode()), 1, limits.MAX_NAME_BYTES, "bytes of text")
    _within("identity.num_layers", identity.num_layers, 1, limits.MAX_LAYERS)
    _within("identity.num_kv_heads", identity.num_kv_heads, 1, limits.MAX_HEADS)
    _within("identity.head_dim", identity.head_dim, 1, limits.MAX_CHANNELS)
    rope = identity.rope
    if rope is None:
        return
    if not (math.isfinite(rope.theta) and rope.theta > 0):
        raise LayoutError(f"identity.rope.theta is {rope.theta}; state the model's positive base frequency")
    if not 0 <= rope.rotary_fraction <= 1:
        raise LayoutError(f"identity.rope.rotary_fraction is {rope.rotary_fraction}; it lies between 0 and 1")


def _check_place(place: Place) -> None:
    for name in ("engine", "incarnation"):
        _within(f"place.{name}", len(getattr(place, name).encode()), 1, limits.MAX_NAME_BYTES, "bytes of text")
    _within("place.tp_size", place.tp_size, 1, limits.MAX_WORLD_RANKS)
    _within("place.pp_size", place.pp_size, 1, limits.MAX_WORLD_RANKS // place.tp_size)
    _within("place.tp_rank", place.tp_rank, 0, place.tp_size - 1)
    _within("place.pp_rank", place.pp_rank, 0, place.pp_size - 1)


def _check_group(spec: CacheSpec, group: Group, path: str) -> None:
    _within(f"{path}.name", len(group.name.encode()), 1, limits.MAX_NAME_BYTES, "bytes of text")
    _within(f"{path}.heads", len(group.heads), 1, limits.MAX_HEADS, "heads")
    for index, head in enumerate(group.heads):
        _within(f"{path}.heads[{index}]", head, 0, spec.identity.num_kv_heads - 1)
    if len(set(group.heads)) != len(group.heads):
        raise LayoutError(f"{path}.heads repeats a head: {group.heads}; list each global head id once, in memory order")
    _within(f"{path}.channels", group.channels, 1, limits.MAX_CHANNELS)
    _within(f"{path}.block_size", group.block_size, 1, limits.MAX_BLOCK_SLOTS)
    _within(f"{path}.num_blocks", group.num_blocks, 1, limits.MAX_OFFSET_BYTES)
    _within(f"{path}.planes", len(group.planes), 1, limits.MAX_PLANES_PER_GROUP, "planes")
    for index, plane in enumerate(group.planes):
        _check_plane(spec, group, plane, f"{path}.planes[{index}]")
    _check_kinds(group, path)
    _check_neighbours(group, path)


def _check_kinds(group: Group, path: str) -> None:
    kinds: dict[int, list[PlaneKind]] = defaultdict(list)
    for plane in group.planes:
        kinds[plane.layer].append(plane.kind)
    first_layer, first = next(iter(kinds.items()))
    for layer, have in kinds.items():
        if len(set(have)) != len(have):
            raise LayoutError(f"{path}.planes states layer {layer} twice for a kind: {have}; one plane each")
        if set(have) != set(first):
            raise LayoutError(
                f"{path}.planes: layer {layer} has {sorted(have)}, layer {first_layer} has {sorted(first)}; "
                "layers of one group have the same kinds, put others into a group of their own"
            )
    if frozenset(first) not in _KINDS_OF_A_LAYER:
        raise LayoutError(f"{path}.planes: a layer has {sorted(first)}; it holds k and v, one of them, or a latent")


def _check_plane(spec: CacheSpec, group: Group, plane: Plane, path: str) -> None:
    _within(f"{path}.layer", plane.layer, 0, spec.identity.num_layers - 1)
    _within(f"{path}.region", plane.region, 0, len(spec.region_bytes) - 1)
    for name in ("offset_bytes", "block_stride", "slot_stride", "head_stride"):
        _within(f"{path}.{name}", getattr(plane, name), 0, limits.MAX_OFFSET_BYTES)
    extent = group.row_bytes
    # Innermost first: each stride must step over everything inside it, or two rows would share bytes.
    for count, stride, name in sorted(_named_axes(group, plane), key=lambda axis: axis[1]):
        if stride < extent:
            raise LayoutError(
                f"{path}.{name} is {stride} bytes, but what it steps over takes {extent}: rows would overlap; "
                "take strides in bytes, from the tensor"
            )
        extent += (count - 1) * stride
    end = plane.offset_bytes + extent
    if end > spec.region_bytes[plane.region]:
        raise LayoutError(
            f"{path} ends at byte {end} of region {plane.region}, which has {spec.region_bytes[plane.region]}; "
            "check num_blocks, the strides and the region's length"
        )


def _named_axes(group: Group, plane: Plane) -> list[tuple[int, int, str]]:
    """(count, stride, field) of the axes that are walked at all: the stride of a single step means nothing."""
    axes = (
        (group.num_blocks, plane.block_stride, "block_stride"),
        (group.block_size, plane.slot_stride, "slot_stride"),
        (len(group.heads), plane.head_stride, "head_stride"),
    )
    return [axis for axis in axes if axis[0] > 1]


def _check_neighbours(group: Group, path: str) -> None:
    """Planes of equal strides that follow each other in a region must not share bytes (one pointer given twice, say).

    Only neighbours: that is linear, and finds a repeated pointer and a wrong K/V offset alike.
    """
    families: dict[tuple[int, int, int, int], list[Plane]] = defaultdict(list)
    for plane in group.planes:
        families[plane.region, plane.block_stride, plane.slot_stride, plane.head_stride].append(plane)
    for family in families.values():
        family.sort(key=lambda plane: plane.offset_bytes)
        axes = sorted(
            ((count, stride) for count, stride, _ in _named_axes(group, family[0])),
            key=lambda axis: axis[1],
            reverse=True,
        )
        for one, other in pairwise(family):
            if _rows_meet(other.offset_bytes - one.offset_bytes, axes, group.row_bytes):
                raise LayoutError(
                    f"{path}.planes: layer {one.layer} {one.kind} and layer {other.layer} {other.kind} share bytes of "
                    f"region {one.region} (offsets {one.offset_bytes} and {other.offset_bytes}); "
                    "layers that alias memory belong to different groups"
                )


def _rows_meet(distance: int, axes: Sequence[Axis], row_bytes: int) -> bool:
    """Whether a plane and its copy ``distance`` bytes on share a byte. ``axes``: (count, stride), longest first."""
    if not axes:
        return abs(distance) < row_bytes
    (count, stride), inner = axes[0], axes[1:]
    # What lies inside one step is shorter than the step, so only the steps around the quotient can meet.
    steps = {max(-(count - 1), min(count - 1, distance // stride + extra)) for extra in (0, 1)}
    return any(_rows_meet(distance - step * stride, inner, row_bytes) for step in steps)


def _within(path: str, value: int, low: int, high: int, unit: str = "") -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        stated = f"{value!r} {unit}".rstrip()
        raise LayoutError(f"{path} is {stated}; it must be a whole number from {low} to {high}")
