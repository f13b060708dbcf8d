"""Models and devices by name: what public pages state of them, and nothing measured.

Models: layer and head counts, hidden size and parameter counts from the models' published configurations. Devices:
peak dense bfloat16 rate, memory bandwidth, memory and NVLink rate from the vendors' data sheets.
"""

from __future__ import annotations

from typing import Final

import msgspec

from kvlink.layout import DType


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a model costs to keep and to run.

    Attributes:
        parameters: of all weights, in units.
        active_parameters: that one token passes through (fewer for a mixture of experts).
        query_heads: attention heads; with ``head_dim`` they give attention's FLOPs.
        kv_heads: heads that are cached; 1 for a latent (MLA).
        head_dim: channels of K, and of V, of a head.
        latent_dim: MLA: channels of the one latent a token and layer has, rotary part included; it replaces K and V.
        kv_dtype: of the cache.
        weight_bytes_each: bytes a parameter takes.
        scale_bytes_per_head: of inline scales a token, layer and head carries, for K and V together.
    """

    name: str
    layers: int
    hidden: int
    query_heads: int
    kv_heads: int
    head_dim: int
    parameters: float
    active_parameters: float
    latent_dim: int | None = None
    kv_dtype: DType = DType.BFLOAT16
    weight_bytes_each: float = 2.0
    scale_bytes_per_head: int = 0


class Device(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One accelerator, by its data sheet.

    Attributes:
        peak_flops: dense bfloat16, FLOP/s.
        memory_bytes_per_second: HBM (or GDDR).
        memory_bytes: of it.
        peer_bytes_per_second: to the other devices of a worker, in one direction (NVLink, else PCIe).
    """

    name: str
    peak_flops: float
    memory_bytes_per_second: float
    memory_bytes: float
    peer_bytes_per_second: float


MODELS: Final = {
    model.name: model
    for model in (
        Model(name="llama-3-8b", layers=32, hidden=4096, query_heads=32, kv_heads=8, head_dim=128,
              parameters=8.03e9, active_parameters=8.03e9),
        Model(name="llama-3-70b", layers=80, hidden=8192, query_heads=64, kv_heads=8, head_dim=128,
              parameters=70.6e9, active_parameters=70.6e9),
        Model(name="qwen3-32b", layers=64, hidden=5120, query_heads=64, kv_heads=8, head_dim=128,
              parameters=32.8e9, active_parameters=32.8e9),
        Model(name="deepseek-v3", layers=61, hidden=7168, query_heads=128, kv_heads=1, head_dim=576,
              latent_dim=576, parameters=671e9, active_parameters=37e9, weight_bytes_each=1.0),
    )
}  # fmt: skip

DEVICES: Final = {
    device.name: device
    for device in (
        Device(name="a100-80gb", peak_flops=312e12, memory_bytes_per_second=2.039e12, memory_bytes=80e9,
               peer_bytes_per_second=300e9),
        Device(name="h100-sxm", peak_flops=989e12, memory_bytes_per_second=3.35e12, memory_bytes=80e9,
               peer_bytes_per_second=450e9),
        Device(name="h200-sxm", peak_flops=989e12, memory_bytes_per_second=4.8e12, memory_bytes=141e9,
               peer_bytes_per_second=450e9),
        Device(name="l40s", peak_flops=362e12, memory_bytes_per_second=0.864e12, memory_bytes=48e9,
               peer_bytes_per_second=32e9),
    )
}  # fmt: skip
