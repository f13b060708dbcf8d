"""Cache geometries of well-known models, by name."""

from __future__ import annotations

from typing import Final

import msgspec

from kvlink.layout import DType, PlaneKind


class Geometry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one token's KV is: ``layers x (K, V) x kv_heads x head_dim`` elements of ``dtype``.

    ``latent``: instead of K and V a layer has one latent of ``head_dim`` channels, which every TP rank holds (MLA).
    """

    model: str
    layers: int
    kv_heads: int
    head_dim: int
    dtype: DType = DType.BFLOAT16
    latent: bool = False

    @property
    def kinds(self) -> tuple[PlaneKind, ...]:
        """What a layer stores."""
        return (PlaneKind.LATENT,) if self.latent else (PlaneKind.K, PlaneKind.V)

    @property
    def head_elements(self) -> int:
        """Elements that a token has of one head, over all layers."""
        return self.layers * len(self.kinds) * self.head_dim


MODELS: Final = {
    geometry.model: geometry
    for geometry in (
        Geometry(model="llama-3-8b", layers=32, kv_heads=8, head_dim=128),
        Geometry(model="llama-3-70b", layers=80, kv_heads=8, head_dim=128),
        Geometry(model="qwen3-32b", layers=64, kv_heads=8, head_dim=128),
        Geometry(model="deepseek-v3", layers=61, kv_heads=1, head_dim=512 + 64, latent=True),
    )
}
"""From the models' published configurations (``num_hidden_layers``, ``num_key_value_heads``, ``head_dim``; for MLA
``kv_lora_rank`` and ``qk_rope_head_dim``, side by side in one latent)."""
