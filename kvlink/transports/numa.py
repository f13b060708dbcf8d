"""Where memory and devices lie on a machine of several NUMA nodes, and which CPUs are near them.

A thread that copies between nodes gets half the bandwidth or less. So a link keeps its threads to the node of its
cache, where that is one node and this process may run there. Reads ``/sys``; on one node nothing happens.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Final

from kvlink._native import _kvlink

ROOT: Final = Path("/")
_SAMPLES_PER_REGION: Final = 3
_PCI_ID_CHARS: Final = 32


def nodes(root: Path = ROOT) -> dict[int, frozenset[int]]:
    """CPUs of each node that has any, by its number.

    Args:
        root: where ``/sys`` is.
    """
    found = {}
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        try:
            cpus = cpu_list((folder / "cpulist").read_text("ascii"))
            if cpus:
                found[int(folder.name.removeprefix("node"))] = cpus
        except (OSError, ValueError):  # not a node, or one that is being taken away
            continue
    return dict(sorted(found.items()))


def cpu_list(text: str) -> frozenset[int]:
    """The kernel's way to write a set of CPUs.

    >>> sorted(cpu_list("0-2,8"))
    [0, 1, 2, 8]
    """
    cpus: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def nodes_of_memory(regions: Iterable[tuple[int, int]]) -> frozenset[int]:
    """Nodes on which some pages of regions, ``(address, length)`` each, lie; empty where the kernel does not say."""
    found = set()
    for address, length in regions:
        for sample in range(_SAMPLES_PER_REGION):
            found.add(_kvlink.memory_node(address + (length - 1) * sample // (_SAMPLES_PER_REGION - 1)))
    return frozenset(found - {-1})


def node_of_gpu(library: str, ordinal: int, root: Path = ROOT) -> int | None:
    """The node that a GPU is attached to; ``None`` where nobody says.

    Args:
        library: the CUDA driver, by name or path.
        ordinal: of the GPU, as the driver counts.
        root: where ``/sys`` is.
    """
    try:
        cuda = ctypes.CDLL(library)
        device, name = ctypes.c_int(), ctypes.create_string_buffer(_PCI_ID_CHARS)
        if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), ordinal):
            return None
        if cuda.cuDeviceGetPCIBusId(name, len(name), device):
            return None
        path = root / "sys/bus/pci/devices" / name.value.decode("ascii").lower() / "numa_node"
        node = int(path.read_text("ascii"))
    except (OSError, AttributeError, ValueError):
        return None
    return node if node >= 0 else None


def near(
    used: Collection[int], machine: Mapping[int, frozenset[int]], allowed: Collection[int]
) -> tuple[frozenset[int] | None, str]:
    """The CPUs that threads are to keep to.

    Args:
        used: nodes of the cache.
        machine: CPUs of each node.
        allowed: CPUs that the process may use now.

    Returns:
        The CPUs, or ``None`` to leave threads as they are; and why, in words.
    """
    if len(machine) <= 1:
        return None, "one NUMA node"
    if not used:
        return None, "the kernel does not say on which NUMA node the cache lies"
    if len(used) > 1:
        return None, f"the cache lies on NUMA nodes {_list(used)}: threads stay where the scheduler puts them"
    (node,) = used
    cpus = machine.get(node, frozenset()) & set(allowed)
    if not cpus:
        return None, f"the cache lies on NUMA node {node}, none of whose CPUs this process may use"
    return cpus, f"threads kept to {len(cpus)} CPUs of NUMA node {node}, where the cache lies"


def allowed_cpus() -> frozenset[int]:
    """CPUs that this process may use."""
    return frozenset(os.sched_getaffinity(0))


def _list(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))
