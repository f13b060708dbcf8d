"""One vLLM engine in a process of its own, told what to do by lines on its standard input.

It steps as vLLM's own loop does: whenever anything is there to do, held blocks included. Lighter than a server: vLLM
is imported once.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import sys
import time
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
_ANSWERS = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)  # vLLM prints; answers have a channel of their own

from vllm import LLM, SamplingParams  # noqa: E402
from vllm.config import KVTransferConfig  # noqa: E402
from vllm.inputs import TokensPrompt  # noqa: E402


class Host:
    """Commands in, answers out, and a step in between whenever there is one to make."""

    def __init__(self, options: dict[str, Any]) -> None:
        connector = options.pop("kv_transfer_config", None)
        batched_tokens = options.pop("max_num_batched_tokens", 2048)
        self.llm = LLM(
            **options,
            dtype="float32",
            enforce_eager=True,
            max_model_len=2048,
            max_num_batched_tokens=batched_tokens,
            kv_transfer_config=KVTransferConfig(**connector) if connector else None,
            disable_log_stats=True,
        )
        self.engine = self.llm.llm_engine
        self.scheduler = self.engine.engine_core.engine_core.scheduler
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
                began = self.scheduler.get_num_unfinished_requests()
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
                if not began:
                    time.sleep(0.001)  # as vLLM does where only transfers are left

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
                )
            case "rows":
                self.answer(id=command["id"], digest=self.rows(command["request"], command["tokens"]))

    def rows(self, request: str, tokens: int) -> str | None:
        """Digest of a request's first rows in every layer, where blocks are plain rows (latents)."""
        found = [known for known in self.scheduler.requests if known.startswith(f"{request}-")]
        if not found:
            return None
        blocks = self.scheduler.kv_cache_manager.get_block_ids(found[0])[0]
        executor = self.engine.engine_core.engine_core.model_executor
        digest = hashlib.sha256()
        for cache in executor.driver_worker.worker.model_runner.kv_caches:
            digest.update(cache[blocks].reshape(-1, cache.shape[-1])[:tokens].contiguous().numpy().tobytes())
        return digest.hexdigest()

    def answer(self, **fields: Any) -> None:
        _ANSWERS.write(json.dumps(fields) + "\n")


if __name__ == "__main__":
    Host(json.loads(sys.argv[1])).run()
