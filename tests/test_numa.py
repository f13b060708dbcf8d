"""Threads keep to the NUMA node of the cache: what `/sys` says, what follows, and that the threads are really moved."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from geometries import rank_spec

from kvlink import Caches, Config
from kvlink.link.making import keep_near
from kvlink.transports import numa
from kvlink.transports.stream import StreamTransport


def machine(root: Path, **nodes: str) -> Path:
    for name, cpus in nodes.items():
        folder = root / "sys/devices/system/node" / name
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus + "\n")
    return root


def threads() -> set[int]:
    return {int(task.name) for task in Path("/proc/self/task").iterdir()}


def test_nodes_are_read_as_the_kernel_writes_them(tmp_path):
    root = machine(tmp_path, node0="0-3,8", node1="4-7", node12="9", node2="")
    (tmp_path / "sys/devices/system/node/node3").mkdir()
    assert numa.nodes(root) == {0: {0, 1, 2, 3, 8}, 1: {4, 5, 6, 7}, 12: {9}}
    assert numa.nodes(tmp_path / "nothing") == {}


@pytest.mark.parametrize(
    ("used", "allowed", "cpus", "why"),
    [
        ({1}, {0, 1, 2, 3}, {2, 3}, "node 1"),
        ({1}, {0, 2}, {2}, "node 1"),
        ({1}, {0, 1}, None, "none of whose CPUs"),
        ({0, 1}, {0, 1, 2, 3}, None, "nodes 0, 1"),
        (set(), {0, 1, 2, 3}, None, "does not say"),
        ({7}, {0, 1, 2, 3}, None, "none of whose CPUs"),
    ],
)
def test_threads_go_where_the_cache_lies_if_that_is_one_node(used, allowed, cpus, why):
    found, said = numa.near(used, {0: frozenset({0, 1}), 1: frozenset({2, 3})}, allowed)
    assert found == cpus
    assert why in said
    assert numa.near(used, {0: frozenset({0, 1, 2, 3})}, allowed) == (None, "one NUMA node")


def test_the_kernel_is_asked_where_memory_lies():
    memory = np.ones(1 << 20, np.uint8)
    found = numa.nodes_of_memory([(memory.__array_interface__["data"][0], memory.nbytes)])
    assert found <= set(numa.nodes()) or not found  # a kernel may not say


def test_every_thread_that_moves_bytes_is_kept_to_the_node(tmp_path, monkeypatch):
    """All lanes' too; not where it is switched off, nor on one node."""
    ours = sorted(os.sched_getaffinity(0))
    root = machine(tmp_path / "two", node0=str(ours[0]), node1=str(ours[-1] + 1))
    monkeypatch.setattr(numa, "nodes_of_memory", lambda _regions: frozenset({0}))
    caches = Caches.standard(rank_spec())
    before = threads()
    transport = StreamTransport(lanes=3)
    try:
        movers = threads() - before
        assert len(movers) == 3
        keep_near([transport], Config(numa=False), caches, root)
        keep_near([transport], Config(), caches, machine(tmp_path / "one", node0="0-63"))
        assert all(os.sched_getaffinity(thread) == set(ours) for thread in movers)
        assert "node 0" in keep_near([transport], Config(), caches, root)
        assert all(os.sched_getaffinity(thread) == {ours[0]} for thread in movers)
        assert os.sched_getaffinity(0) == set(ours)
    finally:
        transport.close()
