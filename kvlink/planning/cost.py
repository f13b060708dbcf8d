"""What a step of an engine takes: a roofline over public data sheets, with its assumptions named.

A step takes the longer of its arithmetic (FLOPs over a part of the peak) and its memory traffic (weights and KV over a
part of the bandwidth), then the all-reduces of tensor parallelism and a fixed overhead. Nothing here is measured:
whatever is built on it has evidence level ``simulated``.
"""

from __future__ import annotations

import math
from typing import Protocol

import msgspec

from kvlink.planning.models import Device, Model
from kvlink.planning.volume import kv_bytes_per_token


class StepCost(Protocol):
    """Seconds of an engine's steps."""

    def step_seconds(self, new_tokens: int, attended: float, context: int) -> float:
        """One step that computes ``new_tokens``.

        Args:
            new_tokens: prompt tokens and one of each decoding request.
            attended: over all new tokens, the sum of the tokens each of them attends to.
            context: tokens of KV that the step reads: of every request in it.
        """
        ...

    def decode_seconds(self, batch: int, context: int, steps: int) -> float:
        """``steps`` steps in which ``batch`` requests decode, from ``context`` tokens in all on, growing as they go."""
        ...


def steps_within(cost: StepCost, batch: int, context: int, most: int, seconds: float) -> int:
    """The step that is under way after ``seconds`` of decoding, counted from 1: 1 to ``most``."""
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        if cost.decode_seconds(batch, context, middle) >= seconds:
            high = middle
        else:
            low = middle + 1
    return low


class Assumptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the roofline assumes and no data sheet states.

    Attributes:
        flops_fraction: of the peak that prefill reaches.
        memory_fraction: of the memory bandwidth that a step reaches.
        usable_memory: of the memory that weights and KV may take.
        step_overhead_seconds: scheduling, launches and sampling of a step.
    """

    flops_fraction: float = 0.5
    memory_fraction: float = 0.7
    usable_memory: float = 0.9
    step_overhead_seconds: float = 0.002


class Roofline:
    """The cost of ``model`` on one worker of ``devices`` devices.

    Args:
        model: what runs.
        device: on what.
        devices: tensor-parallel devices of one worker.
        assumptions: efficiencies and overhead.
    """

    def __init__(self, model: Model, device: Device, devices: int, assumptions: Assumptions) -> None:
        flops = device.peak_flops * devices * assumptions.flops_fraction
        memory = device.memory_bytes_per_second * devices * assumptions.memory_fraction
        ring = 2 * (devices - 1) / devices / device.peer_bytes_per_second
        self._flops_seconds = 2 * model.active_parameters / flops
        self._attended_seconds = 4 * model.layers * model.query_heads * model.head_dim / flops
        self._all_reduce_seconds = 2 * model.layers * model.hidden * 2 * ring  # twice a layer, bfloat16
        self._active_weight_seconds = model.active_parameters * model.weight_bytes_each / memory
        self._weight_seconds = model.parameters * model.weight_bytes_each / memory
        self._context_seconds = kv_bytes_per_token(model, tensor_parallel=devices) / memory
        self._overhead = assumptions.step_overhead_seconds

    def step_seconds(self, new_tokens: int, attended: float, context: int) -> float:
        """See `StepCost.step_seconds`."""
        compute = self._flops_seconds * new_tokens + self._attended_seconds * attended
        memory = self._weights(new_tokens) + self._context_seconds * context
        return max(compute, memory) + self._all_reduce_seconds * new_tokens + self._overhead

    def decode_seconds(self, batch: int, context: int, steps: int) -> float:
        """See `StepCost.decode_seconds`: both rooflines rise in a line with the context, so each stretch is a sum."""
        compute = self._flops_seconds * batch
        memory = self._weights(batch)
        fixed = steps * (self._all_reduce_seconds * batch + self._overhead)
        turn = self._turn(batch, context, compute - memory)
        early, late = min(max(turn, 0), steps), max(min(steps - turn, steps), 0)
        first, second = (memory, self._context_seconds), (compute, self._attended_seconds)
        if self._attended_seconds < self._context_seconds:
            first, second = second, first
        return _stretch(*first, batch, context, early) + _stretch(*second, batch, context + batch * early, late) + fixed

    def _weights(self, new_tokens: int) -> float:
        """Seconds to read the weights: all of them once enough tokens pass through a mixture of experts."""
        return min(self._weight_seconds, self._active_weight_seconds * new_tokens)

    def _turn(self, batch: int, context: int, ahead: float) -> int:
        """The first step at which the roofline that rises faster is the higher one."""
        slope = self._attended_seconds - self._context_seconds
        if slope == 0:
            return 0 if ahead >= 0 else 1 << 62
        crossing = -ahead / slope  # tokens of context at which the two are equal
        return math.ceil((crossing - context) / batch) if batch else 0


def _stretch(base: float, slope: float, batch: int, context: int, steps: int) -> float:
    """Sum of ``base + slope x context`` over steps that add ``batch`` tokens of context each."""
    return steps * base + slope * (steps * context + batch * steps * (steps - 1) / 2)


class TokenCost:
    """A step takes so long a prompt token and nothing else: what a queue of theory has for a server.

    Args:
        seconds: of one prompt token; decoding costs ``decode`` a step.
    """

    def __init__(self, seconds: float, decode: float = 0.0) -> None:
        self._seconds = seconds
        self._decode = decode

    def step_seconds(self, new_tokens: int, attended: float, context: int) -> float:
        """See `StepCost.step_seconds`."""
        return self._seconds * new_tokens

    def decode_seconds(self, batch: int, context: int, steps: int) -> float:
        """See `StepCost.decode_seconds`."""
        return self._decode * steps
