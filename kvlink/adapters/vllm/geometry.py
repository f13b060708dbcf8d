"""vLLM's description of its cache, and the tensors it registers, as KVLink's groups and caches.

vLLM registers one tensor a layer, ``[block, head, slot, channel]``, K and V side by side in the channel (a latent
alone). A backend may lay out the inside of a block and head in its own way, which the tensor's strides do not tell:
those that do are known here by name. Names of layers carry global ids. Layers of one of vLLM's groups have one block
table; those that differ in their rows become groups of their own here, with the same block list.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    KVQuantMode,
    MLAAttentionSpec,
    SlidingWindowSpec,
    SparseCacheRole,
    UniformTypeKVCacheSpecs,
)

from kvlink.adapters.vllm.requests import GroupView
from kvlink.errors import LayoutError, UnsupportedError
from kvlink.layout import DType, Group, Identity, Place, PlaneKind, heads_of_rank
from kvlink.layout.geometry import Row
from kvlink.memory import Caches, PlaneKey

FP8_DTYPES: Final = {"fp8": DType.FLOAT8_E4M3, "fp8_e4m3": DType.FLOAT8_E4M3, "fp8_e5m2": DType.FLOAT8_E5M2}
"""By ``--kv-cache-dtype``: vLLM's specs call them all bytes."""
FUSED_AXES: Final = "block head slot (kv channel)"
SINGLE_AXES: Final = "block head slot channel"
CPU_BACKEND: Final = "CPU_ATTN"
CPU_PLAIN_KERNELS: Final = frozenset({"vec", "vec16"})
"""The CPU backend's kernels that keep a block and head as all of K, a channel's slots together, then all of V, a
slot's channels together. Those for matrix units pack K in tiles."""


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """One of KVLink's groups: vLLM's spec of its layers, and their names by global id."""

    view: GroupView
    spec: AttentionSpec
    layers: dict[int, str] = field(default_factory=dict)

    @property
    def kind(self) -> PlaneKind | None:
        """What its tensors hold; ``None`` for K and V."""
        if not isinstance(self.spec, MLAAttentionSpec) and self.spec.head_size_v:
            return None
        indexer = getattr(self.spec, "cache_role", None) is SparseCacheRole.INDEXER
        return PlaneKind.INDEX if indexer else PlaneKind.LATENT


def describe_groups(config: KVCacheConfig) -> tuple[CacheGroup, ...]:
    """KVLink's groups of an engine: the same in its scheduler, on all of its ranks, and for every block size.

    Raises:
        UnsupportedError: a group is of a kind that cannot be transferred; it is named.
    """
    groups: list[CacheGroup] = []
    used: dict[str, int] = {}
    for index in config.transfer_group_ids:
        engine_group = config.kv_cache_groups[index]
        by_row: dict[tuple[object, ...], list[str]] = {}
        specs: dict[tuple[object, ...], AttentionSpec] = {}
        for layer in engine_group.layer_names or [""]:
            spec = _supported(_spec_of(engine_group.kv_cache_spec, layer), layer)
            row: tuple[object, ...] = (
                _base_name(spec),
                spec.num_kv_heads,
                spec.head_size,
                spec.head_size_v,
                spec.dtype,
            )
            by_row.setdefault(row, []).append(layer)
            specs[row] = spec
        for row, layers in by_row.items():
            base = _base_name(specs[row])
            ordinal = used[base] = used.get(base, -1) + 1
            view = GroupView(
                name=f"{base}.{ordinal}" if ordinal else base,
                index=index,
                block_size=specs[row].block_size,
                windowed=isinstance(specs[row], SlidingWindowSpec | ChunkedLocalAttentionSpec),
            )
            groups.append(CacheGroup(view, specs[row], {_layer_id(name): name for name in layers if name}))
    return tuple(groups)


