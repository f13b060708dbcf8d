"""What the scheduler's side reads of vLLM's requests and of their block lists."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from kvlink.descriptor import Facts

NULL_BLOCK: Final = 0
"""vLLM's block for positions that have left a window."""
NO_ADAPTER: Final = ""
"""Stated by a request without LoRA, so that its KV is not taken for an adapter's, nor the reverse."""


class EngineRequest(Protocol):
    """What is read of vLLM's ``Request``."""

    request_id: str
    prompt_token_ids: Sequence[int] | None
    num_prompt_tokens: int
    num_computed_tokens: int
    kv_transfer_params: dict[str, Any] | None
    lora_request: Any
    mm_features: Sequence[Any]


@dataclass(frozen=True, slots=True)
class GroupView:
    """What the scheduler must know of one KVLink group.

    Attributes:
        name: KVLink's name of the group.
        index: which of vLLM's block lists is the group's.
        block_size: positions in a block.
        windowed: whether blocks before a window are given back, and stand as null blocks.
    """

    name: str
    index: int
    block_size: int
    windowed: bool


def facts_of(request: EngineRequest, tokens: int) -> Facts:
    """What an engine states of the first ``tokens`` positions of a request: which prompt, and which adapter.

    A prompt given as embeddings has no ids to name it by, and is not stated.
    """
    digest = None
    if request.prompt_token_ids is not None:
        named = hashlib.sha256(array("q", request.prompt_token_ids[:tokens]).tobytes())
        for feature in request.mm_features or ():  # images of one size have the same ids
            if feature.mm_position.offset < tokens:
                named.update(feature.identifier.encode())
        digest = named.hexdigest()
    adapter = NO_ADAPTER if request.lora_request is None else str(request.lora_request.lora_name)
    return Facts(prompt_digest=digest, adapter=adapter)


def window_start(group: GroupView, blocks: Sequence[int]) -> int:
    """First position that a block is there for."""
    gone = 0
    if group.windowed:
        while gone < len(blocks) and blocks[gone] == NULL_BLOCK:
            gone += 1
    return gone * group.block_size
