"""The class that vLLM loads: its hooks, passed on to the half that lives in the same process."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from vllm.distributed import get_pp_group, get_tp_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import RequestStatus

from kvlink.adapters.vllm.geometry import describe_caches, describe_groups, streamed_layers, zero_blocks
from kvlink.adapters.vllm.identity import identity_of, place_of
from kvlink.adapters.vllm.messages import StepWork
from kvlink.adapters.vllm.scheduler_half import SchedulerHalf
from kvlink.adapters.vllm.settings import Settings, flow_of
from kvlink.adapters.vllm.stats import KVLinkMetrics, KVLinkStats
from kvlink.adapters.vllm.worker_half import WorkerHalf
from kvlink.bridge import Bridge
from kvlink.limits import VLLM_DRAIN_SECONDS

COMPLETE: Final = frozenset({RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED})
"""A request that ended so has the KV of its whole prompt."""


@dataclass
class KVLinkHandshake(KVConnectorHandshakeMetadata):
    """A rank's card, on its way to its engine's scheduler."""

    card: bytes


@dataclass
class KVLinkMetadata(KVConnectorMetadata):
    """A step's work, on its way to the ranks."""

    work: StepWork = field(default_factory=StepWork)


class KVLinkConnector(KVConnectorBase_V1, SupportsHMA):
    """Fetches the KV of requests that another engine has prefilled, and holds that of requests prefilled here.

    vLLM makes one in its scheduler and one in each worker; either has only its own half. An engine may prefill for
    others, decode for others, or both.
    """

    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _log_with_vllm()
        self._settings = Settings.read(self._kv_transfer_config.kv_connector_extra_config)
        self._identity = identity_of(vllm_config, self._settings)
        self._worker: WorkerHalf | None = None
        self._scheduler: SchedulerHalf | None = None
        self._groups = describe_groups(kv_cache_config)
        self._on_gpu = False
        self._layers: dict[str, int] = {}
        if role is KVConnectorRole.SCHEDULER:
            views = [group.view for group in self._groups]
            self._scheduler = SchedulerHalf(
                views,
                self._identity,
                self._settings.link,
                time.monotonic,
                push_seconds=self._settings.push_seconds,
                zeroed=kv_cache_config.needs_kv_cache_zeroing,
            )

    # --- worker ---------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Open the rank's bridge over its cache; blocks until it listens."""
        caches = describe_caches(
            self._kv_cache_config,
            kv_caches,
            identity=self._identity,
            place=place_of(
                self._vllm_config, tp_rank=get_tp_group().rank_in_group, pp_rank=get_pp_group().rank_in_group
            ),
            cache_dtype=self._vllm_config.cache_config.cache_dtype,
            layers=self._vllm_config.compilation_config.static_forward_context,
        )
        self._on_gpu = any(tensor.is_cuda for tensor in kv_caches.values())
        if self._settings.flow == "push" and not self._vllm_config.parallel_config.use_ubatching:
            self._layers = streamed_layers(self._groups)
        self._worker = WorkerHalf(
            Bridge.open(self._settings.link, caches),
            fetch_seconds=self._settings.fetch_seconds,
            push_seconds=self._settings.push_seconds,
            now=time.monotonic,
            scrub=lambda load: zero_blocks(self._kv_cache_config, kv_caches, load.blocks, load.first_tokens),
            uncovered="zero" if self._kv_cache_config.needs_kv_cache_zeroing else "leave",
            layers=self._layers.values(),
        )

    def get_handshake_metadata(self) -> KVLinkHandshake | None:
        """This rank's card."""
        return None if self._worker is None else KVLinkHandshake(self._worker.card)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """A step begins: cut off who reads what it preempts, before it is written; note what it computes of pushes."""
        if self._worker is not None and isinstance(kv_connector_metadata, KVLinkMetadata):
            self._worker.streams.before_forward(kv_connector_metadata.work)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Submit the step's work."""
        metadata = self._get_connector_metadata()
        if self._worker is not None and isinstance(metadata, KVLinkMetadata):
            self._worker.start(metadata.work)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: loads end before their requests run."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """The step's KV is in place in this layer: those it is pushed to may read it, while later ones compute."""
        if self._worker is not None and (layer := self._layers.get(layer_name)) is not None:
            self._worker.streams.layer_written(layer, self._moment)

    def wait_for_save(self) -> None:
        """The step's KV is in place: those it is pushed to may read it. Nothing is waited for."""
        if self._worker is not None:
            self._worker.streams.after_forward(self._moment)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """What ended, each id once."""
        if self._worker is None:
            return KVConnectorTransferResults()
        ended = self._worker.ended()
        return KVConnectorTransferResults(
            finished_sending=ended.sent, finished_recving=ended.received, failed_recving=ended.failed
        )

    def get_kv_connector_stats(self) -> KVLinkStats | None:
        """What this rank counted since the last call."""
        counted = None if self._worker is None else self._worker.tally.take()
        return None if counted is None else KVLinkStats(data=counted)

    def shutdown(self) -> None:
        """Drain for a moment, cut what is left, close."""
        if self._worker is not None:
            self._worker.close(VLLM_DRAIN_SECONDS)

    # --- scheduler ------------------------------------------------------------------------------------------------

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """The cards of an engine of one pipeline stage."""
        self._take_cards(metadata.values())

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """The cards of all ranks."""
        self._take_cards(metadata.values())

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """A load brings every group that is transferred."""
        return tuple(self._kv_cache_config.transfer_group_ids)

    def on_new_request(self, request: Any) -> None:
        """Read its offer, if it has one."""
        self._need_scheduler().on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How much of its prompt another engine has for it."""
        count = self._need_scheduler().matched_tokens(request, num_computed_tokens)
        return count, count > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Blocks are there: have them filled."""
        self._need_scheduler().blocks_given(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """The step's work."""
        scheduler = self._need_scheduler()
        scheduler.step_scheduled(
            scheduler_output.num_scheduled_tokens,
            scheduler_output.preempted_req_ids or (),
            scheduler_output.kv_connector_block_state.get_block_ids,
        )
        return KVLinkMetadata(scheduler.take_work())

    def has_pending_push_work(self) -> bool:
        """Whether a step must carry what became of a push to the ranks, though nothing else is there to do."""
        return self._need_scheduler().has_push_work

    def update_connector_output(self, connector_output: Any) -> None:
        """What all ranks have reported."""
        self._need_scheduler().loads_ended(connector_output.finished_recving or ())

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished_all_groups`, where the hybrid allocator is off."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Hold a prefilled request's blocks and say where they are; let go of what an aborted one was waiting for."""
        complete = request.status in COMPLETE
        return self._need_scheduler().request_finished(request, block_ids, complete=complete)

    def reset_cache(self) -> bool:
        """What was offered from the cache is void, and what would be loaded may be: weights change."""
        self._need_scheduler().reset()
        return True

    # --- both -----------------------------------------------------------------------------------------------------

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Whether each layer must say when it is written, which a whole captured graph does not."""
        return flow_of(extra_config) == "push"

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVLinkStats:
        """Counts that arrived in another process."""
        return KVLinkStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVLinkMetrics:
        """The metrics under ``vllm:kvlink_*``."""
        return KVLinkMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def _moment(self) -> object:
        """An event behind all that this step has launched so far; nothing on a CPU, which has done it."""
        if not self._on_gpu:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def _need_scheduler(self) -> SchedulerHalf:
        assert self._scheduler is not None, "vLLM calls these hooks in its scheduler only"
        return self._scheduler

    def _take_cards(self, handshakes: Iterable[KVConnectorHandshakeMetadata]) -> None:
        cards = [handshake.card for handshake in handshakes if isinstance(handshake, KVLinkHandshake)]
        self._need_scheduler().set_cards(cards)


def _log_with_vllm() -> None:
    """KVLink's log is silent until somebody listens; here vLLM's handlers do."""
    ours, theirs = logging.getLogger("kvlink"), logging.getLogger("vllm")
    ours.setLevel(theirs.level)
    for handler in theirs.handlers:
        if handler not in ours.handlers:
            ours.addHandler(handler)
