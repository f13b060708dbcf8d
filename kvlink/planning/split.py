"""Which requests would go where, if prefill and decode had pools of their own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypedDict

from kvlink.errors import ConfigError
from kvlink.planning.fields import count, threshold, value_of


class PoolSplit(TypedDict):
    """Request names by pool, in the order they were given."""

    prefill_pool: list[str]
    decode_pool: list[str]
    shared_pool: list[str]


def plan_pd_split(requests: Iterable[object], long_prompt_threshold: int, long_decode_threshold: int) -> PoolSplit:
    """Sort requests by which phase they load: each name lands in exactly one pool.

    A prompt above its threshold loads prefill, a decode above its own loads decode. A request that loads one of them
    goes to that pool; one that loads both, or neither, stays in the shared pool: it gains nothing by being moved.

    Args:
        requests: `LedgerEntry` objects, or mappings with ``name``, ``prompt_tokens`` and ``decode_tokens``.
        long_prompt_threshold: tokens.
        long_decode_threshold: tokens.

    Raises:
        ConfigError: (a ValueError) a field is missing or no count, or a name comes twice; the message names the field.
    """
    prompt_limit = threshold("long_prompt_threshold", long_prompt_threshold)
    decode_limit = threshold("long_decode_threshold", long_decode_threshold)
    split = PoolSplit(prefill_pool=[], decode_pool=[], shared_pool=[])
    seen: set[str] = set()
    for request in requests:
        name = value_of(request, "name")
        if not isinstance(name, str) or name in seen:
            raise ConfigError(f"name is {name!r}; every request needs a text of its own there")
        seen.add(name)
        long_prompt = count(request, "prompt_tokens") > prompt_limit
        long_decode = count(request, "decode_tokens") > decode_limit
        if long_prompt == long_decode:
            split["shared_pool"].append(name)
        elif long_prompt:
            split["prefill_pool"].append(name)
        else:
            split["decode_pool"].append(name)
    return split
