"""A token range cut into pieces that lie in one block of either side."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Pieces(NamedTuple):
    """Stretches of ``slots`` tokens, each inside one block of either side; ``first``: int64, their first positions."""

    slots: int
    first: NDArray[np.int64]


def cut(source_slots: int, target_slots: int, first_token: int, tokens: int) -> list[Pieces]:
    """Cut ``[first_token, tokens)`` at every block edge of either side.

    Args:
        source_slots: slots in a block of the source.
        target_slots: slots in a block of the target.
        first_token: first position.
        tokens: one past the last.

    Returns:
        Pieces of equal size together, larger sizes first, each in order of position.
    """
    if first_token >= tokens:
        return []
    finer, coarser = sorted((source_slots, target_slots))
    if coarser % finer:
        return _cut_at_both(finer, coarser, first_token, tokens)
    # Every edge of the coarser side is one of the finer: full blocks, and at most a part before and one after.
    begin, end = -(-first_token // finer) * finer, tokens // finer * finer
    if begin > end:
        return [Pieces(tokens - first_token, np.array([first_token], dtype=np.int64))]
    pieces = []
    if begin < end:
        pieces.append(Pieces(finer, np.arange(begin, end, finer, dtype=np.int64)))
    before, after = begin - first_token, tokens - end
    if before and before == after:
        return [*pieces, Pieces(before, np.array([first_token, end], dtype=np.int64))]
    parts = [(before, first_token), (after, end)]
    parts.sort(reverse=True)
    return [*pieces, *(Pieces(slots, np.array([first], dtype=np.int64)) for slots, first in parts if slots)]


def _cut_at_both(one: int, other: int, first_token: int, tokens: int) -> list[Pieces]:
    edges = [np.arange(first_token // size * size + size, tokens, size, dtype=np.int64) for size in (one, other)]
    cuts = np.unique(np.concatenate([np.array([first_token, tokens], dtype=np.int64), *edges]))
    first, slots = cuts[:-1], np.diff(cuts)
    order = np.argsort(-slots, kind="stable")
    sizes, begins = np.unique(-slots[order], return_index=True)
    return [
        Pieces(slots=-int(size), first=first[members])
        for size, members in zip(sizes, np.split(order, begins[1:]), strict=True)
    ]
