"""Keep the split or not: the last word over two runs of one workload on the same number of devices."""

from __future__ import annotations

from typing import TypedDict

from kvlink.planning.fields import number


class PDDecision(TypedDict):
    """What a split brought."""

    throughput_gain: float
    latency_delta_ms: float
    keep_split: bool


def evaluate_pd_decision(baseline: object, split_run: object) -> PDDecision:
    """Compare a split run with its co-located baseline.

    Args:
        baseline: an object or mapping with ``throughput`` (any unit, the same in both) and ``p95_latency_ms``.
        split_run: the same of the split.

    Returns:
        ``throughput_gain`` in the throughput's unit, absolute; ``latency_delta_ms``, split minus baseline;
        ``keep_split`` where the gain is above zero and the delta at most zero.

    Raises:
        ConfigError: (a ValueError) a number is missing, negative or not finite; the message names its field.
    """
    gain = number(split_run, "throughput") - number(baseline, "throughput")
    delta = number(split_run, "p95_latency_ms") - number(baseline, "p95_latency_ms")
    return PDDecision(throughput_gain=gain, latency_delta_ms=delta, keep_split=gain > 0 and delta <= 0)
