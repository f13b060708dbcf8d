"""The protocol's machines in their world, as a model for the explorer: everything that may happen, and in any order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from kvlink import errors, protocol, wire
from kvlink.protocol import End, SourcePhase, TargetPart, TargetPhase, group, source, target
from kvlink.testing.explorer import Move
from kvlink.testing.invariants import (
    end_hold,
    install,
    note,
    overdue,
    release,
    report_source,
    report_target,
    show,
    unsettled,
)
from kvlink.testing.worlds import (
    DIGEST,
    KEY,
    Announced,
    Asked,
    Expected,
    Fetch,
    Packet,
    Scenario,
    Source,
    Target,
    World,
    canonical,
    on_the_way,
    overtakes,
    put_fetch,
    put_source,
    put_target,
    soil,
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
            for attempt in fetch.reading:
                ended = fetch._replace(reading=fetch.reading - {attempt}, landed=fetch.landed | {attempt})
                landed = put_fetch(world, index, number, ended)
                yield Step(
                    f"{rank.peer} read {attempt} lands",
                    self._to_target(landed, index, protocol.ReadEnded(attempt, b"rootroot")),
                )
            for attempt in fetch.cutting:
                cut = fetch._replace(cutting=fetch.cutting - {attempt}, reading=fetch.reading - {attempt})
                done = put_fetch(world, index, number, cut)
                yield Step(
                    f"{rank.peer} cut-off of {attempt} done",
                    self._to_target(done, index, protocol.CutOffDone(attempt)),
                )
        failed = all(fetch.end not in (None, End.DONE) for fetch in rank.fetches)
        if rank.fetches and failed and len(rank.fetches) < self.scenario.fetches:
            yield Step(f"{rank.peer} fetches again", self._fetch(world, index))

    def _source_moves(self, world: World, index: int, held: Source) -> Iterator[Step]:
        if held.part is not None and held.part.phase is SourcePhase.OPEN:
            yield Step(f"{held.peer} seals", self._to_source(world, index, protocol.Seal(DIGEST)))
        for lease in held.leases:
            if not _renewed(world, *lease):
                yield Step(f"{held.peer} lease {lease[1]} lapses, unrenewed", _lapse(world, index, lease))

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
            for attempt in fetch.reading:
                error = protocol.error_info(errors.TransportError, "the read failed")
                ended = put_fetch(world, index, number, fetch._replace(reading=fetch.reading - {attempt}))
                failed = self._to_target(ended, index, protocol.ReadEnded(attempt, error=error))
                yield "fail", f"{rank.peer} read {attempt} fails", failed
        if any(fetch.part is not None and fetch.end is None for fetch in rank.fetches):
            cancel = protocol.Cancel(protocol.fail(End.CANCELLED, errors.CancelledError, "by the embedder"))
            yield "cancel", f"{rank.peer} cancels", self._to_target(world, index, cancel)
        yield "crash", f"{rank.peer} crashes", _crash_target(world, index, self._siblings(world, rank))
        for peer in (*(held.peer for held in world.sources), *self._siblings(world, rank)):
            lost = world._replace(notices=world.notices | {(peer, protocol.PeerLost(rank.peer))})
            yield "silence", f"{peer} hears nothing of {rank.peer}", lost

    def _source_faults(self, world: World, index: int, held: Source) -> Iterator[tuple[str, str, World]]:
        for lease in held.leases:
            if _renewed(world, *lease):
                yield "lapse", f"{held.peer} lease {lease[1]} lapses", _lapse(world, index, lease)
        if held.end is None:
            cancel = protocol.Cancel(protocol.fail(End.CANCELLED, errors.CancelledError, "by the source's engine"))
            yield "cancel", f"{held.peer} cancels", self._to_source(world, index, cancel)
        yield "crash", f"{held.peer} crashes", _crash_source(world, index)
        for rank in world.targets:
            lost = world._replace(notices=world.notices | {(rank.peer, protocol.PeerLost(held.peer))})
            yield "silence", f"{rank.peer} hears nothing of {held.peer}", lost

    def _fetch(self, world: World, index: int) -> World:
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
        )
        fetch = Fetch(world.now, part, frozenset(attempt for _, attempt in legs))
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
                    return world if rank.fetches else self._fetch(world, index)
                if isinstance(packet.message, wire.Stands):
                    return self._stands(world, packet.sender, packet.message)
                if isinstance(packet.message, wire.Decided) and not _has_part(rank, packet.message.part):
                    return _sends(world, rank.peer, protocol.membership.answer_unknown(packet.sender, packet.message))
                return self._to_target(world, index, protocol.Received(packet.sender, packet.message))
        return world

    def _source_hears(self, world: World, index: int, peer: str, message: Any) -> World:  # noqa: ANN401
        held = world.sources[index]
        event: Any
        match message:
            case Asked(attempt=attempt):
                event = self._ask(peer, attempt)
            case Expected():
                event = protocol.TicketArrived(peer)
            case wire.Prepared(attempt=attempt):
                held_now = (peer, attempt) in held.leases
                event = protocol.PreparedArrived(peer, attempt, message.root, held_now, b"rootroot")
            case _:
                event = protocol.Received(peer, message)
        return self._to_source(world, index, event)

    def _ask(self, peer: str, attempt: int) -> protocol.AskArrived:
        engine, readers = (peer[0], self.scenario.readers) if peer[0] == "D" else (peer[0], 1)
        return protocol.AskArrived(peer=peer, engine=engine, attempt=attempt, digest=DIGEST, readers=readers)

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
            return _send(world, "D0", peer, group.answer_unknown(peer, message).message)
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
                world = _send(world, "D0", action.peer, action.message)
        return world

    def _to_target(self, world: World, index: int, event: Any) -> World:  # noqa: ANN401
        for number, fetch in enumerate(world.targets[index].fetches):
            if fetch.part is None:
                continue
            part, actions = self._stepped(target, fetch.part, event, world.now)
            if part is fetch.part and not actions:
                continue
            kept = world.targets[index].fetches[number]._replace(part=_unless_closed(part))
            world = self._do_target(put_fetch(world, index, number, kept), index, number, actions)
        return world

    def _to_source(self, world: World, index: int, event: Any) -> World:  # noqa: ANN401
        held = world.sources[index]
        if held.part is None:
            if isinstance(event, protocol.AskArrived):
                refusal = wire.Refused(
                    attempt=event.attempt, error=protocol.ended_error(KEY, held.end or End.DONE, None)
                )
                return _send(world, held.peer, event.peer, refusal)
            message = event.message if isinstance(event, protocol.Received) else event
            peer = getattr(event, "peer", "")
            return _sends(world, held.peer, protocol.answer_unknown(peer, message))
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
                    world = _send(world, rank.peer, peer, message)
                case protocol.SendAsk(peer=peer, attempt=attempt):
                    world = _send(world, rank.peer, peer, Asked(attempt))
                case protocol.StartRead(peer=peer, attempt=attempt):
                    soiled = any(held.freed for held in world.sources if held.peer == peer)
                    dirty = fetch.dirty | {attempt} if soiled else fetch.dirty
                    fetch = fetch._replace(reading=fetch.reading | {attempt}, dirty=dirty)
                    world = put_fetch(world, index, number, fetch)
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
                    world = put_source(world, index, held._replace(parked=(*spots, (peer, attempt))))
                    parked = wire.Parked(attempt=attempt, park_seconds=self.scenario.timing.park_seconds)
                    world = _send(world, held.peer, peer, parked)
                case protocol.Unpark():
                    held = world.sources[index]
                    world = put_source(world, index, held._replace(parked=()))
                    for peer, attempt in held.parked:
                        world = self._to_source(world, index, self._ask(peer, attempt))
                case _:
                    world = _do_plainly(world, index, action)
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


def _do_plainly(world: World, index: int, action: Any) -> World:  # noqa: ANN401
    """The source's deeds that lead to no further step."""
    held = world.sources[index]
    match action:
        case protocol.Send(peer=peer, message=message):
            world = _send(world, held.peer, peer, message)
        case protocol.SendLease(peer=peer, attempt=attempt):
            world = _send(world, held.peer, peer, _lease(attempt))
        case protocol.SendAnnounce(peer=peer):
            world = _send(world, held.peer, peer, Announced())
        case protocol.Expose(peer=peer, attempt=attempt):
            world = put_source(world, index, held._replace(leases=held.leases | {(peer, attempt)}))
        case protocol.Withdraw(peer=peer, attempt=attempt):
            world = put_source(world, index, held._replace(leases=held.leases - {(peer, attempt)}))
        case protocol.EndHold():
            world = end_hold(world, index)
        case protocol.Report(end=end):
            world = report_source(world, index, end)
    return world


