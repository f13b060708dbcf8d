"""vLLM's connector: ``--kv-transfer-config '{"kv_connector": "KVLinkConnector", "kv_role": "kv_both"}'``.

`connector` is the class that vLLM loads and does nothing but pass its hooks on. `scheduler_half` decides, in the
scheduler's process, on pure data, with `outgoing` for what is pushed from here; `worker_half` owns the bridge, in each
rank's process, with `streams` for what is pushed; `messages` is what vLLM carries from the one to the other. `geometry`
reads vLLM's description of its cache, `identity` that of its model, `requests` its requests, `settings` what the
operator said; `stats` reports, and `plugin` makes the name known.

Only `connector`, `geometry` and `stats` import vLLM: the halves are ordinary code, tested without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvlink.adapters.vllm.connector import KVLinkConnector

__all__ = ["KVLinkConnector"]


def __getattr__(name: str) -> object:
    """The connector itself, for ``kv_connector_module_path="kvlink.adapters.vllm"``; it imports vLLM."""
    if name != "KVLinkConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module("kvlink.adapters.vllm.connector").KVLinkConnector
