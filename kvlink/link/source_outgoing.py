"""What a source has told one attempt of KV that is still computed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from kvlink.layout import IndexedBy
from kvlink.plan import Increments

if TYPE_CHECKING:
    from kvlink.descriptor import BlockList
    from kvlink.layout import CacheSpec
    from kvlink.link.pump import Pump
    from kvlink.wire import Advance

Exposed: TypeAlias = "tuple[Pump, str]"
"""The transport that an attempt is exposed at, and what the peer is called there."""


@dataclass(slots=True, eq=False)
class Outgoing:
    """What one attempt was told of its stream.

    Attributes:
        increments: their plans.
        blocks: those it was told, one list a group.
        told: the words for increments that have not landed, by number.
        exposed: where those may be read, if they have bytes.
        landed: increments that have landed.
        moved: their bytes.
    """

    increments: Increments
    blocks: list[list[int]]
    told: dict[int, Advance] = field(default_factory=dict)
    exposed: dict[int, Exposed] = field(default_factory=dict)
    landed: int = 0
    moved: int = 0

    def end(self) -> int:
        """Withdraw all that is exposed; bytes of what has landed."""
        for number, (pump, wire_name) in self.exposed.items():
            pump.transport.withdraw(wire_name, number)
        self.exposed.clear()
        return self.moved

    def add_blocks(
        self, blocks: tuple[BlockList, ...], spec: CacheSpec, tokens: int, *, last: bool, sealed: bool
    ) -> tuple[BlockList, ...]:
        """Block ids that come with an increment, one list a group; they are noted as told.

        Args:
            blocks: all so far.
            spec: ours.
            tokens: positions that some layer holds.
            last: no position can follow: groups that are not indexed by tokens come along.
            sealed: no block can follow.
        """
        added: list[BlockList] = []
        for group, ids, told in zip(spec.groups, blocks, self.blocks, strict=True):
            needed = -(-tokens // group.block_size)
            if sealed or (last and group.indexed_by is IndexedBy.ENTRY):
                needed = len(ids)
            elif group.indexed_by is IndexedBy.ENTRY:
                needed = 0
            more = ids[len(told) : needed]
            told.extend(more)
            added.append(more)
        return tuple(added)
