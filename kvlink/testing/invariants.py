"""The invariants of docs/protocol.md as checks on a world. A finding begins with the invariant's number.

Two follow from the eight and say sooner what went wrong: *A*, the two sides' ends agree; *C*, the source's clock ends
last, so nothing is installed that it has given up.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvlink.protocol import End
from kvlink.protocol.source_leg import LegPhase
from kvlink.testing.worlds import INCREMENT, Fetch, Target, World, put_fetch, put_source, soil


def install(world: World, index: int, number: int) -> World:
    """The target hands its blocks to the engine."""
    rank = world.targets[index]
    fetch = rank.fetches[number]
    world = note(world, *_wrong_install(world, rank, fetch))
    alone = fetch.part is None or fetch.part.siblings is None
    return put_fetch(world, index, number, fetch._replace(blocks="installed" if alone else "hidden"))


def show(world: World, index: int, number: int) -> World:
    """The target lets its engine see what all its siblings have installed."""
    rank = world.targets[index]
    fetch = rank.fetches[number]
    if fetch.blocks != "hidden":
        world = note(world, f"1: {rank.peer} shows blocks that are {fetch.blocks}")
    for other in _engine(world, rank):
        if not any(_ready(part) for part in other.fetches):
            world = note(world, f"3: {rank.peer} shows its part, and {other.peer} has not installed its own")
    return put_fetch(world, index, number, fetch._replace(blocks="installed"))


def _engine(world: World, rank: Target) -> list[Target]:
    return [other for other in world.targets if other.engine == rank.engine]


def _ready(fetch: Fetch) -> bool:
    """It can become visible, or has, or gave up not knowing."""
    return fetch.blocks in ("hidden", "installed") or fetch.end is End.INDETERMINATE


def _wrong_install(world: World, rank: Target, fetch: Fetch) -> Iterator[str]:
    if fetch.blocks != "reserved":
        yield f"1: {rank.peer} installs blocks that are {fetch.blocks}"
    missing = _missing(world, fetch) if fetch.stream else fetch.attempts - fetch.landed
    if missing or fetch.reading:
        yield f"3: {rank.peer} installs while {set(missing)} have not landed"
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


def _missing(world: World, fetch: Fetch) -> set[int]:
    """Attempts of a stream that have not all that the seal covers, each increment once and in its place."""
    return {attempt for attempt in fetch.attempts if not _is_whole(world, fetch, attempt)}


def _is_whole(world: World, fetch: Fetch, attempt: int) -> bool:
    told = sorted(one for one in fetch.told if one.attempt == attempt)
    if [one.number for one in told] != [*range(1, len(told) + 1)] or not told or not told[-1].sealed:
        return False
    if any(attempt + INCREMENT * one.number not in fetch.landed for one in told):
        return False
    ends = [one.tokens for one in told]
    return ends == sorted(ends) and ends[-1] == world.sources[attempt % 10].computed


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
    if fetch.blocks not in ("reserved", "hidden"):
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
            if fetch.end is None or fetch.blocks in ("reserved", "hidden") or fetch.part is not None:
                return f"5: {rank.peer} rests with end {fetch.end}, blocks {fetch.blocks}, part {fetch.part}"
    return _apart(world)


def _apart(world: World) -> str | None:
    """Parts that should have become visible together, and did not."""
    if world.group is not None:
        return f"5: the coordinator rests with {world.group}"
    if not world.gatherings:
        return None
    ranks = [rank for rank in world.targets if rank.engine == world.targets[0].engine]
    visible = [rank.peer for rank in ranks if any(fetch.blocks == "installed" for fetch in rank.fetches)]
    for rank in ranks if visible else ():
        ends = [fetch.end for fetch in rank.fetches]
        if rank.alive and rank.peer not in visible and End.INDETERMINATE not in ends:
            return f"3: {visible} are visible, and {rank.peer} says {ends}"
    if ranks[0].alive and ranks[0].peer in visible and len(visible) < len(ranks):
        return f"3: the coordinator says done, and of its ranks only {visible} are visible"
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
