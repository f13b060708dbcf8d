"""vLLM servers as processes: started together, asked over HTTP, read by their own gauges, and always stopped."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from needs import WHERE
from processes import ENVIRONMENT, end

httpx = pytest.importorskip("httpx", reason=WHERE)

START_SECONDS = 600.0
"""For a start: most of it is imports, and the machine may be busy."""
ANSWER_SECONDS = 120.0


def free_port() -> int:
    """A port that is free, and below those that the kernel gives out: still free when it is used, a minute later."""
    for port in random.sample(range(20_000, 32_000), 100):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("no port is free")


@dataclass
class Server:
    """One vLLM server.

    ``extra`` is the connector's ``kv_connector_extra_config``; ``connector`` is ``None`` for a server without one.
    """

    name: str
    model: Path
    logs: Path
    extra: dict[str, Any] = field(default_factory=dict)
    connector: dict[str, Any] | None = field(default_factory=lambda: {"kv_connector": "KVLinkConnector"})
    arguments: Sequence[str] = ()
    environment: dict[str, str] = field(default_factory=dict)
    block_size: int = 32
    cache_bytes: int = 128 << 20
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> Path:
        return self.logs / f"{self.name}.log"

    def start(self) -> None:
        command = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.model),
            "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32",
            "--enforce-eager", "--max-model-len", "2048", "--max-num-seqs", "8", "--max-num-batched-tokens", "2048",
            "--block-size", str(self.block_size), "--kv-cache-memory-bytes", str(self.cache_bytes), *self.arguments,
        ]  # fmt: skip
        if self.connector is not None:
            config = {"kv_role": "kv_both", "kv_connector_extra_config": self.extra} | self.connector
            command += ["--kv-transfer-config", json.dumps(config)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env=os.environ | ENVIRONMENT | self.environment, start_new_session=True
            )

    def wait(self) -> None:
        """Until it answers; what its log says last is the error if it does not."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            assert self.process is not None
            if self.process.poll() is not None:
                break
            try:
                if httpx.get(f"{self.url}/health", timeout=5).is_success:
                    return
            except httpx.TransportError:
                time.sleep(0.2)
        raise AssertionError(f"{self.name} did not start:\n{self.log.read_text(errors='replace')[-6000:]}")

    def kill(self) -> None:
        """End it and all that it started, at once, as a crash would."""
        if self.process is not None:
            end(self.process.pid)
            self.process.wait(30)
            self.process = None

    def complete(self, prompt: list[int], tokens: int = 8, **more: Any) -> dict[str, Any]:
        """The answer to a prompt of token ids, greedily decoded; ``token_ids`` in its choice.

        Raises:
            httpx.HTTPStatusError: the server did not answer with success.
        """
        answer = httpx.post(f"{self.url}/v1/completions", json=body(prompt, tokens, **more), timeout=ANSWER_SECONDS)
        answer.raise_for_status()
        return answer.json()

    def prefill(self, prompt: list[int]) -> dict[str, Any]:
        """The transfer parameters of a prompt that was prefilled here for another."""
        ask = {"do_remote_decode": True, "do_remote_prefill": False}
        params = self.complete(prompt, 1, kv_transfer_params=ask)["kv_transfer_params"]
        assert isinstance(params, dict)
        return params

    def metrics(self) -> dict[str, float]:
        """Every sample of ``/metrics`` by name and labels, without the engine's own labels."""
        found: dict[str, float] = {}
        for line in httpx.get(f"{self.url}/metrics", timeout=30).text.splitlines():
            if line and not line.startswith("#"):
                sample, _, value = line.rpartition(" ")
                name, _, labels = sample.partition("{")
                kept = [
                    label for label in labels.rstrip("}").split(",")
                    if label and not label.startswith(("engine=", "model_name="))
                ]  # fmt: skip
                key = name + ("{" + ",".join(kept) + "}" if kept else "")
                found[key] = found.get(key, 0.0) + float(value)
        return found

    def cache_usage(self) -> float:
        """Share of the cache that is in use, by the engine's own gauge."""
        return self.metrics()["vllm:kv_cache_usage_perc"]


def grown(before: dict[str, float], after: dict[str, float], name: str) -> float:
    """By how much a sample of two `metrics` grew."""
    return after.get(name, 0.0) - before.get(name, 0.0)


def body(prompt: list[int], tokens: int, **more: Any) -> dict[str, Any]:
    """A completion request: greedy, never ended early, token ids in the answer."""
    return {
        "model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True,
    } | more  # fmt: skip


def tokens_of(answer: dict[str, Any]) -> list[int]:
    ids = answer["choices"][0]["token_ids"]
    assert isinstance(ids, list)
    return ids


@contextmanager
def running(*servers: Server) -> Iterator[None]:
    """The servers, started at once and ended in any case."""
    with ExitStack() as stack:
        for server in servers:
            stack.callback(server.kill)
            server.start()
        with ThreadPoolExecutor(len(servers)) as threads:
            list(threads.map(Server.wait, servers))
        yield
