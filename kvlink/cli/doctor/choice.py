"""What a link here would do by itself: which transport between two ranks of this host, and where its threads run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from kvlink import limits
from kvlink.cli.doctor.findings import Fact, Finding
from kvlink.cli.doctor.machine import ROOT
from kvlink.config import AUTO, Config
from kvlink.errors import KVLinkError
from kvlink.link.choice import candidates, choose
from kvlink.link.making import make_transports
from kvlink.plan import Shape, bytes_text
from kvlink.transports import numa
from kvlink.transports.base import Transport
from kvlink.transports.shared import default_copy_threads
from kvlink.wire import TransportCard, WireKey

_RUN_BYTES = (1024, 16 * 1024, 256 * 1024)


def look_at_choice(config: Config, *, measured: bool, root: Path = ROOT) -> Iterator[Finding]:
    """Open what a link would open, and ask it about two ranks of this host.

    Args:
        config: the link's.
        measured: measure this machine for it, as a link does; else typical speeds are taken.
        root: where ``/sys`` is.
    """
    try:
        transports = make_transports(config if measured else replace(config, calibrate=False), None)
    except KVLinkError as error:
        yield Finding(
            check="link.transport", severity="fatal", text=f"no link can be opened: {error}",
            remedy="leave transports at auto, or name only what this machine has",
        )  # fmt: skip
        return
    try:
        for run_bytes in _RUN_BYTES:
            yield _choice(transports, config, run_bytes, measured=measured)
    finally:
        for transport in transports:
            transport.close()
    yield _threads(config, root)


def _choice(transports: list[Transport], config: Config, run_bytes: int, *, measured: bool) -> Finding:
    shape = Shape(limits.NOMINAL_TRANSFER_BYTES, limits.NOMINAL_TRANSFER_BYTES // run_bytes)
    cards = [_card(transport) for transport in transports]
    common = candidates(transports, cards, shape, integrity=config.integrity)
    name, reason = choose(common, shape, by_cost=config.transports == (AUTO,))
    measured = measured and config.calibrate
    facts: dict[str, Fact] = {"run_bytes": run_bytes, "transport": name, "measured": measured}
    for one in common:
        for way in one.ways:
            facts[f"{one.name}.{way.path}_seconds"] = way.seconds
    told = reason if measured else f"{reason}; by typical speeds, none were measured"
    text = f"two ranks of this host, runs of {bytes_text(run_bytes)}: {name} ({told})"
    return Finding(check="link.transport", severity="ok" if name else "fatal", text=text, facts=facts, remedy=None)


def _card(transport: Transport) -> TransportCard:
    """As a rank would tell whose cache an engine allocated."""
    told = transport.capabilities()
    key = WireKey(region=0, address=1, length=1, key=b"an engine's own")
    return TransportCard(
        name=told.name, version=told.version, origin=told.origin, address=transport.address(), keys=(key,)
    )


def _threads(config: Config, root: Path) -> Finding:
    """What `kvlink.link.making.keep_near` would do for a cache on the node that this process runs on; who copies."""
    machine = numa.nodes(root)
    allowed = numa.allowed_cpus()
    copiers = default_copy_threads(len(allowed)) if config.copy_threads is None else config.copy_threads
    beside = f"{copiers} copy threads beside the shared transport's own"
    here = [node for node, cpus in machine.items() if cpus & allowed]
    facts: dict[str, Fact] = {"nodes": len(machine), "kept": config.numa and len(machine) > 1, "copy_threads": copiers}
    if len(machine) <= 1:
        text = f"one NUMA node: threads run where they will; {beside}"
        return Finding(check="link.threads", severity="ok", text=text, facts=facts)
    if not config.numa:
        text = f"{len(machine)} NUMA nodes, and numa is off: threads may run far from the cache"
        return Finding(check="link.threads", severity="slow", text=text, remedy="leave numa on", facts=facts)
    _, said = numa.near(here[:1], machine, allowed)
    text = f"{len(machine)} NUMA nodes; of a cache on node {here[0] if here else '?'}: {said}; {beside}"
    return Finding(check="link.threads", severity="ok", text=text, facts=facts)
