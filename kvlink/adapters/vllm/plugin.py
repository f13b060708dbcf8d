"""Makes the connector known by name: vLLM runs this in each of its processes (``vllm.general_plugins``)."""

from __future__ import annotations

from importlib import import_module

NAME = "KVLinkConnector"
"""What a user writes as ``kv_connector``."""


def register() -> None:
    """Register the connector with vLLM's factory; may run more than once in a process."""
    factory = import_module("vllm.distributed.kv_transfer.kv_connector.factory").KVConnectorFactory
    try:
        factory.get_connector_class_by_name(NAME)
    except ValueError:
        factory.register_connector(NAME, "kvlink.adapters.vllm.connector", NAME)
