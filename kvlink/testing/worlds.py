"""What the explorer's world is made of: ranks, blocks with a memory, leases, packets in flight.

All but the machines is a model with as little as shows a fault: a read that ran while its source blocks were freed
is *dirty*, whatever the transport says of it; a packet is in flight once or not at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from kvlink import protocol, wire
from kvlink.protocol import End, Group, SourcePart, TargetPart

T = TypeVar("T")
KEY = "request"
DIGEST = "digest"
OPENING = "opening"
"""Of a stream's beginning."""
INCREMENT = 1000
"""What sets an increment's read and lease apart from its attempt's: number n of attempt a is a + n times this."""
FAST = protocol.Timing(
    commit_ttl_seconds=4.0,
    drift_margin_seconds=1.0,
    repeat_seconds=3.0,
    max_repeat_seconds=6.0,
    park_seconds=4.0,
    rest_seconds=4.0,
    tell_seconds=7.0,
    retry_hold_seconds=4.0,
    lost_hold_seconds=2.0,
    retire_seconds=12.0,
    gather_seconds=4.0,
    group_seconds=24.0,
)
"""Few repeats, so few states; the relations between the clocks are those of the defaults."""
UNREPEATED = replace(FAST, repeat_seconds=100.0, max_repeat_seconds=100.0)
"""For scenarios that lose nothing, where a repeat is one more copy of a message and many more states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What may happen.

    Attributes:
        sources: source ranks; every target rank reads them all.
        readers: target ranks of the first engine.
        faults: how many of the faults below may happen.
        kinds: which of ``lose duplicate fail lapse cancel crash silence elsewhere late`` may happen. *elsewhere*: the
            gateway turns to another engine with the same offer, without a word to the first. *late*: a message, a
            read or a cut-off takes as long as it likes, if ``prompt``.
        prompt: what is on its way arrives, in any order, before the clock moves on or the gateway turns elsewhere,
            unless a fault made it late. Else all may take as long as it likes, and worlds are far larger for it.
        fetches: how often one target rank may fetch, each time after the last one failed.
        push: the target delivers a ticket, the source announces; else the target just asks.
        sealed: the prefill is done when the first ask can come.
        chunks: a prefill that is streamed comes in so many, the last with its seal; 0: it is not.
        together: the ranks of the first engine become visible together; its first one coordinates.
        checks: numbers of the invariants that are checked; a negative control looks past those that it breaks first.
    """

    sources: int = 1
    readers: int = 1
    faults: int = 1
    kinds: frozenset[str] = frozenset({"lose", "duplicate", "fail", "lapse", "cancel", "crash", "silence", "elsewhere"})
    fetches: int = 1
    prompt: bool = False
    push: bool = False
    sealed: bool = True
    chunks: int = 0
    together: bool = False
    timing: protocol.Timing = FAST
    deadline_seconds: float = 8.0
    ttl_seconds: float = 8.0
    checks: str = "12345678AC"


_OVER = -1.0
"""When a part began that has ended: it no longer matters."""


class Asked(NamedTuple):
    """`wire.Ask`, less what the model does not need. ``stream``: it knows a stream's beginning only."""

    attempt: int
    stream: bool = False


class Announced(NamedTuple):
    """`wire.Announce`."""

    stream: bool = False


class Expected(NamedTuple):
    """`wire.Expect`."""


class Packet(NamedTuple):
    """A message in flight."""

    sender: str
    receiver: str
    message: Any


class Told(NamedTuple):
    """One increment of a stream: where it ends, and whether the seal came with it."""

    attempt: int
    number: int
    tokens: int
    sealed: bool


class Fetch(NamedTuple):
    """One target part, and what the world knows of it. ``told``: increments whose reads were started."""

    began: float
    part: TargetPart | None
    attempts: frozenset[int]
    reading: frozenset[int] = frozenset()
    cutting: frozenset[int] = frozenset()
    landed: frozenset[int] = frozenset()
    dirty: frozenset[int] = frozenset()
    blocks: str = "reserved"
    end: End | None = None
    stream: bool = False
    told: frozenset[Told] = frozenset()


class Target(NamedTuple):
    """A target rank's incarnation."""

    peer: str
    engine: str
    alive: bool = True
    proven_dead: bool = False
    fetches: tuple[Fetch, ...] = ()


class Source(NamedTuple):
    """A source rank. ``told``: what its targets were told of a stream, by peer; ``computed``: its chunks so far."""

    peer: str
    part: SourcePart | None
    leases: frozenset[tuple[str, int]] = frozenset()
    parked: tuple[tuple[str, Asked], ...] = ()
    told: frozenset[tuple[str, Told]] = frozenset()
    computed: int = 0
    freed: bool = False
    end: End | None = None
    alive: bool = True


