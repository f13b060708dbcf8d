"""What a target was told of KV that its source still computes, on one leg."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from kvlink import limits
from kvlink.descriptor import KVDescriptor, descriptor_digest
from kvlink.errors import ConflictError, LayoutError
from kvlink.layout import Frontier
from kvlink.plan import CopyPlan, Increments
from kvlink.wire import Advance


@dataclass(slots=True, eq=False)
class Incoming:
    """What one leg was told of its stream.

    Attributes:
        opening: what it begins with: no blocks, and the most tokens.
        starts: first position that is read, for each of the source's groups.
        room: tokens that the ticket promised room for.
        blocks: the source's, one list a group, as far as it was told.
        increments: their plans.
        draft: what a seal would cover, if that is foreseen: tokens, blocks in each group, digest of the descriptor.
    """

    opening: KVDescriptor
    starts: tuple[int, ...]
    room: int
    blocks: list[list[int]]
    increments: Increments
    draft: tuple[int, list[int], str] | None = None

    def hear(self, advance: Advance) -> None:
        """Take an increment's words, before it is planned.

        Raises:
            LayoutError: it goes backwards or too far, ends before where we begin, or has blocks of other groups, or
                more than any request.
            ConflictError: the seal covers something else than what was told.
        """
        frontier, before = advance.frontier, self.increments.frontier
        most = min(self.room, self.opening.tokens)
        if not (frontier.covers(before) and frontier.tokens <= frontier.next_tokens <= most):
            raise LayoutError(f"a stream with room for {most} tokens goes from {before} to {frontier}")
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
        content = self._content(frontier.tokens)
        if content != advance.sealed or frontier != Frontier.whole(frontier.tokens):
            raise ConflictError(f"the seal covers {advance.sealed}; what was streamed amounts to {content}")

    def look_ahead(self) -> CopyPlan | None:
        """While nothing else is to be done: plan the likely next increment, and what a seal with it would cover.

        Raises:
            LayoutError: as `Increments.look_ahead`.
        """
        ahead = self.increments.look_ahead()
        if ahead is None:
            return None
        frontier, plan = ahead
        if not frontier.layers:
            self._content(frontier.tokens)
        return plan

    def _content(self, tokens: int) -> str:
        """Digest of the descriptor of what was told so far, if it ends at ``tokens``."""
        counts = [len(blocks) for blocks in self.blocks]
        if self.draft is None or self.draft[:2] != (tokens, counts):
            blocks = tuple(map(tuple, self.blocks))
            digest = descriptor_digest(replace(self.opening, tokens=tokens, blocks=blocks))
            self.draft = tokens, counts, digest
        return self.draft[2]
