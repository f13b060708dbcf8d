"""Whether a spec can be true: every bound, every reference, every byte inside its region.

A peer's spec is checked here once, in the handshake; everything behind (plans, transports) relies on it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from itertools import pairwise

from kvlink import limits
from kvlink.errors import LayoutError
from kvlink.layout.bounds import within
from kvlink.layout.extent import plane_axes, rows_meet
from kvlink.layout.geometry import CacheSpec, Group, Identity, Place, Plane
from kvlink.layout.kinds import check_kinds, check_rows, check_scales


def check_spec(spec: CacheSpec) -> None:
    """Check that a spec is possible in itself; says nothing about another side.

    Checked: bounds of `kvlink.limits`; ranks below sizes; names unique; heads and layers are global ids inside the
    model's counts; every layer of a group has the same kinds, each with all of its channels once; scales are possible;
    planes lie inside their regions for all blocks, slots, heads and channels; rows of a plane do not overlap, nor do
    planes that are neighbours in address order.

    Raises:
        LayoutError: with the dotted path of the field, its value, and how to mend it.
    """
    _check_identity(spec.identity)
    _check_place(spec.place)
    within("region_bytes", len(spec.region_bytes), 1, limits.MAX_REGIONS, "regions")
    for index, length in enumerate(spec.region_bytes):
        within(f"region_bytes[{index}]", length, 1, limits.MAX_OFFSET_BYTES)
    within("groups", len(spec.groups), 1, limits.MAX_GROUPS, "groups")
    names = [group.name for group in spec.groups]
    if len(set(names)) != len(names):
        raise LayoutError(f"groups repeat a name: {names}; groups of two sides are matched by name, so name each once")
    for group in spec.groups:
        _check_group(spec, group, f"groups.{group.name}")


def _check_identity(identity: Identity) -> None:
    within("identity.model", len(identity.model.encode()), 1, limits.MAX_NAME_BYTES, "bytes of text")
    within("identity.num_layers", identity.num_layers, 1, limits.MAX_LAYERS)
    within("identity.num_kv_heads", identity.num_kv_heads, 1, limits.MAX_HEADS)
    within("identity.head_dim", identity.head_dim, 1, limits.MAX_CHANNELS)
    rope = identity.rope
    if rope is None:
        return
    if not (math.isfinite(rope.theta) and rope.theta > 0):
        raise LayoutError(f"identity.rope.theta is {rope.theta}; state the model's positive base frequency")
    if not 0 <= rope.rotary_fraction <= 1:
        raise LayoutError(f"identity.rope.rotary_fraction is {rope.rotary_fraction}; it lies between 0 and 1")


def _check_place(place: Place) -> None:
    for name in ("engine", "incarnation"):
        within(f"place.{name}", len(getattr(place, name).encode()), 1, limits.MAX_NAME_BYTES, "bytes of text")
    within("place.tp_size", place.tp_size, 1, limits.MAX_WORLD_RANKS)
    within("place.pp_size", place.pp_size, 1, limits.MAX_WORLD_RANKS // place.tp_size)
    within("place.dcp_size", place.dcp_size, 1, limits.MAX_WORLD_RANKS)
    within("place.tp_rank", place.tp_rank, 0, place.tp_size - 1)
    within("place.pp_rank", place.pp_rank, 0, place.pp_size - 1)


def _check_group(spec: CacheSpec, group: Group, path: str) -> None:
    within(f"{path}.name", len(group.name.encode()), 1, limits.MAX_NAME_BYTES, "bytes of text")
    if group.num_heads is not None:
        within(f"{path}.num_heads", group.num_heads, 1, limits.MAX_HEADS)
    num_heads = group.num_heads or spec.identity.num_kv_heads
    within(f"{path}.heads", len(group.heads), 1, limits.MAX_HEADS, "heads")
    for index, head in enumerate(group.heads):
        within(f"{path}.heads[{index}]", head, 0, num_heads - 1)
    if len(set(group.heads)) != len(group.heads):
        raise LayoutError(f"{path}.heads repeats a head: {group.heads}; list each global head id once, in memory order")
    within(f"{path}.channels", group.channels, 1, limits.MAX_CHANNELS)
    within(f"{path}.block_size", group.block_size, 1, limits.MAX_BLOCK_SLOTS)
    within(f"{path}.num_blocks", group.num_blocks, 1, limits.MAX_OFFSET_BYTES)
    within(f"{path}.ratio", group.ratio, 1, group.block_size)
    if group.block_size % group.ratio:
        raise LayoutError(
            f"{path}.ratio is {group.ratio}, which does not divide the block_size of {group.block_size}; an engine's "
            "block is a whole number of tensor blocks"
        )
    if group.window is not None:
        within(f"{path}.window", group.window, 1, limits.MAX_TOKENS_PER_REQUEST)
    # A pipeline stage may hold no layer of a group; it keeps the group's place among the block lists all the same.
    fewest = 1 if spec.place.pp_size == 1 else 0
    within(f"{path}.planes", len(group.planes), fewest, limits.MAX_PLANES_PER_GROUP, "planes")
    check_rows(group, path)
    check_scales(group, path)
    for index, plane in enumerate(group.planes):
        _check_plane(spec, group, plane, f"{path}.planes[{index}]")
    check_kinds(group, path)
    _check_neighbours(group, path)


def _check_plane(spec: CacheSpec, group: Group, plane: Plane, path: str) -> None:
    within(f"{path}.layer", plane.layer, 0, spec.identity.num_layers - 1)
    within(f"{path}.region", plane.region, 0, len(spec.region_bytes) - 1)
    for name in ("offset_bytes", "block_stride", "slot_stride", "head_stride", "channel_stride"):
        within(f"{path}.{name}", getattr(plane, name), 0, limits.MAX_OFFSET_BYTES)
    kind_channels = group.row_of(plane.kind).channels
    within(f"{path}.first_channel", plane.first_channel, 0, kind_channels - 1)
    within(f"{path}.channels", plane.channels, 0, kind_channels - plane.first_channel)
    extent, axes = plane_axes(group, plane)
    # Innermost first: each stride must step over everything inside it, or two rows would share bytes.
    for count, stride, name in sorted(axes, key=lambda axis: axis[1]):
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


def _check_neighbours(group: Group, path: str) -> None:
    """Planes of equal strides that follow each other in a region must not share bytes (one pointer given twice, say).

    Only neighbours: that is linear, and finds a repeated pointer and a wrong K/V offset alike.
    """
    families: dict[tuple[int, ...], list[Plane]] = defaultdict(list)
    for plane in group.planes:
        spread = (plane.channel_stride, group.row_of_plane(plane).channels) if plane.channel_stride else ()
        families[plane.region, plane.block_stride, plane.slot_stride, plane.head_stride, *spread].append(plane)
    for family in families.values():
        family.sort(key=lambda plane: plane.offset_bytes)
        nested = sorted(plane_axes(group, family[0])[1], key=lambda axis: axis[1], reverse=True)
        axes = [(count, count, stride) for count, stride, _ in nested]
        for one, other in pairwise(family):
            lengths = plane_axes(group, one)[0], plane_axes(group, other)[0]
            if rows_meet(other.offset_bytes - one.offset_bytes, axes, *lengths):
                raise LayoutError(
                    f"{path}.planes: layer {one.layer} {one.kind} and layer {other.layer} {other.kind} share bytes of "
                    f"region {one.region} (offsets {one.offset_bytes} and {other.offset_bytes}); "
                    "layers that alias memory belong to different groups"
                )
