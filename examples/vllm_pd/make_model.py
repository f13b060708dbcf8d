"""Make a tiny model with random weights and a byte-level tokenizer: enough to see whether two engines agree."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

SPREAD = 0.2
"""Standard deviation of the weights: wide, so that tokens vary and every wrong byte of KV shows."""
COMMON = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "initializer_range": SPREAD,
          "bos_token_id": 256, "eos_token_id": 257, "max_position_embeddings": 4096, "dtype": "float32"}  # fmt: skip


def llama() -> torch.nn.Module:
    """Four layers, four KV heads of 64."""
    return LlamaForCausalLM(
        LlamaConfig(**COMMON, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4, head_dim=64)
    )


def latent() -> torch.nn.Module:
    """Multi-head latent attention: one latent of 512 and 64 rotary channels a token."""
    return DeepseekV3ForCausalLM(
        DeepseekV3Config(
            **COMMON, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, kv_lora_rank=512,
            q_lora_rank=None, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, first_k_dense_replace=2,
            n_routed_experts=2, num_experts_per_tok=1, n_shared_experts=1, moe_intermediate_size=64, n_group=1,
            topk_group=1,
        )
    )  # fmt: skip


def windows() -> torch.nn.Module:
    """Four layers, three of them with a sliding window of 128 tokens."""
    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            **COMMON, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
            sliding_window=128, layer_types=["sliding_attention"] * 3 + ["full_attention"],
        )
    )  # fmt: skip


KINDS = {"llama": llama, "latent": latent, "windows": windows}


def save_tokenizer(folder: Path) -> None:
    """One token a byte, so that a prompt's length is known before it is sent."""
    vocabulary = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary | {"<s>": 256, "</s>": 257}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    ends = {"bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **ends).save_pretrained(folder)


def make(kind: str, folder: Path, seed: int = 0) -> None:
    """Write the model of this kind to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    KINDS[kind]().save_pretrained(folder)
    save_tokenizer(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    make(arguments.kind, arguments.folder)
