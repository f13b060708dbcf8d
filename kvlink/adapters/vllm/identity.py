"""Which model's KV an engine makes, and where a rank sits, read off vLLM's configuration."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

from kvlink.adapters.vllm.settings import Settings
from kvlink.errors import UnsupportedError
from kvlink.layout import Identity, Place, Rope

MAX_SCALING_CHARS: Final = 160
"""Longest RoPE scaling that is stated in words; a longer one by its type and digest."""


def identity_of(vllm_config: Any, settings: Settings) -> Identity:
    """The model as both engines must have it.

    Weights that are quantised make other KV than those that are not: their kind is part of the name. A revision is
    stated where ``--revision`` or the settings give one, and compared where both sides do.

    Raises:
        UnsupportedError: the draft model's KV of a prompt's last tokens is a guess, which nobody would compute anew.
    """
    ahead = vllm_config.num_prefill_lookahead_tokens
    if ahead > 1:
        raise UnsupportedError(
            f"a draft of {ahead} MTP modules reads {ahead} tokens past what prefill computes, and fills its cache with "
            "guesses there, which this connector would transfer; use num_speculative_tokens 1"
        )
    model = vllm_config.model_config
    config = model.hf_text_config
    name = settings.model or str(model.model)
    speculation = vllm_config.speculative_config
    draft = None if speculation is None else getattr(speculation, "draft_model_config", None)
    return Identity(
        model=f"{name} ({model.quantization})" if model.quantization else name,
        num_layers=model.get_total_num_hidden_layers() + _draft_layers(draft),
        num_kv_heads=model.get_total_num_kv_heads(),
        head_dim=model.get_head_size(),
        attention="mla" if model.use_mla else "gqa",
        weights_revision=settings.weights_revision or model.revision,
        rope=_rope(config),
    )


def place_of(vllm_config: Any, *, tp_rank: int, pp_rank: int) -> Place:
    """Where a rank sits. vLLM's instance id is new in each life of an engine, and the same in all of its processes.

    Raises:
        UnsupportedError: tokens are sharded over ranks (decode or prefill context parallelism).
    """
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(parallel, name, 1)
        if size > 1:
            raise UnsupportedError(f"{name} is {size}: tokens sharded over ranks cannot be transferred; use 1")
    return Place(
        engine=str(vllm_config.kv_transfer_config.engine_id),
        incarnation=str(vllm_config.instance_id),
        pp_rank=pp_rank,
        pp_size=parallel.pipeline_parallel_size,
        tp_rank=tp_rank,
        tp_size=parallel.tensor_parallel_size,
    )


def _draft_layers(draft: Any) -> int:
    """Layers that a draft model adds behind the model's own, each with a cache of its own."""
    config = None if draft is None else draft.hf_config
    for name in ("num_nextn_predict_layers", "n_predict", "num_hidden_layers"):
        count = getattr(config, name, None)
        if isinstance(count, int):
            return count
    return 0


def _rope(config: Any) -> Rope | None:
    stated = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    parameters = dict(stated) if isinstance(stated, Mapping) else {}
    by_kind = [value for value in parameters.values() if isinstance(value, Mapping)]
    first = by_kind[0] if by_kind else parameters
    theta = first.get("rope_theta", getattr(config, "rope_theta", None))
    if theta is None:
        return None
    fraction = first.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None))
    return Rope(theta=float(theta), scaling=_scaling(parameters), rotary_fraction=1.0 if fraction is None else fraction)


def _scaling(parameters: Mapping[str, Any]) -> str:
    """How RoPE is scaled, in words: where layers of several kinds have their own, all of them."""
    rest = {key: value for key, value in parameters.items() if key not in ("rope_theta", "partial_rotary_factor")}
    kind = rest.get("rope_type", rest.get("type", "several" if rest else "default"))
    if rest.keys() <= {"rope_type", "type"}:
        return "none" if kind == "default" else str(kind)
    text = json.dumps(rest, sort_keys=True, default=str)
    return text if len(text) <= MAX_SCALING_CHARS else f"{kind} {hashlib.sha256(text.encode()).hexdigest()[:16]}"
