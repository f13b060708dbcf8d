"""Which transport a pair of ranks uses: the first that works of a list that was set, or what is predicted to be best.

Pure. The target chooses, since it reads, and tells the source (`kvlink.wire.Chosen`): so the two need not be set alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from kvlink import limits
from kvlink.errors import KVLinkError, PeerIncompatibleError
from kvlink.layout import GroupShare, alias_classes, sample_blocks, sample_capacity, share_of
from kvlink.plan import LegPlanner, Shape, bytes_text, seconds_text
from kvlink.transports.base import Peer, RegionKey, Transport, Way

if TYPE_CHECKING:
    from kvlink.layout import CacheSpec, RankShare
    from kvlink.wire import TransportCard

USUAL_SHAPE = Shape(limits.NOMINAL_TRANSFER_BYTES, limits.NOMINAL_TRANSFER_BYTES // limits.LEAF_BYTES)
"""Of a pair whose plan cannot be told before a request is there: runs of 16 KiB."""
_SPREAD = 2
"""Every other block, so that none touch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A transport that both have. ``refusal``: why the pair cannot use it; ``ways``: what it predicts, if anything."""

    name: str
    refusal: str | None = None
    ways: tuple[Way, ...] = ()

    @property
    def best(self) -> Way | None:
        """The way that is predicted to take least."""
        return min(self.ways, key=lambda way: way.seconds, default=None)


def candidates(
    ours: Sequence[Transport], theirs: Sequence[TransportCard], shape: Shape, *, integrity: bool
) -> list[Candidate]:
    """What both have, in our order, each asked whether it can work between the two, and what it would take."""
    cards = {card.name: card for card in theirs}
    return [
        _candidate(transport, card, shape, integrity=integrity)
        for transport in ours
        if (card := cards.get(transport.capabilities().name)) is not None
    ]


def choose(common: Sequence[Candidate], shape: Shape, *, by_cost: bool) -> tuple[str | None, str]:
    """Choose a transport.

    Args:
        common: best first, as far as that was set.
        shape: what the ways were predicted for.
        by_cost: the fastest counts; else the first that is not refused. One that predicts nothing comes last.

    Returns:
        Its name, ``None`` if all are refused; and the reason, with every other candidate's figure or refusal.
    """
    usable = [one for one in common if one.refusal is None]
    refused = "".join(f"; not {one.name}: {one.refusal}" for one in common if one.refusal is not None)
    if not usable:
        return None, refused.removeprefix("; ")
    if by_cost:
        usable.sort(key=lambda one: one.best.seconds if one.best else float("inf"))
    chosen = usable[0]
    if not by_cost:
        return chosen.name, ("only one stated that both have" if len(common) == 1 else "first that was set") + refused
    if chosen.best is None or len(usable) == 1:
        return chosen.name, ("only transport in common" if len(common) == 1 else "only one that works") + refused
    what = f"predicted for {bytes_text(shape.total_bytes)} in runs of {bytes_text(shape.run_bytes)}"
    others = ", ".join(_figures(one) for one in usable[1:])
    return chosen.name, f"{_figures(chosen)} {what}; {others}{refused}"


def shape_of_pair(source: CacheSpec, target: CacheSpec) -> Shape:
    """What a prompt's plan between two ranks looks like, as far as their caches tell.

    It is scaled to `limits.NOMINAL_TRANSFER_BYTES`. Where none can be made without a request, it is `USUAL_SHAPE`.
    """
    leg = tuple(_in_common(share_of(source), share_of(target)))
    # Which groups share memory is only asked of ours: what is read may repeat, and a peer's spec may make it long work.
    apart, owners = tuple(range(len(source.groups))), alias_classes(target)
    sides = (source, apart), (target, owners)
    rooms = [sample_capacity(*side, _SPREAD, default=limits.NOMINAL_TOKENS) for side in sides]
    tokens = min(limits.NOMINAL_TOKENS, *rooms)
    try:
        starts = [max(0, tokens - (group.window or tokens)) for group in source.groups]
        planner = LegPlanner(source, target, leg)
        blocks = [sample_blocks(*side, tokens, _SPREAD) for side in sides]
        plan = planner.plan(*blocks, first_token=starts, tokens=tokens)
    except KVLinkError:
        return USUAL_SHAPE
    if plan.total_bytes == 0:
        return USUAL_SHAPE
    return Shape.of(plan).scaled_to(limits.NOMINAL_TRANSFER_BYTES)


def none_in_common(ours: Sequence[str], theirs: Sequence[str], why: str, peer: str) -> PeerIncompatibleError:
    """The error for a pair that nothing works for."""
    passed = f" that works ({why})" if why else ""
    return PeerIncompatibleError(
        f"no transport in common{passed}: we have {list(ours)}, the peer has {sorted(theirs)}; "
        "set the same `transports` on both sides, or leave them at auto",
        peer=peer,
        stage="handshake",
    )


def _candidate(transport: Transport, card: TransportCard, shape: Shape, *, integrity: bool) -> Candidate:
    refusal = transport.refusal(card.address)
    if refusal is not None:
        return Candidate(name=card.name, refusal=refusal)
    keys = [RegionKey(region=key.region, address=key.address, length=key.length, key=key.key) for key in card.keys]
    ways = transport.ways(shape, Peer(address=card.address, keys=keys, integrity=integrity))
    return Candidate(name=card.name, ways=ways)


def _figures(candidate: Candidate) -> str:
    if candidate.best is None:
        return f"{candidate.name} (not predicted)"
    path = "" if candidate.best.path == candidate.name else f" {candidate.best.path}"
    return f"{candidate.name}{path} {seconds_text(candidate.best.seconds)}"


def _in_common(source: RankShare, target: RankShare) -> list[GroupShare]:
    """Layers and heads that both hold; what of it is really read is decided by request."""
    theirs = {group.name: group for group in source.groups}
    shares = []
    for group in target.groups:
        if (other := theirs.get(group.name)) is not None:
            their_layers, their_heads = set(other.layers), set(other.heads)
            layers = tuple(layer for layer in group.layers if layer in their_layers)
            heads = tuple(head for head in group.heads if head in their_heads)
            if layers and heads:
                shares.append(msgspec.structs.replace(group, layers=layers, heads=heads))
    return shares
