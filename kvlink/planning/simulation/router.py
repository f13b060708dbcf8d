"""Describes simulated workers to `kvlink.cluster.route`, and keeps some of its explanations.

All predictions are what a real router could know: queued prompt tokens, promised room, prefix blocks, links in use, and
an expected number of tokens to decode; never the true one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from kvlink.cluster import Candidate, Choice, Wish, route
from kvlink.planning.cost import StepCost
from kvlink.planning.simulation.flight import Flight
from kvlink.planning.simulation.scenario import Scenario
from kvlink.planning.simulation.worker import Worker
from kvlink.planning.volume import kv_bytes_per_token

if TYPE_CHECKING:
    import simpy

TYPICAL_CONTEXT: Final = 4096
"""Tokens of context at which the router reckons what a prompt token costs."""
KEPT_EXPLANATIONS: Final = 3


class Router:
    """Chooses workers of a fleet; changes nothing.

    Args:
        env: the simulation, for its clock.
        scenario: the fleet's rules.
        cost: of a worker's steps.
    """

    def __init__(self, env: simpy.Environment, scenario: Scenario, cost: StepCost) -> None:
        self._env = env
        self._scenario = scenario
        self._cost = cost
        self.token_bytes = kv_bytes_per_token(scenario.model, tensor_parallel=scenario.devices)
        budget = scenario.token_budget
        self._prompt_token_seconds = cost.step_seconds(budget, budget * TYPICAL_CONTEXT, TYPICAL_CONTEXT) / budget
        self.explanations: list[str] = []

    def queue_seconds(self, worker: Worker) -> float:
        """Predicted time of the prompts that a worker has still to compute."""
        return worker.pending_tokens * self._prompt_token_seconds

    def need(self, flight: Flight) -> int:
        """Tokens of room that a request is promised where it decodes: prompt and expected growth."""
        return flight.prompt + self._scenario.growth_tokens

    def shared(self, flight: Flight, workers: Sequence[Worker]) -> Worker | None:
        """Who computes the prompt and decodes."""
        return self._choose(flight, workers, self._wish(flight, self.need(flight), decodes=True), self._as_shared)

    def prefill(self, flight: Flight, workers: Sequence[Worker], revision: int) -> Worker | None:
        """Who computes the prompt, of one revision."""
        wish = self._wish(flight, flight.prompt, decodes=False, revision=revision)
        return self._choose(flight, workers, wish, self._as_prefill)

    def decode(self, flight: Flight, workers: Sequence[Worker], revision: int) -> Worker | None:
        """Who decodes, of one revision."""
        wish = self._wish(flight, self.need(flight), decodes=True, revision=revision)
        return self._choose(flight, workers, wish, self._as_decode)

    def _wish(self, flight: Flight, tokens: int, *, decodes: bool, revision: int | None = None) -> Wish:
        """Its deadline is the first token's, or, where it decodes, that of the last one expected."""
        arrival, objectives = flight.arrival, self._scenario.objectives
        seconds = objectives.ttft_seconds
        if decodes:
            seconds += objectives.tpot_seconds * self._scenario.expected_decode
        return Wish(
            identity=None if revision is None else self._identity(revision),
            tokens=tokens,
            adapter=arrival.adapter,
            priority=arrival.priority,
            seconds_left=arrival.at_seconds + seconds - self._env.now,
            excluded_domains=flight.excluded,
        )

    def _choose(
        self,
        flight: Flight,
        workers: Sequence[Worker],
        wish: Wish,
        describe: Callable[[Flight, Worker], Candidate],
    ) -> Worker | None:
        if not any(wish.tokens <= worker.unpromised for worker in workers):
            return None  # what `route` would find too, the long way
        candidates = [describe(flight, worker) for worker in workers]
        choice = route(wish, candidates)
        if choice.name is None and wish.excluded_domains:
            choice = route(replace(wish, excluded_domains=frozenset()), candidates)  # better there than nowhere
        self._explain(flight, choice)
        return next((worker for worker in workers if worker.name == choice.name), None)

    def _explain(self, flight: Flight, choice: Choice) -> None:
        if len(self.explanations) < KEPT_EXPLANATIONS and any(s.candidate.prefix_tokens for s in choice.scores):
            self.explanations.append(f"{flight.arrival.name}: {choice.explain()}")

    # --- workers as candidates ------------------------------------------------------------------------------------

    def _identity(self, revision: int) -> str:
        return f"{self._scenario.model.name} revision {revision}"

    def _as_shared(self, flight: Flight, worker: Worker) -> Candidate:
        hit = self._hit(flight, worker)
        work = (flight.prompt - hit) * self._prompt_token_seconds + self._decode_work(flight, worker)
        return self._candidate(flight, worker, hit, work, queue=self.queue_seconds(worker))

    def _as_prefill(self, flight: Flight, worker: Worker) -> Candidate:
        hit = self._hit(flight, worker)
        work = (flight.prompt - hit) * self._prompt_token_seconds
        return self._candidate(flight, worker, hit, work, queue=self.queue_seconds(worker))

    def _as_decode(self, flight: Flight, worker: Worker) -> Candidate:
        hit = self._hit(flight, worker)
        moved = self._scenario.transfer.seconds((flight.prompt - hit) * self.token_bytes)
        busy = max(worker.link_free_at - self._env.now, 0.0)
        return self._candidate(flight, worker, hit, self._decode_work(flight, worker), transfer=busy + moved)

    def _hit(self, flight: Flight, worker: Worker) -> int:
        return min(worker.space.match(flight.arrival.blocks) * worker.space.block_tokens, flight.prompt - 1)

    def _decode_work(self, flight: Flight, worker: Worker) -> float:
        """Expected decode time there: each step reads the KV of all who have room there."""
        batch, context = len(worker.flights) + 1, worker.space.total - worker.unpromised + flight.prompt
        return self._scenario.expected_decode * self._cost.decode_seconds(batch, context, 1)

    def _candidate(
        self, flight: Flight, worker: Worker, hit: int, work: float, *, queue: float = 0.0, transfer: float = 0.0
    ) -> Candidate:
        tenant = flight.arrival.tenant
        return Candidate(
            name=worker.name,
            identity=self._identity(worker.revision),
            healthy=worker.healthy,
            state=worker.state,
            domain=worker.domain,
            total_tokens=worker.space.total,
            free_tokens=worker.unpromised,
            prefix_tokens=hit,
            work_seconds=work,
            queue_seconds=queue,
            transfer_seconds=transfer,
            adapters=worker.adapters,
            tenant_share=0.0 if tenant is None else worker.tenants[tenant] / worker.space.total,
        )
