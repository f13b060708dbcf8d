"""What these tests need, said where it is missing."""

from __future__ import annotations

import random
from importlib.util import find_spec

import pytest

WHERE = "vLLM is not installed here; tests/engines/environment makes a place where it is, and runs these tests"
NEEDS_VLLM = [
    pytest.mark.skipif(find_spec("vllm") is None, reason=WHERE),
    pytest.mark.timeout(900),
]


PATIENT = {"peer_lost_seconds": 15, "lease_seconds": 15, "commit_ttl_seconds": 30, "handshake_seconds": 30}
"""For tests that are not about time: several engines on a few busy cores fall silent for longer than hosts do."""


def prompt(tokens: int, seed: int = 0) -> list[int]:
    """A prompt of so many bytes, another for each seed."""
    drawn = random.Random(1000 * seed + tokens)
    return [drawn.randrange(256) for _ in range(tokens)]
