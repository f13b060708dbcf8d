"""What one step of an engine runs: chunked prefill beside continuous decode, under one budget of tokens."""

from __future__ import annotations

from collections.abc import Iterable


def prefill_chunks(
    remaining_tokens: Iterable[int], *, decoding: int, token_budget: int, max_running: int
) -> tuple[int, ...]:
    """How many prompt tokens of each waiting request the next step computes.

    Decoding requests take one token of the budget each; what is left goes to prompts, first come first served, whole
    where it suffices and cut where it does not. A step with any prompt computes at least one token of it, so a full
    decode batch slows prefill and never stops it.

    Args:
        remaining_tokens: of the prompts in order, each above zero; read only as far as the budget goes.
        decoding: requests that decode in the same step.
        token_budget: of one step.
        max_running: requests in a step, decoding ones included.

    Returns:
        One number for each of the first prompts; the others get nothing.
    """
    left, places = max(token_budget - decoding, 1), max_running - decoding
    chunks = []
    if places > 0:
        for tokens in remaining_tokens:
            chunks.append(min(tokens, left))
            left -= chunks[-1]
            if left <= 0 or len(chunks) == places:
                break
    return tuple(chunks)
