"""Routing: which worker a request goes to. First who may take it, then who serves it soonest, always with the reasons.

A score is seconds: the predicted time until the candidate has done the request's work, so that its terms add up
without weights. What the fleet cannot know exactly (queue, transfer, work) comes in as the caller's prediction.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvlink import limits
from kvlink.cluster.pools import PoolState


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a request needs of a worker.

    Attributes:
        identity: fingerprint of the model and revision it must be; ``None``: any.
        tokens: of room, the whole prompt and its expected growth.
        adapter: that must be loaded, or will be at a cost; ``None``: none.
        priority: higher goes first; work of lower priority does not delay it.
        seconds_left: until its deadline.
        excluded_domains: failure domains it must stay out of.
    """

    identity: str | None
    tokens: int
    adapter: str | None = None
    priority: int = 0
    seconds_left: float = float("inf")
    excluded_domains: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One worker as it is for one request.

    Attributes:
        identity: fingerprint of what it serves.
        healthy: it answers.
        state: in its pool.
        domain: failure domain (host, rack), where known.
        total_tokens: room when empty.
        free_tokens: room now.
        prefix_tokens: of the prompt that are there already; for the explanation, ``work_seconds`` has their effect.
        work_seconds: predicted for the request's own work there, prefix taken into account.
        queue_seconds: predicted wait behind work of the same or a higher priority.
        transfer_seconds: predicted for its KV over the real topology, present congestion included.
        adapters: that are loaded.
        tenant_share: part of the worker's room, 0 to 1, that the request's tenant holds.
    """

    name: str
    identity: str
    healthy: bool = True
    state: PoolState = PoolState.ACTIVE
    domain: str | None = None
    total_tokens: int
    free_tokens: int
    prefix_tokens: int = 0
    work_seconds: float = 0.0
    queue_seconds: float = 0.0
    transfer_seconds: float = 0.0
    adapters: frozenset[str] = frozenset()
    tenant_share: float = 0.0


@dataclass(frozen=True, slots=True)
class Score:
    """One candidate's seconds, term by term."""

    candidate: Candidate
    work_seconds: float
    queue_seconds: float
    transfer_seconds: float
    adapter_seconds: float
    tenant_seconds: float
    late: bool

    @property
    def seconds(self) -> float:
        """Sum of the terms."""
        return (
            self.work_seconds + self.queue_seconds + self.transfer_seconds + self.adapter_seconds + self.tenant_seconds
        )


@dataclass(frozen=True, slots=True)
class Choice:
    """Where a request goes, and why.

    Attributes:
        name: of the chosen worker, or ``None``.
        scores: of all who may take it, best first.
        refused: who may not, and why.
        waits: nobody takes it now, and somebody may once room comes back.
    """

    name: str | None
    scores: tuple[Score, ...]
    refused: tuple[tuple[str, str], ...]
    waits: bool

    def explain(self) -> str:
        """The choice in words, one line a worker."""
        lines = [f"{self.name or 'nobody'} takes it" + (", it waits for room" if self.waits else "")]
        for score in self.scores:
            parts = [f"work {score.work_seconds:.3f} ({score.candidate.prefix_tokens} tokens of prefix there)"]
            parts += [
                f"{word} {seconds:.3f}"
                for word, seconds in (
                    ("queue", score.queue_seconds),
                    ("transfer", score.transfer_seconds),
                    ("adapter", score.adapter_seconds),
                    ("tenant's share", score.tenant_seconds),
                )
                if seconds
            ]
            late = ", after its deadline" if score.late else ""
            lines.append(f"  {score.candidate.name}: {score.seconds:.3f} s = {' + '.join(parts)}{late}")
        lines += [f"  {name}: no, {why}" for name, why in self.refused]
        return "\n".join(lines)


NO_ROOM = "no room now"


def refusal(wish: Wish, candidate: Candidate) -> str | None:
    """Why ``candidate`` may not take the request, or ``None``. Lasting reasons come before passing ones."""
    reasons = (
        (wish.identity not in (None, candidate.identity), f"it serves {candidate.identity}, not {wish.identity}"),
        (not candidate.healthy, "it does not answer"),
        (candidate.state is not PoolState.ACTIVE, f"it is {candidate.state}"),
        (candidate.domain in wish.excluded_domains, f"failure domain {candidate.domain} is excluded"),
        (
            wish.tokens > candidate.total_tokens,
            f"too large: {wish.tokens} tokens with growth, {candidate.total_tokens} when empty",
        ),
        (wish.tokens > candidate.free_tokens, NO_ROOM),
    )
    return next((why for applies, why in reasons if applies), None)


def score(wish: Wish, candidate: Candidate) -> Score:
    """Seconds that ``candidate`` would take, by term.

    A tenant that holds a part of a worker's room waits in proportion behind the others there: its share of the queue
    is counted once more.
    """
    loading = wish.adapter is not None and wish.adapter not in candidate.adapters
    adapter = limits.ADAPTER_LOAD_SECONDS if loading else 0.0
    tenant = candidate.tenant_share * candidate.queue_seconds
    total = candidate.work_seconds + candidate.queue_seconds + candidate.transfer_seconds + adapter + tenant
    return Score(
        candidate,
        candidate.work_seconds,
        candidate.queue_seconds,
        candidate.transfer_seconds,
        adapter,
        tenant,
        late=total > wish.seconds_left,
    )


def route(wish: Wish, candidates: Iterable[Candidate]) -> Choice:
    """Choose a worker: who meets the deadline before who does not, then the fewest seconds, then the name."""
    scores, refused = [], []
    for candidate in candidates:
        why = refusal(wish, candidate)
        if why is None:
            scores.append(score(wish, candidate))
        else:
            refused.append((candidate.name, why))
    scores.sort(key=lambda one: (one.late, one.seconds, one.candidate.name))
    waits = not scores and any(why == NO_ROOM for _, why in refused)
    return Choice(scores[0].candidate.name if scores else None, tuple(scores), tuple(refused), waits)
