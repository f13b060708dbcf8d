"""The protocol's machines in their world, as a model for the explorer: everything that may happen, and in any order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from kvlink import errors, protocol, wire
from kvlink.layout import Frontier
from kvlink.protocol import End, SourcePhase, group, source, target
from kvlink.testing.deeds import (
    crash_source,
    crash_target,
    do_plainly,
    has_part,
    lapse,
    reading,
    renewed,
    send,
    sends,
    streams,
    unless_closed,
)
from kvlink.testing.explorer import Move
from kvlink.testing.invariants import (
    install,
    note,
    overdue,
    release,
    report_target,
    show,
    unsettled,
)
from kvlink.testing.worlds import (
    DIGEST,
    INCREMENT,
    KEY,
    OPENING,
    Announced,
    Asked,
    Expected,
    Fetch,
    Packet,
    Scenario,
    Source,
    Target,
    Told,
    World,
    canonical,
    on_the_way,
    overtakes,
    put_fetch,
    put_source,
    put_target,
    textless,
)


class Step(NamedTuple):
    """A `Move` between worlds."""

    label: str
    world: World
    fault: bool = False


class ProtocolModel:
    """All interleavings of a scenario."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self._steps: dict[Any, tuple[Any, tuple[Any, ...]]] = {}
        self._numbers: dict[Any, int] = {}
        self._values: list[Any] = []
        longest = scenario.deadline_seconds + scenario.timing.park_seconds
        self._bound = longest + scenario.timing.commit_ttl_seconds + scenario.timing.drift_margin_seconds
        self._bound += scenario.timing.tell_seconds if scenario.together else 0.0
        self._bound += (scenario.chunks + 1) * scenario.timing.rest_seconds if scenario.chunks else 0.0

    def start(self) -> World:
        """Every source holds; the first engine's ranks have asked, or delivered their tickets."""
        plan = self.scenario
        sources = tuple(
            Source(
                f"S{index}",
                source.begin(
                    KEY,
                    digest=DIGEST if plan.sealed else None,
                    ttl_seconds=plan.ttl_seconds,
                    deadline_seconds=plan.deadline_seconds,
                    now=0.0,
                    timing=plan.timing,
                ),
            )
            for index in range(plan.sources)
        )
        targets = tuple(Target(f"D{index}", "D") for index in range(plan.readers))
        world = World(0.0, plan.faults, frozenset(), frozenset(), sources, targets, plan.readers)
        for index, rank in enumerate(targets):
            if plan.push:
                tickets = {Packet(rank.peer, held.peer, Expected()) for held in sources}
                world = world._replace(packets=world.packets | tickets)
            else:
                world = self._fetch(world, index)
        return world

    def pack(self, world: World) -> tuple[Any, ...]:
        """Its pieces' numbers: few pieces are new, and what is remembered of a state is a few integers."""
        pieces = (world.packets, world.late, world.notices, world.wrong, world.sources, world.targets, world.group)
        return (world.now, world.faults, world.gatherings, *(self._number(piece) for piece in pieces))

    def unpack(self, packed: Any) -> World:  # noqa: ANN401
        """The world of these numbers."""
        now, faults, gatherings, *numbers = packed
        packets, late, notices, wrong, sources, targets, group = (self._values[number] for number in numbers)
        return World(
            now, faults, packets, notices, sources, targets, self.scenario.readers, wrong, late, group, gatherings
        )

    def _number(self, piece: Any) -> int:  # noqa: ANN401
        number = self._numbers.get(piece)
        if number is None:
            number = self._numbers[piece] = len(self._values)
            self._values.append(piece)
        return number

    # --- moves ------------------------------------------------------------------------------------------------

    def moves(self, world: World) -> Iterator[Move]:
        """Everything that may happen next."""
        for label, after, fault in self._moves(world):
            yield Move(label, canonical(after), fault)

    def _moves(self, world: World) -> Iterator[Step]:
        for packet in world.packets:
            if self.scenario.prompt and overtakes(world, packet):
                continue
            rest = world._replace(packets=world.packets - {packet}, late=world.late - {packet})
            yield Step(f"{_name(packet)} arrives", self._deliver(rest, packet))
        for notice in world.notices:
            rest = world._replace(notices=world.notices - {notice}, late=world.late - {notice})
            yield Step(f"{notice[0]} learns: {_short(notice[1])}", self._notify(rest, *notice))
        for index, rank in enumerate(world.targets):
            yield from self._target_moves(world, index, rank) if rank.alive else ()
        for index, held in enumerate(world.sources):
            yield from self._source_moves(world, index, held) if held.alive else ()
        yield from self._time(world)
        if world.faults:
            spent = world._replace(faults=world.faults - 1)
            for kind, label, after in self._faults(spent):
                if kind in self.scenario.kinds:
                    yield Step(f"FAULT {label}", after, fault=True)

    def _target_moves(self, world: World, index: int, rank: Target) -> Iterator[Step]:
        for number, fetch in enumerate(rank.fetches):
            for read in fetch.reading:
                ended = fetch._replace(reading=fetch.reading - {read}, landed=fetch.landed | {read})
                landed = put_fetch(world, index, number, ended)
                increment, attempt = divmod(read, INCREMENT)
                yield Step(
                    f"{rank.peer} read {read} lands",
                    self._to_target(landed, index, protocol.ReadEnded(attempt, b"rootroot", number=increment)),
                )
            for attempt in fetch.cutting:
                reading = frozenset(read for read in fetch.reading if read % INCREMENT != attempt)
                cut = fetch._replace(cutting=fetch.cutting - {attempt}, reading=reading)
                done = put_fetch(world, index, number, cut)
                yield Step(
                    f"{rank.peer} cut-off of {attempt} done",
                    self._to_target(done, index, protocol.CutOffDone(attempt)),
                )
        failed = all(fetch.end not in (None, End.DONE) for fetch in rank.fetches)
        if rank.fetches and failed and len(rank.fetches) < self.scenario.fetches:
            again = self._fetch(world, index, stream=rank.fetches[-1].stream)
            yield Step(f"{rank.peer} fetches again", again)

    def _source_moves(self, world: World, index: int, held: Source) -> Iterator[Step]:
        if held.part is not None and held.part.phase in (SourcePhase.OPEN, SourcePhase.STREAMING):
            computed = put_source(world, index, held._replace(computed=held.computed + 1))
            event: Any = protocol.Seal(DIGEST)
            if self.scenario.chunks:
                frontier = Frontier.whole(held.computed + 1)
                last = held.computed + 1 == self.scenario.chunks
                event = protocol.Seal(DIGEST, frontier, OPENING) if last else protocol.Advanced(frontier, OPENING)
            yield Step(f"{held.peer}: {type(event).__name__}", self._to_source(computed, index, event))
        for lease in held.leases:
            if not renewed(world, *lease):
                yield Step(f"{held.peer} lease {lease[1]} lapses, unrenewed", lapse(world, index, lease))

    def _time(self, world: World) -> Iterator[Step]:
        fetches = [fetch for rank in world.targets if rank.alive for fetch in rank.fetches]
        timers = [target.next_timer(fetch.part) for fetch in fetches if fetch.part is not None]
        timers += [source.next_timer(held.part) for held in world.sources if held.part is not None]
        timers += [] if world.group is None else [group.next_timer(world.group)]
        due = [timer for timer in timers if timer is not None]
        if not due or self._busy(world):
            return
        before = world = world._replace(now=max(min(due), world.now))
        for index, rank in enumerate(world.targets):
            world = self._to_target(world, index, protocol.Tick()) if rank.alive else world
        for index, held in enumerate(world.sources):
            world = self._to_source(world, index, protocol.Tick()) if held.alive else world
        world = self._to_group(world, protocol.Tick())
        if world == before and min(due) <= world.now:
            world = note(world, f"5: the timer of {min(due):g} is due, and nothing comes of it")
        yield Step(f"the clock comes to {world.now:g}", world)

    def _busy(self, world: World) -> set[Any]:
        """What holds the clock."""
        return {*world.packets, *on_the_way(world), *_news(world)} - world.late if self.scenario.prompt else set()

    def _faults(self, world: World) -> Iterator[tuple[str, str, World]]:
        """Kind, label and outcome of all that need not happen."""
        if self.scenario.prompt:
            for moving in self._busy(world):
                yield "late", f"{_what(moving)} is late", world._replace(late=world.late | {moving})
        for packet in world.packets:
            yield "lose", f"{_name(packet)} is lost", world._replace(packets=world.packets - {packet})
            yield "duplicate", f"{_name(packet)} arrives, and will again", self._deliver(world, packet)
        for index, rank in enumerate(world.targets):
            yield from self._target_faults(world, index, rank) if rank.alive else ()
        for index, held in enumerate(world.sources):
            yield from self._source_faults(world, index, held) if held.alive else ()
        if all(rank.engine != "E" for rank in world.targets) and not self._busy(world):
            elsewhere = world._replace(targets=(*world.targets, Target("E0", "E")))
            yield "elsewhere", "the gateway turns to engine E", self._fetch(elsewhere, len(world.targets))

    def _target_faults(self, world: World, index: int, rank: Target) -> Iterator[tuple[str, str, World]]:
        for number, fetch in enumerate(rank.fetches):
            for read in fetch.reading:
                error = protocol.error_info(errors.TransportError, "the read failed")
                ended = put_fetch(world, index, number, fetch._replace(reading=fetch.reading - {read}))
                increment, attempt = divmod(read, INCREMENT)
                event = protocol.ReadEnded(attempt, error=error, number=increment)
                yield "fail", f"{rank.peer} read {read} fails", self._to_target(ended, index, event)
        if any(fetch.part is not None and fetch.end is None for fetch in rank.fetches):
            cancel = protocol.Cancel(protocol.fail(End.CANCELLED, errors.CancelledError, "by the embedder"))
            yield "cancel", f"{rank.peer} cancels", self._to_target(world, index, cancel)
        yield "crash", f"{rank.peer} crashes", crash_target(world, index, self._siblings(world, rank))
        for peer in (*(held.peer for held in world.sources), *self._siblings(world, rank)):
            lost = world._replace(notices=world.notices | {(peer, protocol.PeerLost(rank.peer))})
            yield "silence", f"{peer} hears nothing of {rank.peer}", lost

    def _source_faults(self, world: World, index: int, held: Source) -> Iterator[tuple[str, str, World]]:
        for lease in held.leases:
            if renewed(world, *lease):
                yield "lapse", f"{held.peer} lease {lease[1]} lapses", lapse(world, index, lease)
        if held.end is None:
            cancel = protocol.Cancel(protocol.fail(End.CANCELLED, errors.CancelledError, "by the source's engine"))
            yield "cancel", f"{held.peer} cancels", self._to_source(world, index, cancel)
        yield "crash", f"{held.peer} crashes", crash_source(world, index)
        for rank in world.targets:
            lost = world._replace(notices=world.notices | {(rank.peer, protocol.PeerLost(held.peer))})
            yield "silence", f"{rank.peer} hears nothing of {held.peer}", lost

    def _fetch(self, world: World, index: int, *, stream: bool = False) -> World:
        rank = world.targets[index]
        first = 100 * (index + 1) + 10 * len(rank.fetches)
        legs = [(held.peer, first + number) for number, held in enumerate(world.sources)]
        part, actions = target.begin(
            KEY,
            legs,
            deadline_seconds=self.scenario.deadline_seconds,
            now=world.now,
            timing=self.scenario.timing,
            siblings=self._membership(rank, first),
            stream=stream,
        )
        fetch = Fetch(world.now, part, frozenset(attempt for _, attempt in legs), stream=stream)
        world = put_target(world, index, rank._replace(fetches=(*rank.fetches, fetch)))
        return self._do_target(world, index, len(rank.fetches), actions)

    def _membership(self, rank: Target, number: int) -> protocol.Membership | None:
        if not self.scenario.together or rank.engine != "D":
            return None
        return protocol.Membership(key=KEY, coordinator="D0", number=number, content=DIGEST)

    def _siblings(self, world: World, rank: Target) -> list[str]:
        """Whom of its engine it speaks with."""
        if not self.scenario.together:
            return []
        return [other.peer for other in world.targets if other is not rank and "D0" in (rank.peer, other.peer)]

    # --- delivery ---------------------------------------------------------------------------------------------

    def _deliver(self, world: World, packet: Packet) -> World:
        for index, held in enumerate(world.sources):
            if held.peer == packet.receiver and held.alive:
                return self._source_hears(world, index, packet.sender, packet.message)
        for index, rank in enumerate(world.targets):
            if rank.peer == packet.receiver and rank.alive:
                if isinstance(packet.message, Announced):
                    return world if rank.fetches else self._fetch(world, index, stream=packet.message.stream)
                if isinstance(packet.message, wire.Stands):
                    return self._stands(world, packet.sender, packet.message)
                if isinstance(packet.message, wire.Decided) and not has_part(rank, packet.message.part):
                    return sends(world, rank.peer, protocol.membership.answer_unknown(packet.sender, packet.message))
                return self._to_target(world, index, protocol.Received(packet.sender, packet.message))
        return world

    def _source_hears(self, world: World, index: int, peer: str, message: Any) -> World:  # noqa: ANN401
        held = world.sources[index]
        event: Any
        match message:
            case Asked():
                event = self._ask(peer, message)
            case Expected():
                event = protocol.TicketArrived(peer)
            case wire.Landed():
                return self._landed(world, index, peer, message)
            case wire.Prepared(attempt=attempt):
                streams = message.increments > 0
                world = self._landed(world, index, peer, message) if streams else world
                held_now = streams or (peer, attempt) in held.leases
                counts = message.increments, message.content
                event = protocol.PreparedArrived(peer, attempt, message.root, held_now, b"rootroot", *counts)
            case _:
                event = protocol.Received(peer, message)
        return self._to_source(world, index, event)

    def _landed(self, world: World, index: int, peer: str, message: wire.Landed | wire.Prepared) -> World:
        """Each increment that it tells of for the first time, with what the transport last knows of its lease."""
        held, attempt = world.sources[index], message.attempt
        leg = None if held.part is None else held.part.leg(peer)
        stream = None if leg is None or leg.attempt != attempt else leg.stream
        numbers = () if stream is None else range(stream.landed + 1, min(message.increments, stream.exposed) + 1)
        for number in numbers:
            lease = (peer, attempt + INCREMENT * number)
            held = world.sources[index]
            kept = lease in held.leases
            world = put_source(world, index, held._replace(leases=held.leases - {lease}))
            landed = protocol.LandedArrived(peer, attempt, number, kept, b"rootroot" if kept else None)
            world = self._to_source(world, index, landed)
        if not numbers and isinstance(message, wire.Landed):
            world = self._to_source(world, index, protocol.LandedArrived(peer, attempt, message.increments))
        return world

    def _ask(self, peer: str, asked: Asked) -> protocol.AskArrived:
        engine, readers = (peer[0], self.scenario.readers) if peer[0] == "D" else (peer[0], 1)
        digest = OPENING if asked.stream else DIGEST
        return protocol.AskArrived(peer=peer, engine=engine, attempt=asked.attempt, digest=digest, readers=readers)

    def _notify(self, world: World, peer: str, event: Any) -> World:  # noqa: ANN401
        """A local notice: silence, proof of death, a lapse."""
        if isinstance(event, protocol.PeerDead):
            targets = tuple(
                rank._replace(proven_dead=True) if rank.peer == event.peer else rank for rank in world.targets
            )
            world = world._replace(targets=targets)
        for index, held in enumerate(world.sources):
            if held.peer == peer and held.alive:
                return self._to_source(world, index, event)
        for index, rank in enumerate(world.targets):
            if rank.peer == peer and rank.alive:
                world = self._to_target(world, index, event)
                return self._to_group(world, event) if peer == "D0" else world
        return world

    def _stands(self, world: World, peer: str, message: wire.Stands) -> World:
        """A rank tells the coordinator where its part stands."""
        if group.begins(world.group, peer, message):
            number, peers = world.gatherings + 1, [f"D{index}" for index in range(self.scenario.readers)]
            timing = self.scenario.timing
            begun = group.begin(KEY, number, "D0", peers, now=world.now, timing=timing, after=world.group)
            world = world._replace(group=begun, gatherings=number)
        if world.group is None:
            return send(world, "D0", peer, group.answer_unknown(peer, message).message)
        return self._to_group(world, protocol.Stood(peer, message))

    def _to_group(self, world: World, event: Any) -> World:  # noqa: ANN401
        if world.group is None:
            return world
        after, actions = self._stepped(group, world.group, event, world.now)
        world = world._replace(group=None if after.phase is protocol.GroupPhase.CLOSED else after)
        for action in actions:
            if action.peer == "D0":
                world = self._to_target(world, 0, protocol.Received("D0", action.message))
            else:
                world = send(world, "D0", action.peer, action.message)
        return world

    def _to_target(self, world: World, index: int, event: Any) -> World:  # noqa: ANN401
        for number, fetch in enumerate(world.targets[index].fetches):
            if fetch.part is None:
                continue
            part, actions = self._stepped(target, fetch.part, event, world.now)
            if part is fetch.part and not actions:
                continue
            kept = world.targets[index].fetches[number]._replace(part=unless_closed(part))
            world = self._do_target(put_fetch(world, index, number, kept), index, number, actions)
        return world

    def _to_source(self, world: World, index: int, event: Any) -> World:  # noqa: ANN401
        held = world.sources[index]
        if held.part is None:
            if isinstance(event, protocol.AskArrived):
                refusal = wire.Refused(
                    attempt=event.attempt, error=protocol.ended_error(KEY, held.end or End.DONE, None)
                )
                return send(world, held.peer, event.peer, refusal)
            message = event.message if isinstance(event, protocol.Received) else event
            peer = getattr(event, "peer", "")
            return sends(world, held.peer, protocol.answer_unknown(peer, message))
        part, actions = self._stepped(source, held.part, event, world.now)
        if part is held.part and not actions:
            return world
        closed = part.phase is SourcePhase.CLOSED
        world = put_source(world, index, held._replace(part=None if closed else part))
        return self._do_source(world, index, actions)

    def _stepped(self, machine: Any, part: Any, event: Any, now: float) -> tuple[Any, tuple[Any, ...]]:  # noqa: ANN401
        """A machine's step. It is a function of these values, and few of them are new."""
        key = (part, event, now)
        known = self._steps.get(key)
        if known is None:
            known = self._steps[key] = textless(machine.step(part, event, now))
        return known

    # --- deeds ------------------------------------------------------------------------------------------------

    def _do_target(  # noqa: C901 - one case an action
        self, world: World, index: int, number: int, actions: tuple[Any, ...]
    ) -> World:
        rank = world.targets[index]
        own: list[wire.Stands] = []  # what a rank tells itself is heard after the step, and never lost
        for action in actions:
            fetch = world.targets[index].fetches[number]
            match action:
                case protocol.Send(peer=peer, message=wire.Stands() as stands) if peer == rank.peer:
                    own.append(stands)
                case protocol.Send(peer=peer, message=message):
                    world = send(world, rank.peer, peer, message)
                case protocol.SendAsk(peer=peer, attempt=attempt):
                    world = send(world, rank.peer, peer, Asked(attempt, fetch.stream))
                case protocol.StartRead(peer=peer, attempt=attempt):
                    world = put_fetch(world, index, number, reading(world, fetch, peer, attempt))
                case protocol.StartIncrement(peer=peer, attempt=attempt, advance=said):
                    told = Told(attempt, said.number, said.frontier.tokens, said.sealed is not None)
                    fetch = reading(world, fetch, peer, attempt + INCREMENT * said.number)
                    world = put_fetch(world, index, number, fetch._replace(told=fetch.told | {told}))
                case protocol.CutOff(attempt=attempt):
                    world = put_fetch(world, index, number, fetch._replace(cutting=fetch.cutting | {attempt}))
                case protocol.Install():
                    world = self._to_target(install(world, index, number), index, protocol.InstallDone())
                case protocol.Show():
                    world = show(world, index, number)
                case protocol.ReleaseBlocks():
                    world = release(world, index, number)
                case protocol.Report(end=end):
                    world = report_target(world, index, number, end)
        for stands in own:
            world = self._stands(world, rank.peer, stands)
        return world

    def _do_source(self, world: World, index: int, actions: tuple[Any, ...]) -> World:
        for action in actions:
            match action:
                case protocol.ParkAsk(peer=peer, attempt=attempt):
                    held = world.sources[index]
                    spots = tuple(spot for spot in held.parked if spot[0] != peer)
                    asked = Asked(attempt, streams(world, peer, attempt))
                    world = put_source(world, index, held._replace(parked=(*spots, (peer, asked))))
                    parked = wire.Parked(attempt=attempt, park_seconds=self.scenario.timing.park_seconds)
                    world = send(world, held.peer, peer, parked)
                case protocol.Unpark():
                    held = world.sources[index]
                    world = put_source(world, index, held._replace(parked=()))
                    for peer, asked in held.parked:
                        world = self._to_source(world, index, self._ask(peer, asked))
                case _:
                    world = do_plainly(world, index, action)
        return world

    # --- checks -----------------------------------------------------------------------------------------------

    def broken(self, world: World) -> str | None:
        """The invariants that hold at every moment."""
        late = overdue(world, self._bound)
        findings = world.wrong if late is None else (*world.wrong, late)
        return next((finding for finding in findings if finding[0] in self.scenario.checks), None)

    def unsettled(self, world: World) -> str | None:
        """The invariants of a world at rest."""
        finding = unsettled(world)
        return finding if finding is not None and finding[0] in self.scenario.checks else None


def _name(packet: Packet) -> str:
    return f"{packet.sender}->{packet.receiver} {_short(packet.message)}"


def _news(world: World) -> list[tuple[str, Any]]:
    """What is soon known; proof of a death may come at any time."""
    return [notice for notice in world.notices if not isinstance(notice[1], protocol.PeerDead)]


def _what(moving: Any) -> str:  # noqa: ANN401
    if isinstance(moving, Packet):
        return _name(moving)
    return f"the read or cut-off of {moving}" if isinstance(moving, int) else f"the news of {_short(moving[1])}"


def _short(value: Any) -> str:  # noqa: ANN401
    attempt = getattr(value, "attempt", None)
    about = getattr(value, "peer", None) if attempt is None else attempt
    return type(value).__name__ if about is None else f"{type(value).__name__}({about})"