def _renewed(world: World, peer: str, attempt: int) -> bool:
    """Whether the target still has a use for this lease, and so renews it."""
    return any(
        fetch.part is not None and fetch.end is None and attempt in fetch.attempts
        for rank in world.targets
        if rank.peer == peer and rank.alive
        for fetch in rank.fetches
    )


def _lapse(world: World, index: int, lease: tuple[str, int]) -> World:
    """The transport knows at once, the machine when the notice comes."""
    held = world.sources[index]
    world = put_source(world, index, held._replace(leases=held.leases - {lease}))
    return world._replace(notices=world.notices | {(held.peer, protocol.LeaseLapsed(*lease))})


def _crash_target(world: World, index: int, siblings: list[str]) -> World:
    """The process is gone, its memory with it. Its peers hear silence, or proof, in either order, at any time."""
    rank = world.targets[index]
    dead = rank._replace(alive=False, fetches=tuple(fetch._replace(part=None) for fetch in rank.fetches))
    peers = [*(held.peer for held in world.sources), *siblings]
    lost = {(peer, protocol.PeerLost(rank.peer)) for peer in peers}
    proof = {(peer, protocol.PeerDead(rank.peer)) for peer in peers}
    world = put_target(world, index, dead)._replace(notices=world.notices | lost | proof)
    return world._replace(group=None) if rank.peer == "D0" else world


