"""Who reads whom: for every head of every layer a target holds, exactly one source rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from kvlink.errors import LayoutError, UnsupportedError
from kvlink.layout import GroupShare, RankShare

_Holders = frozenset[int]
"""Ranks, as positions in canonical order."""


class Leg(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One (source rank, target rank) pair: what the target reads from the source.

    ``source`` and ``target`` are indices into the two sides' lists of `kvlink.layout.RankShare`. A group appears more
    than once only where its layers are read with different heads.
    """

    source: int
    target: int
    groups: tuple[GroupShare, ...]


def assign_legs(sources: Sequence[RankShare], targets: Sequence[RankShare]) -> tuple[Leg, ...]:
    """Give every (group, layer, head) of every target exactly one source that holds it.

    Replicas are spread: of n sources that hold a head, the j-th of the targets that hold it reads source j modulo n.
    So all targets of one engine must be assigned in one call. With a single target given, its ``tp_rank`` stands for
    j, and what its siblings read is not known.

    The result depends on what the ranks hold, not on the order in which they are listed.

    Args:
        sources: all ranks of the source engine.
        targets: all ranks of the target engine, or one.

    Returns:
        Legs by target rank, then source rank, in (pp, tp) order.

    Raises:
        UnsupportedError: no source holds something a target needs; names group, layer, head and both sides.
        LayoutError: a rank is listed twice.
    """
    source_order, target_order = _canonical(sources, "sources"), _canonical(targets, "targets")
    source_ranks = [sources[index] for index in source_order]
    target_ranks = [targets[index] for index in target_order]
    parts: dict[tuple[int, int], list[GroupShare]] = defaultdict(list)
    for name in dict.fromkeys(group.name for rank in target_ranks for group in rank.groups):
        for (target, source), heads_of_layer in _assign_group(name, source_ranks, target_ranks).items():
            parts[target, source] += _as_shares(name, heads_of_layer)
    return tuple(
        Leg(source=source_order[source], target=target_order[target], groups=tuple(parts[target, source]))
        for target, source in sorted(parts)
    )


def readers_of(legs: Sequence[Leg], source_index: int) -> int:
    """How many targets read this source: its blocks are free when that many have ended."""
    return len({leg.target for leg in legs if leg.source == source_index})


def unread_sources(legs: Sequence[Leg], num_sources: int) -> tuple[int, ...]:
    """Sources that nobody reads, ascending: told so, they free their blocks at once."""
    return tuple(sorted(set(range(num_sources)) - {leg.source for leg in legs}))


def _canonical(ranks: Sequence[RankShare], side: str) -> list[int]:
    places = [(rank.pp_rank, rank.tp_rank) for rank in ranks]
    if len(set(places)) != len(places):
        raise LayoutError(f"{side} list a (pp, tp) rank twice: {places}; pass each rank of one engine once")
    return sorted(range(len(ranks)), key=places.__getitem__)


def _assign_group(
    name: str, sources: Sequence[RankShare], targets: Sequence[RankShare]
) -> dict[tuple[int, int], dict[int, list[int]]]:
    """``{(target, source): {layer: [heads]}}``, deciding once for all layers and heads held by the same ranks."""
    source_layers, source_heads = _holders(name, sources)
    target_layers, target_heads = _holders(name, targets)
    assigned: dict[tuple[int, int], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for layers, layer_sources, layer_targets in _classes(source_layers, target_layers):
        for heads, head_sources, head_targets in _classes(source_heads, target_heads):
            readers = sorted(layer_targets & head_targets)
            candidates = sorted(layer_sources & head_sources)
            if readers and not candidates:
                raise _uncovered(name, layers[0], heads[0], sources, targets[readers[0]])
            for position, target in enumerate(readers):
                turn = targets[target].tp_rank if len(targets) == 1 else position
                heads_of_layer = assigned[target, candidates[turn % len(candidates)]]
                for layer in layers:
                    heads_of_layer[layer] += heads
    return assigned


def _holders(name: str, ranks: Sequence[RankShare]) -> tuple[dict[int, _Holders], dict[int, _Holders]]:
    """Which ranks hold each layer, and each head, of a group."""
    layers: dict[int, set[int]] = defaultdict(set)
    heads: dict[int, set[int]] = defaultdict(set)
    for index, rank in enumerate(ranks):
        for group in rank.groups:
            if group.name == name:
                for layer in group.layers:
                    layers[layer].add(index)
                for head in group.heads:
                    heads[head].add(index)
    return _frozen(layers), _frozen(heads)


def _frozen(holders: Mapping[int, set[int]]) -> dict[int, _Holders]:
    return {item: frozenset(ranks) for item, ranks in holders.items()}


def _classes(
    source: Mapping[int, _Holders], target: Mapping[int, _Holders]
) -> Iterator[tuple[list[int], _Holders, _Holders]]:
    """Items that targets hold, grouped by who holds them on either side."""
    classes: dict[tuple[_Holders, _Holders], list[int]] = defaultdict(list)
    for item in sorted(target):
        classes[source.get(item, frozenset()), target[item]].append(item)
    for (source_holders, target_holders), items in classes.items():
        yield items, source_holders, target_holders


def _as_shares(name: str, heads_of_layer: Mapping[int, Sequence[int]]) -> list[GroupShare]:
    layers_of: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for layer in sorted(heads_of_layer):
        layers_of[tuple(sorted(heads_of_layer[layer]))].append(layer)
    return [GroupShare(name=name, layers=tuple(layers), heads=heads) for heads, layers in layers_of.items()]


def _uncovered(name: str, layer: int, head: int, sources: Sequence[RankShare], target: RankShare) -> UnsupportedError:
    holding = [
        f"pp {rank.pp_rank} tp {rank.tp_rank}"
        for rank in sources
        for group in rank.groups
        if group.name == name and (layer in group.layers or head in group.heads)
    ]
    have = f"{', '.join(holding[:8])} hold its layer or its head, not both" if holding else "none holds either"
    return UnsupportedError(
        f"group {name!r} layer {layer} head {head}: target rank pp {target.pp_rank} tp {target.tp_rank} needs it and "
        f"no source rank holds it (of {len(sources)} source ranks, {have}); "
        "give the roster of all source ranks, serving the same model"
    )
