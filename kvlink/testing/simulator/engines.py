"""Engines: groups of ranks that live, die and come back together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from kvlink.testing.simulator.checks import Checks
from kvlink.testing.simulator.clockwork import Agenda
from kvlink.testing.simulator.network import Network, Rank
from kvlink.testing.simulator.plan import Plan
from kvlink.testing.simulator.source_rank import SourceRank
from kvlink.testing.simulator.target_rank import TargetRank


@dataclass(slots=True, eq=False)
class Engine:
    """One incarnation of an engine: ``kind`` is ``"S"``, the source, or the name of a target."""

    kind: str
    name: str
    ranks: tuple[Rank, ...]

    @property
    def alive(self) -> bool:
        """All its ranks live; it dies as one."""
        return all(rank.alive for rank in self.ranks)


class Engines:
    """All engines, and who is their latest incarnation."""

    def __init__(self, plan: Plan, dice: Random, network: Network, checks: Checks) -> None:
        self.agenda: Agenda = network.agenda
        self.network = network
        self.lost: Callable[[Engine], None] = lambda _engine: None
        self._plan = plan
        self._dice = dice
        self._checks = checks
        self._latest: dict[str, Engine] = {}
        self._incarnations: dict[str, int] = {}
        for kind in ("S", *plan.target_ranks):
            self.start(kind)

    def start(self, kind: str) -> Engine:
        """A new incarnation."""
        number = self._incarnations[kind] = self._incarnations.get(kind, 0) + 1
        count = self._plan.source_ranks if kind == "S" else self._plan.target_ranks[kind]
        make = SourceRank if kind == "S" else TargetRank
        ranks = tuple(make(self.network, self._checks, self._plan, f"{kind}/{index}", number) for index in range(count))
        for rank in ranks:
            self.network.join(rank)
        self.network.note(f"{kind}@{number} starts")
        engine = self._latest[kind] = Engine(kind, f"{kind}@{number}", ranks)
        return engine

    def living(self, kind: str) -> Engine | None:
        """The latest incarnation, if it lives."""
        engine = self._latest[kind]
        return engine if engine.alive else None

    @property
    def latest(self) -> list[Engine]:
        """The latest incarnation of each."""
        return list(self._latest.values())

    @staticmethod
    def sources(engine: Engine) -> list[SourceRank]:
        """A source engine's ranks."""
        return [rank for rank in engine.ranks if isinstance(rank, SourceRank)]

    @staticmethod
    def targets(engine: Engine) -> list[TargetRank]:
        """A target engine's ranks."""
        return [rank for rank in engine.ranks if isinstance(rank, TargetRank)]

    def crash(self, first: Rank, restart_seconds: float) -> None:
        """One rank is killed, its siblings follow, a successor starts after a while."""
        engine = next(engine for engine in self._latest.values() if first in engine.ranks)
        for rank in engine.ranks:
            seconds = 0.0 if rank is first else self._dice.random() * 0.2
            self.agenda.after(seconds, None, self._kill, rank)
        self.agenda.after(0.3, None, self.lost, engine)
        self.agenda.after(0.3 + restart_seconds * 0.5, None, self._restart, engine)

    def _kill(self, rank: Rank) -> None:
        if rank.alive:
            self.network.note(f"{rank.name} is KILLED")
            rank.crash()
            self.network.reconsider()

    def _restart(self, engine: Engine) -> None:
        if self._latest[engine.kind] is engine:
            self.start(engine.kind)
            for rank in engine.ranks:
                self.network.announce_death(rank)

    def stop(self, rank: Rank, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after ``seconds``."""
        if rank.running:
            self.network.note(f"{rank.name} is STOPPED for {seconds:.2f} s")
            rank.stop()
            self.network.reconsider()
            self.agenda.after(seconds, None, self._resume, rank)

    def _resume(self, rank: Rank) -> None:
        if rank.alive and rank.stopped:
            self.network.note(f"{rank.name} is resumed")
            rank.resume(self._dice.shuffle)
            self.network.reconsider()

    def pause(self, first: Rank, seconds: float) -> None:
        """All ranks of an engine cut what runs and sleep; they wake up as the same incarnation."""
        engine = next(engine for engine in self._latest.values() if first in engine.ranks)
        self.network.note(f"{engine.name} PAUSES for {seconds:.2f} s")
        for rank in engine.ranks:
            rank.post(0.0, self._cut, rank, seconds, 40)

    def _cut(self, rank: Rank, seconds: float, patience: int) -> None:
        for key in list(rank.works):
            rank.cancel(key)
        if not rank.idle and patience:
            rank.post(0.1, self._cut, rank, seconds, patience - 1)
            return
        if rank.idle and not rank.asleep:
            rank.fall_asleep()
            rank.asleep = True
            self.network.say_goodbye(rank)
            self.network.reconsider()
            self.agenda.after(seconds, None, self._wake, rank)

    def _wake(self, rank: Rank) -> None:
        self.network.note(f"{rank.name} wakes up")
        rank.asleep = False
        self.network.reconsider()