class World(NamedTuple):
    """One state of everything.

    Attributes:
        now: both sides' clock.
        faults: how many may still happen.
        packets: in flight.
        late: packets, news, and attempts whose read or cut-off is on its way, that no longer hold the clock.
        notices: ``(who, event)``: what a rank will come to know without a message, now or later.
        sources: the source ranks.
        targets: the target ranks' incarnations.
        readers: how many must install for the sources to be done.
        group: what the coordinating rank knows, if parts become visible together.
        gatherings: how many it has begun.
        wrong: what invariants have been broken so far.
    """

    now: float
    faults: int
    packets: frozenset[Packet]
    notices: frozenset[tuple[str, Any]]
    sources: tuple[Source, ...]
    targets: tuple[Target, ...]
    readers: int = 1
    wrong: tuple[str, ...] = ()
    late: frozenset[Any] = frozenset()
    group: Group | None = None
    gatherings: int = 0


def put_target(world: World, index: int, rank: Target) -> World:
    """One target rank replaced."""
    return world._replace(targets=(*world.targets[:index], rank, *world.targets[index + 1 :]))


def put_fetch(world: World, index: int, number: int, fetch: Fetch) -> World:
    """One target part replaced."""
    rank = world.targets[index]
    fetches = (*rank.fetches[:number], fetch, *rank.fetches[number + 1 :])
    return put_target(world, index, rank._replace(fetches=fetches))


def put_source(world: World, index: int, held: Source) -> World:
    """One source rank replaced."""
    return world._replace(sources=(*world.sources[:index], held, *world.sources[index + 1 :]))


def soil(world: World, peer: str) -> World:
    """The blocks of ``peer`` get other content: what is being read from them is not what it was."""
    number = [held.peer for held in world.sources].index(peer)
    for index, rank in enumerate(world.targets):
        for place, fetch in enumerate(rank.fetches):
            soiled = {attempt for attempt in fetch.reading if attempt % 10 == number}
            world = put_fetch(world, index, place, fetch._replace(dirty=fetch.dirty | soiled))
    return world


def textless(value: T) -> T:
    """The same value without the texts of its errors: nobody parses them, and states must not differ in words."""
    if isinstance(value, wire.ErrorInfo):
        return replace(value, message="")
    if isinstance(value, tuple):
        items = tuple(map(textless, value))
        return value if all(after is item for after, item in zip(items, value, strict=True)) else items  # type: ignore[return-value]  # no other kind is in a state
    if isinstance(value, Struct):
        fields = {name: getattr(value, name) for name in value.__struct_fields__}
        plain = {name: after for name, field in fields.items() if (after := textless(field)) is not field}
        return replace(value, **plain) if plain else value
    return value


def canonical(world: World) -> World:
    """Drop what can make no difference any more, so that states that differ in nothing else are one."""
    alive = {held.peer for held in world.sources if held.alive}
    together = world.gatherings > 0
    alive |= {rank.peer for rank in world.targets if rank.alive and (together or _listening(rank))}
    targets = tuple(_with_settled(rank) for rank in world.targets)
    proofs = {notice for notice in world.notices if isinstance(notice[1], protocol.PeerDead)}
    notices = frozenset(notice for notice in world.notices if notice[0] in alive or notice in proofs)
    return world._replace(
        packets=frozenset(packet for packet in world.packets if packet.receiver in alive),
        late=world.late and world.late & {*world.packets, *on_the_way(world), *notices},
        notices=notices,
        targets=targets,
    )


def on_the_way(world: World) -> list[int]:
    """Attempts whose read, or cut-off, will end."""
    fetches = [fetch for rank in world.targets if rank.alive for fetch in rank.fetches]
    return [attempt for fetch in fetches for attempt in fetch.reading | fetch.cutting]


_ORDER = (*wire.Stage, *wire.Verdict)


def overtakes(world: World, packet: Packet) -> bool:
    """Whether a word between a rank and its coordinator would arrive before an earlier one of the same connection.

    It can, if the earlier is late: its connection was lost, and made anew.
    """
    if not isinstance(packet.message, wire.Stands | wire.Decided):
        return False
    others = (other for other in world.packets if other[:2] == packet[:2] and other not in world.late)
    return any(type(other.message) is type(packet.message) and _rank(other) < _rank(packet) for other in others)


def _rank(packet: Packet) -> int:
    message: wire.Stands | wire.Decided = packet.message
    said = message.stage if isinstance(message, wire.Stands) else message.verdict
    return 1000 * message.part + _ORDER.index(said)


def _listening(rank: Target) -> bool:
    return not rank.fetches or any(fetch.part is not None for fetch in rank.fetches)


def _with_settled(rank: Target) -> Target:
    if all(_is_settled(fetch, alive=rank.alive) for fetch in rank.fetches):
        return rank
    fetches = tuple(fetch if _is_settled(fetch, alive=rank.alive) else _settled(fetch) for fetch in rank.fetches)
    return rank._replace(fetches=fetches)


def _is_settled(fetch: Fetch, *, alive: bool) -> bool:
    return (alive and fetch.end is None) or fetch.began == _OVER


def _settled(fetch: Fetch) -> Fetch:
    """An ended part only tells: what it once waited for no longer sets it apart."""
    part = fetch.part
    if part is not None:
        legs = tuple(replace(leg, prepared_at=None, root=None, stream=None) for leg in part.legs)
        part = replace(part, deadline_at=0.0, failure=None, legs=legs)
    return fetch._replace(part=part, began=_OVER, landed=frozenset(), dirty=frozenset(), told=frozenset())
