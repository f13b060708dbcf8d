"""The answer: compatible or what differs; legs, and a plan of one request over each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from kvlink.errors import ConfigError, KVLinkError, LayoutError, MismatchError, UnsupportedError
from kvlink.layout import (
    CacheSpec,
    alias_classes,
    compare_identity,
    sample_blocks,
    sample_capacity,
    share_of,
)
from kvlink.plan import DIRECT, PACKED, CopyPlan, Leg, LegPlanner, assign_legs, choose_path, unread_sources
from kvlink.version import VERSION

SCHEMA: Final = "kvlink.layout/1"
DEFAULT_TOKENS: Final = 4096
OFFERED_PATHS: Final = (DIRECT, PACKED)
"""What the transports of this version can do."""


class GroupReport(msgspec.Struct, frozen=True, kw_only=True):
    """One group of one side, as its first rank holds it."""

    name: str
    dtype: str
    block_size: int
    num_blocks: int
    kinds: tuple[str, ...]


class SideReport(msgspec.Struct, frozen=True, kw_only=True):
    """One engine. ``unread``: ranks of a source that nobody reads, as ``pp/tp``."""

    engine: str
    model: str
    tp: int
    pp: int
    groups: tuple[GroupReport, ...]
    unread: tuple[str, ...] = ()


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """Why two engines are not compatible. ``error``: code of the error that a transfer would end with."""

    error: str
    field: str
    source_value: str | None
    target_value: str | None
    message: str


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """What a leg moves of one group: layers and heads as stretches, such as ``0-3,8``."""

    group: str
    layers: str
    heads: str


class LegReport(msgspec.Struct, frozen=True, kw_only=True):
    """One (source rank, target rank) pair; ranks as ``pp/tp``. ``path`` is ``None`` where no transport can move it."""

    source: str
    target: str
    shares: tuple[Share, ...]
    bytes: int
    runs: int
    run_bytes: int
    plan_bytes: int
    path: str | None
    path_reason: str


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All of it. ``bytes`` and ``runs`` are over all legs; ``run_bytes`` is a run's mean."""

    schema: str = SCHEMA
    kvlink: str = VERSION
    compatible: bool
    difference: Difference | None
    tokens: int
    first_token: int
    source: SideReport
    target: SideReport
    bytes: int = 0
    runs: int = 0
    run_bytes: int = 0
    conversions: tuple[str, ...] = ()
    legs: tuple[LegReport, ...] = ()


def compare(sources: Sequence[CacheSpec], targets: Sequence[CacheSpec], tokens: int | None, first_token: int) -> Report:
    """Compare two engines and plan one request between them.

    Args:
        sources: specs of all source ranks, in (pp, tp) order, each checked.
        targets: specs of all target ranks, likewise.
        tokens: prompt length; ``None`` for 4096, or what both caches hold.
        first_token: where the target's prefix ends.

    Raises:
        ConfigError: the caches do not hold so many tokens, or the prefix is longer than the prompt.
    """
    capacity = min(
        sample_capacity(spec, alias_classes(spec), 1, default=DEFAULT_TOKENS) for spec in (*sources, *targets)
    )
    tokens = min(DEFAULT_TOKENS, capacity) if tokens is None else tokens
    if not 0 <= first_token <= tokens <= capacity:
        raise ConfigError(
            f"--tokens {tokens} and --first-token {first_token} must ascend within the {capacity} tokens that both "
            "caches hold of one request"
        )
    report = Report(
        compatible=False,
        difference=None,
        tokens=tokens,
        first_token=first_token,
        source=_side(sources),
        target=_side(targets),
    )
    try:
        names = {"source_peer": str(sources[0].place), "target_peer": str(targets[0].place)}
        compare_identity(sources[0].identity, targets[0].identity, **names)
        legs = assign_legs(list(map(share_of, sources)), list(map(share_of, targets)))
        planned = [_plan(leg, sources[leg.source], targets[leg.target], tokens, first_token) for leg in legs]
    except (MismatchError, UnsupportedError) as error:
        return msgspec.structs.replace(report, difference=_difference(error))
    unread = tuple(_rank(sources[index]) for index in unread_sources(legs, len(sources)))
    reports = tuple(report for report, _ in planned)
    total, runs = sum(leg.bytes for leg in reports), sum(leg.runs for leg in reports)
    return msgspec.structs.replace(
        report,
        compatible=True,
        source=msgspec.structs.replace(report.source, unread=unread),
        bytes=total,
        runs=runs,
        run_bytes=total // max(1, runs),
        conversions=tuple(dict.fromkeys(text for _, texts in planned for text in texts)),
        legs=reports,
    )


def _plan(
    leg: Leg, source: CacheSpec, target: CacheSpec, tokens: int, first_token: int
) -> tuple[LegReport, tuple[str, ...]]:
    planner = LegPlanner(source, target, leg.groups)
    starts = [max(first_token, tokens - (group.window or tokens)) for group in source.groups]
    try:
        blocks = [sample_blocks(spec, alias_classes(spec), tokens, 1) for spec in (source, target)]
        plan = planner.plan(*blocks, first_token=starts, tokens=tokens)
    except LayoutError as error:
        raise ConfigError(f"a request of {tokens} tokens cannot be laid out: {error}; lower --tokens") from error
    return _leg_report(leg, source, target, plan), planner.conversions


def _leg_report(leg: Leg, source: CacheSpec, target: CacheSpec, plan: CopyPlan) -> LegReport:
    path, reason = choose_path(plan, OFFERED_PATHS)
    return LegReport(
        source=_rank(source),
        target=_rank(target),
        shares=tuple(
            Share(group=share.name, layers=stretches(share.layers), heads=stretches(share.heads))
            for share in leg.groups
        ),
        bytes=plan.total_bytes,
        runs=plan.run_count,
        run_bytes=plan.total_bytes // max(1, plan.run_count),
        plan_bytes=plan.nbytes,
        path=path,
        path_reason=reason,
    )


def stretches(ids: Iterable[int]) -> str:
    """Ascending ids as stretches.

    >>> stretches([0, 1, 2, 3, 8])
    '0-3,8'
    """
    found: list[list[int]] = []
    for value in ids:
        if found and value == found[-1][1] + 1:
            found[-1][1] = value
        else:
            found.append([value, value])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in found)


def _side(specs: Sequence[CacheSpec]) -> SideReport:
    first = specs[0]
    return SideReport(
        engine=first.place.engine,
        model=first.identity.model,
        tp=first.place.tp_size,
        pp=first.place.pp_size,
        groups=tuple(
            GroupReport(
                name=group.name,
                dtype=group.dtype.value,
                block_size=group.block_size,
                num_blocks=group.num_blocks,
                kinds=tuple(dict.fromkeys(plane.kind.value for plane in group.planes)),
            )
            for group in first.groups
        ),
    )


def _difference(error: KVLinkError) -> Difference:
    values: tuple[str | None, str | None] = (None, None)
    field = error.message.partition(":")[0]  # what cannot be converted is named first
    if isinstance(error, MismatchError):
        field, values = error.field, (str(error.source_value), str(error.target_value))
    return Difference(
        error=error.code, field=field, source_value=values[0], target_value=values[1], message=error.message
    )


def _rank(spec: CacheSpec) -> str:
    return f"{spec.place.pp_rank}/{spec.place.tp_rank}"
