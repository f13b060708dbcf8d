"""What a container, or a kernel that is strict, keeps two workers of one host from: namespaces and tracing.

Reads ``/proc``, changes nothing. Whether one process really may read another's memory, `speed` finds out.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvlink.cli.doctor.findings import Fact, Finding
from kvlink.cli.doctor.machine import ROOT, read

_HOSTS: Final = {"pid": 0xEFFFFFFC, "ipc": 0xEFFFFFFF, "user": 0xEFFFFFFD}
"""Inodes of the namespaces that a machine starts with; the network's has no fixed one in most kernels."""
_NEEDS: Final = {"net": "the shared transport", "pid": "CMA (ucx, pulled)", "user": "the same"}
"""What two workers of a host have only within one such namespace. Of the ipc namespace KVLink uses nothing."""
_SYS_PTRACE: Final = 19
"""The bit of CAP_SYS_PTRACE."""


def look_at_containers(*, root: Path = ROOT) -> Iterator[Finding]:
    """Look at namespaces, and at what rules tracing.

    Args:
        root: where ``/proc`` is.
    """
    yield _namespaces(root)
    yield _tracing(root)


def _namespaces(root: Path) -> Finding:
    ids = {name: _namespace(root, name) for name in ("net", "pid", "ipc", "user")}
    own = [name for name, host in _HOSTS.items() if ids[name] not in (None, host)]
    facts: dict[str, Fact] = dict(ids)
    listed = ", ".join(f"{name} {number}" for name, number in ids.items() if number is not None)
    text = f"namespaces: {listed or 'the kernel does not say'}"
    if not own:
        return Finding(check="container.namespaces", severity="ok", text=text, facts=facts)
    text += f"; {' and '.join(own)} of its own, as in a container"
    needs = ", ".join(f"{name} for {what}" for name, what in _NEEDS.items())
    remedy = (
        f"two workers of a host need the same namespaces: {needs}. Compare these numbers in both, and share them: one "
        "pod with shareProcessNamespace, or --network host --pid host (hostNetwork, hostPID). --ipc host is not needed"
    )
    return Finding(check="container.namespaces", severity="note", text=text, remedy=remedy, facts=facts)


def _tracing(root: Path) -> Finding:
    """What UCX needs in order to read another process's memory (process_vm_readv) is the right to trace it."""
    scope, status = read(root / "proc/sys/kernel/yama/ptrace_scope"), read(root / "proc/self/status")
    capable, filtered = may_trace(status), is_filtered(status)
    facts: dict[str, Fact] = {
        "ptrace_scope": int(scope) if scope.isdigit() else None, "cap_sys_ptrace": capable, "seccomp_filter": filtered,
    }  # fmt: skip
    text = (
        f"tracing: ptrace_scope {scope or 'not in this kernel'}, CAP_SYS_PTRACE {'held' if capable else 'not held'}, "
        f"{'a' if filtered else 'no'} seccomp filter"
    )
    strict = scope.isdigit() and int(scope) > 0 and not capable
    if not strict and not filtered:
        return Finding(check="container.tracing", severity="ok", text=text, facts=facts)
    return Finding(
        check="container.tracing", severity="note", text=f"{text}: may forbid CMA, see cma.read",
        remedy=tracing_remedy(scope if strict else "", filtered=filtered), facts=facts,
    )  # fmt: skip


def tracing_remedy(scope: str, *, filtered: bool) -> str:
    """Ways to let one worker of a host read another's memory.

    Args:
        scope: what ``ptrace_scope`` says; "" where it forbids nothing.
        filtered: a seccomp filter is in force.
    """
    ways = []
    if scope.isdigit() and int(scope) > 0:
        ways.append(f"ptrace_scope is {scope}: sysctl kernel.yama.ptrace_scope=0, or give workers CAP_SYS_PTRACE")
    if filtered:
        ways.append("a seccomp filter is in force: --security-opt seccomp=unconfined, or --cap-add SYS_PTRACE")
    ways.append("run the workers of a host as one user and in one pid namespace (--pid host, hostPID)")
    return "; ".join(ways)


def may_trace(status: str) -> bool:
    """Whether a process with this ``/proc/self/status`` has CAP_SYS_PTRACE."""
    for line in status.splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> _SYS_PTRACE & 1)
    return False


def is_filtered(status: str) -> bool:
    """Whether one with this ``/proc/self/status`` runs under a seccomp filter, as containers do."""
    return "Seccomp:\t2" in status


def _namespace(root: Path, name: str) -> int | None:
    try:
        number = os.readlink(root / "proc/self/ns" / name).partition("[")[2].rstrip("]")
    except OSError:
        return None
    return int(number) if number.isdigit() else None
