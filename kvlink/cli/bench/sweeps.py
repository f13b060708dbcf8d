"""The command line of many benches in one: what is swept, and the options of every point."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Final

import msgspec

from kvlink.cli.bench import options
from kvlink.cli.bench.case import Case
from kvlink.cli.bench.options import Options
from kvlink.errors import ConfigError

MAX_POINTS: Final = 40
"""Of a sweep: doublings from 1 to beyond any cache."""
MAX_REPEAT: Final = 1000


class Sweep(msgspec.Struct, frozen=True, kw_only=True):
    """What is varied, and its values in ascending order."""

    name: str
    values: tuple[int, ...]


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """A series as asked for: options of each point, in the sweep's order (one point where nothing is swept)."""

    sweep: Sweep | None
    points: tuple[Options, ...]
    repeat: int
    json: str | None
    csv: str | None
    html: str | None
    plot: str | None
    quiet: bool


def parse(arguments: argparse.Namespace) -> Series | None:
    """The series that is asked for; ``None`` where one plain bench is.

    Raises:
        ConfigError: a value is out of its bounds, or a combination makes no sense.
    """
    files = (arguments.csv, arguments.html, arguments.plot)
    if arguments.sweep is None and arguments.repeat == 1 and not any(files):
        return None
    if arguments.serve is not None:
        raise ConfigError("--serve lends the source half: give --sweep, --repeat and files to the one that connects")
    if arguments.compare is not None:
        raise ConfigError(
            "--compare runs at one run length: drop --sweep, --repeat, --csv, --html and --plot, "
            "or see --fragments of benchmarks/peers/compare.py"
        )
    if not 1 <= arguments.repeat <= MAX_REPEAT:
        raise ConfigError(f"--repeat is {arguments.repeat}; it must lie between 1 and {MAX_REPEAT}")
    if arguments.plot is not None and arguments.sweep is None:
        raise ConfigError("--plot draws bandwidth against size: give --sweep too")
    if sum(file == "-" for file in (arguments.json, arguments.csv, arguments.html)) > 1:
        raise ConfigError("only one of --json, --csv and --html can have standard output")
    sweep = None if arguments.sweep is None else _sweep(arguments.sweep)
    points = [options.parse(arguments)] if sweep is None else [_point(arguments, sweep.name, v) for v in sweep.values]
    return Series(
        sweep=sweep,
        points=tuple(points),
        repeat=arguments.repeat,
        json=arguments.json,
        csv=arguments.csv,
        html=arguments.html,
        plot=arguments.plot,
        quiet=arguments.quiet,
    )


def _sweep(text: str) -> Sweep:
    name, _, bounds = text.partition("=")
    low, _, high = bounds.partition(":")
    known = name in _SETTERS
    if not known or not (low.isdecimal() and high.isdecimal()) or not 1 <= int(low) <= int(high):
        raise ConfigError(f"--sweep is {text!r}; give one of {', '.join(_SETTERS)} as NAME=LOW:HIGH, 1 or more")
    values = [int(low)]
    while values[-1] * 2 <= int(high):
        values.append(values[-1] * 2)
    if len(values) > MAX_POINTS:
        raise ConfigError(f"--sweep {text} has {len(values)} points; at most {MAX_POINTS} are run")
    return Sweep(name=name, values=tuple(values))


def _point(arguments: argparse.Namespace, name: str, value: int) -> Options:
    changed = argparse.Namespace(**vars(arguments))
    _SETTERS[name](changed, value)
    return options.parse(changed)


def _set_tokens(arguments: argparse.Namespace, value: int) -> None:
    if arguments.trace is not None:
        raise ConfigError("--trace states the prompts' lengths: drop it, or sweep something else than tokens")
    arguments.tokens = value


def _set_concurrency(arguments: argparse.Namespace, value: int) -> None:
    arguments.concurrency = value


def _set_run_bytes(arguments: argparse.Namespace, value: int) -> None:
    """A block of a layer's K is one run where both sides have the same ranks, layout and block size."""
    case = options.parse(arguments).case
    if case.source != case.target:
        raise ConfigError("--sweep run-bytes sets the block size of both sides: give them the same TP, PP and layout")
    slot_bytes = _slot_bytes(case)
    if value % slot_bytes:
        raise ConfigError(
            f"--sweep run-bytes={value}: a token of a layer's K takes {slot_bytes} bytes on a rank, and a run holds "
            "whole tokens; give a multiple, or fewer --kv-heads or a smaller --head-dim"
        )
    arguments.source_block_size = arguments.target_block_size = value // slot_bytes
    # Whole blocks, or the last block of every prompt would be a shorter run.
    arguments.tokens = -(-arguments.tokens // arguments.source_block_size) * arguments.source_block_size


def _slot_bytes(case: Case) -> int:
    heads = -(-case.geometry.kv_heads // case.source.tp)
    return heads * case.geometry.head_dim * case.dtype("source").itemsize


_SETTERS: Final[dict[str, Callable[[argparse.Namespace, int], None]]] = {
    "tokens": _set_tokens,
    "run-bytes": _set_run_bytes,
    "concurrency": _set_concurrency,
}
