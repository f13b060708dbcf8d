"""The machine as the kernel describes it: processors, memory, limits. Reads ``/proc`` and ``/sys``, changes nothing."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvlink.cli.doctor.findings import Finding

ROOT: Final = Path("/")
_FEW_CORES: Final = 4
"""Below this many, two movers, a forward pass and an event loop share cores."""
_USUAL_LOCKED_BYTES: Final = 64 * 1024 * 1024
"""A locked-memory limit below this cannot register a cache with an RDMA device."""


def look_at_machine(*, root: Path = ROOT, rdma: bool = False) -> Iterator[Finding]:
    """Look at processors, memory and limits.

    Args:
        root: where ``/proc`` and ``/sys`` are.
        rdma: whether there is a device that pins the memory it reads and writes.
    """
    yield _processors(root)
    yield _numa(root)
    yield _memory(root)
    yield _locked_memory(rdma)
    yield _anonymous_huge_pages(root)
    yield _shared_huge_pages(root)
    yield _reserved_huge_pages(root)


def _processors(root: Path) -> Finding:
    allowed, present = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    quota = cgroup_cpus(root)
    usable = min(allowed, quota or allowed)
    facts = {"allowed_cpus": allowed, "present_cpus": present, "cgroup_cpus": quota}
    text = f"{_count(present, 'CPU')}, {allowed} of them allowed by affinity"
    if quota is not None:
        text += f", a cgroup quota of {quota:g}"
    if usable >= _FEW_CORES:
        return Finding(check="cpu.cores", severity="ok", text=text, facts=facts)
    remedy = "each moving lane takes a core while it moves: give the worker more, or set stream_lanes to 1"
    return Finding(check="cpu.cores", severity="note", text=text, remedy=remedy, facts=facts)


def _numa(root: Path) -> Finding:
    nodes = {}
    for folder in sorted((root / "sys/devices/system/node").glob("node[0-9]*")):
        nodes[int(folder.name.removeprefix("node"))] = _cpu_list(read(folder / "cpulist"))
    used = sorted(node for node, cpus in nodes.items() if cpus & os.sched_getaffinity(0))
    facts = {"nodes": len(nodes), "allowed_nodes": len(used)}
    if len(nodes) <= 1:
        return Finding(check="cpu.numa", severity="ok", text="one NUMA node", facts=facts)
    if len(used) == 1:
        return Finding(check="cpu.numa", severity="ok", text=f"{len(nodes)} NUMA nodes, bound to one", facts=facts)
    remedy = "start each worker on the node of its memory, GPU and NIC: numactl --cpunodebind=N --membind=N"
    text = f"{len(nodes)} NUMA nodes, and this process may run on {len(used)}"
    return Finding(check="cpu.numa", severity="slow", text=text, remedy=remedy, facts=facts)


def _memory(root: Path) -> Finding:
    info = _meminfo(root)
    total, available, limit = info.get("MemTotal", 0), info.get("MemAvailable", 0), cgroup_memory_bytes(root)
    facts = {"total_bytes": total, "available_bytes": available, "cgroup_bytes": limit}
    text = f"{total / 1e9:.1f} GB, {available / 1e9:.1f} GB available"
    if limit is not None and limit < total:
        text += f"; this cgroup may use {limit / 1e9:.1f} GB"
    return Finding(check="memory.size", severity="ok", text=text, facts=facts)


def _locked_memory(rdma: bool) -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    facts = {"soft_bytes": soft, "hard_bytes": hard}
    if soft == resource.RLIM_INFINITY or _may_lock_anything():
        return Finding(check="memory.locked", severity="ok", text="locked memory is not limited", facts=facts)
    text = f"at most {soft / 2**20:.0f} MiB may be locked (ulimit -l)"
    if soft >= _USUAL_LOCKED_BYTES or not rdma:
        if not rdma:
            text += "; only RDMA locks what it registers, and there is none"
        return Finding(check="memory.locked", severity="ok", text=text, facts=facts)
    remedy = "ulimit -l unlimited, LimitMEMLOCK=infinity in a unit, --ulimit memlock=-1 for a container"
    return Finding(check="memory.locked", severity="fatal", text=text, remedy=remedy, facts=facts)


def _may_lock_anything() -> bool:
    """Whether the process has CAP_IPC_LOCK."""
    for line in read(Path("/proc/self/status")).splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> 14 & 1)
    return False


def _anonymous_huge_pages(root: Path) -> Finding:
    mode = _chosen(read(root / "sys/kernel/mm/transparent_hugepage/enabled"))
    check, facts = "pages.huge", {"mode": mode}
    if mode in {"always", "madvise"}:
        text = f"transparent huge pages: {mode}; pools that KVLink allocates ask for them"
        if mode == "madvise":
            text += ", an engine's own allocator may not"
        return Finding(check=check, severity="ok", text=text, facts=facts)
    remedy = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled (as root): CMA runs at half its speed without"
    return Finding(
        check=check, severity="slow", text=f"transparent huge pages: {mode or 'not in this kernel'}", remedy=remedy,
        facts=facts,
    )  # fmt: skip


def _shared_huge_pages(root: Path) -> Finding:
    mode = _chosen(read(root / "sys/kernel/mm/transparent_hugepage/shmem_enabled"))
    check, facts = "pages.shared", {"mode": mode}
    if mode in {"always", "within_size", "advise", "force"}:
        return Finding(check=check, severity="ok", text=f"huge pages for shared memory: {mode}", facts=facts)
    remedy = "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled (as root), where workers share a host"
    text = f"huge pages for shared memory: {mode or 'not in this kernel'}"
    return Finding(check=check, severity="note", text=text, remedy=remedy, facts=facts)


def _reserved_huge_pages(root: Path) -> Finding:
    info = _meminfo(root)
    total, free, size = (info.get(name, 0) for name in ("HugePages_Total", "HugePages_Free", "Hugepagesize"))
    facts = {"reserved": total, "free": free, "page_bytes": size}
    text = f"{total} huge pages reserved (hugetlb), {free} free; KVLink needs none"
    return Finding(check="pages.reserved", severity="ok", text=text, facts=facts)


# --- reading --------------------------------------------------------------------------------------------------------


def read(path: Path) -> str:
    """What a file of the kernel's says, or "" where there is none or it may not be read."""
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def cgroup_cpus(root: Path) -> float | None:
    """Processors' worth of time that this process's cgroup may use; ``None``: no limit is stated."""
    quota, _, period = read(_cgroup(root, "") / "cpu.max").partition(" ")
    if not quota:
        quota = read(_cgroup(root, "cpu") / "cpu.cfs_quota_us")
        period = read(_cgroup(root, "cpu") / "cpu.cfs_period_us")
    if not quota.isdigit() or not period.isdigit() or not int(period):
        return None
    return int(quota) / int(period)


