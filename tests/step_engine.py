"""An engine as vLLM runs one, without vLLM: a step takes the scheduler's work to every rank and their reports back.

Every report is checked as vLLM does: an id that ends twice, or that nobody waits for, would end the engine.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from kvlink import Bridge, Caches, Config, Identity, Place
from kvlink.adapters.vllm.messages import Fetch, StepWork
from kvlink.adapters.vllm.requests import GroupView
from kvlink.adapters.vllm.scheduler_half import SchedulerHalf
from kvlink.adapters.vllm.worker_half import WorkerHalf
from kvlink.cli.bench.content import CacheContent, Prompt
from kvlink.layout import CacheSpec, DType, heads_of_rank, standard_spec

MODEL = Identity(model="tiny", num_layers=3, num_kv_heads=4, head_dim=32, weights_revision="r1")


@dataclass
class Request:
    """What the halves read of vLLM's request."""

    request_id: str
    prompt_token_ids: Sequence[int] | None
    num_computed_tokens: int = 0
    kv_transfer_params: dict[str, Any] | None = None
    lora_request: Any = None
    mm_features: Sequence[Any] = ()

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids or ())


@dataclass
class _Scheduled:
    """What a step computes of a request: its prompt's positions up to ``tokens``."""

    request: Request
    prompt: Prompt
    blocks: Sequence[int]
    tokens: int


