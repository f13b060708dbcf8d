"""Two real vLLM engines that decode what the other has prefilled, both ways, and answer as one engine alone does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engines_in_processes import FOR_A_READER, Engine, running
from needs import NEEDS_VLLM, PATIENT, prompt

pytestmark = NEEDS_VLLM

NO_PREFIXES = {"enable_prefix_caching": False}
LENGTHS = (1, 2, 31, 32, 33, 63, 64, 65, 127, 129, 200, 700)

PAIRS: dict[str, tuple[str, dict[str, Any], dict[str, Any], tuple[int, ...]]] = {
    "blocks of 32 and 64": ("llama", {"block_size": 32}, {"block_size": 64}, LENGTHS),
    "windows, blocks of 32 and 64": ("windows", {"block_size": 32}, {"block_size": 64}, (*LENGTHS, 128, 130, 161)),
    "TP 2 and TP 1": ("llama", {"tensor_parallel_size": 2}, {}, LENGTHS),
}


@pytest.fixture(scope="module", params=PAIRS)
def pair(
    request: pytest.FixtureRequest, model: Callable[[str], Path], logs: Path
) -> Iterator[tuple[Engine, Engine, tuple[int, ...]]]:
    kind, one, other, lengths = PAIRS[request.param]
    engines = [
        Engine(name, model(kind), logs, extra=PATIENT, options=options | NO_PREFIXES)
        for name, options in (("one", one), ("other", other))
    ]
    with running(*engines):
        yield (*engines, lengths)


@pytest.mark.parametrize("back", [False, True], ids=["there", "and back"])
def test_decode_goes_on_as_if_it_had_prefilled(pair: tuple[Engine, Engine, tuple[int, ...]], back: bool) -> None:
    """D1, D4, D5, D7, E1: on real engines; every block is back afterwards."""
    source, target, lengths = (pair[1], pair[0], pair[2]) if back else pair
    for length in lengths:
        asked = prompt(length)
        alone = target.complete(asked)
        assert target.complete(asked, params=source.prefill(asked)) == alone, f"{length} tokens\n{target.tail()}"
    source.until_free()
    target.until_free()


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
