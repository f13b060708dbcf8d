"""The invariants of docs/protocol.md, by number, as checks on a world: what broke, or ``None``."""

from __future__ import annotations

from kvlink.protocol import End
from kvlink.protocol.source_leg import LegPhase
from kvlink.testing.worlds import Fetch, Target, World, put_fetch, put_source, soil


def wrong_install(world: World, rank: Target, fetch: Fetch) -> str | None:
    """What an install breaks, if anything."""
    if fetch.blocks != "reserved":
        return f"1, 4: {rank.peer} installs blocks that are {fetch.blocks}"
    if fetch.landed < fetch.attempts or fetch.reading:
        return f"3: {rank.peer} installs while {set(fetch.attempts - fetch.landed)} have not landed"
    if fetch.dirty:
        return f"8: {rank.peer} installs what {set(fetch.dirty)} read from blocks after their lease"
    if others := [other for other in installed(world) if other[0] != rank.engine]:
        return f"2: {rank.peer} installs, and {others} have installed"
    for held in world.sources:
        leg = held.part.leg(rank.peer) if held.part is not None else None
        standing = leg is not None and leg.attempt in fetch.attempts and leg.phase is LegPhase.COMMITTED
        if held.alive and not standing:
            return f"2: {rank.peer} installs, and the commit of {held.peer} does not stand: {leg and leg.phase.value}"
    return None


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
    wrong = world.wrong
    if fetch.blocks != "reserved":
        wrong = wrong or f"4: {rank.peer} releases blocks that are {fetch.blocks}"
    if fetch.reading or fetch.cutting:
        wrong = (
            wrong or f"1: {rank.peer} releases blocks into which {set(fetch.reading | fetch.cutting)} may still land"
        )
    return put_fetch(world, index, number, fetch._replace(blocks="released"))._replace(wrong=wrong)


def report_target(world: World, index: int, number: int, end: End) -> World:
    """The target part's end is told."""
    rank = world.targets[index]
    fetch = rank.fetches[number]
    wrong = world.wrong
    if fetch.end is not None:
        wrong = wrong or f"4: {rank.peer} reports {end} after {fetch.end}"
    if fetch.reading or fetch.cutting:
        wrong = wrong or f"4: {rank.peer} reports {end} before the cut-off"
    if (end is End.DONE) != (fetch.blocks == "installed"):
        wrong = wrong or f"3: {rank.peer} reports {end} with blocks {fetch.blocks}"
    return put_fetch(world, index, number, fetch._replace(end=end))._replace(wrong=wrong)


def report_source(world: World, index: int, end: End) -> World:
    """The source part's end is told."""
    held = world.sources[index]
    wrong = world.wrong
    if held.end is not None:
        wrong = wrong or f"4: {held.peer} reports {end} after {held.end}"
    if not held.freed:
        wrong = wrong or f"4: {held.peer} reports {end} and keeps its blocks"
    return put_source(world, index, held._replace(end=end))._replace(wrong=wrong)


def end_hold(world: World, index: int) -> World:
    """The source takes its blocks back: from now on they hold something else."""
    held = world.sources[index]
    wrong = world.wrong
    if held.freed:
        wrong = wrong or f"4: {held.peer} frees its blocks twice"
    if held.leases:
        wrong = wrong or f"4: {held.peer} frees blocks under the leases {set(held.leases)}"
    world = put_source(world, index, held._replace(freed=True))._replace(wrong=wrong)
    return soil(world, held.peer)


def unsettled(world: World) -> str | None:
    """What must hold once everything has come to rest."""
    holders = installed(world)
    for held in world.sources:
        if held.alive and (held.end is None or not held.freed or held.leases):
            return f"4, 5: {held.peer} rests with end {held.end}, leases {set(held.leases)}, freed: {held.freed}"
        if held.end in (End.FAILED, End.CANCELLED, End.EXPIRED) and len(holders) >= world.readers:
            return f"2: {held.peer} says {held.end}, and {holders} have installed"
        if held.end is End.DONE and not any(fetch.blocks == "installed" for fetch in _fetches(world)):
            return f"3: {held.peer} says {held.end}, and nobody has installed"
    for rank in world.targets:
        for fetch in rank.fetches if rank.alive else ():
            if fetch.end is None or fetch.blocks == "reserved" or fetch.part is not None:
                return f"4, 5: {rank.peer} rests with end {fetch.end}, blocks {fetch.blocks}, part {fetch.part}"
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
