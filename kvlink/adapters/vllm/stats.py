"""What vLLM shows of the connector: a line in its log, and metrics under ``vllm:kvlink_*``."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Final

from prometheus_client import Counter, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

from kvlink.adapters.vllm.tally import Tally

SECONDS: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
BYTES: Final = tuple(float(4**power) for power in range(6, 19))
"""4 KiB to 64 GiB."""


@dataclass
class KVLinkStats(KVConnectorStats):
    """A `kvlink.adapters.vllm.tally.Tally` on its way to the API server; several add up."""

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def reset(self) -> None:
        """Count from zero."""
        self.data: dict[str, Any] = asdict(Tally())

    def aggregate(self, other: KVConnectorStats) -> KVLinkStats:
        """Add another's counts to these."""
        for name, counted in other.data.items():
            mine = self.data[name]
            if isinstance(counted, list):
                self.data[name] = [*mine, *counted]
            elif isinstance(counted, int):
                self.data[name] = mine + counted
            else:
                self.data[name] = mine | {key: mine.get(key, 0) + count for key, count in counted.items()}
        return self

    def reduce(self) -> dict[str, int | float]:
        """What the log says of an interval."""
        seconds, total = self.data["fetch_seconds"], sum(self.data["fetch_bytes"])
        told: dict[str, int | float] = {"KV loads": len(seconds)}
        if seconds:
            told["median load (ms)"] = round(median(seconds) * 1e3, 2)
            told["loaded (MB)"] = round(total / 1e6, 1)
        if self.data["streamed_bytes"]:
            told["while prefill computed (MB)"] = round(self.data["streamed_bytes"] / 1e6, 1)
        if self.data["retries"]:
            told["tried again"] = self.data["retries"]
        for name, count in sorted(self.data["failures"].items()):
            told[f"failed {name.rstrip('|').replace('|', ' ')}"] = count
        for name, count in sorted(self.data["sends"].items()):
            told[f"sends {name}"] = count
        return told

    def is_empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not any(self.data.values())


class KVLinkMetrics(KVConnectorPromMetrics):
    """The same as Prometheus metrics, one series an engine."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        histogram, counter = metric_types[Histogram], metric_types[Counter]
        self._seconds = create_metric_per_engine(
            histogram(
                name="vllm:kvlink_load_seconds",
                documentation="Time from submitting a KV load to its install, a rank.",
                buckets=SECONDS,
                labelnames=labelnames,
            ),
            per_engine_labelvalues,
        )
        self._bytes = create_metric_per_engine(
            histogram(
                name="vllm:kvlink_load_bytes",
                documentation="Payload of a KV load, a rank.",
                buckets=BYTES,
                labelnames=labelnames,
            ),
            per_engine_labelvalues,
        )
        self._streamed = create_metric_per_engine(
            counter(
                name="vllm:kvlink_streamed_bytes",
                documentation="Payload of pushes that had landed before their prefill was done, a rank.",
                labelnames=labelnames,
            ),
            per_engine_labelvalues,
        )
        self._exposed = create_metric_per_engine(
            histogram(
                name="vllm:kvlink_push_exposed_seconds",
                documentation="Time from the end of a push's prefill to its install, a rank.",
                buckets=SECONDS,
                labelnames=labelnames,
            ),
            per_engine_labelvalues,
        )
        self._retries = create_metric_per_engine(
            counter(
                name="vllm:kvlink_load_retries",
                documentation="Tries beyond the first of KV loads that were installed, a rank.",
                labelnames=labelnames,
            ),
            per_engine_labelvalues,
        )
        self._failures = counter(
            name="vllm:kvlink_failed_loads",
            documentation="KV loads that failed, a rank: the error's code, and the field where two engines differ.",
            labelnames=[*labelnames, "kind", "field"],
        )
        self._sends = counter(
            name="vllm:kvlink_sends",
            documentation="Finished requests whose blocks came back, a rank, by how they ended (done: fetched).",
            labelnames=[*labelnames, "end"],
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record what one engine's ranks counted."""
        for value in transfer_stats_data["fetch_seconds"]:
            self._seconds[engine_idx].observe(value)
        for value in transfer_stats_data["fetch_bytes"]:
            self._bytes[engine_idx].observe(value)
        self._streamed[engine_idx].inc(transfer_stats_data["streamed_bytes"])
        for value in transfer_stats_data["exposed_seconds"]:
            self._exposed[engine_idx].observe(value)
        self._retries[engine_idx].inc(transfer_stats_data["retries"])
        labels = self.per_engine_labelvalues[engine_idx]
        for name, count in transfer_stats_data["failures"].items():
            self._failures.labels(*labels, *name.split("|", 1)).inc(count)
        for name, count in transfer_stats_data["sends"].items():
            self._sends.labels(*labels, name).inc(count)
