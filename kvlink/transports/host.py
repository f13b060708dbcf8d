"""Which host this is, so that two ranks can tell whether they share one."""

from __future__ import annotations

from functools import cache
from pathlib import Path


@cache
def host_id() -> str:
    """One life of this kernel: no two hosts have the same, nor one host after a restart.

    Raises:
        OSError: the kernel does not say (not Linux).
    """
    return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()


def host_id_or_none() -> str:
    """The same, or nothing, which is nobody's host."""
    try:
        return host_id()
    except OSError:
        return ""


def is_this_host(told: str) -> bool:
    """Whether a peer that told its host's id runs here."""
    return told != "" and told == host_id_or_none()
