"""Two network namespaces and a wire between them, to be cut and mended: what a machine's own loopback never does."""

from __future__ import annotations

import os
import subprocess
from typing import Self

ENDS = ("198.18.77.1", "198.18.77.2")
"""Of the range that is set aside for tests of networks (RFC 2544)."""
NOBODY = "02:00:00:00:00:99"
"""A hardware address that no one has."""


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Wire:
    """Two namespaces with one end each. A context manager.

    Attributes:
        inside: for each end, the command that runs another one there.
    """

    def __init__(self) -> None:
        self._names = tuple(f"kvlink-{os.getpid()}-{end}" for end in (0, 1))
        self.inside = tuple(("ip", "netns", "exec", name) for name in self._names)

    def __enter__(self) -> Self:
        try:
            for name in self._names:
                _ip("netns", "add", name)
            one, other = self._names
            _ip("-n", one, "link", "add", "wire", "type", "veth", "peer", "name", "wire", "netns", other)
            for name, address in zip(self._names, ENDS, strict=True):
                _ip("-n", name, "address", "add", f"{address}/30", "dev", "wire")
                _ip("-n", name, "link", "set", "lo", "up")
                _ip("-n", name, "link", "set", "wire", "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        for name in self._names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)

    def down(self) -> None:
        """Pull it out at one end: the other sees that too."""
        _ip("-n", self._names[0], "link", "set", "wire", "down")

    def up(self) -> None:
        _ip("-n", self._names[0], "link", "set", "wire", "up")

    def swallow(self) -> None:
        """From now on everything sent gets lost, and nobody is told: it is addressed to nobody."""
        for name, other in zip(self._names, reversed(ENDS), strict=True):
            _ip("-n", name, "neighbour", "replace", other, "lladdr", NOBODY, "dev", "wire", "nud", "permanent")

    def heal(self) -> None:
        """Undo `swallow`."""
        for name, other in zip(self._names, reversed(ENDS), strict=True):
            _ip("-n", name, "neighbour", "delete", other, "dev", "wire")


def why_no_wire() -> str | None:
    """Why this machine cannot have one, in a word for whoever reads why a test was skipped."""
    try:
        with Wire():
            return None
    except FileNotFoundError:
        return "network namespaces need the command `ip`: install iproute2"
    except subprocess.CalledProcessError as error:
        return f"`{' '.join(error.cmd)}` failed, and network namespaces need it: {error.stderr.strip()}"