def describe_caches(
    config: KVCacheConfig,
    tensors: Mapping[str, Any],
    *,
    identity: Identity,
    place: Place,
    cache_dtype: str,
    layers: Mapping[str, Any],
) -> Caches:
    """A rank's tensors as KVLink's caches, by their true strides.

    Args:
        config: this rank's.
        tensors: as vLLM registers them, by layer name.
        identity: the model.
        place: the rank.
        cache_dtype: ``--kv-cache-dtype``.
        layers: vLLM's attention layers by name; those of a quantised cache hold its scales.

    Raises:
        UnsupportedError: the cache is of a kind that cannot be transferred.
        LayoutError: a tensor is not what vLLM's description says, or is missing.
    """
    planes: dict[PlaneKey, Any] = {}
    groups, axes, absent = [], {}, []
    for group in describe_groups(config):
        name = group.view.name
        own = _own_tensors(group, tensors)
        on_cpu = group.kind is None and any(_is_cpu_backend(layers.get(group.layers[layer])) for layer in own)
        for layer, tensor in own.items():
            if on_cpu:
                _check_cpu_kernel(group, group.layers[layer], layers[group.layers[layer]])
                planes |= {PlaneKey(name, layer, kind): view for kind, view in cpu_views(group.spec.head_size, tensor)}
            else:
                planes[PlaneKey(name, layer, group.kind)] = tensor
        if not own:
            absent.append(name)
        axes[name] = FUSED_AXES if group.kind is None and not on_cpu else SINGLE_AXES
        scales = _scales(group, list(own), layers) if group.spec.kv_quant_mode is not KVQuantMode.NONE else ()
        groups.append(_group(group, config, own, identity, place, _dtype(group.spec, cache_dtype), scales))
    return Caches.from_tensors(planes, groups, identity, place, axes=axes, absent=absent)


def streamed_layers(groups: Iterable[CacheGroup]) -> dict[str, int]:
    """By name, the ids of layers whose KV is all written once vLLM says so of their attention.

    An id with several caches (an indexer's beside the attention's) is left out, for vLLM does not say it of each: it
    counts as written with the next one.
    """
    named = [(layer, name) for group in groups for layer, name in group.layers.items()]
    count = Counter(layer for layer, _ in named)
    return {name: layer for layer, name in named if count[layer] == 1}


