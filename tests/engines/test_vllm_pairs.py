"""Two real vLLM engines that decode what the other has prefilled, both ways, and answer as one engine alone does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engines_in_processes import Engine, running
from needs import NEEDS_VLLM, PATIENT, prompt

pytestmark = NEEDS_VLLM
if not NEEDS_VLLM[0].args[0]:
    import torch
    from transformers import AutoModelForCausalLM

NO_PREFIXES = {"enable_prefix_caching": False}
LENGTHS = (1, 2, 31, 32, 33, 63, 64, 65, 127, 129, 200, 700)

PAIRS: dict[str, tuple[str, dict[str, Any], dict[str, Any], tuple[int, ...]]] = {
    "blocks of 32 and 64": ("llama", {"block_size": 32}, {"block_size": 64}, LENGTHS),
    "windows, blocks of 32 and 64": ("windows", {"block_size": 32}, {"block_size": 64}, (*LENGTHS, 128, 130, 161)),
    "latents": ("latent", {}, {}, (1, 15, 16, 17, 33, 65, 161, 400)),
    "TP 2 and TP 1": ("llama", {"tensor_parallel_size": 2}, {}, LENGTHS),
}


def by_transformers(model: Path, asked: list[int]) -> list[int]:
    """What transformers answers. For latents vLLM is no reference for itself here: its CPU kernels give a prompt's last
    token another answer in a chunk than alone, as it is computed after a load; the latter is that of transformers."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    answer = loaded.generate(torch.tensor([asked]), max_new_tokens=8, do_sample=False, eos_token_id=None)
    return answer[0, len(asked) :].tolist()


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
        alone = by_transformers(target.model, asked) if "latent" in target.model.name else target.complete(asked)
        assert target.complete(asked, params=source.prefill(asked)) == alone, f"{length} tokens\n{target.tail()}"
    source.until_free()
    target.until_free()
