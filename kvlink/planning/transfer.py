"""What the hand-over of a request's KV takes: a line fitted to what ``kvlink bench`` measured.

``seconds = fixed + bytes / rate``. The fixed part is the median of the phases whose length does not depend on bytes;
the rate is the least-squares line through what is left of the median latencies. Where a link is named, the rate is the
link's times the measured fraction of the limit: the fraction travels to another wire better than the rate does.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Final, Literal

import msgspec

from kvlink import limits
from kvlink.errors import ConfigError

FIXED_PHASES: Final = ("handshake", "reserve", "plan", "commit", "install")
ASSUMED_FIXED_SECONDS: Final = 0.003
ASSUMED_FRACTION: Final = 0.9


class _Percentiles(msgspec.Struct, frozen=True):
    p50: float


class _Case(msgspec.Struct, frozen=True):
    transport: str
    concurrency: int


class BenchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What the model reads of a ``kvlink.bench/1`` object; its other fields are ignored."""

    schema: Literal["kvlink.bench/1"]
    evidence_level: str
    verified: bool
    case: _Case
    bytes_per_request: int
    latency_s: _Percentiles
    phases_s: dict[str, _Percentiles]
    fraction_of_limit: float | None = None


class TransferModel(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of moving a request's KV from one worker to another.

    Attributes:
        fixed_seconds: of any transfer, however small.
        bytes_per_second: effective, of one worker's link.
        fraction: of a link's rate that ``bytes_per_second`` is, for the same over another link.
        origin: where the numbers come from, in words.
        largest_error: of the fitted median latencies, relative; ``None`` where nothing was fitted.
    """

    fixed_seconds: float
    bytes_per_second: float
    fraction: float
    origin: str
    largest_error: float | None = None

    def seconds(self, size: int) -> float:
        """A transfer of ``size`` bytes over an idle link. Nothing to move takes nothing."""
        return self.fixed_seconds + size / self.bytes_per_second if size else 0.0


def read_record(path: Path) -> BenchRecord:
    """Read what ``kvlink bench --json`` wrote, or a record that holds it as ``result``.

    Raises:
        ConfigError: (a ValueError) the file cannot be read, or is no such result.
    """
    try:
        with path.open("rb") as file:
            data = file.read(limits.MAX_PLAN_FILE_BYTES)
        kind = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        return msgspec.json.decode(kind.get("result", msgspec.Raw(data)), type=BenchRecord)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is no kvlink.bench/1 result: {error}") from error


def assumed_transfer(link_bytes_per_second: float) -> TransferModel:
    """Without any record: the link at `ASSUMED_FRACTION` of its rate, and says that it is assumed."""
    return TransferModel(
        fixed_seconds=ASSUMED_FIXED_SECONDS,
        bytes_per_second=ASSUMED_FRACTION * _positive(link_bytes_per_second),
        fraction=ASSUMED_FRACTION,
        origin=f"assumed: {ASSUMED_FRACTION:.0%} of a link of {link_bytes_per_second / 1e9:g} GB/s, "
        f"{ASSUMED_FIXED_SECONDS * 1e3:g} ms fixed",
    )


def fit_transfer(records: Sequence[BenchRecord], link_bytes_per_second: float | None = None) -> TransferModel:
    """Fit the model to verified records of one transport, one request in flight.

    Args:
        records: of ``kvlink bench``.
        link_bytes_per_second: the wire to plan for; ``None`` plans for the one that was measured.

    Raises:
        ConfigError: (a ValueError) no record can be used, or they are of different transports.
    """
    usable = [r for r in records if r.verified and r.case.concurrency == 1 and r.bytes_per_request > 0]
    transports = {record.case.transport for record in usable}
    if len(transports) != 1:
        found = ", ".join(sorted(transports)) or "none"
        raise ConfigError(f"records: transports {found}; give verified ones of one transport, one request in flight")
    fixed = median(sum(r.phases_s[p].p50 for p in FIXED_PHASES if p in r.phases_s) for r in usable)
    points = [(r.bytes_per_request, max(r.latency_s.p50 - fixed, 1e-9)) for r in usable]
    rate = sum(size * size for size, _ in points) / sum(size * seconds for size, seconds in points)
    error = max(abs(size / rate - seconds) / seconds for size, seconds in points)
    origin = f"fitted to {len(usable)} {usable[0].evidence_level} records of {usable[0].case.transport}"
    fractions = [r.fraction_of_limit for r in usable if r.fraction_of_limit is not None]
    fraction = min(median(fractions), 1.0) if fractions else ASSUMED_FRACTION
    if link_bytes_per_second is not None:
        if not fractions:
            raise ConfigError("records: none has a fraction_of_limit; without it they say nothing about another link")
        rate = fraction * _positive(link_bytes_per_second)
        origin += f"; {fraction:.0%} of the limit, taken over to a link of {link_bytes_per_second / 1e9:g} GB/s"
    return TransferModel(
        fixed_seconds=fixed,
        bytes_per_second=rate,
        fraction=fraction,
        origin=origin,
        largest_error=error if link_bytes_per_second is None else None,
    )


def _positive(rate: float) -> float:
    if not rate > 0:
        raise ConfigError(f"link_bytes_per_second is {rate!r}; it must be above zero")
    return rate
