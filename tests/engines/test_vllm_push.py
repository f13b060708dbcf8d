"""Two real vLLM engines, the one pushing what it computes to the other while it computes it.

The prefill engine computes 128 tokens a step, has room for little more than one long prompt, and sits behind a relay.
A load that fails is computed by the decode engine, as its policy says; where it should not fail, its log is looked at.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from engines_in_processes import FOR_A_READER, Engine, running
from needs import NEEDS_VLLM, PATIENT, prompt
from relay import Relay
from servers import free_port

pytestmark = NEEDS_VLLM
if not NEEDS_VLLM[0].args[0]:
    from vllm.config import ParallelConfig
    from vllm.distributed.kv_transfer.kv_connector.v1 import base
    from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from kvlink.adapters.vllm import KVLinkConnector

HOOKS = {
    "handle_preemptions": ["self", "kv_connector_metadata"],
    "save_kv_layer": ["self", "layer_name", "kv_layer", "attn_metadata", "kwargs"],
    "wait_for_save": ["self"],
    "has_pending_push_work": ["self"],
    "requires_piecewise_for_cudagraph": ["extra_config"],
}

PUSH_FIELD = "kvlink_push"
LONG = 1500
CHUNK = 128
SOURCE_BLOCKS = 66
"""65 of them for requests: a long prompt has 47."""
BYTES_PER_TOKEN = 4 * 2 * 4 * 64 * 4
"""Layers, K and V, heads, channels, bytes of a float32."""
SLOW_BYTES_PER_SECOND = 1e6


@dataclass
class Lab:
    """A prefill engine behind a relay, and a decode engine. The tests below run in order, and share it."""

    source: Engine
    target: Engine
    relay: Relay
    known: dict[str, Any] = field(default_factory=dict)
    keys: Iterator[int] = field(default_factory=itertools.count)

    def submit(self, asked: list[int], tokens: int = 8) -> tuple[str, str]:
        """The same prompt to both, as a router does that knows the prefill engine; the ids of both."""
        key = {PUSH_FIELD: f"key-{next(self.keys)}"}
        return (
            self.source.submit(asked, 1, FOR_A_READER | key),
            self.target.submit(asked, tokens, self.known | key),
        )

    def learn(self) -> None:
        """Who the prefill engine is, from its answer."""
        there = self.source.submit(prompt(10), 1, FOR_A_READER | {PUSH_FIELD: f"key-{next(self.keys)}"})
        self.known = self.source.result(there)["params"]
        self.target.complete(prompt(10), params=self.known)
        self.settle()

    def settle(self) -> None:
        """Every block is back on both sides."""
        self.source.until_free()
        self.target.until_free()

    def check(self, seed: int) -> None:
        """Later requests are right, and every block is back on both sides."""
        failures = self.failures
        asked = prompt(300, seed)
        alone = self.target.complete(asked)
        there, here = self.submit(asked)
        assert self.target.result(here)["tokens"] == alone, self.target.tail()
        self.source.result(there)
        assert self.failures == failures, self.target.tail()
        self.settle()

    @property
    def failures(self) -> int:
        """Loads that failed on the decode engine so far."""
        return self.target.log.read_text(errors="replace").count("was not loaded")

    def in_the_middle(self, asked: list[int], *, slow: bool = True) -> tuple[str, str]:
        """A request of which a third is computed, and on its way; the prefill engine stands still there."""
        self.relay.bytes_per_second = SLOW_BYTES_PER_SECOND if slow else None
        self.relay.passed = 0
        self.source.step(on=False)
        ids = self.submit(asked)
        self.source.step(on=True, steps=4)
        wanted = 500_000 if slow else 4 * CHUNK * BYTES_PER_TOKEN
        deadline = time.monotonic() + 30
        while self.relay.passed < wanted:
            assert time.monotonic() < deadline, self.target.tail()
            time.sleep(0.005)
        return ids


@pytest.fixture(scope="module")
def lab(model: Callable[[str], Path], logs: Path) -> Iterator[Lab]:
    port = free_port()
    common = PATIENT | {"transports": ["stream"], "flow": "push"}
    behind = {"listen": f"tcp://127.0.0.1:{port}", "advertise": "127.0.0.2"}
    source = Engine(
        "source", model("llama"), logs, extra=common | behind,
        options={"max_num_batched_tokens": CHUNK, "num_gpu_blocks_override": SOURCE_BLOCKS},
    )  # fmt: skip
    target = Engine(
        "target", model("llama"), logs, extra=common, connector={"kv_load_failure_policy": "recompute"},
        options={"enable_prefix_caching": False},
    )  # fmt: skip
    with Relay("127.0.0.2", port, "127.0.0.1") as relay, running(source, target):
        made = Lab(source, target, relay)
        made.learn()
        yield made


def test_what_a_push_relies_on_in_vllm_is_there() -> None:
    """Where another version differs, this says in what. A preemption is told before anything of its step is written."""
    assert set(HOOKS) <= set(vars(KVLinkConnector))
    for hook, parameters in HOOKS.items():
        for cls in (base.KVConnectorBase_V1, KVLinkConnector):
            assert list(inspect.signature(getattr(cls, hook)).parameters) == parameters, hook
    fields = {field.name for field in dataclasses.fields(SchedulerOutput)}
    assert {"num_scheduled_tokens", "preempted_req_ids", "kv_connector_block_state"} <= fields
    assert callable(KVConnectorBlockState.get_block_ids)
    assert hasattr(ParallelConfig, "use_ubatching")
    step = inspect.getsource(GPUModelRunner.execute_model)
    assert step.index("handle_preemptions(") < step.index("_update_states(")
    assert KVLinkConnector.requires_piecewise_for_cudagraph({"flow": "push"})
    assert not KVLinkConnector.requires_piecewise_for_cudagraph({})


def test_prompts_of_all_lengths_are_pushed_at_once(lab: Lab) -> None:
    """E4: chunked prefill, more at once than the prefill engine has room for; every answer is that of one engine."""
    prompts = [prompt(length) for length in (1, 2, 31, 32, 33, 127, 128, 129, 300, 777, LONG)]
    alone = [lab.target.complete(asked) for asked in prompts]
    ids = [lab.submit(asked) for asked in prompts]
    assert [lab.target.result(here)["tokens"] for _, here in ids] == alone, lab.target.tail()
    for there, _ in ids:
        lab.source.result(there)
    assert lab.failures == 0, lab.target.tail()
    lab.settle()


def test_a_prompt_that_prefill_has_cached_is_pushed(lab: Lab) -> None:
    asked = prompt(700, 1)
    alone = lab.target.complete(asked)
    for _ in range(2):
        there, here = lab.submit(asked)
        assert lab.target.result(here)["tokens"] == alone, lab.target.tail()
        lab.source.result(there)
    assert lab.failures == 0, lab.target.tail()
    lab.settle()


def test_what_is_computed_is_there_before_the_rest_is_computed(lab: Lab) -> None:
    """Four chunks of twelve arrive while the prefill engine stands still."""
    asked = prompt(LONG, 20)
    alone = lab.target.complete(asked)
    there, here = lab.in_the_middle(asked, slow=False)
    lab.source.step(on=True)
    assert lab.target.result(here)["tokens"] == alone, lab.target.tail()
    lab.source.result(there)
    assert lab.failures == 0, lab.target.tail()
    lab.settle()


def test_a_prefill_that_is_preempted_is_pushed_anew(lab: Lab) -> None:
    """A6: while its first chunks are on their way, four answers grow into the room that it needs."""
    asked = prompt(LONG, 2)
    alone = lab.target.complete(asked)
    before = lab.source.gauges()["preemptions"]
    lab.relay.bytes_per_second = SLOW_BYTES_PER_SECOND
    lab.source.step(on=False)  # so that they arrive together
    growing = [lab.source.submit(prompt(120, seed), 40) for seed in range(10, 14)]
    there, here = lab.submit(asked)
    lab.source.step(on=True)
    lab.source.until(lambda gauges: gauges["preemptions"] > before)
    lab.relay.bytes_per_second = None
    assert lab.target.result(here)["tokens"] == alone, lab.target.tail()
    for one in (*growing, there):
        lab.source.result(one)
    assert lab.failures == 0, lab.target.tail()
    assert "its prefill was preempted" in lab.target.log.read_text(errors="replace")
    lab.settle()
    lab.check(3)


def test_a_decode_that_is_aborted_in_mid_stream(lab: Lab) -> None:
    """A1, A2: its blocks are free after its cut-off; prefill's as soon as it has ended."""
    there, here = lab.in_the_middle(prompt(LONG, 4))
    lab.target.abort(here)
    lab.target.until_free()
    lab.source.step(on=True)
    lab.source.result(there)
    lab.source.until_free()
    lab.relay.bytes_per_second = None
    lab.check(5)


def test_a_prefill_that_is_aborted_in_mid_stream(lab: Lab) -> None:
    """B5, E3: its blocks come back after its readers are cut off; decode computes the prompt itself."""
    asked = prompt(LONG, 6)
    alone = lab.target.complete(asked)
    there, here = lab.in_the_middle(asked)
    lab.source.abort(there)
    lab.source.step(on=True)
    lab.source.until_free()
    assert lab.target.result(here)["tokens"] == alone
    lab.relay.bytes_per_second = None
    lab.check(7)


def test_the_prefill_engine_is_killed_in_mid_stream(lab: Lab) -> None:
    """C1, C7: decode computes the prompt itself within its bounds; a restarted engine is another one, and serves."""
    asked = prompt(LONG, 8)
    alone = lab.target.complete(asked)
    _, here = lab.in_the_middle(asked)
    lab.source.kill()
    assert lab.target.result(here)["tokens"] == alone
    lab.target.until_free()
    lab.relay.bytes_per_second = None
    lab.source.name = "restarted source"
    lab.source.start()
    lab.source.wait()
    lab.learn()
    lab.check(9)
