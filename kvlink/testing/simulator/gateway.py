"""The embedder: a gateway that sends requests, reduces their parts' ends, retries with fresh blocks, turns elsewhere.

It stands for everything around KVLink, so it is allowed every foolishness that an engine is known for: asking before
the KV is there, asking twice, asking another engine while the first still reads, cancelling at any moment. What it
never does is to take blocks back that KVLink has.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kvlink.protocol import End
from kvlink.testing.simulator.plan import SPAN_SECONDS, legs
from kvlink.testing.simulator.source_rank import Offer
from kvlink.wire import Decline, ErrorInfo, Renew

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from kvlink.testing.simulator.engines import Engine, Engines
    from kvlink.testing.simulator.network import Rank
    from kvlink.testing.simulator.plan import Plan
    from kvlink.testing.simulator.source_rank import SourceRank
    from kvlink.testing.simulator.target_rank import TargetRank


@dataclass(slots=True, eq=False)
class Whole:
    """One target engine's try at a request: a part on each of its ranks, by slot; ``None`` while it lives."""

    engine: Engine
    ends: dict[str, End | None] = field(default_factory=dict)
    settled: bool = False
    repeat: bool = False
    """It says again what another has said: it never makes the request whole."""

    @property
    def over(self) -> bool:
        """Every part has ended, or its process has."""
        return all(end is not None for end in self.ends.values())


@dataclass(slots=True, eq=False)
class Request:
    """One request."""

    key: str
    push: bool
    source: Engine
    tries: list[Whole] = field(default_factory=list)
    offer: Offer | None = None
    done: bool = False
    given_up: bool = False


