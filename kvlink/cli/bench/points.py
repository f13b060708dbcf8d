"""The result of a series: the reports of all runs, and each point over its repeats."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvlink.cli.bench.report import Report
from kvlink.cli.bench.sweeps import Sweep
from kvlink.cli.bench.tally import median

SCHEMA = "kvlink.bench.series/1"


class SeriesReport(msgspec.Struct, frozen=True, kw_only=True):
    """``kvlink.bench.series/1``: the reports (``kvlink.bench/1``) of every run, in the order they were made.

    Runs go over all points, then over all points again: run i is of point ``i % points``.
    """

    schema: str
    kvlink: str
    command: str
    sweep: Sweep | None
    points: int
    repeat: int
    verified: bool
    reports: tuple[Report, ...]


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One point over its repeats: medians of the runs' own medians, and their extremes."""

    value: int | None
    bytes_per_request: int
    run_bytes: int
    gb_s: float
    lowest_gb_s: float
    highest_gb_s: float
    limit_name: str | None
    limit_gb_s: float | None
    fraction: float | None
    latency_p50_s: float
    latency_p99_s: float


def points_of(result: SeriesReport) -> list[Point]:
    """Each point over its repeats, in the sweep's order."""
    values: Sequence[int | None] = (None,) if result.sweep is None else result.sweep.values
    return [_point(value, result.reports[index :: result.points]) for index, value in enumerate(values)]


def _point(value: int | None, reports: Sequence[Report]) -> Point:
    rates = [report.throughput_gb_s.median for report in reports]
    limits = [report.limit for report in reports if report.limit is not None]
    fractions = [report.fraction_of_limit for report in reports if report.fraction_of_limit is not None]
    return Point(
        value=value,
        bytes_per_request=reports[0].bytes_per_request,
        run_bytes=reports[0].runs.bytes,
        gb_s=median(rates),
        lowest_gb_s=min(report.throughput_gb_s.min for report in reports),
        highest_gb_s=max(report.throughput_gb_s.max for report in reports),
        limit_name=limits[0].name if limits else None,
        limit_gb_s=median(limit.gb_s for limit in limits) if limits else None,
        fraction=median(fractions) if fractions else None,
        latency_p50_s=median(report.latency_s.p50 for report in reports),
        latency_p99_s=median(report.latency_s.p99 for report in reports),
    )
