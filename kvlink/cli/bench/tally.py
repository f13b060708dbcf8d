"""What a bench measured, and the statistics of it."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvlink.cli.bench import messages as m

GB: Final = 1e9
PHASES: Final = ("handshake", "reserve", "plan", "gather", "wire", "scatter", "verify", "commit", "install")


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A stretch on the target host's monotonic clock."""

    start_seconds: float
    end_seconds: float

    @classmethod
    def over(cls, spans: Sequence[m.Moved] | Sequence[Span]) -> Span:
        """From the first start to the last end."""
        return cls(
            start_seconds=min(span.start_seconds for span in spans), end_seconds=max(span.end_seconds for span in spans)
        )

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end_seconds - self.start_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One request's transfer: all ranks, first verb to last install. ``payload_bytes`` counts re-read chunks once."""

    request: int
    payload_bytes: int
    span: Span
    moves: tuple[m.RankMove, ...]

    @property
    def gb_s(self) -> float:
        """Payload over wall clock."""
        return self.payload_bytes / self.span.seconds / GB


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A transfer and a raw move of the same bytes, one right after the other."""

    payload_bytes: int
    transfer_seconds: float
    raw_seconds: float

    @property
    def raw_gb_s(self) -> float:
        """The limit as this pair saw it."""
        return self.payload_bytes / self.raw_seconds / GB

    @property
    def fraction(self) -> float:
        """Rate of the transfer over rate of the raw move."""
        return self.raw_seconds / self.transfer_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A timed window: its transfers, and the CPU time each side's processes spent in it."""

    transfers: tuple[Transfer, ...]
    source_cpu_seconds: float
    target_cpu_seconds: float
    exposed_seconds: tuple[float, ...] = ()

    @property
    def payload_bytes(self) -> int:
        """Payload of all its transfers."""
        return sum(transfer.payload_bytes for transfer in self.transfers)

    @property
    def gb_s(self) -> float:
        """Payload over the wall clock from the first start to the last end."""
        return self.payload_bytes / Span.over([transfer.span for transfer in self.transfers]).seconds / GB


@dataclass(slots=True)
class Tally:
    """All that a bench measured. ``windows`` and ``pairs`` are warm; ``cold`` is the very first request.

    ``load_before``: the machine's, as the bench began.
    ``exposed``: of each warm request that was computed layer by layer, seconds from its last layer to its last
    rank's install; without ``one_clock`` of both sides, to its source's knowing of it.
    """

    cold: Transfer | None = None
    open_seconds: float = 0.0
    windows: list[Window] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)
    completed: int = 0
    failed: int = 0
    retried: int = 0
    verified: int = 0
    faults: list[str] = field(default_factory=list)
    exposed: list[float] = field(default_factory=list)
    one_clock: bool = False
    load_before: float = field(default_factory=lambda: os.getloadavg()[0])

    @property
    def transfers(self) -> list[Transfer]:
        """Warm transfers; where there is nothing but the cold one, that."""
        warm = [transfer for window in self.windows for transfer in window.transfers]
        return warm or ([self.cold] if self.cold else [])

    @property
    def sound(self) -> bool:
        """Nothing failed, and every byte of every target cache was compared and right."""
        return not self.failed and not self.faults and self.completed > 0 and self.verified == self.completed

    def rates(self) -> list[float]:
        """GB/s of each warm window; with one request in flight, a window is one request."""
        return [window.gb_s for window in self.windows] or [transfer.gb_s for transfer in self.transfers]

    def cpu_seconds_per_gb(self) -> tuple[float, float]:
        """Source's and target's, over all warm windows."""
        moved = sum(window.payload_bytes for window in self.windows) / GB
        if not moved:
            return 0.0, 0.0
        source = sum(window.source_cpu_seconds for window in self.windows)
        target = sum(window.target_cpu_seconds for window in self.windows)
        return source / moved, target / moved

    def phase(self, name: str) -> list[float]:
        """Seconds that each rank spent in a phase, request by request; 0 where it has no such phase."""
        return [move.phases.get(name, 0.0) for transfer in self.transfers for move in transfer.moves]


def percentile(values: Iterable[float], percent: float) -> float:
    """The ``percent``-th percentile, linear between neighbours; 0 of nothing."""
    ordered = sorted(values)
    if not ordered:
        return 0.0
    rank = (len(ordered) - 1) * percent / 100
    low = int(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def median(values: Iterable[float]) -> float:
    """The median; 0 of nothing."""
    ordered = list(values)
    return statistics.median(ordered) if ordered else 0.0
