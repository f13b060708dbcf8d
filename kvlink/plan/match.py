"""What two sides must agree on before a group can move, and what of each kind is copied, converted or refused.

Refused by name is whatever would lose meaning silently: a quantised kind whose scales are not stated, inline scales on
one side only, bytes that only the engines understand, tokens sharded over ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvlink.errors import MismatchError, UnsupportedError
from kvlink.layout import CacheSpec, DType, Group, GroupShare, IndexedBy, PlaneKind


@dataclass(frozen=True, slots=True)
class GroupPair:
    """One group on both sides, and what of it moves."""

    source_spec: CacheSpec
    source: Group
    target_spec: CacheSpec
    target: Group
    share: GroupShare

    @property
    def path(self) -> str:
        """The group as errors name it."""
        return f"groups.{self.share.name}"

    @property
    def places(self) -> tuple[str, str]:
        """Source rank and target rank, as text."""
        return str(self.source_spec.place), str(self.target_spec.place)

    def differs(self, field: str, source: object, target: object) -> MismatchError:
        """The error for a field that both state differently."""
        source_place, target_place = self.places
        return MismatchError(f"{self.path}.{field}", source, target, source=source_place, target=target_place)


def find_group(spec: CacheSpec, name: str, side: str) -> int:
    """Index of a group by its name.

    Raises:
        UnsupportedError: the side has no such group.
    """
    names = [group.name for group in spec.groups]
    if name not in names:
        raise UnsupportedError(f"group {name!r} of the leg is not on the {side}: {spec.place} has {names}")
    return names.index(name)


def kinds_of(group: Group) -> tuple[PlaneKind, ...]:
    """The kinds of a group's layers, in the order of `PlaneKind`."""
    present = {plane.kind for plane in group.planes}
    return tuple(kind for kind in PlaneKind if kind in present)


def has_inline_scales(group: Group, kind: PlaneKind) -> bool:
    """Whether a plane of the group holds the scales of ``kind``."""
    return any(plane.kind.scaled is kind for plane in group.planes)


def check_agreement(pair: GroupPair) -> None:
    """Refuse a pair that does not mean the same, or whose bytes cannot be made to.

    Raises:
        MismatchError: names the field, both values and both peers.
        UnsupportedError: names the field and why it cannot be converted.
    """
    _check_sharding(pair)
    for field, one, other in _stated(pair):
        if one != other:
            raise pair.differs(field, one, other)
    for kind in kinds_of(pair.source):
        _check_kind(pair, kind)
    _check_share(pair)


def _check_sharding(pair: GroupPair) -> None:
    for side, spec in (("source", pair.source_spec), ("target", pair.target_spec)):
        if spec.place.dcp_size > 1:
            raise UnsupportedError(
                f"place.dcp_size is {spec.place.dcp_size} at {spec.place} ({side}): decode context parallelism shards "
                "tokens over ranks, and KVLink plans whole token ranges; serve with a DCP size of 1"
            )


def _stated(pair: GroupPair) -> list[tuple[str, object, object]]:
    """(field, source's value, target's value) of all that must be equal, in order."""
    source, target = pair.source, pair.target
    kinds = kinds_of(source), kinds_of(target)
    fields: list[tuple[str, object, object]] = [
        ("indexed_by", source.indexed_by.value, target.indexed_by.value),
        ("planes.kind", "+".join(kinds[0]), "+".join(kinds[1])),
        (
            "num_heads",
            source.num_heads or pair.source_spec.identity.num_kv_heads,
            target.num_heads or pair.target_spec.identity.num_kv_heads,
        ),
    ]
    if source.window is not None and target.window is not None:
        fields.append(("window", source.window, target.window))
    if source.indexed_by is IndexedBy.ENTRY:
        fields.append(("block_size", source.block_size, target.block_size))
    for kind in kinds[0]:
        one, other = source.row_of(kind), target.row_of(kind)
        plain = not any(row.kind is kind for row in (*source.rows, *target.rows))
        fields.append(("channels" if plain else f"rows.{kind}.channels", one.channels, other.channels))
    return fields


def _check_kind(pair: GroupPair, kind: PlaneKind) -> None:
    one, other = pair.source.row_of(kind).dtype, pair.target.row_of(kind).dtype
    inline = has_inline_scales(pair.source, kind)
    fixed = kind.scaled is not None or inline or DType.OPAQUE in (one, other)
    if fixed and one != other:
        why = "inline scales" if kind.scaled is not None or inline else "bytes that only the engines understand"
        raise _refusal(pair, kind, f"{why} can be moved, not converted: serve both sides in one dtype")
    if inline:
        return
    for side, group, dtype in (("source", pair.source, one), ("target", pair.target, other)):
        if dtype.quantised and not group.scales:
            place = pair.places[side == "target"]
            raise UnsupportedError(
                f"{pair.path}.scales: {place} ({side}) stores {kind} as {dtype.value} and states no scales; without "
                "them the values would change silently: state the group's scales (1.0 where the engine uses none), or "
                "describe its inline scales as planes"
            )


def _refusal(pair: GroupPair, kind: PlaneKind, why: str) -> UnsupportedError:
    one, other = pair.source.row_of(kind).dtype, pair.target.row_of(kind).dtype
    return UnsupportedError(
        f"{pair.path}.dtype of {kind}: {pair.places[0]} (source) has {one.value}, {pair.places[1]} (target) has "
        f"{other.value}; {why}"
    )


def _check_share(pair: GroupPair) -> None:
    for side, place, group in zip(("source", "target"), pair.places, (pair.source, pair.target), strict=True):
        for name, wanted, have in (
            ("layer", pair.share.layers, {plane.layer for plane in group.planes}),
            ("head", pair.share.heads, set(group.heads)),
        ):
            if not wanted or len(set(wanted)) != len(wanted) or not have.issuperset(wanted):
                raise UnsupportedError(
                    f"{pair.path}: the leg moves {name}s {wanted}, {place} ({side}) holds {sorted(have)}; "
                    f"assign legs from what the ranks hold, each {name} once"
                )
