"""Two vLLM servers over HTTP behind a small proxy: tokens equal, nothing computed twice, refusals by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from needs import NEEDS_VLLM, PATIENT, WHERE, prompt

from kvlink import Offer

httpx = pytest.importorskip("httpx", reason=WHERE)
if NEEDS_VLLM[0].args[0]:
    Deployment = Server = Any
else:
    from deployment import SOURCE, TOKEN_BYTES, Deployment, deployed, until
    from servers import Server, body, grown

pytestmark = NEEDS_VLLM

LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 96, 100, 127, 128, 129, 200, 255, 256, 257, 400, 511, 777, 1500)
AT_ONCE = 6
BLOCK = 32
REFUSED = 'vllm:kvlink_failed_loads_total{field="identity.weights_revision",kind="mismatch"}'


@pytest.fixture(scope="module")
def deployment(model: Callable[[str], Path], logs: Path) -> Iterator[Deployment]:
    extra = PATIENT | {"weights_revision": "r1"}
    prefill = Server("prefill", model("llama"), logs, extra=extra)
    decode = Server("decode", model("llama"), logs, extra=extra)
    with deployed(prefill, decode) as made:
        yield made


def test_every_prompt_token_is_fetched_and_every_answer_is_right(deployment: Deployment) -> None:
    """24 prompts of 1 to 1,500 tokens, several at once. Only a prompt's last token is computed by the decode server."""
    prompts = [prompt(length) for length in LENGTHS]
    alone = [deployment.alone(asked) for asked in prompts]
    before = deployment.decode.metrics()
    with ThreadPoolExecutor(AT_ONCE) as threads:
        assert list(threads.map(deployment.ask, prompts)) == alone
    after = deployment.decode.metrics()
    assert grown(before, after, "vllm:external_prefix_cache_hits_total") == sum(LENGTHS)
    # vLLM counts a prompt's last token, computed to sample from it, as loaded too; but not that of a one-token prompt.
    assert grown(before, after, SOURCE % "external_kv_transfer") == sum(LENGTHS) - 1
    assert grown(before, after, SOURCE % "local_compute") == 1
    assert grown(before, after, "vllm:kvlink_load_seconds_count") == len(LENGTHS)
    assert grown(before, after, "vllm:kvlink_load_bytes_sum") == sum(LENGTHS) * TOKEN_BYTES
    deployment.until_free()
    assert deployment.prefill.metrics()['vllm:kvlink_sends_total{end="done"}'] >= len(LENGTHS)


def test_another_revision_is_refused_by_name(deployment: Deployment) -> None:
    """K4: in the log and in a metric; the client is told that the request failed, and the source's blocks return."""
    asked = prompt(100, 2)
    offer = Offer.from_params(deployment.prefill.prefill(asked))
    identity = msgspec.structs.replace(offer.roster.identity, weights_revision="r2")
    roster = msgspec.structs.replace(offer.roster, identity=identity)
    params = msgspec.structs.replace(offer, roster=roster).to_params()
    before = deployment.decode.metrics()
    with pytest.raises(httpx.HTTPStatusError, match="500"):
        deployment.decode.complete(asked, kv_transfer_params=params)
    until(lambda: grown(before, deployment.decode.metrics(), REFUSED) == 1)
    assert "identity.weights_revision differs" in deployment.decode.log.read_text()
    deployment.until_free()


def test_a_client_that_hangs_up_gives_every_block_back(deployment: Deployment) -> None:
    """B4: through the proxy, while tokens stream."""
    with httpx.stream(
        "POST", f"{deployment.proxy}/v1/completions", json=body(prompt(500, 3), 1400, stream=True), timeout=60
    ) as answer:
        next(answer.iter_raw())
    deployment.until_free()
    asked = prompt(60, 4)
    assert deployment.ask(asked) == deployment.alone(asked)


def test_a_prefix_that_the_decode_server_has_is_not_fetched(deployment: Deployment) -> None:
    """A conversation's next turn: only what lies past the last whole block of the one before it."""
    first = prompt(200, 5)
    deployment.ask(first)
    longer = first + prompt(100, 6)
    alone = deployment.alone(longer)
    before = deployment.decode.metrics()
    assert deployment.ask(longer) == alone
    after = deployment.decode.metrics()
    here = len(first) // BLOCK * BLOCK
    assert grown(before, after, SOURCE % "local_cache_hit") == here
    assert grown(before, after, SOURCE % "external_kv_transfer") == len(longer) - here
    assert grown(before, after, "vllm:kvlink_load_bytes_sum") == (len(longer) - here) * TOKEN_BYTES


def test_a_decode_server_comes_back_with_other_weights(deployment: Deployment) -> None:
    """K4, C7: killed, and started anew: it states another revision, and is refused by that name.

    Its policy says to recompute: the answer is right all the same.
    """
    deployment.decode.kill()
    deployment.decode.name = "restarted decode"
    deployment.decode.extra = deployment.decode.extra | {"weights_revision": "r2"}
    deployment.decode.connector = {"kv_connector": "KVLinkConnector", "kv_load_failure_policy": "recompute"}
    deployment.decode.start()
    deployment.decode.wait()
    asked = prompt(100, 8)
    assert deployment.ask(asked) == deployment.alone(asked)
    until(lambda: deployment.decode.metrics().get(REFUSED) == 1)
    assert "identity.weights_revision differs" in deployment.decode.log.read_text()
    deployment.until_free()
