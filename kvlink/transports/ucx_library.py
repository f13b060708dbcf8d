"""Which UCX serves, and whether two UCX can work together. Files and version numbers only; nothing is loaded here."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvlink.errors import UnavailableError

LIBUCP: Final = "libucp.so.0"
RDMA_DEVICES: Final = Path("/sys/class/infiniband")
SYSTEM_FOLDERS: Final = (
    "/usr/local/lib",
    "/opt/ucx/lib",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
)
_VERSION: Final = re.compile(r"(\d{1,6})\.(\d{1,6})(?:\.|$)")


@dataclass(frozen=True, slots=True)
class UcxLibrary:
    """A libucp to load.

    Attributes:
        name: a path, or a bare file name for the loader's own search.
        kind: ``wheel``, ``system`` or ``path``.
        reason: why it was chosen.
    """

    name: str
    kind: str
    reason: str


def choose(origin: str, *, devices: Path = RDMA_DEVICES, folders: Iterable[str] | None = None) -> UcxLibrary:
    """Turn the ``ucx_origin`` setting into a library.

    ``auto`` takes a system UCX where this machine has RDMA devices and that build supports them (the wheel is built
    without), else the wheel; ``wheel``, ``system`` or a path force one.

    Args:
        origin: ``auto``, ``wheel``, ``system``, or the path of a libucp.so.0.
        devices: folder in which the kernel lists RDMA devices.
        folders: where a system UCX may be; ``None`` is LD_LIBRARY_PATH, then the usual places.

    Raises:
        UnavailableError: there is no such library; the message says what to install.
    """
    if origin == "wheel":
        return UcxLibrary(str(_wheel()), "wheel", "asked for")
    if origin == "system":
        return UcxLibrary(LIBUCP, "system", "asked for")
    if origin != "auto":
        return UcxLibrary(str(_at(origin)), "path", "asked for")
    if not has_devices(devices):
        return UcxLibrary(str(_wheel()), "wheel", "this machine has no RDMA devices")
    system = _system_with_rdma(_folders() if folders is None else folders)
    if system is None:
        return UcxLibrary(
            str(_wheel()), "wheel", "this machine has RDMA devices, but no system UCX that supports them was found"
        )
    return UcxLibrary(str(system), "system", "it supports this machine's RDMA devices")


def has_devices(devices: Path = RDMA_DEVICES) -> bool:
    """Whether the kernel lists an RDMA device."""
    return devices.is_dir() and any(devices.iterdir())


def supports_rdma(libucp: Path) -> bool:
    """Whether this UCX was built with its InfiniBand and RoCE transports: they are files beside it."""
    return any((libucp.parent / "ucx").glob("libuct_ib*.so*"))


def incompatibility(local: str, remote: str) -> str | None:
    """Why two versions of UCX cannot work together, or ``None``.

    Both sides need the same release series (major and minor number). UCX's addresses, keys and lanes changed with
    nearly every one. Measured: 1.22 cannot use the keys of 1.13, 1.15 and 1.18; 1.19 cannot read from 1.20 over TCP;
    and a 1.22 that a 1.20 or 1.21 reads from over TCP *aborts its process* ("endpoint reconfiguration not supported").

    Args:
        local: this side's version, as UCX states it (``1.22.0``).
        remote: the peer's.
    """
    versions = []
    for side, text in (("this side", local), ("the peer", remote)):
        match = _VERSION.match(text)
        if match is None:
            return f"{side} states no UCX version but {text[:64]!r}"
        versions.append((int(match[1]), int(match[2])))
    ours, theirs = versions
    if ours == theirs:
        return None
    return (
        f"UCX {local} here and UCX {remote} at the peer cannot work together; "
        "give both sides a UCX of the same release series (setting ucx_origin)"
    )


def _wheel() -> Path:
    spec = importlib.util.find_spec("libucx")  # not imported: that would load libraries
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / "lib" / LIBUCP
        if path.exists():
            return path
    raise UnavailableError("the UCX wheel is not installed; `pip install libucx-cu12`, or set ucx_origin to 'system'")


def _at(path: str) -> Path:
    found = Path(path)
    if not found.is_file():
        raise UnavailableError(
            f"ucx_origin {path!r} is neither 'auto', 'wheel' nor 'system', nor a file; "
            f"give the path of a {LIBUCP}, or one of the three"
        )
    return found.absolute()


def _folders() -> list[str]:
    return [*filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":")), *SYSTEM_FOLDERS]


def _system_with_rdma(folders: Iterable[str]) -> Path | None:
    candidates = (Path(folder) / LIBUCP for folder in folders)
    return next((path for path in candidates if path.exists() and supports_rdma(path)), None)