def zero_blocks(
    config: KVCacheConfig,
    tensors: Mapping[str, Any],
    blocks: Sequence[Sequence[int]],
    first_tokens: Sequence[int],
) -> None:
    """Zero a request's blocks, from its first tokens on; those before hold what others may read.

    Args:
        config: this rank's.
        tensors: as vLLM registers them.
        blocks: one list a group of `describe_groups`, in the engine's blocks.
        first_tokens: one a group, on a block's boundary.
    """
    for group, listed, first in zip(describe_groups(config), blocks, first_tokens, strict=True):
        own = listed[-(-first // group.view.block_size) :]
        for tensor in _own_tensors(group, tensors).values():
            ratio = tensor.shape[0] // config.num_blocks
            for block in own:
                tensor[block * ratio : (block + 1) * ratio].zero_()


def _group(  # noqa: PLR0913, PLR0917 - what describe_caches has found out
    group: CacheGroup,
    config: KVCacheConfig,
    own: Mapping[int, Any],
    identity: Identity,
    place: Place,
    dtype: DType,
    scales: tuple[tuple[float, ...], ...],
) -> Group:
    spec = group.spec
    blocks = next((int(tensor.shape[0]) for tensor in own.values()), config.num_blocks)
    if blocks % config.num_blocks:
        raise LayoutError(f"groups.{group.view.name}: {blocks} tensor blocks are no multiple of {config.num_blocks}")
    total = 1 if group.kind is not None else _total_heads(spec, identity, place)
    rows: tuple[Row, ...] = ()
    if group.kind is None and spec.head_size_v != spec.head_size:
        rows = (Row(PlaneKind.V, spec.head_size_v, dtype),)
    return Group(
        name=group.view.name,
        heads=heads_of_rank(total, place.tp_size, place.tp_rank),
        channels=spec.head_size,
        dtype=dtype,
        block_size=spec.block_size,
        num_blocks=config.num_blocks,
        planes=(),
        ratio=blocks // config.num_blocks,
        num_heads=None if total == identity.num_kv_heads else total,
        window=spec.sliding_window if isinstance(spec, SlidingWindowSpec) else None,
        rows=rows,
        scales=scales,
    )


def _own_tensors(group: CacheGroup, tensors: Mapping[str, Any]) -> dict[int, Any]:
    """By layer. Layers that share another's cache are that other's, and left out."""
    own: dict[int, Any] = {}
    seen: set[int] = set()
    for layer, name in sorted(group.layers.items()):
        tensor = tensors.get(name)
        if tensor is None:
            raise LayoutError(f"layer {name} of groups.{group.view.name} has no tensor among those registered")
        if len(tensor.shape) != 4:
            raise UnsupportedError(
                f"layer {name} registers a tensor of shape {tuple(tensor.shape)}, not [block, head, slot, channel]"
            )
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            own[layer] = tensor
    return own


def _is_cpu_backend(attention: Any) -> bool:
    backend = getattr(attention, "attn_backend", None)
    return backend is not None and backend.get_name() == CPU_BACKEND


def _check_cpu_kernel(group: CacheGroup, name: str, attention: Any) -> None:
    kernel = getattr(attention, "isa", None)
    if kernel not in CPU_PLAIN_KERNELS:
        raise UnsupportedError(
            f"layer {name} packs K for the CPU's {kernel!r} kernel; serve in float32 or float16, whose kernels do not"
        )
    if group.spec.head_size != group.spec.head_size_v:
        raise UnsupportedError(f"layer {name} has K and V of different sizes, which the CPU backend does not keep so")


def cpu_views(channels: int, tensor: Any) -> tuple[tuple[PlaneKind, Any], ...]:
    """K and V of a layer of the CPU backend, both as [block, head, slot, channel], by the strides they really have."""
    blocks, heads, slots, _ = tensor.shape
    halves = tensor.view(blocks, heads, 2, slots * channels)
    keys = halves[:, :, 0].unflatten(2, (channels, slots)).transpose(2, 3)
    return (PlaneKind.K, keys), (PlaneKind.V, halves[:, :, 1].unflatten(2, (slots, channels)))


def _total_heads(spec: AttentionSpec, identity: Identity, place: Place) -> int:
    """Heads of the whole model in a group of which this rank has ``spec.num_kv_heads``."""
    usual = heads_of_rank(identity.num_kv_heads, place.tp_size, place.tp_rank)
    return identity.num_kv_heads if len(usual) == spec.num_kv_heads else spec.num_kv_heads * place.tp_size


def _scales(group: CacheGroup, own: Sequence[int], layers: Mapping[str, Any]) -> tuple[tuple[float, ...], ...]:
    """What the attention layers multiply stored values by: a row a plane, K then V."""
    rows: list[tuple[float, ...]] = []
    for layer in own:
        attention = layers[group.layers[layer]]
        rows.append((float(attention._k_scale_float),))  # noqa: SLF001 - vLLM gives them no other name
        if group.kind is None:
            rows.append((float(attention._v_scale_float),))  # noqa: SLF001
    return tuple(rows)


def _dtype(spec: AttentionSpec, cache_dtype: str) -> DType:
    if spec.kv_quant_mode is not KVQuantMode.NONE:
        return FP8_DTYPES[cache_dtype]
    return DType(str(spec.dtype).removeprefix("torch."))


def _spec_of(spec: KVCacheSpec, layer: str) -> KVCacheSpec:
    if not isinstance(spec, UniformTypeKVCacheSpecs):
        return spec
    return spec.kv_cache_specs[layer] if layer else spec.first_spec


def _supported(spec: KVCacheSpec, layer: str) -> AttentionSpec:
    """Refuse by name what would be moved wrongly."""
    where = f"the cache of layer {layer or '?'}"
    if not isinstance(spec, FullAttentionSpec | SlidingWindowSpec | ChunkedLocalAttentionSpec):
        raise UnsupportedError(f"{where} is a {type(spec).__name__}, which this connector does not transfer")
    quantised = spec.kv_quant_mode not in (KVQuantMode.NONE, KVQuantMode.FP8_PER_TENSOR)
    if quantised or (getattr(spec, "cache_dtype_str", None) or "").endswith("ds_mla"):
        raise UnsupportedError(f"{where} is packed ({spec.kv_quant_mode.name}); use another --kv-cache-dtype")
    if spec.num_head_slots is not None or spec.state_content_bytes is not None or spec.tokens_per_state != 1:
        raise UnsupportedError(f"{where} packs heads or tokens in a way that this connector does not know")
    return spec


def _base_name(spec: AttentionSpec) -> str:
    latent = isinstance(spec, MLAAttentionSpec) or not spec.head_size_v
    indexer = getattr(spec, "cache_role", None) is SparseCacheRole.INDEXER
    what = "index" if indexer else "latent" if latent else "full"
    if isinstance(spec, SlidingWindowSpec):
        return f"{what}-window{spec.sliding_window}"
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return f"{what}-chunk{spec.attention_chunk_size}"
    return what


def _layer_id(name: str) -> int:
    numbers = [int(word) for word in name.split(".") if word.isdecimal()]
    if len(numbers) != 1:
        raise UnsupportedError(f"layer {name!r} does not say which one it is: its name has {len(numbers)} numbers")
    return numbers[0]
