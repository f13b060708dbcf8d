"""The invariants of docs/protocol.md, checked at every step against what a god would know of each attempt.

A finding begins with the invariant's number; *A* (the ends agree), *C* (the source's clock ends last) and *R* (whoever
repeats is answered, and what is acknowledged is recorded) follow from the eight and say sooner what went wrong.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvlink import limits, wire
from kvlink.protocol import End, EndHold, Expose, Learned, Report, SourcePart, TargetPart
from kvlink.protocol.source_leg import BUSY, FREE
from kvlink.protocol.source_leg import LegPhase as SourceLegPhase
from kvlink.protocol.target_leg import LegPhase as TargetLegPhase
from kvlink.testing.simulator.clockwork import InvariantError
from kvlink.testing.simulator.network import Network, Rank

_RECORDED: dict[type, tuple[SourceLegPhase, ...]] = {
    wire.Installed: (SourceLegPhase.INSTALLED,),
    wire.NotInstalled: (*FREE, SourceLegPhase.INSTALLED),
}
_WAITS: dict[type, tuple[TargetLegPhase, ...]] = {
    wire.Prepared: (TargetLegPhase.PREPARED,),
    wire.Installed: (TargetLegPhase.INSTALLED,),
    wire.NotInstalled: (TargetLegPhase.NOT_INSTALLED,),
}
_ASKS = (TargetLegPhase.ASKING, TargetLegPhase.PARKED)


@dataclass(slots=True, eq=False)
class Try:
    """One target part: the truth about it.

    Attributes:
        rank: whose.
        key: of which request.
        attempts: its legs' attempts, by source rank's incarnation.
        together: it becomes visible with its siblings.
        moving: attempts of which bytes may still land.
        ready: it is installed, and time cannot take it away any more; its siblings may.
        installed: the engine has its blocks, and has not released them.
        ever: the engine once got them.
        end: how it was reported.
    """

    rank: Rank
    key: str
    attempts: dict[str, int]
    together: bool = False
    moving: set[int] = field(default_factory=set)
    ready: bool = False
    installed: bool = False
    ever: bool = False
    end: End | None = None

    @property
    def may_install(self) -> bool:
        """It is installed, or may be yet."""
        return self.rank.alive and (self.ever or self.end is None)


class Checks:
    """Watches every rank of one world.

    Args:
        network: its ranks, and what is between them.
        clocks: no two clocks differ by more than the margin covers.
    """

    def __init__(self, network: Network, *, clocks: bool = True) -> None:
        self._network = network
        self._clocks = clocks
        self._tries: dict[tuple[str, int], Try] = {}
        self._last: dict[str, int] = {}
        self._commits: dict[tuple[str, str, int], list[tuple[Try, int]]] = {}
        self._leased: dict[tuple[str, str, int, str], set[int]] = {}

    # --- the target ---------------------------------------------------------------------------------------------------

    def begun(self, one: Try) -> None:
        """A target part has chosen its attempts."""
        last = self._last.get(one.rank.name, 0)
        if min(one.attempts.values()) <= last:
            raise InvariantError(f"6: {one.rank.name} uses attempt {min(one.attempts.values())} after {last}")
        self._last[one.rank.name] = max(one.attempts.values())
        for attempt in one.attempts.values():
            self._tries[one.rank.name, attempt] = one

    def installs(self, one: Try) -> None:
        """The one switch is about to be thrown; contents are checked by the target against its blocks."""
        if one.moving:
            raise InvariantError(f"3: {one.rank.name} installs {one.key} while {sorted(one.moving)} still move")
        if one.end is not None:
            raise InvariantError(f"4: {one.rank.name} installs {one.key} after it reported {one.end}")
        for peer, attempt in one.attempts.items():
            source: Any = self._network.ranks[peer]
            phase = source.phase_of(one.key, one.rank.name, attempt) if source.alive else SourceLegPhase.COMMITTED
            if phase is SourceLegPhase.LEASED:
                raise InvariantError(f"3: {one.rank.name} installs {one.key}, and {peer} has not committed")
            late = phase is SourceLegPhase.INDETERMINATE and not self._clocks  # it says that it does not know: so be it
            if phase is not SourceLegPhase.COMMITTED and not late:
                raise InvariantError(f"C: {one.rank.name} installs {one.key}, and {peer} has given up: leg is {phase}")

    def shows(self, one: Try) -> None:
        """A part becomes visible; all its siblings must be able to."""
        if not one.ready or one.end is not None:
            raise InvariantError(f"3: {one.rank.name} shows {one.key}; installed: {one.ready}, reported: {one.end}")
        self.tells_installed(one)

    def tells_installed(self, one: Try) -> None:
        """A source may free its blocks at this word: nothing of the request is needed from any source any more."""
        for name, tries in self._siblings(one).items() if one.together else ():
            if not any(other.ready for other in tries):
                raise InvariantError(f"3: {one.rank.name} goes ahead with {one.key}; {name} has not installed its part")

    def _siblings(self, one: Try) -> dict[str, list[Try]]:
        """What each rank of the engine has tried of the same request."""
        ranks: dict[str, list[Try]] = {
            name: [] for name, rank in self._network.ranks.items() if rank.engine == one.rank.engine
        }
        for other in self._tries.values():
            if other.key == one.key and other.rank.engine == one.rank.engine:
                ranks[other.rank.name].append(other)
        return ranks

    def _shown_by_all(self, one: Try) -> None:
        for name, tries in self._siblings(one).items():
            if not any(other.ever for other in tries):
                raise InvariantError(f"3: {one.rank.name} is done with {one.key}, and {name} does not show its part")

    def _shown_by_none(self, one: Try) -> None:
        """It failed as one: only who knows that he does not know may say so while a sibling is visible."""
        for name, tries in self._siblings(one).items():
            latest = max(tries, key=lambda other: min(other.attempts.values()), default=None)
            if latest is not None and latest.installed:
                raise InvariantError(f"3: {one.rank.name} has failed {one.key}, and {name} shows its part")

    def target_reports(self, one: Try, end: End) -> None:
        """A target part's end is told."""
        if one.end is not None:
            raise InvariantError(f"4: {one.rank.name} reports {end} for {one.key} after {one.end}")
        if one.moving:
            raise InvariantError(f"4: {one.rank.name} reports {end} for {one.key} before the cut-off")
        if (end is End.DONE) != one.installed:
            raise InvariantError(f"3: {one.rank.name} reports {end} for {one.key}; installed: {one.installed}")
        if one.together and end is End.DONE and one.rank.slot.endswith("/0"):
            self._shown_by_all(one)
        if one.together and end is not End.DONE and end is not End.INDETERMINATE and one.ready:
            self._shown_by_none(one)
        one.end = end

    def released(self, one: Try) -> None:
        """A target part's blocks go back."""
        if one.moving:
            raise InvariantError(f"1: {one.rank.name} frees blocks of {one.key}; {sorted(one.moving)} may still land")
        one.installed = False

    # --- the source ---------------------------------------------------------------------------------------------------

    def source_stepped(self, rank: Rank, epoch: int, event: Any, after: SourcePart, actions: tuple[Any, ...]) -> None:  # noqa: ANN401
        """A source's machine has taken a step, and nothing of it is carried out yet."""
        reports = 0
        for action in actions:
            message = getattr(action, "message", None)
            if isinstance(message, wire.Commit):
                self._commits_to(rank, epoch, after, action.peer, message.attempt)
            elif isinstance(message, wire.Ack):
                self._acknowledges(rank, after, event, message.attempt)
            elif isinstance(action, Expose):
                self._leases_to(rank, epoch, after, action.peer, action.attempt)
            elif isinstance(action, EndHold) and any(leg.phase in BUSY for leg in after.legs):
                raise InvariantError(f"4: {rank.name} ends the hold of {after.key} while a leg is leased or committed")
            elif isinstance(action, (Report, Learned)):
                reports += 1
                if action.end is End.DONE:
                    self._is_done(rank, after)
        if reports > 1:
            raise InvariantError(f"4: {rank.name} reports {after.key} twice in a step")
        self._agrees(rank, after)

    def _commits_to(self, rank: Rank, epoch: int, part: SourcePart, peer: str, attempt: int) -> None:
        one = self._tries[peer, attempt]
        commits = self._commits.setdefault((rank.name, part.key, epoch), [])
        if (one, attempt) in commits:
            return
        leg = part.leg(peer)
        stream = None if leg is None else leg.stream  # whose leases were judged as its increments landed
        if stream is not None and not (stream.sealed and stream.landed == stream.exposed):
            raise InvariantError(f"3: {rank.name} commits {part.key} to {peer}'s attempt {attempt}; its stream goes on")
        if stream is None and not self._network.held(rank.name, peer, attempt):
            raise InvariantError(f"8: {rank.name} commits {part.key} to {peer}'s attempt {attempt}; its lease lapsed")
        for other, number in commits:
            same_leg = other.rank is one.rank or other.rank.engine != one.rank.engine
            if same_leg and other.may_install:
                raise InvariantError(
                    f"2: {rank.name} commits {part.key} to attempt {attempt} of {peer}, "
                    f"and attempt {number} of {other.rank.name} may be installed"
                )
        commits.append((one, attempt))

    def _leases_to(self, rank: Rank, epoch: int, part: SourcePart, peer: str, attempt: int) -> None:
        leased = self._leased.setdefault((rank.name, part.key, epoch, peer), set())
        if attempt in leased:
            raise InvariantError(f"6: {rank.name} leases attempt {attempt} of {peer} again, for {part.key}")
        leased.add(attempt)
        if len(leased) > limits.MAX_ATTEMPTS_PER_LEG:
            raise InvariantError(f"6: {rank.name} leases {part.key} to {peer} for the {len(leased)}th time")

    def _acknowledges(self, rank: Rank, part: SourcePart, event: Any, attempt: int) -> None:  # noqa: ANN401
        told = getattr(event, "message", None)
        leg = part.leg(getattr(event, "peer", ""))
        if leg is None or leg.attempt != attempt or told is None:
            return
        if leg.phase not in _RECORDED[type(told)] and self._tries[leg.peer, attempt].rank.alive:
            what = f"{type(told).__name__} {attempt} of {leg.peer}"
            raise InvariantError(f"R: {rank.name} acknowledges {what} and records {leg.phase.value}")

    def _is_done(self, rank: Rank, part: SourcePart) -> None:
        for leg in part.legs:
            one = self._tries[leg.peer, leg.attempt]
            if one.rank.alive and not one.ever:
                raise InvariantError(
                    f"A: {rank.name} is done with {part.key}; {leg.peer} did not install {leg.attempt}"
                )

    def _agrees(self, rank: Rank, part: SourcePart) -> None:
        for leg in part.legs:
            if leg.phase in FREE:
                one = self._tries.get((leg.peer, leg.attempt))
                if one is not None and one.ever and one.rank.alive:
                    raise InvariantError(
                        f"A: {rank.name} holds attempt {leg.attempt} of {leg.peer} for {leg.phase.value}; "
                        f"it is installed ({part.key})"
                    )

    def unanswered(self, rank: Rank, peer: str, message: Any) -> None:  # noqa: ANN401
        """A source has said nothing to a message that its sender repeats until it is answered."""
        one = self._tries.get((peer, message.attempt))
        if one is None or not one.rank.alive:
            return
        target: Any = one.rank
        part: TargetPart | None = target.part_of(message.attempt)
        leg = None if part is None else part.leg(message.attempt)
        if leg is not None and leg.peer == rank.name and leg.phase in _WAITS.get(type(message), _ASKS):
            raise InvariantError(f"R: {rank.name} does not answer {type(message).__name__} {message.attempt} of {peer}")
