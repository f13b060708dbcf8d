"""What the connector relies on in vLLM, item by item: where another version differs, this says in which."""

from __future__ import annotations

import dataclasses
import inspect
from importlib.metadata import entry_points
from types import SimpleNamespace

import pytest
from needs import NEEDS_VLLM

pytestmark = NEEDS_VLLM
if not NEEDS_VLLM[0].args[0]:
    import torch
    import vllm._custom_ops as ops
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1 import base, metrics
    from vllm.v1 import kv_cache_interface as cache
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request, RequestStatus

    from kvlink.adapters.vllm import KVLinkConnector, plugin
    from kvlink.adapters.vllm.geometry import cpu_views, describe_groups
    from kvlink.adapters.vllm.identity import identity_of
    from kvlink.adapters.vllm.settings import Settings
    from kvlink.errors import UnsupportedError
    from kvlink.layout import PlaneKind

HOOKS = {
    "register_kv_caches": ["self", "kv_caches"],
    "get_handshake_metadata": ["self"],
    "start_load_kv": ["self", "forward_context", "kwargs"],
    "wait_for_layer_load": ["self", "layer_name"],
    "save_kv_layer": ["self", "layer_name", "kv_layer", "attn_metadata", "kwargs"],
    "wait_for_save": ["self"],
    "get_transfer_results": ["self", "finished_req_ids"],
    "get_kv_connector_stats": ["self"],
    "shutdown": ["self"],
    "set_xfer_handshake_metadata": ["self", "metadata"],
    "set_xfer_handshake_metadata_pp_aware": ["self", "metadata"],
    "get_loaded_kv_cache_group_ids": ["self", "request"],
    "on_new_request": ["self", "request"],
    "get_num_new_matched_tokens": ["self", "request", "num_computed_tokens"],
    "update_state_after_alloc": ["self", "request", "blocks", "num_external_tokens"],
    "build_connector_meta": ["self", "scheduler_output"],
    "update_connector_output": ["self", "connector_output"],
    "request_finished": ["self", "request", "block_ids"],
    "reset_cache": ["self"],
    "build_kv_connector_stats": ["data"],
    "build_prom_metrics": ["vllm_config", "metric_types", "labelnames", "per_engine_labelvalues"],
}
FIELDS = {
    "KVConnectorTransferResults": {"finished_sending", "finished_recving", "failed_recving"},
    "KVCacheConfig": {"num_blocks", "kv_cache_groups"},
    "KVCacheGroupSpec": {"layer_names", "kv_cache_spec", "enable_kv_transfer"},
    "AttentionSpec": {"block_size", "num_kv_heads", "head_size", "head_size_v", "dtype", "kv_quant_mode",
                      "num_head_slots", "state_content_bytes", "tokens_per_state"},
    "SlidingWindowSpec": {"sliding_window"},
    "ChunkedLocalAttentionSpec": {"attention_chunk_size"},
    "MLAAttentionSpec": {"cache_role", "cache_dtype_str"},
    "UniformTypeKVCacheSpecs": {"kv_cache_specs"},
    "KVConnectorStats": {"data"},
    "VllmConfig": {"instance_id", "model_config", "parallel_config", "cache_config", "speculative_config",
                   "compilation_config", "kv_transfer_config"},
    "KVTransferConfig": {"engine_id", "kv_connector_extra_config", "kv_load_failure_policy"},
    "KVConnectorOutput": {"finished_recving"},
}  # fmt: skip


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_is_called_as_it_was(hook: str) -> None:
    assert list(inspect.signature(getattr(base.KVConnectorBase_V1, hook)).parameters) == HOOKS[hook]
    assert list(inspect.signature(getattr(KVLinkConnector, hook)).parameters) == HOOKS[hook]


def test_all_that_is_abstract_is_there() -> None:
    assert not KVLinkConnector.__abstractmethods__
    assert list(inspect.signature(base.SupportsHMA.request_finished_all_groups).parameters) == [
        "self",
        "request",
        "block_ids",
    ]


@pytest.mark.parametrize("name", FIELDS)
def test_a_type_has_the_fields_that_are_read(name: str) -> None:
    homes = [base, cache, metrics]
    types = {"VllmConfig": VllmConfig, "KVTransferConfig": KVTransferConfig, "KVConnectorOutput": KVConnectorOutput}
    found = types.get(name) or next(getattr(home, name) for home in homes if hasattr(home, name))
    assert FIELDS[name] <= {field.name for field in dataclasses.fields(found)}


def test_what_is_derived_is_there() -> None:
    for name in ("transfer_group_ids", "needs_kv_cache_zeroing"):
        assert hasattr(cache.KVCacheConfig, name)
    assert {"FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED"} <= set(RequestStatus.__members__)
    source = inspect.getsource(Request.__init__)
    for name in ("request_id", "prompt_token_ids", "num_prompt_tokens", "num_computed_tokens", "kv_transfer_params",
                 "lora_request", "mm_features"):  # fmt: skip
        assert f"self.{name}" in source, name


def test_a_recurrent_state_is_refused_by_name() -> None:
    """Before anything is served: what is not transferred is not left out silently."""
    state = cache.MambaSpec(block_size=32, shapes=((4, 64),), dtypes=(torch.float32,))
    config = cache.KVCacheConfig(
        num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[cache.KVCacheGroupSpec(["model.layers.0.mixer"], state)]
    )
    with pytest.raises(UnsupportedError, match=r"model\.layers\.0\.mixer is a MambaSpec"):
        describe_groups(config)


def test_several_mtp_modules_are_refused() -> None:
    """Prefill would have to drop the tokens that they look ahead."""
    assert isinstance(inspect.getattr_static(VllmConfig, "num_prefill_lookahead_tokens"), property)
    with pytest.raises(UnsupportedError, match="3 MTP modules"):
        identity_of(SimpleNamespace(num_prefill_lookahead_tokens=3), Settings.read({}))


def test_the_connector_is_known_by_name() -> None:
    """The entry point of the installed package; registering twice is as good as once."""
    points = [point for point in entry_points(group="vllm.general_plugins") if point.name == "kvlink"]
    assert points, "kvlink is not installed, only imported: vLLM cannot find the connector by its name"
    for _ in range(2):
        points[0].load()()
    assert KVConnectorFactory.get_connector_class_by_name(plugin.NAME) is KVLinkConnector


@pytest.mark.parametrize("kernel", ["vec", "vec16"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_cpu_backend_lays_out_a_block_as_it_did(kernel: str, dtype: str) -> None:
    """D5: vLLM's own kernel writes, the planes KVLink is told of are read: the tensor's strides do not tell."""
    blocks, heads, slots, channels = 3, 2, 32 if kernel == "vec" else 16, 64
    tensor = torch.zeros(blocks, heads, slots, 2 * channels, dtype=getattr(torch, dtype))
    rows = torch.arange(slots * heads * channels, dtype=torch.float32).reshape(slots, heads, channels) % 251
    written = {PlaneKind.K: rows.to(tensor.dtype), PlaneKind.V: (rows + 1).to(tensor.dtype)}
    keys, values = tensor.view(blocks, heads, 2 * slots, channels).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(
        written[PlaneKind.K], written[PlaneKind.V], keys, values, torch.arange(slots) + slots, kernel
    )
    for kind, view in cpu_views(channels, tensor):
        assert torch.equal(view[1].transpose(0, 1), written[kind]), kind
        assert not view[0].any()
