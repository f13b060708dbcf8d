"""The limit: the same bytes moved bare, without leases, digests or protocol, over the same plan."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Protocol

import msgspec

from kvlink import limits
from kvlink.cli.bench.case import Case
from kvlink.memory import Caches
from kvlink.plan import CopyPlan, Leg
from kvlink.relayout import move_local, native_plan
from kvlink.transports.base import RegionKey
from kvlink.transports.ucx import UcxProbe
from kvlink.wire import WireKey

_FRAGMENT_BYTES: Final = limits.DEFAULT_CHUNK_LEAVES * limits.LEAF_BYTES
"""A link cuts runs at the ends of chunks; so does the raw loop."""

Plans = Sequence[tuple[Leg, CopyPlan]]


class Prober(Protocol):
    """A target worker's way to move bytes bare."""

    async def move(self, plans: Plans) -> float:
        """Move all legs; seconds of the slowest target rank, from its first byte asked for to its last one landed."""

    def close(self) -> None:
        """Let go of everything. Idempotent."""


class LocalProber:
    """Copies inside one process, in one thread. ``sources`` and ``targets`` are by rank position."""

    def __init__(self, sources: Mapping[int, Caches], targets: Mapping[int, Caches]) -> None:
        self._kept = (sources, targets)  # below are addresses alone
        self._sources = {position: _local(caches) for position, caches in sources.items()}
        self._targets = {position: _local(caches) for position, caches in targets.items()}

    async def move(self, plans: Plans) -> float:
        """See `Prober.move`."""
        made = [(leg, native_plan(plan)) for leg, plan in plans]

        def copy() -> float:
            start = time.monotonic()
            for leg, plan in made:
                move_local(plan, self._sources[leg.source], self._targets[leg.target])
            return time.monotonic() - start

        return await asyncio.to_thread(copy)

    def close(self) -> None:
        """See `Prober.close`."""


class _ProbeCard(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """What a raw probe needs to read one source rank."""

    address: bytes
    keys: tuple[WireKey, ...]


class ProbeServer:
    """A source worker's side: one serving probe a rank, with its own registration of the rank's memory."""

    def __init__(self, case: Case, ranks: Sequence[Caches]) -> None:
        self._probes = [_probe(case, caches) for caches in ranks]
        self._regions = [len(caches.regions) for caches in ranks]
        for probe in self._probes:
            probe.serve()

    def addresses(self) -> tuple[bytes, ...]:
        """One a rank."""
        return tuple(
            msgspec.msgpack.encode(_ProbeCard(probe.address(), tuple(_key(probe, region) for region in range(regions))))
            for probe, regions in zip(self._probes, self._regions, strict=True)
        )

    def close(self) -> None:
        """Stop serving. Idempotent."""
        for probe in self._probes:
            probe.close()


class UcxProber:
    """A target worker's side: one probe a leg, and one thread a target rank, as its link has.

    Args:
        case: says which UCX and which of its transports.
        legs: of the whole bench.
        targets: this worker's ranks, by rank position.
        addresses: of all source ranks, in rank order.
    """

    def __init__(
        self, case: Case, legs: Sequence[Leg], targets: Mapping[int, Caches], addresses: Sequence[bytes]
    ) -> None:
        self._probes: dict[tuple[int, int], UcxProbe] = {}
        self._threads = ThreadPoolExecutor(len(targets), thread_name_prefix="bench-probe")
        for leg in legs:
            if leg.target in targets:
                card = msgspec.msgpack.decode(addresses[leg.source], type=_ProbeCard)
                probe = _probe(case, targets[leg.target])
                self._probes[leg.source, leg.target] = probe
                probe.connect(card.address)
                for key in card.keys:
                    probe.import_key(RegionKey(region=key.region, address=key.address, length=key.length, key=key.key))

    async def move(self, plans: Plans) -> float:
        """See `Prober.move`. The legs of one rank follow each other, as its one thread would have them."""
        by_target: dict[int, list[tuple[UcxProbe, CopyPlan]]] = defaultdict(list)
        for leg, plan in plans:
            by_target[leg.target].append((self._probes[leg.source, leg.target], plan))
        loop = asyncio.get_running_loop()
        return max(
            await asyncio.gather(*(loop.run_in_executor(self._threads, _get, own) for own in by_target.values()))
        )

    def close(self) -> None:
        """See `Prober.close`."""
        self._threads.shutdown()
        for probe in self._probes.values():
            probe.close()


def _get(work: Sequence[tuple[UcxProbe, CopyPlan]]) -> float:
    return sum(probe.get(plan, max_run_bytes=_FRAGMENT_BYTES) for probe, plan in work)


def _probe(case: Case, caches: Caches) -> UcxProbe:
    probe = UcxProbe(ucx_origin=case.ucx_origin, ucx_tls=case.ucx_tls)
    for index, region in enumerate(caches.regions):
        probe.register(index, region.address, region.length)
    return probe


def _key(probe: UcxProbe, region: int) -> WireKey:
    key = probe.export_key(region)
    return WireKey(region=key.region, address=key.address, length=key.length, key=key.key)


def _local(caches: Caches) -> list[tuple[int, int]]:
    """A rank's regions as `kvlink.relayout.move_local` takes them."""
    return [(region.address, region.length) for region in caches.regions]
