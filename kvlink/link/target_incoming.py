"""What a target was told of KV that its source still computes, on one leg."""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec.structs import replace

from kvlink import limits
from kvlink.descriptor import KVDescriptor, descriptor_digest
from kvlink.errors import ConflictError, LayoutError
from kvlink.layout import NOTHING, Frontier
from kvlink.wire import Advance


@dataclass(slots=True, eq=False)
class Incoming:
    """What one leg was told of its stream.

    Attributes:
        opening: what it begins with: no blocks, and the most tokens.
        starts: first position that is read, for each of the source's groups.
        room: tokens that the ticket promised room for.
        frontier: how far it was told.
        blocks: the source's, one list a group.
    """

    opening: KVDescriptor
    starts: tuple[int, ...]
    room: int
    frontier: Frontier = NOTHING
    blocks: list[list[int]] = field(default_factory=list)

    def hear(self, advance: Advance) -> None:
        """Take an increment's words; the frontier is left to whoever plans.

        Raises:
            LayoutError: it goes backwards or too far, ends before where we begin, or has blocks of other groups, or
                more than any request.
            ConflictError: the seal covers something else than what was told.
        """
        frontier, most = advance.frontier, min(self.room, self.opening.tokens)
        if not (frontier.covers(self.frontier) and frontier.tokens <= frontier.next_tokens <= most):
            raise LayoutError(f"a stream with room for {most} tokens goes from {self.frontier} to {frontier}")
        if len(advance.blocks) != len(self.blocks):
            raise LayoutError(f"{len(advance.blocks)} block lists are told for {len(self.blocks)} groups")
        for told, more in zip(self.blocks, advance.blocks, strict=True):
            if len(told) + len(more) > limits.MAX_BLOCKS_PER_REQUEST:
                raise LayoutError(f"a stream has more than {limits.MAX_BLOCKS_PER_REQUEST} blocks in one group")
            told.extend(more)
        if advance.sealed is None:
            return
        if frontier.tokens < max(self.starts):  # what lies before is others', too: their prefix
            raise LayoutError(f"a stream ends at position {frontier.tokens}, and is read from {self.starts} on")
        blocks = tuple(map(tuple, self.blocks))
        content = descriptor_digest(replace(self.opening, tokens=frontier.tokens, blocks=blocks))
        if content != advance.sealed or frontier != Frontier.whole(frontier.tokens):
            raise ConflictError(f"the seal covers {advance.sealed}; what was streamed amounts to {content}")
