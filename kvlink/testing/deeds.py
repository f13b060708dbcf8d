"""What the protocol model's ranks do to their world: leases, messages, crashes."""

from __future__ import annotations

from typing import Any

from kvlink import protocol, wire
from kvlink.layout import Frontier
from kvlink.protocol import TargetPart, TargetPhase
from kvlink.testing.invariants import end_hold, report_source
from kvlink.testing.worlds import (
    DIGEST,
    INCREMENT,
    Announced,
    Fetch,
    Packet,
    Target,
    Told,
    World,
    put_source,
    put_target,
    soil,
)


def do_plainly(world: World, index: int, action: Any) -> World:  # noqa: ANN401
    """The source's deeds that lead to no further step."""
    held = world.sources[index]
    match action:
        case protocol.Send(peer=peer, message=message):
            world = send(world, held.peer, peer, message)
        case protocol.SendLease(peer=peer, attempt=attempt):
            world = send(world, held.peer, peer, lease_of(attempt))
        case protocol.SendAnnounce(peer=peer):
            world = send(world, held.peer, peer, Announced(stream=held.part is not None and held.part.digest is None))
        case protocol.EndHold():
            world = end_hold(world, index)
        case protocol.Report(end=end):
            world = report_source(world, index, end)
        case _:
            world = expose(world, index, action)
    return world


def expose(world: World, index: int, action: Any) -> World:  # noqa: ANN401
    """What may be read of a source, and what its targets are told of a stream."""
    held = world.sources[index]
    match action:
        case protocol.Expose(peer=peer, attempt=attempt, stream=False):
            world = put_source(world, index, held._replace(leases=held.leases | {(peer, attempt)}))
        case protocol.ExposeIncrement(peer=peer, attempt=attempt, number=number):
            told = Told(attempt, number, action.frontier.tokens, action.sealed)
            leases = held.leases | {(peer, attempt + INCREMENT * number)}
            world = put_source(world, index, held._replace(leases=leases, told=held.told | {(peer, told)}))
        case protocol.SendAdvance(peer=peer, attempt=attempt, number=number):
            for told in (one for to, one in held.told if (to, one.attempt, one.number) == (peer, attempt, number)):
                world = send(world, held.peer, peer, advance_of(told))
        case protocol.Withdraw(peer=peer, attempt=attempt):
            leases = frozenset(one for one in held.leases if (one[0], one[1] % INCREMENT) != (peer, attempt))
            told_others = frozenset(one for one in held.told if (one[0], one[1].attempt) != (peer, attempt))
            world = put_source(world, index, held._replace(leases=leases, told=told_others))
    return world


def renewed(world: World, peer: str, attempt: int) -> bool:
    """Whether the target still has a use for this lease, and so renews it."""
    return any(
        fetch.part is not None and fetch.end is None and attempt % INCREMENT in fetch.attempts
        for rank in world.targets
        if rank.peer == peer and rank.alive
        for fetch in rank.fetches
    )


def reading(world: World, fetch: Fetch, peer: str, read: int) -> Fetch:
    """A read is started; of blocks that are something else by now, it reads rubbish."""
    soiled = any(held.freed for held in world.sources if held.peer == peer)
    dirty = fetch.dirty | {read} if soiled else fetch.dirty
    return fetch._replace(reading=fetch.reading | {read}, dirty=dirty)


def streams(world: World, peer: str, attempt: int) -> bool:
    """Whether an attempt reads a stream."""
    fetches = (fetch for rank in world.targets if rank.peer == peer for fetch in rank.fetches)
    return any(fetch.stream and attempt in fetch.attempts for fetch in fetches)


def advance_of(told: Told) -> wire.Advance:
    """The words for an increment."""
    frontier, sealed = Frontier.whole(told.tokens), DIGEST if told.sealed else None
    return wire.Advance(
        attempt=told.attempt, number=told.number, frontier=frontier, blocks=(), total_bytes=0, sealed=sealed
    )


def lapse(world: World, index: int, lease: tuple[str, int]) -> World:
    """The transport knows at once, the machine when the notice comes."""
    held = world.sources[index]
    world = put_source(world, index, held._replace(leases=held.leases - {lease}))
    peer, read = lease
    return world._replace(notices=world.notices | {(held.peer, protocol.LeaseLapsed(peer, read % INCREMENT))})


def crash_target(world: World, index: int, siblings: list[str]) -> World:
    """The process is gone, its memory with it. Its peers hear silence, or proof, in either order, at any time."""
    rank = world.targets[index]
    dead = rank._replace(alive=False, fetches=tuple(fetch._replace(part=None) for fetch in rank.fetches))
    peers = [*(held.peer for held in world.sources), *siblings]
    lost = {(peer, protocol.PeerLost(rank.peer)) for peer in peers}
    proof = {(peer, protocol.PeerDead(rank.peer)) for peer in peers}
    world = put_target(world, index, dead)._replace(notices=world.notices | lost | proof)
    return world._replace(group=None) if rank.peer == "D0" else world


def crash_source(world: World, index: int) -> World:
    """As `_crash_target`; whoever reads from it reads rubbish from now on."""
    held = world.sources[index]
    dead = held._replace(alive=False, part=None, leases=frozenset(), parked=(), told=frozenset(), freed=True)
    lost = {(rank.peer, protocol.PeerLost(held.peer)) for rank in world.targets}
    proof = {(rank.peer, protocol.PeerDead(held.peer)) for rank in world.targets}
    return soil(put_source(world, index, dead)._replace(notices=world.notices | lost | proof), held.peer)


def has_part(rank: Target, number: int) -> bool:
    """Whether a rank still has the part of this number among its siblings'."""
    parts = (fetch.part for fetch in rank.fetches if fetch.part is not None)
    return any(part.siblings is not None and part.siblings.number == number for part in parts)


def unless_closed(part: TargetPart) -> TargetPart | None:
    """What of a part is kept."""
    return None if part.phase is TargetPhase.CLOSED else part


def lease_of(attempt: int) -> wire.Lease:
    """The words for a lease."""
    capacity = wire.Capacity(leased_blocks=0, active_legs=0, max_legs=1)
    return wire.Lease(attempt=attempt, lease_seconds=1.0, total_bytes=0, capacity=capacity)


def send(world: World, sender: str, receiver: str, message: Any) -> World:  # noqa: ANN401
    """A message is on its way, once."""
    return world._replace(packets=world.packets | {Packet(sender, receiver, message)})


def sends(world: World, sender: str, actions: tuple[protocol.Send, ...]) -> World:
    """Several are."""
    for action in actions:
        world = send(world, sender, action.peer, action.message)
    return world
