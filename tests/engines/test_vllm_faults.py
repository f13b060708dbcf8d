"""What breaks between two real vLLM engines: bytes, processes, clients. Every block comes back, and work goes on.

A relay stands in front of the prefill engine's port: it slows payload, so that there is a middle of a transfer, and
spoils it. Blocks are read off the engines' own allocators.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from engines_in_processes import Engine, running
from needs import NEEDS_VLLM, prompt
from relay import Relay
from servers import free_port, grown

pytestmark = NEEDS_VLLM

LONG = prompt(1500)
CLAIM_SECONDS = 4.0
SLACK_SECONDS = 1.0
"""For busy cores."""
LOADED = "vllm:kvlink_load_seconds_count"
SPOILED = 'vllm:kvlink_failed_loads_total{field="",kind="integrity"}'
SLOW_BYTES_PER_SECOND = 1e6
"""A transfer of 12 MB then takes some seconds on its lanes."""


@dataclass
class Lab:
    """A prefill engine behind a relay, and a decode engine. The tests below run in order, and share it."""

    source: Engine
    target: Engine
    relay: Relay

    def fetched(self, asked: list[int]) -> list[int]:
        return self.target.complete(asked, params=self.source.prefill(asked))

    def check(self, seed: int) -> None:
        """Later requests are loaded and right, and every block is back on both sides."""
        asked = prompt(90, seed)
        alone = self.target.complete(asked)
        before = self.target.metrics()
        assert self.fetched(asked) == alone, self.target.tail()
        assert grown(before, self.target.metrics(), LOADED) == 1, self.target.tail()
        self.source.until_free()
        self.target.until_free()

    def in_the_middle(self) -> str:
        """A request of the target whose transfer has begun and is far from done."""
        self.relay.bytes_per_second = SLOW_BYTES_PER_SECOND
        params = self.source.prefill(LONG)
        self.relay.passed = 0
        request_id = self.target.submit(LONG, params=params)
        deadline = time.monotonic() + 30
        while self.relay.passed < 500_000:
            assert time.monotonic() < deadline, self.target.tail()
            time.sleep(0.005)
        return request_id


@pytest.fixture(scope="module")
def lab(model: Callable[[str], Path], logs: Path) -> Iterator[Lab]:
    port = free_port()
    behind = {"listen": f"tcp://127.0.0.1:{port}", "advertise": "127.0.0.2", "claim_ttl_seconds": CLAIM_SECONDS}
    common = {"transports": ["stream"], "weights_revision": "r1", "commit_ttl_seconds": 20}
    source = Engine("source", model("llama"), logs, extra=common | behind)
    target = Engine("target", model("llama"), logs, extra=common, options={"enable_prefix_caching": False})
    with Relay("127.0.0.2", port, "127.0.0.1") as relay, running(source, target):
        yield Lab(source, target, relay)


def test_the_relay_changes_nothing_by_itself(lab: Lab) -> None:
    lab.check(1)
    assert lab.relay.passed > 0


def test_spoiled_bytes_never_become_tokens(lab: Lab) -> None:
    """Integrity is on: the request fails, as vLLM's policy says, and the next is right.

    The spoiled bytes hold NaN, which would reach the next requests through slots that vLLM only masks.
    """
    asked = prompt(300)
    before = lab.target.metrics()
    lab.relay.spoil = True
    try:
        answer = lab.target.result(lab.target.submit(asked, params=lab.source.prefill(asked)))
    finally:
        lab.relay.spoil = False
    assert (answer["reason"], answer["tokens"]) == ("error", [])
    assert grown(before, lab.target.metrics(), SPOILED) == 1
    lab.check(2)


def test_an_abort_in_the_queue(lab: Lab) -> None:
    """B4: the source's blocks come back at once, long before its claim runs out."""
    params = lab.source.prefill(LONG)
    for _ in range(2):  # a step of the source's lies between the two: it has published by then
        lab.source.gauges()
    lab.target.step(on=False)
    request_id = lab.target.submit(LONG, params=params)
    lab.target.abort(request_id)
    lab.target.step(on=True)
    assert lab.source.until_free() < CLAIM_SECONDS / 2
    lab.target.until_free()
    lab.check(3)


def test_an_abort_in_mid_transfer(lab: Lab) -> None:
    """A1, A2: the target's blocks are free only after its cut-off; what still arrives lands nowhere."""
    request_id = lab.in_the_middle()
    lab.target.abort(request_id)
    lab.target.until_free()
    lab.source.until_free()
    lab.relay.bytes_per_second = None
    lab.check(4)