def cgroup_memory_bytes(root: Path) -> int | None:
    """Memory that this process's cgroup may use; ``None``: no limit is stated."""
    limit = read(_cgroup(root, "") / "memory.max") or read(_cgroup(root, "memory") / "memory.limit_in_bytes")
    return int(limit) if limit.isdigit() else None


def _cgroup(root: Path, controller: str) -> Path:
    """The folder of this process's cgroup: of version 2 for "", else of that controller of version 1."""
    for line in read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller == controllers or (controller and controller in controllers.split(",")):
            own = root / "sys/fs/cgroup" / controller / path.lstrip("/")
            # In a container the path is the host's, and its own cgroup is mounted at the top.
            return own if own.is_dir() else root / "sys/fs/cgroup" / controller
    return root / "sys/fs/cgroup" / controller


def _meminfo(root: Path) -> dict[str, int]:
    """Bytes, but for counts of pages."""
    values = {}
    for line in read(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        number, _, unit = value.strip().partition(" ")
        if number.isdigit():
            values[name] = int(number) * (1024 if unit == "kB" else 1)
    return values


def _chosen(text: str) -> str:
    """The word in brackets: how the kernel shows which of several is chosen."""
    return text.partition("[")[2].partition("]")[0]


def _cpu_list(text: str) -> set[int]:
    """``0-3,8`` as numbers."""
    cpus: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
