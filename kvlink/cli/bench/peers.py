"""``--compare``: NIXL and Mooncake on bytes of the bench's run length, beside KVLink, by benchmarks/peers/compare.py.

The peers' programs belong to a checkout, not to the package: each runs in an environment that has its library.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Final

import kvlink
from kvlink.cli.bench.report import Report
from kvlink.errors import ConfigError, KVLinkError, UnavailableError

PEERS: Final = {"nixl": "nixl", "mooncake": "mooncake-transfer-engine-non-cuda"}
"""Module of each, and what to install."""
_PROGRAM: Final = Path(kvlink.__file__).resolve().parent.parent / "benchmarks" / "peers" / "compare.py"
_LEAST_BYTES, _MOST_BYTES = 4 * 1024, 1024 * 1024
_POOL_MIB, _MOVE_MIB, _ROUNDS = 256, 64, 9


def parse(text: str | None) -> tuple[str, ...]:
    """Read the value of ``--compare``.

    Raises:
        ConfigError: an unknown name.
    """
    names = () if text is None else tuple(name.strip() for name in text.split(","))
    if unknown := [name for name in names if name not in PEERS]:
        raise ConfigError(f"--compare names {', '.join(map(repr, unknown))}; known are {', '.join(PEERS)}")
    return names


def check(names: tuple[str, ...]) -> None:
    """Say now what cannot be compared with.

    Raises:
        UnavailableError: a library is not importable here, or there is no checkout.
    """
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise UnavailableError(f"--compare {name}: it is not importable here; pip install {PEERS[name]}")
    if names and not _PROGRAM.is_file():
        raise UnavailableError("--compare runs benchmarks/peers/compare.py, which a checkout has: run it from there")


def compare(report: Report) -> None:
    """Run the comparison at the length of the bench's runs; its table goes to standard error.

    Raises:
        KVLinkError: it ended badly; its own words are above.
    """
    fragment = min(max(report.runs.bytes, _LEAST_BYTES), _MOST_BYTES) // _LEAST_BYTES * _LEAST_BYTES
    command = [
        sys.executable, str(_PROGRAM), "--fragments", f"{fragment >> 10}K", "--rounds", str(_ROUNDS),
        "--pool-mib", str(_POOL_MIB), "--move-mib", str(_MOVE_MIB),
        "--scenes", "tcp" if report.case.transport == "stream" else "host", "--transports", report.case.transport,
    ]  # fmt: skip
    done = subprocess.run(command, stdout=sys.stderr, check=False)  # noqa: S603 - our own program, and figures
    if done.returncode != 0:
        raise KVLinkError(f"the comparison with peers ended with code {done.returncode}; its own words are above")
