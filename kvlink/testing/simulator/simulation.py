"""One seed: a world is drawn, lives until nothing is left to happen, and is judged; then it must serve once more."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from kvlink.memory.ledger import LedgerError
from kvlink.testing.simulator.checks import Checks
from kvlink.testing.simulator.clockwork import Agenda, InvariantError
from kvlink.testing.simulator.engines import Engines
from kvlink.testing.simulator.gateway import Gateway, Request
from kvlink.testing.simulator.network import Network, Rank
from kvlink.testing.simulator.plan import MAX_DRIFT, Fault, Plan, draw
from kvlink.testing.simulator.source_rank import SourceRank
from kvlink.testing.simulator.target_rank import TargetRank

REST_SECONDS = 400.0
"""Everything has come to its end by then: faults are over after `SPAN_SECONDS`, and no clock is longer."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a seed.

    Attributes:
        seed: which.
        events: how many things happened.
        done: requests that became visible whole.
        requests: requests.
        finding: the invariant that broke, or ``None``.
        trace: what happened, if it was asked for.
    """

    seed: int
    events: int
    done: int
    requests: int
    finding: str | None
    trace: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.finding is None:
            return f"seed {self.seed}: {self.events} events, {self.done} of {self.requests} requests done"
        return "\n".join((f"seed {self.seed}: {self.finding}", *(f"  {line}" for line in self.trace)))


def simulate(seed: int, *, trace: bool = False, drift: float | None = None) -> Outcome:
    """Run one seed. The same seed does the same thing, whatever ran before it.

    Args:
        seed: any number.
        trace: record what happens; a seed that is found to fail is run again with it.
        drift: how fast or slow clocks may be, a share; by default what the margin covers, in half of the seeds. Beyond
            that, *C* is not checked: it is what the margin is for.
    """
    plan, dice = draw(seed)
    simulation = _Simulation(plan, dice, [] if trace else None, drift)
    finding = None
    try:
        simulation.run()
    except InvariantError as error:
        finding = str(error)
    except LedgerError as error:
        finding = f"4: the block accounting says: {error}"
    return simulation.outcome(finding)


class _Simulation:
    def __init__(self, plan: Plan, dice: Random, log: list[str] | None, drift: float | None) -> None:
        self._plan = plan
        self._dice = dice
        self._log = log
        self._agenda = Agenda()
        usual = dice.choice((0.0, MAX_DRIFT))
        drift = usual if drift is None else drift
        self._network = Network(plan, dice, self._agenda, drift, log)
        self._engines = Engines(plan, dice, self._network, Checks(self._network, clocks=drift <= MAX_DRIFT))
        self._gateway = Gateway(plan, dice, self._engines)
        self._engines.lost = self._gateway.lost

    def run(self) -> None:
        self._network.note(str(self._plan))
        self._gateway.start()
        for fault in self._plan.faults:
            self._agenda.after(fault.at, None, self._arm, fault)
        self._come_to_rest("after the faults")
        # Nothing is left over, and whoever comes now is served: no dead end.
        self._network.quiet = True
        last = len(self._gateway.requests)
        self._gateway.request(push=self._dice.random() < 0.5)
        self._come_to_rest("after a last request")
        if not all(request.done for request in self._gateway.requests[last:]) or len(self._gateway.requests) == last:
            raise InvariantError("5: a dead end: a request after all faults does not succeed")

    def outcome(self, finding: str | None) -> Outcome:
        requests = self._gateway.requests
        done = sum(request.done for request in requests)
        return Outcome(self._plan.seed, self._agenda.events, done, len(requests), finding, tuple(self._log or ()))

    def _come_to_rest(self, when: str) -> None:
        if not self._agenda.run(self._agenda.now + REST_SECONDS):
            raise InvariantError(f"5: no rest {REST_SECONDS:g} s on, {when}: something goes on for ever")
        self._judge(when)

    def _judge(self, when: str) -> None:
        for engine in self._engines.latest:
            for rank in (*self._engines.sources(engine), *self._engines.targets(engine)):
                stats = rank.blocks.stats()
                out = stats.held + stats.leased + stats.reserved + stats.landed + stats.draining + stats.installed
                if rank.works or out:
                    raise InvariantError(f"5: {rank.name} rests {when} with {list(rank.works)} and {stats}")
                if rank.pool.free != rank.pool.size:
                    missing = rank.pool.size - rank.pool.free
                    raise InvariantError(f"4: {rank.name} rests {when}, and {missing} blocks never came back")
            for target in self._engines.targets(engine):
                if target.coordinating.groups:
                    raise InvariantError(f"5: {target.name} rests {when} and coordinates {target.coordinating.groups}")
            for source in self._engines.sources(engine):
                if len(source.lot) or len(source.tickets):
                    raise InvariantError(f"5: {source.name} rests {when} with {len(source.lot)} asks parked")

    # --- faults -------------------------------------------------------------------------------------------------------

    def _arm(self, fault: Fault) -> None:
        if fault.on:
            self._network.trap(fault.on, lambda sender, receiver: self._strike(fault, sender, receiver))
        else:
            self._strike(fault)

    def _strike(self, fault: Fault, *at: Rank) -> None:
        kind = fault.kind
        pick = Random(fault.dice)  # noqa: S311 - it must be repeatable, not secret
        requests = [request for request in self._gateway.requests if request.tries]
        if kind in ("elsewhere", "again", "decline", "renew", "cancel target", "cancel source"):
            if requests:
                self._meddle(kind, pick.choice(requests))
            return
        engines = [engine for engine in self._engines.latest if engine.alive]
        sources = [rank for engine in engines for rank in self._engines.sources(engine)]
        targets = [rank for engine in engines for rank in self._engines.targets(engine)]
        sources = [rank for rank in sources if rank in at] or sources  # two siblings' word may be what it strikes with
        targets = [rank for rank in targets if rank in at] or targets
        if not self._network.quiet and sources and targets:
            self._network.note(f"FAULT {kind} {fault.seconds:.2f} {fault.on}")
            self._hit(fault, pick.choice(sources), pick.choice(targets), pick, at)

    def _meddle(self, kind: str, request: Request) -> None:
        gateway = self._gateway
        self._network.note(f"FAULT {kind} {request.key}")
        match kind:
            case "elsewhere":
                gateway.turn_elsewhere(request)
            case "again":
                gateway.ask_again(request)
            case "decline":
                gateway.decline(request)
            case "renew":
                gateway.renew(request)
            case "cancel target":
                gateway.cancel_target(request, request.tries[-1])
            case "cancel source":
                gateway.cancel_source(request)

    def _hit(  # noqa: C901, PLR0912 - one case a fault
        self, fault: Fault, one: SourceRank, other: TargetRank, pick: Random, at: tuple[Rank, ...]
    ) -> None:
        network = self._network
        pair = network.pair(one.name, other.name)
        match fault.kind:
            case "crash target":
                self._engines.crash(other, fault.seconds)
            case "crash source":
                self._engines.crash(one, fault.seconds)
            case "pause target":
                self._engines.pause(other, fault.seconds)
            case "pause source":
                self._engines.pause(one, fault.seconds)
            case "stop target":
                self._engines.stop(other, fault.seconds)
            case "stop source":
                self._engines.stop(one, fault.seconds)
            case "sever":
                network.sever(one, other, fault.seconds)
            case "split":
                self._split(other, at, fault.seconds)
            case "stick":  # at a word of one to the other: what answers it
                way = pair.ranks if pair.source in at[1:] else pair.ranks[::-1]
                network.stick(*(way if at else pick.choice((pair.ranks, pair.ranks[::-1]))), 2.0 + fault.seconds)
            case "reset":
                network.lose(one, other)
                network.lose(other, one)
            case "silence":
                network.lose(*pick.choice((pair.ranks, pair.ranks[::-1])))
            case "lapse":
                for attempt in list(pair.leases):
                    network.lapse(pair, attempt)
            case "fail read" | "corrupt" if reading := other.reads_now():
                key, attempt = pick.choice(reading)
                other.post(0.0, other.fail_read if fault.kind == "fail read" else other.corrupt, key, attempt)
            case "deaf":  # its renewals stop, and nothing else
                for attempt in list(pair.leases):
                    network.renew(one.name, other.name, attempt, renewing=False)

    def _split(self, rank: TargetRank, at: tuple[Rank, ...], seconds: float) -> None:
        """Ranks of one engine do not hear each other: those whose word it strikes with, or this one and its leader."""
        leader = self._network.ranks.get(rank.leader)
        one, other = at if at and at[0].engine == at[1].engine else (leader, rank)
        if one is not None and one is not other:
            self._network.sever(one, other, seconds)
