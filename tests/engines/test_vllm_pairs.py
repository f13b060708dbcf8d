"""Two real vLLM engines that decode what the other has prefilled, both ways, and answer as one engine alone does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engines_in_processes import Engine, running
from needs import NEEDS_VLLM, prompt

pytestmark = NEEDS_VLLM

NO_PREFIXES = {"enable_prefix_caching": False}
LENGTHS = (1, 2, 31, 32, 33, 63, 64, 65, 127, 129, 200, 700)

PAIRS: dict[str, tuple[str, dict[str, Any], dict[str, Any], tuple[int, ...]]] = {
    "blocks of 32 and 64": ("llama", {"block_size": 32}, {"block_size": 64}, LENGTHS),
    "windows, blocks of 32 and 64": ("windows", {"block_size": 32}, {"block_size": 64}, (*LENGTHS, 128, 130, 161)),
    # vLLM's CPU kernels answer differently for a latent's last token if it is computed in a chunk or alone, as it is
    # after a load: chunks of 32 leave it alone in both.
    "latents": (
        "latent",
        {"long_prefill_token_threshold": 32},
        {"long_prefill_token_threshold": 32},
        (1, 33, 65, 161, 705),
    ),
    "TP 2 and TP 1": ("llama", {"tensor_parallel_size": 2}, {}, LENGTHS),
}


@pytest.fixture(scope="module", params=PAIRS)
def pair(
    request: pytest.FixtureRequest, model: Callable[[str], Path], logs: Path
) -> Iterator[tuple[Engine, Engine, tuple[int, ...]]]:
    kind, one, other, lengths = PAIRS[request.param]
    engines = [
        Engine(name, model(kind), logs, options=options | NO_PREFIXES)
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