class StepEngine:
    """An engine of some TP ranks in this process; its halves speak only through what vLLM would carry."""

    def __init__(
        self,
        name: str,
        *,
        tp: int = 1,
        block_size: int = 16,
        layout: str = "nhd",
        identity: Identity = MODEL,
        config: Config | None = None,
        incarnation: str = "1",
        canary: int = 0xA5,
        now: Callable[[], float] = time.monotonic,
        fetch_seconds: float = 10.0,
        push_seconds: float = 20.0,
        layers: bool = False,
    ) -> None:
        config = config or Config(transports=("stream",))
        self.block_size = block_size
        self.scrubbed: list[Fetch] = []
        self.contents: list[CacheContent] = []
        self._by_layer: list[list[CacheContent]] = []
        self._layers = layers
        self.ranks: list[WorkerHalf] = []
        for tp_rank in range(tp):
            spec = standard_spec(
                layout,
                identity=identity,
                place=Place(engine=name, incarnation=incarnation, tp_rank=tp_rank, tp_size=tp),
                layers=range(identity.num_layers),
                heads=heads_of_rank(identity.num_kv_heads, tp, tp_rank),
                block_size=block_size,
                num_blocks=64,
                dtype=DType.FLOAT16,
            )
            caches = Caches.standard(spec)
            content = CacheContent(spec, [region.array for region in caches.regions], canary)
            content.wipe()
            self.contents.append(content)
            regions = [region.array for region in caches.regions]
            self._by_layer.append([CacheContent(_only(spec, each), regions, canary) for each in _layers_of(spec)])
            bridge = Bridge.open(config, caches)
            self.ranks.append(
                WorkerHalf(
                    bridge,
                    fetch_seconds=fetch_seconds,
                    push_seconds=push_seconds,
                    now=now,
                    scrub=self.scrubbed.append,
                    layers=range(identity.num_layers) if layers else (),
                )
            )
        group = GroupView(name="full", index=0, block_size=block_size, windowed=False)
        self.scheduler = SchedulerHalf([group], identity, config, now, push_seconds=push_seconds)
        self.scheduler.set_cards(rank.card for rank in self.ranks)
        self.waiting: set[str] = set()
        """Loads and sends that have not been reported by all ranks."""
        self.sent: list[str] = []
        self.loaded: list[str] = []
        self.failed: set[str] = set()
        self._reports: dict[str, Counter[str]] = {"sent": Counter(), "received": Counter()}
        self._scheduled: dict[str, _Scheduled] = {}
        self._preempted: set[str] = set()
        self._overwritten: list[int] = []

    def close(self) -> None:
        for rank in self.ranks:
            rank.close(0.0)

    # --- as vLLM's scheduler would --------------------------------------------------------------------------------

    def prefill(self, request: Request, prompt: Prompt, blocks: Sequence[int]) -> dict[str, Any] | None:
        """Compute the prompt, end the request, and answer its transfer parameters."""
        for content in self.contents:
            content.fill(prompt, blocks)
        request.num_computed_tokens = request.num_prompt_tokens
        _, params = self.scheduler.request_finished(request, (list(blocks),), complete=True)
        if params is not None:
            self.waiting.add(request.request_id)
        return params

    def compute(self, request: Request, prompt: Prompt, blocks: Sequence[int], tokens: int) -> None:
        """Have the next step compute the prompt up to ``tokens``; the request has these blocks so far."""
        self._scheduled[request.request_id] = _Scheduled(request, prompt, blocks, tokens)

    def preempt(self, request: Request, blocks: Sequence[int]) -> None:
        """Have the next step write other things to the request's blocks."""
        request.num_computed_tokens = 0
        self._preempted.add(request.request_id)
        self._overwritten += blocks

    def finish(self, request: Request, blocks: Sequence[int]) -> dict[str, Any] | None:
        """The request's prompt is computed, and its one token sampled: it ends; its transfer parameters."""
        held, params = self.scheduler.request_finished(request, (list(blocks),), complete=True)
        if held:
            self.waiting.add(request.request_id)
        return params

    def arrive(self, request: Request) -> None:
        self.scheduler.on_new_request(request)

    def admit(self, request: Request, blocks: Sequence[int], computed: int = 0) -> int:
        """Give the request blocks; how many tokens are loaded into them."""
        count = self.scheduler.matched_tokens(request, computed)
        self.scheduler.blocks_given(request, (list(blocks),), count)
        if count:
            self.waiting.add(request.request_id)
        return count

    def end(self, request: Request) -> None:
        """The request ends here: aborted, or decoded to its end."""
        held, _ = self.scheduler.request_finished(request, ([],), complete=False)
        if held:
            self.waiting.add(request.request_id)

    def step(self) -> StepWork:
        scheduled, self._scheduled = self._scheduled, {}
        self.scheduler.step_scheduled(
            {name: one.tokens - one.request.num_computed_tokens for name, one in scheduled.items()},
            self._preempted,
            {name: (list(one.blocks),) for name, one in scheduled.items()}.get,
        )
        self._preempted = set()
        work = self.scheduler.take_work()
        carried = msgspec.msgpack.encode(work)  # vLLM sends it to other processes
        for rank, content, by_layer in zip(self.ranks, self.contents, self._by_layer, strict=True):
            told = msgspec.msgpack.decode(carried, type=StepWork)
            rank.streams.before_forward(told)
            content.wipe_blocks(self._overwritten)
            for layer, own in enumerate(by_layer):
                for one in scheduled.values():
                    own.fill(Prompt(one.prompt.seed, one.tokens), one.blocks[: -(-one.tokens // self.block_size)])
                if self._layers and scheduled:
                    rank.streams.layer_written(layer)
                    time.sleep(0.002)  # readers have their turn between two layers
            rank.streams.after_forward()
            rank.start(told)
            ended = rank.ended()
            assert ended.failed <= ended.received
            self.failed |= ended.failed
            self._reports["sent"].update(ended.sent)
            self._reports["received"].update(ended.received)
        self._overwritten = []
        for one in scheduled.values():
            one.request.num_computed_tokens = one.tokens
        for kind, into in (("sent", self.sent), ("received", self.loaded)):
            counts = self._reports[kind]
            whole = [request_id for request_id, count in counts.items() if count == len(self.ranks)]
            for request_id in whole:
                del counts[request_id]
                assert request_id in self.waiting, f"{request_id} is reported, and nobody waits for it"
                self.waiting.discard(request_id)
                into.append(request_id)
            if kind == "received":
                self.scheduler.loads_ended(whole)
        return work


def _layers_of(spec: CacheSpec) -> list[int]:
    return sorted({plane.layer for group in spec.groups for plane in group.planes})


def _only(spec: CacheSpec, layer: int) -> CacheSpec:
    """The spec of one layer's storage."""
    (group,) = spec.groups
    planes = tuple(plane for plane in group.planes if plane.layer == layer)
    return msgspec.structs.replace(spec, groups=(msgspec.structs.replace(group, planes=planes),))


def run(*engines: StepEngine, until: Callable[[], bool], timeout_seconds: float = 20.0) -> None:
    """Step the engines in turn."""
    deadline = time.monotonic() + timeout_seconds
    while not until():
        assert time.monotonic() < deadline, [engine.waiting for engine in engines]
        for engine in engines:
            engine.step()
        time.sleep(0.001)
