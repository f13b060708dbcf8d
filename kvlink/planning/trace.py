"""Workloads: recorded traces in the public formats, and synthetic arrivals.

JSON lines, one request each: ``input_length``, ``output_length`` (tokens), ``timestamp`` (milliseconds, optional) and
``hash_ids`` (optional: one id for each block of the prompt, equal ids for equal prefixes); optional ``tenant``,
``priority`` and ``adapter``. CSV with a header: a column of prompt tokens and one of generated tokens, by their public
names, and a time column if there is one. Requests without a time arrive as a Poisson process.
"""

from __future__ import annotations

import csv
import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Final, TextIO

import msgspec

from kvlink import limits
from kvlink.errors import ConfigError
from kvlink.planning.fields import count, number

Tokens = Annotated[int, msgspec.Meta(ge=0, le=limits.MAX_TOKENS_PER_REQUEST)]
DEFAULT_RATE: Final = 1.0
PROMPT_COLUMNS: Final = ("ContextTokens", "Request tokens", "prompt_tokens", "input_length", "num_prefill_tokens")
DECODE_COLUMNS: Final = ("GeneratedTokens", "Response tokens", "decode_tokens", "output_length", "num_decode_tokens")
TIME_COLUMNS: Final = ("TIMESTAMP", "Timestamp", "timestamp_seconds", "arrived_at")


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a workload.

    Attributes:
        name: unique in its trace.
        at_seconds: when it arrives, from the trace's first.
        prompt_tokens: 1 or more.
        decode_tokens: 1 or more: a request that asks for none still gets its first token.
        blocks: ids of the full blocks of its prompt; equal ids are equal prefixes.
        tenant: whose it is.
        priority: higher goes first.
        adapter: it needs.
    """

    name: str
    at_seconds: float
    prompt_tokens: int
    decode_tokens: int
    blocks: tuple[int, ...] = ()
    tenant: str | None = None
    priority: int = 0
    adapter: str | None = None


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """A workload in order of arrival. ``block_tokens``: tokens that one of ``Arrival.blocks`` stands for."""

    name: str
    arrivals: tuple[Arrival, ...]
    block_tokens: int = 512

    @property
    def seconds(self) -> float:
        """From the first arrival to the last."""
        return self.arrivals[-1].at_seconds - self.arrivals[0].at_seconds

    def faster(self, factor: float) -> Trace:
        """The same requests, arriving ``factor`` times as often."""
        if not factor > 0:
            raise ConfigError(f"rate factor is {factor!r}; it must be above zero")
        arrivals = tuple(msgspec.structs.replace(a, at_seconds=a.at_seconds / factor) for a in self.arrivals)
        return msgspec.structs.replace(self, arrivals=arrivals)

    def spread_ties(self) -> Trace:
        """The same requests, with those of one time stamp spread evenly up to the next stamp.

        For traces with coarse stamps, which else arrive in bursts that nobody has seen. The last stamp's stay together.
        """
        arrivals: list[Arrival] = []
        groups = [list(group) for _, group in itertools.groupby(self.arrivals, key=lambda a: a.at_seconds)]
        for group, following in itertools.zip_longest(groups, groups[1:], fillvalue=groups[-1]):
            gap = (following[0].at_seconds - group[0].at_seconds) / len(group)
            arrivals += [
                msgspec.structs.replace(arrival, at_seconds=arrival.at_seconds + gap * index)
                for index, arrival in enumerate(group)
            ]
        return msgspec.structs.replace(self, arrivals=tuple(arrivals))


class _Line(msgspec.Struct):
    """One line of a JSON trace; fields that are not listed are allowed and not read."""

    input_length: Tokens
    output_length: Tokens
    timestamp: Annotated[float, msgspec.Meta(ge=0)] | None = None
    hash_ids: tuple[int, ...] = ()
    tenant: str | None = None
    priority: int = 0
    adapter: str | None = None


def read_trace(
    path: Path,
    *,
    requests: int = limits.MAX_TRACE_REQUESTS,
    block_tokens: int = 512,
    rate: float = DEFAULT_RATE,
    seed: int = 0,
) -> Trace:
    """Read a trace file.

    Args:
        path: ``.csv`` for a table, anything else JSON lines.
        requests: read no more than the first so many.
        block_tokens: tokens of a block in ``hash_ids``.
        rate: arrivals a second where the trace has no times.
        seed: of those arrivals.

    Raises:
        ConfigError: the file cannot be read, a line is no request, or it holds none; the message names the line.
    """
    read = _csv if path.suffix.lower() == ".csv" else _json_lines
    bound = min(requests, limits.MAX_TRACE_REQUESTS)
    try:
        with path.open(encoding="utf-8", errors="replace", newline="") as file:
            rows = list(itertools.islice(read(file, path, block_tokens), bound))
    except OSError as error:
        raise ConfigError(f"trace {path} cannot be read: {error.strerror}") from error
    except csv.Error as error:  # a field without end
        raise ConfigError(f"{path} is no table: {error}") from error
    if not rows:
        raise ConfigError(f"trace {path} holds no request")
    return Trace(name=path.stem, arrivals=_in_order(rows, rate, seed), block_tokens=block_tokens)


_Row = tuple[float | None, Arrival]
"""When it arrives, where the trace says so, and the request."""


def _in_order(rows: list[_Row], rate: float, seed: int) -> tuple[Arrival, ...]:
    """Put times on an axis that begins with the first arrival; draw them where there are none."""
    if any(at is None for at, _ in rows):
        times = list(itertools.islice(_poisson(rate, random.Random(seed)), len(rows)))  # noqa: S311 - a workload
        timed = list(zip(times, (arrival for _, arrival in rows), strict=True))
    else:
        timed = sorted(((at or 0.0, arrival) for at, arrival in rows), key=lambda row: row[0])
    start = timed[0][0]
    return tuple(msgspec.structs.replace(arrival, at_seconds=at - start) for at, arrival in timed)


def _json_lines(file: TextIO, path: Path, block_tokens: int) -> Iterator[_Row]:
    decoder = msgspec.json.Decoder(_Line)
    for index, text in enumerate(iter(lambda: file.readline(limits.MAX_TRACE_LINE_BYTES), ""), start=1):
        if not text.strip():
            continue
        try:
            line = decoder.decode(text)
        except (msgspec.DecodeError, RecursionError) as error:  # nested too deeply even to be skipped
            raise ConfigError(f"{path} line {index} is no request: {error}") from error
        at = None if line.timestamp is None else line.timestamp / 1e3
        yield (
            at,
            Arrival(
                name=f"r{index}",
                at_seconds=0.0,
                prompt_tokens=max(line.input_length, 1),
                decode_tokens=max(line.output_length, 1),
                blocks=line.hash_ids[: line.input_length // block_tokens],  # a block that is not full is not shared
                tenant=line.tenant,
                priority=line.priority,
                adapter=line.adapter,
            ),
        )


def _csv(file: TextIO, path: Path, _: int) -> Iterator[_Row]:
    rows = csv.DictReader(iter(lambda: file.readline(limits.MAX_TRACE_LINE_BYTES), ""))
    names = rows.fieldnames or ()
    prompt, decode = _column(PROMPT_COLUMNS, names, path), _column(DECODE_COLUMNS, names, path)
    time = next((name for name in TIME_COLUMNS if name in names), None)
    for index, row in enumerate(rows, start=2):
        try:
            values = {prompt: float(row[prompt]), decode: float(row[decode])}
            sizes = [max(count(values, name), 1) for name in (prompt, decode)]
            if max(sizes) > limits.MAX_TOKENS_PER_REQUEST:
                raise ConfigError(f"it has more than {limits.MAX_TOKENS_PER_REQUEST} tokens")
            at = None if time is None else _seconds(row[time])
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{path} line {index} is no request: {error}") from error
        yield at, Arrival(name=f"r{index - 1}", at_seconds=0.0, prompt_tokens=sizes[0], decode_tokens=sizes[1])


def _column(known: tuple[str, ...], names: Sequence[str], path: Path) -> str:
    for name in known:
        if name in names:
            return name
    raise ConfigError(f"{path} has none of the columns {', '.join(known)} in its first line")


def _seconds(text: str) -> float:
    """A number of seconds, or a date with its time."""
    try:
        return number({"time": float(text)}, "time")
    except ValueError:
        stamp = datetime.fromisoformat(text.strip()[:26])
        return (stamp - datetime(1970, 1, 1)).total_seconds()  # noqa: DTZ001 - only differences count


def _poisson(rate: float, chance: random.Random) -> Iterator[float]:
    """Arrival times of a Poisson process from zero on."""
    if not rate > 0:
        raise ConfigError(f"rate is {rate!r}; it must be above zero")
    at = 0.0
    while True:
        yield at
        at += chance.expovariate(rate)


def synthetic_trace(text: str, *, seed: int = 0) -> Trace:
    """A workload by description: ``rate=2,prompt=4000,decode=200,requests=1000,spread=0.5``.

    Arrivals are Poisson. Lengths are lognormal with the given means; ``spread`` is their coefficient of variation, 0
    for lengths that are all alike. ``prompt`` and ``decode`` are needed.

    Raises:
        ConfigError: a name is unknown, or a value is no number that is fit for it.
    """
    values: dict[str, object] = {"rate": DEFAULT_RATE, "requests": 1000.0, "spread": 0.5}
    for item in text.split(","):
        name, _, value = item.partition("=")
        if name.strip() not in ("rate", "prompt", "decode", "requests", "spread"):
            raise ConfigError(f"{item!r}: give rate, prompt, decode, requests and spread, each as name=number")
        try:
            values[name.strip()] = float(value)
        except ValueError:
            raise ConfigError(f"{item!r} has no number behind its =") from None
    return _draw(values, text, seed)


def _draw(values: Mapping[str, object], text: str, seed: int) -> Trace:
    spread, requests = number(values, "spread"), count(values, "requests")
    if not 1 <= requests <= limits.MAX_TRACE_REQUESTS:
        raise ConfigError(f"requests is {requests}; it must lie between 1 and {limits.MAX_TRACE_REQUESTS}")
    chance = random.Random(seed)  # noqa: S311 - a workload, no secret
    times = _poisson(number(values, "rate"), chance)
    arrivals = tuple(
        Arrival(
            name=f"r{index + 1}",
            at_seconds=next(times),
            prompt_tokens=_length(number(values, "prompt"), spread, chance),
            decode_tokens=_length(number(values, "decode"), spread, chance),
        )
        for index in range(requests)
    )
    return Trace(name=f"synthetic {text}", arrivals=arrivals)


def _length(mean: float, spread: float, chance: random.Random) -> int:
    """A lognormal length of that mean and coefficient of variation, 1 or more."""
    if spread == 0 or mean == 0:
        return max(round(mean), 1)
    sigma = math.sqrt(math.log1p(spread * spread))
    drawn = chance.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma)
    return min(max(round(drawn), 1), limits.MAX_TOKENS_PER_REQUEST)
