"""The request ledger: what planning knows of each request."""

from __future__ import annotations

import msgspec


class LedgerEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One request. The functions of this room also take mappings with these keys.

    Attributes:
        name: unique in its ledger.
        prompt_tokens: of the prompt, cached prefix included.
        decode_tokens: that were, or are expected to be, generated.
        prefix_hit_tokens: of the prompt that needed no prefill.
        queue_seconds: from arrival until work on it began.
    """

    name: str
    prompt_tokens: int
    decode_tokens: int
    prefix_hit_tokens: int = 0
    queue_seconds: float = 0.0
