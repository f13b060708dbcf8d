"""A prefill and a decode server behind the example's proxy, as an operator would run them."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from needs import WHERE
from servers import Server, body, free_port, running, tokens_of

httpx = pytest.importorskip("httpx", reason=WHERE)

PROXY = Path(__file__).parents[2] / "examples" / "vllm_pd" / "proxy.py"
TOKEN_BYTES = 4 * 2 * 4 * 64 * 4
"""Of the test model: layers, K and V, heads, channels, bytes of a float32."""
SOURCE = 'vllm:prompt_tokens_by_source_total{source="%s"}'
"""vLLM's counter of prompt tokens by where their KV came from."""


@dataclass
class Deployment:
    """Two servers, and the address that clients know."""

    prefill: Server
    decode: Server
    proxy: str

    def ask(self, asked: list[int], tokens: int = 8) -> list[int]:
        """What a client is answered."""
        answer = httpx.post(f"{self.proxy}/v1/completions", json=body(asked, tokens), timeout=300)
        answer.raise_for_status()
        return tokens_of(answer.json())

    def alone(self, asked: list[int]) -> list[int]:
        """Co-located: the prefill server's own answer. The decode server has never seen the prompt."""
        return tokens_of(self.prefill.complete(asked))

    def until_free(self) -> None:
        """Every block is back on both sides, by the servers' own gauges."""
        until(lambda: self.prefill.cache_usage() == self.decode.cache_usage() == 0)


@contextmanager
def deployed(prefill: Server, decode: Server, *arguments: str) -> Iterator[Deployment]:
    """Both started, and a proxy with these arguments of its own; all stopped at the end."""
    with ExitStack() as stack:
        stack.enter_context(running(prefill, decode))
        port = free_port()
        command = [
            sys.executable, str(PROXY), "--prefill", prefill.url, "--decode", decode.url, "--port", str(port),
            *arguments,
        ]  # fmt: skip
        process = subprocess.Popen(command)
        stack.callback(process.wait, 10)
        stack.callback(process.kill)
        until(lambda: _healthy(f"http://127.0.0.1:{port}/health"))
        yield Deployment(prefill, decode, f"http://127.0.0.1:{port}")


def until(holds: Callable[[], bool], timeout_seconds: float = 60.0) -> None:
    """Wait for what a server comes to by itself."""
    deadline = time.monotonic() + timeout_seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _healthy(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).is_success
    except httpx.TransportError:
        return False
