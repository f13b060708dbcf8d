"""One vLLM engine in a process of its own, told what to do by lines on its standard input.

It steps as vLLM's own loop does: whenever anything is there to do, held blocks included. Lighter than a server: vLLM
is imported once, for all of them (`nursery`), and scheduler and worker share one process.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import time
from typing import IO, Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import vllm.v1.worker.cpu_worker  # noqa: F401 - for all forks
from nursery import nurse
from prometheus_client import REGISTRY
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.device_communicators import shm_broadcast
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.inputs import TokensPrompt
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends import cpu_attn

PAUSE_SECONDS = 0.001

# vLLM's ranks wait for each other by yielding without a pause. Linux 6.18 lets whatever else is to run on their cores
# wait for tens of seconds then, the threads of connectors among it. Ranks import this file too.
shm_broadcast.sched_yield = lambda: time.sleep(PAUSE_SECONDS / 4)


class Host:
    """Commands in, answers out, and a step in between whenever there is one to make."""

    def __init__(self, options: dict[str, Any], answers: IO[str]) -> None:
        self.answers = answers
        self.executed = False
        connector = options.pop("kv_transfer_config", None)
        batched_tokens = options.pop("max_num_batched_tokens", 2048)
        if options["block_size"] % 32:
            _allow_blocks_of_16()
        self.llm = LLM(
            **options,
            dtype="float32",
            enforce_eager=True,
            max_model_len=2048,
            max_num_batched_tokens=batched_tokens,
            kv_transfer_config=KVTransferConfig(**connector) if connector else None,
            disable_log_stats=False,
        )
        self.engine = self.llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.core.post_step = self.stepped
        self.scheduler = self.core.scheduler
        self.stepping = True
        self.steps_left: int | None = None
        self.preempted: dict[str, int] = {}

    def run(self) -> None:
        self.answer(ready=True)
        buffer = b""
        while True:
            busy = self.stepping and self.scheduler.has_requests()
            if select.select([0], [], [], 0 if busy else 0.05)[0]:
                received = os.read(0, 1 << 20)
                if not received:
                    return
                *lines, buffer = (buffer + received).split(b"\n")
                for line in lines:
                    self.obey(json.loads(line))
            if busy:
                if self.steps_left is not None:
                    self.steps_left -= 1
                    self.stepping = self.steps_left > 0
                for request in self.scheduler.requests.values():
                    self.preempted[request.request_id] = request.num_preemptions
                for output in self.engine.step():
                    if output.finished:
                        self.answer(
                            id=output.request_id,
                            tokens=list(output.outputs[0].token_ids),
                            reason=output.outputs[0].finish_reason,
                            params=output.kv_transfer_params,
                        )
                if not self.executed and self.scheduler.has_requests():
                    time.sleep(PAUSE_SECONDS)  # as vLLM does where only transfers are left

    def stepped(self, model_executed: bool) -> None:
        """VLLM's own loop is told this; it is not ours to see elsewhere."""
        self.executed = model_executed

    def obey(self, command: dict[str, Any]) -> None:
        match command.pop("do"):
            case "add":
                sampling = SamplingParams(
                    temperature=0, max_tokens=command["tokens"], ignore_eos=True,
                    extra_args={"kv_transfer_params": command["params"]} if command["params"] else None,
                )  # fmt: skip
                self.engine.add_request(command["id"], TokensPrompt(prompt_token_ids=command["prompt"]), sampling)
            case "abort":
                self.engine.abort_request([command["id"]])
            case "step":
                self.stepping, self.steps_left = command["on"], command["steps"]
            case "gauges":
                pool = self.scheduler.kv_cache_manager.block_pool
                self.answer(
                    id=command["id"],
                    free_blocks=pool.get_num_free_blocks(),
                    blocks=pool.num_gpu_blocks - 1,  # one is the null block
                    usage=pool.get_usage(),
                    requests=len(self.scheduler.requests),
                    preemptions=sum(self.preempted.values()),
                    metrics=metrics(),
                )
            case "rows":
                self.answer(id=command["id"], digest=self.rows(command["request"], command["tokens"]))
            case "reset":
                self.answer(id=command["id"], done=self.core.reset_prefix_cache(reset_connector=True))
            case "close":
                began = time.monotonic()
                get_kv_transfer_group().shutdown()
                self.answer(id=command["id"], seconds=time.monotonic() - began)
                self.core.shutdown()
                raise SystemExit

    def rows(self, request: str, tokens: int) -> str | None:
        """Digest of a request's first rows in every layer, where blocks are plain rows (latents)."""
        found = [known for known in self.scheduler.requests if known.startswith(f"{request}-")]
        if not found:
            return None
        blocks = self.scheduler.kv_cache_manager.get_block_ids(found[0])[0]
        executor = self.core.model_executor
        digest = hashlib.sha256()
        for cache in executor.driver_worker.worker.model_runner.kv_caches:
            digest.update(cache[blocks].reshape(-1, cache.shape[-1])[:tokens].contiguous().numpy().tobytes())
        return digest.hexdigest()

    def answer(self, **fields: Any) -> None:
        self.answers.write(json.dumps(fields) + "\n")


def metrics() -> dict[str, float]:
    """The samples that a test asks for, named as `servers.Server.metrics` does."""
    found = {}
    for family in REGISTRY.collect():
        for sample in family.samples:
            if sample.name.startswith(("vllm:kvlink", "vllm:prompt_tokens_by_source")):
                labels = [f'{name}="{value}"' for name, value in sorted(sample.labels.items())
                          if name not in {"engine", "model_name"}]  # fmt: skip
                found[sample.name + ("{" + ",".join(labels) + "}" if labels else "")] = sample.value
    return found


def _allow_blocks_of_16() -> None:
    """VLLM's kernels for CPUs know blocks of 16 slots (``vec16``); its backend only ever offers multiples of 32."""
    cpu_attn.CPUAttentionBackend.get_supported_kernel_block_sizes = staticmethod(lambda spec=None: [MultipleOf(16)])


if __name__ == "__main__":
    nurse(lambda options, answers: Host(options, answers).run())