def _crash_source(world: World, index: int) -> World:
    """As `_crash_target`; whoever reads from it reads rubbish from now on."""
    held = world.sources[index]
    dead = held._replace(alive=False, part=None, leases=frozenset(), parked=(), freed=True)
    lost = {(rank.peer, protocol.PeerLost(held.peer)) for rank in world.targets}
    proof = {(rank.peer, protocol.PeerDead(held.peer)) for rank in world.targets}
    return soil(put_source(world, index, dead)._replace(notices=world.notices | lost | proof), held.peer)


def _has_part(rank: Target, number: int) -> bool:
    parts = (fetch.part for fetch in rank.fetches if fetch.part is not None)
    return any(part.siblings is not None and part.siblings.number == number for part in parts)


def _unless_closed(part: TargetPart) -> TargetPart | None:
    return None if part.phase is TargetPhase.CLOSED else part


def _lease(attempt: int) -> wire.Lease:
    capacity = wire.Capacity(leased_blocks=0, active_legs=0, max_legs=1)
    return wire.Lease(attempt=attempt, lease_seconds=1.0, total_bytes=0, capacity=capacity)


def _send(world: World, sender: str, receiver: str, message: Any) -> World:  # noqa: ANN401
    return world._replace(packets=world.packets | {Packet(sender, receiver, message)})


def _sends(world: World, sender: str, sends: tuple[protocol.Send, ...]) -> World:
    for send in sends:
        world = _send(world, sender, send.peer, send.message)
    return world


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
