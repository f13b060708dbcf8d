"""What kind of requests a workload is made of."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypedDict

from kvlink.planning.fields import count, threshold


class RequestMix(TypedDict):
    """Requests of each kind; together all of them."""

    prefill_heavy: int
    decode_heavy: int
    mixed: int


def summarize_request_mix(requests: Iterable[object], long_prompt_threshold: int) -> RequestMix:
    """Count requests that mostly prefill, mostly decode, and do neither.

    With T for the threshold: *prefill-heavy* is a prompt above T with at most T / 8 decoded tokens, *decode-heavy* a
    prompt of at most T with more than T / 8, *mixed* every other. The eighth is exact: nothing is rounded.

    Args:
        requests: `LedgerEntry` objects, or mappings with ``prompt_tokens`` and ``decode_tokens``.
        long_prompt_threshold: tokens.

    Raises:
        ConfigError: (a ValueError) a number is missing, negative or not whole; the message names its field.
    """
    limit = threshold("long_prompt_threshold", long_prompt_threshold)
    mix = RequestMix(prefill_heavy=0, decode_heavy=0, mixed=0)
    for request in requests:
        long_prompt = count(request, "prompt_tokens") > limit
        long_decode = count(request, "decode_tokens") * 8 > limit
        if long_prompt == long_decode:
            mix["mixed"] += 1
        elif long_prompt:
            mix["prefill_heavy"] += 1
        else:
            mix["decode_heavy"] += 1
    return mix