class Gateway:
    """Sends requests and looks after them."""

    def __init__(self, plan: Plan, dice: Random, engines: Engines) -> None:
        self.requests: list[Request] = []
        self._plan = plan
        self._dice = dice
        self._engines = engines
        self._network = engines.network
        self._serial = 0

    def start(self) -> None:
        """Have the plan's requests begin, each at its time."""
        for number in range(self._plan.requests):
            at = self._dice.random() * (0.5 if number == 0 else SPAN_SECONDS * 0.5)
            self._later(at, self.request)

    def request(self, *, push: bool | None = None) -> None:
        """A prompt has come: have its KV computed, and a target engine told."""
        source = self._engines.living("S")
        target = self._engines.living(self._dice.choice(list(self._plan.target_ranks)))
        if source is None or target is None:
            if not self._network.quiet:
                self._later(1.0, self.request)
            return
        self._serial += 1
        push = self._dice.random() < 0.4 if push is None else push
        request = Request(f"r{self._serial}", push, source)
        self.requests.append(request)
        wait = self._dice.choice((0.0, 0.05, 0.5, 3.0)) if not self._network.quiet else 0.0
        self._network.note(f"REQUEST {request.key}: {'push' if push else 'fetch'}, {source.name} to {target.name}")
        if push:
            for rank in self._engines.sources(source):
                rank.post(self._skew(), self._announce, request, rank)
            streamed = self._plan.streamed and self._dice.random() < self._plan.streamed
            self._later(wait, self._stream if streamed else self._seal, request)
            self._later(self._dice.random() * 0.1, self._try, request, target)
            return
        self._make_offer(request)
        if self._dice.random() < 0.3:
            self._later(wait, self._publish, request)
            self._later(0.0, self._try, request, target)
        else:
            self._publish(request)
            self._later(wait + 0.01, self._try, request, target)

    # --- the source ---------------------------------------------------------------------------------------------------

    def _make_offer(self, request: Request) -> bool:
        """Compute the KV, if every rank has room for it."""
        ranks = self._engines.sources(request.source)
        if not all(rank.alive and rank.pool.free >= self._plan.blocks for rank in ranks):
            request.given_up = True
            return False
        blocks = {rank.name: rank.pool.take(self._plan.blocks, request.key) or () for rank in ranks}
        request.offer = Offer(request.key, f"{request.key}{blocks}", request.key, blocks)
        return True

    def _publish(self, request: Request) -> None:
        for rank in self._engines.sources(request.source) if request.offer is not None else ():
            rank.post(self._skew(), self._publish_on, request, rank)

    def _publish_on(self, request: Request, rank: SourceRank) -> None:
        offer = request.offer
        if offer is not None:
            rank.prefill(offer)
            if rank.publish(offer, self._plan.ttl, self._source_ended) is not None:
                rank.pool.give_back(offer.blocks[rank.name], request.key)

    def _announce(self, request: Request, rank: SourceRank) -> None:
        rank.announce(request.key, self._plan.ttl, self._source_ended)

    def _seal(self, request: Request) -> None:
        if self._make_offer(request):
            for rank in self._engines.sources(request.source):
                rank.post(self._skew(), self._seal_on, request, rank)
        else:  # a failed prefill
            self.cancel_source(request)

    def _stream(self, request: Request) -> None:
        """Compute block by block, and say so of each; every rank at its own pace."""
        if self._make_offer(request):
            for rank in self._engines.sources(request.source):
                rank.post(self._skew(), self._stream_on, request, rank, 1)
        else:
            self.cancel_source(request)

    def _stream_on(self, request: Request, rank: SourceRank, computed: int) -> None:
        offer = request.offer
        if offer is None:
            return
        last = computed == self._plan.blocks
        wanted = rank.advance(offer, computed)
        if wanted and last and self._dice.random() < 0.5:
            rank.seal(offer)  # in one breath
        elif wanted:
            gap = 0.0 if self._network.quiet else self._dice.random() ** 2
            rank.post(gap, rank.seal, offer) if last else rank.post(gap, self._stream_on, request, rank, computed + 1)
        elif computed == 1:
            rank.pool.give_back(offer.blocks[rank.name], request.key)

    def _seal_on(self, request: Request, rank: SourceRank) -> None:
        offer = request.offer
        if offer is not None:
            rank.prefill(offer)
            if not rank.seal(offer):
                rank.pool.give_back(offer.blocks[rank.name], request.key)

    def _source_ended(self, _rank: Rank, _end: End, _error: ErrorInfo | None) -> None:
        """Nothing hangs on it here: what counts is what the targets say."""

    def cancel_source(self, request: Request) -> None:
        """The source engine takes it back, on all its ranks."""
        for rank in self._engines.sources(request.source):
            rank.post(self._skew(), rank.cancel, request.key)

    # --- the target ---------------------------------------------------------------------------------------------------

    def _try(self, request: Request, engine: Engine) -> None:
        if request.given_up or request.done or not engine.alive or len(request.tries) >= self._plan.tries:
            return
        whole = Whole(engine)
        request.tries.append(whole)
        ranks = self._engines.targets(engine)
        whole.ends.update({rank.slot: None for rank in ranks})
        for rank in ranks:
            rank.post(self._skew(), self._begin, request, whole, rank)
        if request.push or self._dice.random() < 0.5:
            self._tell_unread(request, engine)

    def _begin(self, request: Request, whole: Whole, rank: TargetRank) -> None:
        if whole.ends.get(rank.slot) is not None:
            return
        plan = legs(self._plan, whole.engine.kind)
        index = int(rank.slot.split("/")[1])
        names = [source.name for source in self._engines.sources(request.source)]
        readers = {source: sum(source in reads for reads in plan.values()) for source in plan[index]}
        wanted = tuple((names[source], readers[source]) for source in plan[index])
        offer = None if request.push else request.offer
        mistakes = 0.0 if self._network.quiet else self._plan.mistakes
        if offer is not None and self._dice.random() < mistakes:
            offer = replace(offer, digest="of something else")
        elif self._dice.random() < mistakes:
            wanted = tuple((name, count + 1) for name, count in wanted)
        if offer is None and not request.push:
            return
        got = rank.fetch(
            request.key, wanted, offer, lambda one, end, error: self._ended(request, whole, one, end, error)
        )
        if got == "full":
            self._ended(request, whole, rank, End.FAILED, None)
        elif got in ("refused", "joined", "recorded") and whole.ends.get(rank.slot) is None:
            whole.ends[rank.slot] = End.FAILED
            self._reduce(request, whole)

    def _tell_unread(self, request: Request, engine: Engine) -> None:
        read = {source for sources in legs(self._plan, engine.kind).values() for source in sources}
        first = self._engines.targets(engine)[0]
        for index, source in enumerate(self._engines.sources(request.source)):
            if index not in read:
                decline = Decline(key=request.key, why="replica", unread=True)
                first.post(self._skew(), self._network.send, first, source.name, decline)

    def _ended(self, request: Request, whole: Whole, rank: Rank, end: End, error: ErrorInfo | None) -> None:
        if whole.settled:
            return
        whole.ends[rank.slot] = end
        if whole.over:
            self._reduce(request, whole)
        elif end is not End.DONE and End.DONE not in whole.ends.values():
            retryable = error is None or error.retryable
            alone = not self._plan.together  # what becomes visible together is not tried again in parts
            if alone and retryable and self._dice.random() < 0.4 and whole.engine.alive and not self._network.quiet:
                whole.ends[rank.slot] = None  # this part alone is tried again, with fresh blocks
                rank.post(0.1 + self._dice.random(), self._begin, request, whole, rank)
            elif self._dice.random() < 0.7:
                self.cancel_target(request, whole)

    def lost(self, engine: Engine) -> None:
        """A target engine has died: its parts have ended with it."""
        for request in self.requests:
            for whole in request.tries:
                if whole.engine is engine and not whole.settled:
                    for slot, end in whole.ends.items():
                        whole.ends[slot] = end or End.FAILED
                    self._reduce(request, whole)

    def _reduce(self, request: Request, whole: Whole) -> None:
        """Visible only if every part is installed; else what is installed is released, and tried again elsewhere."""
        if whole.settled or not whole.over:
            return
        whole.settled = True
        done = all(end is End.DONE for end in whole.ends.values()) and whole.engine.alive and not whole.repeat
        self._network.note(f"{request.key} on {whole.engine.name}: {'WHOLE' if done else 'not whole'}")
        request.done = request.done or done
        for rank in self._engines.targets(whole.engine):
            use = self._dice.random() * 3.0 if done else self._skew()
            if whole.ends.get(rank.slot) is End.DONE:
                rank.post(use, rank.release, request.key)
        if not done and not whole.repeat and End.DONE not in whole.ends.values() and not self._network.quiet:
            self._later(0.1 + self._dice.random() * 0.5, self.turn_elsewhere, request)

    def cancel_target(self, request: Request, whole: Whole) -> None:
        """The target engine takes it back, on all its ranks."""
        for rank in self._engines.targets(whole.engine):
            rank.post(self._skew(), rank.cancel, request.key)

    # --- foolishness --------------------------------------------------------------------------------------------------

    def turn_elsewhere(self, request: Request) -> None:
        """Another target engine, or the same one again, gets the same offer; the first need not have ended."""
        living = [engine for kind in self._plan.target_ranks if (engine := self._engines.living(kind)) is not None]
        if living:
            self._try(request, self._dice.choice(living))

    def ask_again(self, request: Request) -> None:
        """The same fetch once more, with the same words: it joins, or gets the outcome, or is refused."""
        for whole in request.tries[-1:]:
            for rank in self._engines.targets(whole.engine) if whole.engine.alive else ():
                again = Whole(whole.engine, {rank.slot: None}, repeat=True)
                rank.post(self._skew(), self._begin, request, again, rank)

    def decline(self, request: Request) -> None:
        """A target engine will not ask after all, on all its ranks."""
        for whole in request.tries[-1:]:
            self._tell_sources(request, whole, Decline(key=request.key, why="full local hit", unread=False))

    def renew(self, request: Request) -> None:
        """It is queued over there."""
        for whole in request.tries[-1:]:
            self._tell_sources(request, whole, Renew(keys=(request.key,)))

    def _tell_sources(self, request: Request, whole: Whole, message: Decline | Renew) -> None:
        for rank in self._engines.targets(whole.engine):
            for source in self._engines.sources(request.source):
                rank.post(self._skew(), self._network.send, rank, source.name, message)

    def _skew(self) -> float:
        return 0.0 if self._network.quiet else self._dice.random() ** 4

    def _later(self, seconds: float, do: Callable[..., None], *args: object) -> None:
        self._engines.agenda.after(seconds, None, do, *args)
