"""Push between two vLLM servers over HTTP, behind the proxy that sends each prompt to both at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from needs import NEEDS_VLLM, PATIENT, WHERE, prompt

httpx = pytest.importorskip("httpx", reason=WHERE)
if NEEDS_VLLM[0].args[0]:
    Deployment = Server = Any
else:
    from deployment import SOURCE, TOKEN_BYTES, Deployment, deployed
    from servers import Server, body, grown, tokens_of

pytestmark = NEEDS_VLLM

LENGTHS = (1, 2, 31, 32, 33, 64, 65, 100, 127, 128, 129, 200, 256, 400, 511, 777, 1000, 1200, 1400, 1500)
AT_ONCE = 6
CHUNK = "256"


@pytest.fixture(scope="module")
def deployment(model: Callable[[str], Path], logs: Path) -> Iterator[Deployment]:
    extra = PATIENT | {"flow": "push"}
    prefill = Server(
        "prefill", model("llama"), logs, extra=extra,
        arguments=["--no-enable-prefix-caching", "--max-num-batched-tokens", CHUNK],
    )  # fmt: skip
    decode = Server("decode", model("llama"), logs, extra=extra, arguments=["--no-enable-prefix-caching"])
    with deployed(prefill, decode, "--flow", "push") as made:
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
    assert grown(before, after, "vllm:external_prefix_cache_hits_total") == sum(LENGTHS)
    assert grown(before, after, SOURCE % "external_kv_transfer") == sum(LENGTHS) - 1
    assert grown(before, after, SOURCE % "local_compute") == 1
    assert grown(before, after, "vllm:kvlink_load_bytes_sum") == sum(LENGTHS) * TOKEN_BYTES
    assert grown(before, after, "vllm:kvlink_streamed_bytes_total") > 0, "nothing moved before its prefill was done"
    assert grown(before, after, "vllm:kvlink_push_exposed_seconds_count") > 0
    deployment.until_free()


def test_a_client_that_hangs_up_gives_every_block_back(deployment: Deployment) -> None:
    """B4: through the proxy, while tokens stream."""
    asked = body(prompt(500, 3), 1400, stream=True)
    with httpx.stream("POST", f"{deployment.proxy}/v1/completions", json=asked, timeout=60) as answer:
        next(answer.iter_raw())
    deployment.until_free()
    assert deployment.ask(prompt(60, 4)) == tokens_of(deployment.decode.complete(prompt(60, 4)))


def test_a_prefill_that_is_refused_is_answered_at_once(deployment: Deployment) -> None:
    """B2: the decode server waits for nobody."""
    too_long = httpx.post(f"{deployment.proxy}/v1/completions", json=body(prompt(2049), 8), timeout=60)
    assert too_long.status_code == 400
    deployment.until_free()
