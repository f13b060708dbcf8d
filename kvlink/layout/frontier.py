"""How far a request's KV has been computed: a frontier over positions and layers, which only advances."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple, Self

import msgspec

from kvlink import limits
from kvlink.errors import LayoutError

if TYPE_CHECKING:
    from kvlink.layout.geometry import CacheSpec

_Tokens = Annotated[int, msgspec.Meta(ge=0, le=limits.MAX_TOKENS_PER_REQUEST)]
_Layers = Annotated[int, msgspec.Meta(ge=0, le=limits.MAX_LAYERS)]


class Rectangle(NamedTuple):
    """Positions ``[first_token, tokens)`` in layers ``[first_layer, end_layer)``, by their global ids."""

    first_layer: int
    end_layer: int
    first_token: int
    tokens: int


class Frontier(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Positions that are in place: all of ``[0, tokens)``, and of the chunk under way some layers.

    An engine computes a chunk of positions layer after layer, in the order of their ids. So one step is enough:

    Attributes:
        tokens: every layer holds positions ``[0, tokens)``.
        layers: layers whose global id is below hold positions ``[0, next_tokens)``; 0 between chunks.
        next_tokens: where the chunk under way ends; ``tokens`` between chunks.
    """

    tokens: _Tokens = 0
    layers: _Layers = 0
    next_tokens: _Tokens = 0

    @classmethod
    def whole(cls, tokens: int) -> Self:
        """Every layer holds positions ``[0, tokens)``."""
        return cls(tokens, 0, tokens)

    def of_layer(self, layer: int) -> int:
        """How many positions a layer holds."""
        return self.next_tokens if layer < self.layers else self.tokens

    def covers(self, other: Frontier) -> bool:
        """Whether no layer holds fewer positions than under ``other``."""
        edges = (0, self.layers, other.layers)  # between them nothing changes
        return all(self.of_layer(layer) >= other.of_layer(layer) for layer in edges)

    def beyond(self, before: Frontier) -> Iterator[Rectangle]:
        """What became ready since ``before``, which this covers: at most three rectangles, in the order of layers."""
        edges = sorted({0, before.layers, self.layers, limits.MAX_LAYERS})
        for first, end in pairwise(edges):
            if before.of_layer(first) < self.of_layer(first):
                yield Rectangle(first, end, before.of_layer(first), self.of_layer(first))

    def foresee(self, before: Frontier, end_layer: int) -> Frontier | None:
        """Where an engine comes to next that goes on in the chunk under way as it did since ``before``.

        Args:
            before: an earlier frontier.
            end_layer: as for `advance`.

        Returns:
            ``None`` between chunks: how long the next one is, nobody knows.
        """
        step = self.layers - (before.layers if before.tokens == self.tokens else 0)
        if step <= 0:
            return None
        if self.layers + step >= end_layer:
            return Frontier.whole(self.next_tokens)
        return Frontier(self.tokens, self.layers + step, self.next_tokens)

    def advance(self, tokens: int | None, layers: int | None, *, max_tokens: int, end_layer: int) -> Frontier:
        """The frontier after an engine's word.

        Args:
            tokens: positions ``[0, tokens)`` are in place; by default, where the chunk under way ends.
            layers: in layers with a global id below; by default, in all.
            max_tokens: what was announced.
            end_layer: one past this rank's last layer: from there on all is said of its layers.

        Raises:
            LayoutError: it goes backwards, or past what was announced, or says nothing of a position.
        """
        if tokens is None and layers is None:
            return self
        upto = self.next_tokens if tokens is None else tokens
        if not 0 <= upto <= max_tokens or (layers is not None and not 0 <= layers <= limits.MAX_LAYERS):
            raise LayoutError(
                f"ready(tokens={tokens}, layers={layers}): positions go up to the announced {max_tokens}, layers up to "
                f"{limits.MAX_LAYERS}"
            )
        if tokens is None and upto == self.tokens:
            raise LayoutError(f"ready(layers={layers}): no chunk is under way; say up to which position with tokens")
        if layers is None or layers >= end_layer or upto <= self.tokens:
            following = Frontier.whole(upto)
        else:
            following = Frontier(self.tokens, layers, upto) if layers else Frontier.whole(self.tokens)
        if not following.covers(self):
            raise LayoutError(
                f"ready(tokens={tokens}, layers={layers}) goes backwards: all layers hold {self.tokens} positions, "
                f"those below {self.layers} hold {self.next_tokens}"
            )
        return following


def end_layer_of(spec: CacheSpec) -> int:
    """One past a rank's last layer, by its global id."""
    return 1 + max((plane.layer for group in spec.groups for plane in group.planes), default=-1)


NOTHING: Final = Frontier()
"""No position of any layer."""
