"""``--compare``: NIXL and Mooncake on bytes of the bench's run length, beside KVLink, by benchmarks/peers/compare.py.

The peers' programs belong to a checkout, not to the package: each runs in an environment that has its library.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated, Final

import msgspec

import kvlink
from kvlink.errors import ConfigError, KVLinkError, UnavailableError

PEERS: Final = {"nixl": "nixl", "mooncake": "mooncake-transfer-engine-non-cuda"}
"""Module of each, and what to install."""
_PROGRAM: Final = Path("benchmarks", "peers", "compare.py")
"""In a checkout."""
_LEAST_BYTES, _MOST_BYTES = 4 * 1024, 1024 * 1024
_POOL_MIB, _MOVE_MIB, _ROUNDS = 256, 64, 9


class Rate(msgspec.Struct, frozen=True, kw_only=True):
    """GB/s over the rounds."""

    median: float
    min: float
    max: float


class Spent(msgspec.Struct, frozen=True, kw_only=True):
    """CPU seconds per 1e9 bytes."""

    source: float
    target: float


class Contender(msgspec.Struct, frozen=True, kw_only=True):
    """One mode of one library. ``peer``: it is none of KVLink's, and no raw limit."""

    gb_s: Rate
    cpu_seconds_per_gb: Spent
    peer: bool


class Ratios(msgspec.Struct, frozen=True, kw_only=True):
    """KVLink's modes over the best peer's, and over the raw limit: medians of each round's ratio."""

    best_peer: str | None
    over_best_peer: dict[str, float]
    over_limit: dict[str, float]


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """One size as ``kvlink.peers/1`` has it. ``absent``: who was not measured, and why."""

    scene: str
    fragment_bytes: int
    payload_bytes: int
    results: dict[str, Contender]
    ratios: Ratios
    absent: dict[str, str]


class _Record(msgspec.Struct, frozen=True, kw_only=True):
    """What the program writes; more than this is not read."""

    sizes: Annotated[tuple[Comparison, ...], msgspec.Meta(min_length=1)]


def parse(text: str | None) -> tuple[str, ...]:
    """Read the value of ``--compare``.

    Raises:
        ConfigError: an unknown name.
    """
    names = () if text is None else tuple(name.strip() for name in text.split(","))
    if unknown := [name for name in names if name not in PEERS]:
        raise ConfigError(f"--compare names {', '.join(map(repr, unknown))}; known are {', '.join(PEERS)}")
    return names


def check(names: tuple[str, ...], python: str = sys.executable) -> None:
    """Say now what cannot be compared with.

    Args:
        names: of the peers.
        python: the interpreter that has them.

    Raises:
        ConfigError: there is no such interpreter.
        UnavailableError: a library is not importable there, or there is no checkout.
    """
    for name in names:
        if not _importable(name, python):
            raise UnavailableError(
                f"--compare {name}: {python} cannot import it; pip install {PEERS[name]} there, or give --peers-python "
                "that of an environment that has it"
            )
    if names:
        _program()


def _program() -> Path:
    """Of the checkout that kvlink is run from, or that this is.

    Raises:
        UnavailableError: neither.
    """
    for checkout in (Path.cwd(), Path(kvlink.__file__).resolve().parent.parent):
        if (program := checkout / _PROGRAM).is_file():
            return program
    raise UnavailableError(f"--compare runs {_PROGRAM}, which a checkout of KVLink has: run it from there")


def _importable(name: str, python: str) -> bool:
    look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({name!r}) is None)"
    try:
        return subprocess.run([python, "-c", look], capture_output=True, check=False).returncode == 0  # noqa: S603 - ours
    except OSError as error:
        raise ConfigError(f"--peers-python {python} cannot be run: {error.strerror}") from error


def compare(names: tuple[str, ...], *, run_bytes: int, transport: str, python: str, quiet: bool) -> Comparison:
    """Run the comparison at the length of the bench's runs; its table goes to standard error.

    Args:
        names: of the peers.
        run_bytes: rounded to a size that all of them take.
        transport: KVLink's.
        python: the interpreter that has the peers.
        quiet: do not say what is waited for.

    Raises:
        KVLinkError: it ended badly; its own words are above.
    """
    fragment = min(max(run_bytes, _LEAST_BYTES), _MOST_BYTES) // _LEAST_BYTES * _LEAST_BYTES
    command = [
        sys.executable, str(_program()), "--fragments", f"{fragment >> 10}K", "--rounds", str(_ROUNDS),
        "--pool-mib", str(_POOL_MIB), "--move-mib", str(_MOVE_MIB),
        "--contenders", ",".join(("kvlink", *names, "limit")),
        "--scenes", "tcp" if transport == "stream" else "host", "--transports", transport,
        "--peers-python", python, "--json", "-",
    ]  # fmt: skip
    if not quiet:
        sys.stderr.write(f"comparing with {', '.join(names)} in fragments of {fragment >> 10} KiB: a minute or two\n")
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)  # noqa: S603 - our own program, and figures
    if done.returncode != 0:
        raise KVLinkError(f"the comparison with peers ended with code {done.returncode}; its own words are above")
    return msgspec.json.decode(done.stdout, type=_Record).sizes[0]
