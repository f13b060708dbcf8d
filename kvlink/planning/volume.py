"""How many bytes a request's KV is, how long they must take at least, and how much of it a pool can hold."""

from __future__ import annotations

from dataclasses import dataclass

from kvlink.errors import ConfigError
from kvlink.planning.fields import count, number
from kvlink.planning.models import Device, Model


def kv_bytes_per_token(model: Model, *, tensor_parallel: int = 1) -> int:
    """Bytes a token has over all ranks of an engine.

    ``2 x layers x KV heads x head_dim x bytes``, the 2 for K and V; a latent (MLA) is stored once a layer instead.
    Inline scales are counted with them. More tensor-parallel ranks than KV heads hold replicas, and each is counted:
    that many bytes are received.

    Args:
        model: the geometry.
        tensor_parallel: ranks that share the heads.
    """
    copies = max(model.kv_heads, count({"tensor_parallel": tensor_parallel}, "tensor_parallel"))
    if model.latent_dim is not None:
        row = model.latent_dim * model.kv_dtype.itemsize
    else:
        row = 2 * model.head_dim * model.kv_dtype.itemsize
    return model.layers * copies * (row + model.scale_bytes_per_head)


def kv_bytes(model: Model, tokens: int, *, tensor_parallel: int = 1) -> int:
    """KV bytes of ``tokens`` tokens over all ranks; see `kv_bytes_per_token`.

    Raises:
        ConfigError: (a ValueError) ``tokens`` is negative or no count.
    """
    return kv_bytes_per_token(model, tensor_parallel=tensor_parallel) * count({"tokens": tokens}, "tokens")


def shard_bytes(model: Model, tokens: int, *, tensor_parallel: int, pipeline_parallel: int = 1) -> int:
    """KV bytes of the fullest rank: uneven layers and heads go to the first ranks, so rank 0 has the most."""
    heads = -(-model.kv_heads // tensor_parallel)
    layers = -(-model.layers // pipeline_parallel)
    one_head = kv_bytes(model, tokens) // (model.layers * model.kv_heads)
    return one_head * heads * layers


def transfer_bound_seconds(size: int, bandwidth_bytes_per_second: float) -> float:
    """The least time that ``size`` bytes take over an *effective* bandwidth: one divided by the other.

    It leaves out all that is not bytes on one idle wire: handshake, reservation, plan and commit, waiting for a link
    that others use, runs too short to fill it, gather and scatter, verification. `kvlink.planning.transfer` adds what
    was measured of these.

    Raises:
        ConfigError: (a ValueError) a number is negative, or the bandwidth is zero.
    """
    rate = number({"bandwidth_bytes_per_second": bandwidth_bytes_per_second}, "bandwidth_bytes_per_second")
    if rate == 0:
        raise ConfigError("bandwidth_bytes_per_second is 0; give what the wire moves, above zero")
    return count({"size": size}, "size") / rate


@dataclass(frozen=True, slots=True)
class Capacity:
    """Room for KV in one worker.

    Attributes:
        tokens: that fit.
        requests: of the given length that fit whole, their growth included.
    """

    tokens: int
    requests: int


def capacity(
    model: Model, device: Device, *, devices: int, request_tokens: int, memory_fraction: float = 0.9
) -> Capacity:
    """What one worker of ``devices`` devices can hold beside the weights.

    Args:
        model: whose weights and cache share the memory.
        device: what each of them is.
        devices: that share one worker's weights and KV (tensor parallel).
        request_tokens: prompt and expected growth of one request.
        memory_fraction: of the memory that the engine takes; the rest is activations, graphs and the runtime.

    Raises:
        ConfigError: (a ValueError) the weights alone do not fit, or a number is negative.
    """
    memory = device.memory_bytes * devices * memory_fraction
    weights = model.parameters * model.weight_bytes_each
    if weights >= memory:
        raise ConfigError(
            f"{model.name}'s weights ({weights / 1e9:.0f} GB) do not fit into {devices} x {device.name} "
            f"({memory / 1e9:.0f} GB at memory fraction {memory_fraction:g}); give a worker more devices"
        )
    tokens = int((memory - weights) // kv_bytes_per_token(model, tensor_parallel=devices))
    return Capacity(tokens=tokens, requests=tokens // max(count({"n": request_tokens}, "n"), 1))
