"""Who serves: the card of each rank, and the roster of all ranks of one engine incarnation. No keys, no geometry."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Annotated, Final, Self

import msgspec

from kvlink import limits
from kvlink.errors import MismatchError, SchemaError, VersionError
from kvlink.layout import GroupShare, Identity, Place, RankShare, fingerprint
from kvlink.wire.address import Address
from kvlink.wire.codec import decode_with, encode_with
from kvlink.wire.messages import Name

CARD_VERSION: Final = 1
"""First byte of an encoded card."""

AddressText = Annotated[str, msgspec.Meta(max_length=limits.MAX_NAME_BYTES * 2)]
Size = Annotated[int, msgspec.Meta(ge=1, le=limits.MAX_WORLD_RANKS)]


class RankCard(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="card"):
    """What one rank tells its engine's scheduler: where it listens and which layers and heads it holds.

    Attributes:
        place: the rank.
        address: as `Address` reads it.
        share: what it holds.
        identity: which model.
        identity_fingerprint: `kvlink.layout.fingerprint` of it.
        kvlink: the version of KVLink there.
    """

    place: Place
    address: AddressText
    share: RankShare
    identity: Identity
    identity_fingerprint: Name
    kvlink: Name

    def __post_init__(self) -> None:
        Address.parse(self.address)
        _check_share(self.share, self.identity, self.place.pp_size)
        if (self.share.pp_rank, self.share.tp_rank) != (self.place.pp_rank, self.place.tp_rank):
            msg = f"card of {self.place} holds the share of pp {self.share.pp_rank} tp {self.share.tp_rank}"
            raise SchemaError(msg)
        if self.identity_fingerprint != fingerprint(self.identity):
            msg = f"card of {self.place} states a fingerprint that is not its identity's"
            raise SchemaError(msg)

    def to_bytes(self) -> bytes:
        """The encoded card; raises as `kvlink.wire.encode` does."""
        return bytes([CARD_VERSION]) + encode_with(self, limits.MAX_CARD_BYTES - 1)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Read a card.

        Raises:
            VersionError: made by a KVLink that encodes cards in another version.
            WireError: not a card, too large, or it contradicts itself.
        """
        if data[:1] != bytes([CARD_VERSION]):
            msg = f"card has version {data[0] if data else 'nothing'}; this side reads version {CARD_VERSION}"
            raise VersionError(msg)
        return decode_with(msgspec.msgpack.Decoder(cls), memoryview(data)[1:], "rank card", limits.MAX_CARD_BYTES - 1)


class RosterRank(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One rank of a roster: where it listens, and what it holds."""

    address: AddressText
    share: RankShare


class Roster(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All ranks of one incarnation of an engine, ordered by (pp, tp). Complete, or it cannot be made."""

    engine: Name
    incarnation: Name
    identity: Identity
    pp_size: Size
    tp_size: Size
    ranks: Annotated[tuple[RosterRank, ...], msgspec.Meta(min_length=1, max_length=limits.MAX_WORLD_RANKS)]

    def __post_init__(self) -> None:
        if self.pp_size * self.tp_size > limits.MAX_WORLD_RANKS:
            msg = f"pp_size {self.pp_size} x tp_size {self.tp_size} is more than {limits.MAX_WORLD_RANKS} ranks"
            raise SchemaError(msg)
        expected = [(pp, tp) for pp in range(self.pp_size) for tp in range(self.tp_size)]
        actual = [(rank.share.pp_rank, rank.share.tp_rank) for rank in self.ranks]
        if actual != expected:
            msg = (
                f"roster of {self.engine!r} with pp_size {self.pp_size} and tp_size {self.tp_size} "
                f"{_what_differs(actual, expected)}; give one card of every rank, in order of (pp, tp)"
            )
            raise SchemaError(msg)
        for rank in self.ranks:
            Address.parse(rank.address)
            _check_share(rank.share, self.identity, self.pp_size)

    @classmethod
    def of(cls, cards: Iterable[bytes]) -> Roster:
        """Put an engine's cards together, in any order.

        Args:
            cards: from `RankCard.to_bytes`, one of each rank.

        Raises:
            MismatchError: two cards are not of one engine incarnation, world or model; the field and both are named.
            SchemaError: a rank is missing or given twice.
            WireError: a card cannot be read.
        """
        read = sorted((RankCard.from_bytes(card) for card in cards), key=lambda c: (c.place.pp_rank, c.place.tp_rank))
        if not read:
            raise SchemaError("a roster needs the card of every rank of its engine; none was given")
        first = read[0]
        for card in read[1:]:
            _check_same(first, card)
        return cls(
            engine=first.place.engine,
            incarnation=first.place.incarnation,
            identity=first.identity,
            pp_size=first.place.pp_size,
            tp_size=first.place.tp_size,
            ranks=tuple(RosterRank(card.address, card.share) for card in read),
        )

    @property
    def shares(self) -> tuple[RankShare, ...]:
        """What each rank holds, as ``kvlink.plan.assign_legs`` takes it."""
        return tuple(rank.share for rank in self.ranks)

    def place(self, index: int) -> Place:
        """The place of ``ranks[index]``."""
        pp_rank, tp_rank = divmod(index, self.tp_size)
        return Place(
            engine=self.engine,
            incarnation=self.incarnation,
            pp_rank=pp_rank,
            pp_size=self.pp_size,
            tp_rank=tp_rank,
            tp_size=self.tp_size,
        )


def _check_same(first: RankCard, card: RankCard) -> None:
    pairs = [
        (f"place.{name}", getattr(first.place, name), getattr(card.place, name))
        for name in ("engine", "incarnation", "pp_size", "tp_size")
    ]
    pairs.append(("identity", first.identity, card.identity))
    for field, one, other in pairs:
        if one != other:
            raise MismatchError(field, one, other, source=str(first.place), target=str(card.place), stage="roster")


def _what_differs(actual: Sequence[tuple[int, int]], expected: Sequence[tuple[int, int]]) -> str:
    have, want = set(actual), set(expected)
    if missing := sorted(want - have):
        return f"lacks rank (pp, tp) {missing[0]}" + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
    if extra := sorted(have - want):
        return f"has a rank {extra[0]} too many"
    return "has its ranks out of order" if len(actual) == len(expected) else "has a rank twice"


def _check_share(share: RankShare, identity: Identity, pp_size: int) -> None:
    """Shares are global ids, ascending: what ``share_of`` makes, and what a plan relies on."""
    where = f"share of pp {share.pp_rank} tp {share.tp_rank}"
    if not 0 < len(share.groups) <= limits.MAX_GROUPS:
        msg = f"{where} has {len(share.groups)} groups; between 1 and {limits.MAX_GROUPS} are accepted"
        raise SchemaError(msg)
    if len({group.name for group in share.groups}) != len(share.groups):
        msg = f"{where} names a group twice"
        raise SchemaError(msg)
    for group in share.groups:
        if group.layers or pp_size == 1:  # a stage may hold no layer of a group
            _check_ids(f"{where}: layers", group.layers, min(identity.num_layers, limits.MAX_LAYERS), group)
        # A group may have heads of its own number (state, indexer); the spec says so and is checked for it.
        _check_ids(f"{where}: heads", group.heads, limits.MAX_HEADS, group)


def _check_ids(what: str, ids: tuple[int, ...], below: int, group: GroupShare) -> None:
    ascending = all(one < other for one, other in pairwise(ids))
    if not ids or not ascending or ids[0] < 0 or ids[-1] >= below:
        msg = f"{what} of group {group.name[:64]!r} must be ascending ids from 0 to {below - 1}"
        raise SchemaError(msg)
