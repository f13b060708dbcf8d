"""Push between two vLLM servers over HTTP, behind the proxy that sends each prompt to both at once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from needs import NEEDS_VLLM, PATIENT, WHERE, prompt

httpx = pytest.importorskip("httpx", reason=WHERE)
if NEEDS_VLLM[0].args[0]:
    Server = Any
else:
    from servers import Server, body, free_port, running, tokens_of
    from test_vllm_servers import grown, healthy, until

pytestmark = NEEDS_VLLM

PROXY = Path(__file__).parents[2] / "examples" / "vllm_pd" / "proxy.py"
LENGTHS = (1, 2, 31, 32, 33, 64, 65, 100, 127, 128, 129, 200, 256, 400, 511, 777, 1000, 1200, 1400, 1500)
AT_ONCE = 6
CHUNK = "256"
BYTES_PER_TOKEN = 4 * 2 * 4 * 64 * 4
"""Layers, K and V, heads, channels, bytes of a float32."""


@dataclass
class Deployment:
    prefill: Server
    decode: Server
    proxy: str

    def ask(self, asked: list[int], tokens: int = 8) -> list[int]:
        answer = httpx.post(f"{self.proxy}/v1/completions", json=body(asked, tokens), timeout=300)
        answer.raise_for_status()
        return tokens_of(answer.json())

    def settled(self) -> bool:
        return self.prefill.cache_usage() == self.decode.cache_usage() == 0


@pytest.fixture(scope="module")
def deployment(model: Callable[[str], Path], logs: Path) -> Iterator[Deployment]:
    extra = PATIENT | {"flow": "push"}
    prefill = Server(
        "prefill", model("llama"), logs, extra=extra,
        arguments=["--no-enable-prefix-caching", "--max-num-batched-tokens", CHUNK],
    )  # fmt: skip
    decode = Server("decode", model("llama"), logs, extra=extra, arguments=["--no-enable-prefix-caching"])
    with ExitStack() as stack:
        stack.enter_context(running(prefill, decode))
        port = free_port()
        command = [
            sys.executable, str(PROXY), "--flow", "push", "--prefill", prefill.url, "--decode", decode.url,
            "--port", str(port),
        ]  # fmt: skip
        process = subprocess.Popen(command)
        stack.callback(process.wait, 10)
        stack.callback(process.kill)
        until(lambda: healthy(f"http://127.0.0.1:{port}/health"))
        made = Deployment(prefill, decode, f"http://127.0.0.1:{port}")
        made.ask(prompt(10, 1))  # the proxy learns who prefills
        yield made


def test_every_prompt_token_is_pushed_and_every_answer_is_right(deployment: Deployment) -> None:
    """E4: chunked prefill, several at once. Only a prompt's last token is computed by the decode server."""
    prompts = [prompt(length) for length in LENGTHS]
    alone = [tokens_of(deployment.decode.complete(asked)) for asked in prompts]
    before = deployment.decode.metrics()
    with ThreadPoolExecutor(AT_ONCE) as threads:
        assert list(threads.map(deployment.ask, prompts)) == alone
    after = deployment.decode.metrics()
    source = 'vllm:prompt_tokens_by_source_total{source="%s"}'
    assert grown(before, after, "vllm:external_prefix_cache_hits_total") == sum(LENGTHS)
    assert grown(before, after, source % "external_kv_transfer") == sum(LENGTHS) - 1
    assert grown(before, after, source % "local_compute") == 1
    assert grown(before, after, "vllm:kvlink_load_bytes_sum") == sum(LENGTHS) * BYTES_PER_TOKEN
    assert grown(before, after, "vllm:kvlink_streamed_bytes_total") > 0, "nothing moved before its prefill was done"
    assert grown(before, after, "vllm:kvlink_push_exposed_seconds_count") > 0
    until(deployment.settled)


def test_a_client_that_hangs_up_gives_every_block_back(deployment: Deployment) -> None:
    """B4: through the proxy, while tokens stream."""
    asked = body(prompt(500, 3), 1400, stream=True)
    with httpx.stream("POST", f"{deployment.proxy}/v1/completions", json=asked, timeout=60) as answer:
        next(answer.iter_raw())
    until(deployment.settled)
    assert deployment.ask(prompt(60, 4)) == tokens_of(deployment.decode.complete(prompt(60, 4)))


def test_a_prefill_that_is_refused_is_answered_at_once(deployment: Deployment) -> None:
    """B2: the decode server waits for nobody."""
    too_long = httpx.post(f"{deployment.proxy}/v1/completions", json=body(prompt(2049), 8), timeout=60)
    assert too_long.status_code == 400
    until(deployment.settled)
