"""The invariants of docs/protocol.md as checks on a world. A finding begins with the invariant's number.

Two follow from the eight and say sooner what went wrong: *A*, the two sides' ends agree; *C*, the source's clock ends
last, so nothing is installed that it has given up.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvlink.protocol import End
from kvlink.protocol.source_leg import LegPhase
from kvlink.testing.worlds import Fetch, Target, World, put_fetch, put_source, soil


def install(world: World, index: int, number: int) -> World:
    """The target hands its blocks to the engine."""
    rank = world.targets[index]
    fetch = rank.fetches[number]
    world = note(world, *_wrong_install(world, rank, fetch))
    return put_fetch(world, index, number, fetch._replace(blocks="installed"))


def _wrong_install(world: World, rank: Target, fetch: Fetch) -> Iterator[str]:
    if fetch.blocks != "reserved":
        yield f"1: {rank.peer} installs blocks that are {fetch.blocks}"
    if fetch.landed < fetch.attempts or fetch.reading:
        yield f"3: {rank.peer} installs while {set(fetch.attempts - fetch.landed)} have not landed"
    if fetch.dirty:
        yield f"8: {rank.peer} installs what {set(fetch.dirty)} read from blocks after their lease"
    if others := [other for other in installed(world) if other[0] != rank.engine]:
        yield f"2: {rank.peer} installs, and {others} have installed"
    for held in world.sources:
        leg = held.part.leg(rank.peer) if held.part is not None else None
        phase = leg.phase if leg is not None and leg.attempt in fetch.attempts else None
        if held.alive and phase is LegPhase.LEASED:
            yield f"3: {rank.peer} installs, and {held.peer} has not committed"
        elif held.alive and phase is not LegPhase.COMMITTED:
            yield f"C: {rank.peer} installs, and {held.peer} has given up: the leg is {phase and phase.value}"


def installed(world: World) -> list[str]:
    """Ranks that hold the request's KV, as far as anybody can know."""
    return [
        rank.peer
        for rank in world.targets
        if not rank.proven_dead
        for fetch in rank.fetches
        if fetch.blocks == "installed"
    ]


def release(world: World, index: int, number: int) -> World:
    """The target takes its reservation back."""
    rank = world.targets[index]
    fetch = rank.fetches[number]
    if fetch.blocks != "reserved":
        world = note(world, f"4: {rank.peer} releases blocks that are {fetch.blocks}")
    if moving := fetch.reading | fetch.cutting:
        world = note(world, f"1: {rank.peer} releases blocks into which {set(moving)} may still land")
    return put_fetch(world, index, number, fetch._replace(blocks="released"))


def report_target(world: World, index: int, number: int, end: End) -> World:
    """The target part's end is told."""
    rank = world.targets[index]
    fetch = rank.fetches[number]
    if fetch.end is not None:
        world = note(world, f"4: {rank.peer} reports {end} after {fetch.end}")
    if fetch.reading or fetch.cutting:
        world = note(world, f"4: {rank.peer} reports {end} before the cut-off")
    if (end is End.DONE) != (fetch.blocks == "installed"):
        world = note(world, f"3: {rank.peer} reports {end} with blocks {fetch.blocks}")
    return put_fetch(world, index, number, fetch._replace(end=end))


def report_source(world: World, index: int, end: End) -> World:
    """The source part's end is told."""
    held = world.sources[index]
    if held.end is not None:
        world = note(world, f"4: {held.peer} reports {end} after {held.end}")
    if not held.freed:
        world = note(world, f"4: {held.peer} reports {end} and keeps its blocks")
    return put_source(world, index, held._replace(end=end))


def end_hold(world: World, index: int) -> World:
    """The source takes its blocks back: from now on they hold something else."""
    held = world.sources[index]
    if held.freed:
        world = note(world, f"4: {held.peer} frees its blocks twice")
    if held.leases:
        world = note(world, f"4: {held.peer} frees blocks under the leases {set(held.leases)}")
    return soil(put_source(world, index, held._replace(freed=True)), held.peer)


def unsettled(world: World) -> str | None:
    """What must hold once everything has come to rest."""
    holders = installed(world)
    for held in world.sources:
        if held.alive and (held.end is None or not held.freed or held.leases):
            return f"5: {held.peer} rests with end {held.end}, leases {set(held.leases)}, freed: {held.freed}"
        if held.end in (End.FAILED, End.CANCELLED, End.EXPIRED) and len(holders) >= world.readers:
            return f"A: {held.peer} says {held.end}, and {holders} have installed"
        if held.end is End.DONE and not any(fetch.blocks == "installed" for fetch in _fetches(world)):
            return f"A: {held.peer} says {held.end}, and nobody has installed"
    for rank in world.targets:
        for fetch in rank.fetches if rank.alive else ():
            if fetch.end is None or fetch.blocks == "reserved" or fetch.part is not None:
                return f"5: {rank.peer} rests with end {fetch.end}, blocks {fetch.blocks}, part {fetch.part}"
    return None


def overdue(world: World, bound_seconds: float) -> str | None:
    """A part that should have ended by now. While its cut-off is awaited it is draining, and counted as such."""
    for rank in world.targets:
        for fetch in rank.fetches if rank.alive else ():
            if fetch.end is None and not fetch.cutting and world.now > fetch.began + bound_seconds:
                return f"5: {rank.peer} has not ended {bound_seconds:g} s after its ask"
    return None


def _fetches(world: World) -> list[Fetch]:
    return [fetch for rank in world.targets for fetch in rank.fetches]


def note(world: World, *findings: str) -> World:
    """What was found wrong."""
    return world._replace(wrong=(*world.wrong, *findings))