def test_an_offer_that_nobody_fetches(lab: Lab) -> None:
    """B1: it ends by its own time to live."""
    lab.source.prefill(LONG)
    assert lab.source.gauges()["free_blocks"] < lab.source.gauges()["blocks"]
    lab.source.until_free(CLAIM_SECONDS + 4)
    lab.check(5)


def test_the_target_is_killed_in_mid_transfer(lab: Lab) -> None:
    """C7, B1: the source's blocks come back within the bounds on a lost peer; a restarted target is served."""
    lab.in_the_middle()
    lab.target.kill()
    lab.source.until_free()
    lab.relay.bytes_per_second = None
    lab.target.name = "restarted target"
    lab.target.connector = {"kv_load_failure_policy": "recompute"}
    lab.target.options |= {"num_gpu_blocks_override": 66}
    lab.target.start()
    lab.target.wait()
    lab.check(6)


def test_spoiled_bytes_are_computed_here_where_the_policy_says_so(lab: Lab) -> None:
    asked = prompt(300, 8)
    before = lab.target.metrics()
    lab.relay.spoil = True
    try:
        tokens = lab.fetched(asked)
    finally:
        lab.relay.spoil = False
    assert tokens == lab.target.complete(asked)
    assert grown(before, lab.target.metrics(), SPOILED) == 1
    lab.check(7)


def test_preempted_requests_go_on(lab: Lab) -> None:
    """The restarted target has 65 blocks: six requests fit when they arrive, and not when they have grown."""
    asked = [prompt(300, seed) for seed in range(10, 16)]
    offers = [lab.source.prefill(one) for one in asked]
    lab.target.step(on=False)  # so that they arrive together
    waiting = [lab.target.submit(one, 120, offer) for one, offer in zip(asked, offers, strict=True)]
    lab.target.step(on=True)
    answers = [lab.target.result(request_id)["tokens"] for request_id in waiting]
    assert lab.target.gauges()["preemptions"] > 0
    assert answers == [lab.target.complete(one, 120) for one in asked]
    lab.check(8)


def test_the_source_is_killed_in_mid_transfer(lab: Lab) -> None:
    """C1, C7: the load fails within its bounds and is computed here, as the policy says; a restarted source serves."""
    request_id = lab.in_the_middle()
    lab.source.kill()
    tokens = lab.target.result(request_id)["tokens"]
    lab.target.until_free()
    lab.relay.bytes_per_second = None
    lab.source.name = "restarted source"
    lab.source.extra |= {"integrity": False}  # it states no digests: for the last control
    lab.source.start()
    lab.source.wait()
    assert tokens == lab.target.complete(LONG)
    lab.check(9)


def test_weights_that_change_void_what_was_offered(lab: Lab) -> None:
    """K4: vLLM resets its connector where weights change: what is held comes back, and a reader is told."""
    asked = prompt(300, 9)
    params = lab.source.prefill(asked)
    lab.source.until(lambda gauges: gauges["free_blocks"] < gauges["blocks"])
    lab.source.reset()
    assert lab.source.until_free() < CLAIM_SECONDS / 2
    before = lab.target.metrics()
    assert lab.target.complete(asked, params=params) == lab.target.complete(asked)
    assert grown(before, lab.target.metrics(), LOADED) == 0
    lab.check(10)


def test_spoiled_bytes_change_the_tokens_where_nobody_looks(lab: Lab) -> None:
    """The control of all comparisons of tokens: with integrity off, as the restarted source has it, they differ.

    What it has installed stays in the target's cache, NaN and all: only the end of an engine comes after it.
    """
    asked = prompt(300, 7)
    alone = lab.target.complete(asked)
    before = lab.target.metrics()
    lab.relay.spoil = True
    try:
        assert lab.fetched(asked) != alone
    finally:
        lab.relay.spoil = False
    assert grown(before, lab.target.metrics(), LOADED) == 1


def test_an_engine_ends_in_its_time_in_mid_transfer(lab: Lab) -> None:
    """VLLM kills what has not ended in 5 s. The other engine's blocks come back, and its client is served."""
    request_id = lab.in_the_middle()
    assert lab.source.close() < 3 + SLACK_SECONDS
    assert len(lab.target.result(request_id)["tokens"]) == 8
    lab.target.until_free()
