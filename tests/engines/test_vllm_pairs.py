"""Real vLLM engines that decode what another has prefilled, every way, and answer as one engine alone does."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engines_in_processes import FOR_A_READER, Engine, running
from needs import NEEDS_VLLM, PATIENT, prompt

pytestmark = NEEDS_VLLM

NO_PREFIXES = {"enable_prefix_caching": False}
LENGTHS = (1, 2, 16, 31, 32, 33, 64, 65, 129, 700)

SETS: dict[str, tuple[str, list[dict[str, Any]], tuple[int, ...]]] = {
    "blocks of 16, 32 and 64": ("llama", [{"block_size": 16}, {"block_size": 32}, {"block_size": 64}], LENGTHS),
    "windows, blocks of 32 and 64": ("windows", [{"block_size": 32}, {"block_size": 64}], (*LENGTHS, 128, 130, 161)),
    "TP 2 and TP 1": ("llama", [{"tensor_parallel_size": 2}, {}], LENGTHS),
}


@pytest.fixture(scope="module", params=SETS)
def engines(
    request: pytest.FixtureRequest, model: Callable[[str], Path], logs: Path
) -> Iterator[tuple[list[Engine], tuple[int, ...]]]:
    kind, options, lengths = SETS[request.param]
    made = [
        Engine(f"{request.param} {number}", model(kind), logs, extra=PATIENT, options=own | NO_PREFIXES)
        for number, own in enumerate(options)
    ]
    with running(*made):
        yield made, lengths


def test_decode_goes_on_as_if_it_had_prefilled(engines: tuple[list[Engine], tuple[int, ...]]) -> None:
    """D1, D4, D5, D7, E1: from each engine to each other; what does not load fails. Every block is back afterwards."""
    everyone, lengths = engines
    for length in lengths:
        asked = prompt(length)
        alone = {engine.name: engine.complete(asked) for engine in everyone}
        for source, target in itertools.permutations(everyone, 2):
            answered = target.complete(asked, params=source.prefill(asked))
            where = f"{source.name} to {target.name}, {length} tokens"
            assert answered == alone[target.name], f"{where}\n{target.tail()}"
    for engine in everyone:
        engine.until_free()


def test_latents_arrive_bit_by_bit(model: Callable[[str], Path], logs: Path) -> None:
    """D7: compared in the caches: vLLM's CPU kernels for latents answer a prompt's last token differently in a chunk
    than alone, as it is computed after a load, so that their tokens tell nothing."""
    source, target = (
        Engine(name, model("latent"), logs, extra=PATIENT, options=NO_PREFIXES) for name in ("from", "to")
    )
    with running(source, target):
        for length in (2, 16, 17, 33, 161, 400):
            asked = prompt(length)
            prefilled = source.submit(asked, 1, FOR_A_READER)
            params = source.result(prefilled)["params"]
            sent = source.rows(prefilled, length - 1)
            decoding = target.submit(asked, 1000, params)
            deadline = time.monotonic() + 60
            while target.rows(decoding, length - 1) != sent:
                assert time.monotonic() < deadline, target.tail()
            target.abort(decoding)
        source.until_free()
        target.until_free()
