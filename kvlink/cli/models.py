"""Cache geometries of well-known models, by name."""

from __future__ import annotations

from typing import Final

import msgspec

from kvlink.layout import DType


class Geometry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one token's KV is: ``layers x (K, V) x kv_heads x head_dim`` elements of ``dtype``."""

    model: str
    layers: int
    kv_heads: int
    head_dim: int
    dtype: DType = DType.BFLOAT16

    @property
    def token_bytes(self) -> int:
        """Bytes of KV a token has over all layers and heads."""
        return self.layers * 2 * self.kv_heads * self.head_dim * self.dtype.itemsize


MODELS: Final = {
    geometry.model: geometry
    for geometry in (
        Geometry(model="llama-3-8b", layers=32, kv_heads=8, head_dim=128),
        Geometry(model="llama-3-70b", layers=80, kv_heads=8, head_dim=128),
        Geometry(model="qwen3-32b", layers=64, kv_heads=8, head_dim=128),
    )
}
"""From the models' published configurations (``num_hidden_layers``, ``num_key_value_heads``, ``head_dim``)."""
