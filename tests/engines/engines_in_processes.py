"""Engines as processes, driven from a test: prompts in, tokens out, their own gauges, and a hard end for each."""

from __future__ import annotations

import itertools
import json
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nursery import Fork, fork

HOST = Path(__file__).with_name("engine_host.py")
START_SECONDS = 600.0
ANSWER_SECONDS = 120.0
GAUGE_SECONDS = 20.0
FOR_A_READER = {"do_remote_decode": True, "do_remote_prefill": False}


@dataclass
class Engine:
    """One engine. ``extra`` is the connector's extra config; ``options`` are vLLM's own."""

    name: str
    model: Path
    logs: Path
    extra: dict[str, Any] = field(default_factory=dict)
    connector: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    process: Fork | None = None

    def __post_init__(self) -> None:
        self._ids = itertools.count(1)
        self._answers: dict[str, queue.Queue[dict[str, Any]]] = {}

    @property
    def log(self) -> Path:
        return self.logs / f"{self.name}.log"

    def start(self) -> None:
        self._answers = {"": queue.Queue()}  # what it says when it is ready; nobody waits for a life before this one
        config = {"kv_connector": "KVLinkConnector", "kv_role": "kv_both", "kv_connector_extra_config": self.extra}
        options: dict[str, Any] = {
            "model": str(self.model), "max_num_seqs": 8, "block_size": 32, "kv_cache_memory_bytes": 64 << 20,
            "kv_transfer_config": config | self.connector,
        } | self.options  # fmt: skip
        self.process = fork(HOST, [options], self.log, self.environment)
        threading.Thread(target=self._read, args=(self.process,), daemon=True).start()

    def wait(self) -> None:
        if self._take("", START_SECONDS).get("ready") is not True:
            raise AssertionError(f"{self.name} did not start:\n{self.tail()}")

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-5000:]

    def kill(self) -> None:
        """End it as a crash would."""
        if self.process is not None:
            self.process.kill()
            self.process = None

    def submit(self, prompt: Sequence[int], tokens: int = 8, params: dict[str, Any] | None = None) -> str:
        request_id = f"{self.name}-{next(self._ids)}"
        self._answers[request_id] = queue.Queue()
        self._tell(do="add", id=request_id, prompt=list(prompt), tokens=tokens, params=params)
        return request_id

    def result(self, request_id: str, timeout_seconds: float = ANSWER_SECONDS) -> dict[str, Any]:
        return self._take(request_id, timeout_seconds)

    def complete(self, prompt: Sequence[int], tokens: int = 8, params: dict[str, Any] | None = None) -> list[int]:
        """The tokens of a prompt, greedily decoded."""
        return self.result(self.submit(prompt, tokens, params))["tokens"]

    def prefill(self, prompt: Sequence[int]) -> dict[str, Any]:
        """The transfer parameters of a prompt that was prefilled for another."""
        params = self.result(self.submit(prompt, 1, FOR_A_READER))["params"]
        assert params is not None, self.tail()
        return params

    def abort(self, request_id: str) -> None:
        self._tell(do="abort", id=request_id)

    def step(self, *, on: bool, steps: int | None = None) -> None:
        """Stop stepping, or go on, maybe for so many steps only: while it is off, nothing is scheduled or polled."""
        self._tell(do="step", on=on, steps=steps)

    def gauges(self) -> dict[str, Any]:
        """The engine's own: free blocks, blocks, usage, requests; its metrics by name and labels."""
        return self._ask(do="gauges")

    def metrics(self) -> dict[str, float]:
        """Every sample of KVLink's, and where prompt tokens came from."""
        return self.gauges()["metrics"]

    def rows(self, request_id: str, tokens: int) -> str | None:
        """Digest of a live request's first rows in every layer, for models whose blocks are plain rows."""
        return self._ask(do="rows", request=request_id, tokens=tokens)["digest"]

    def reset(self) -> bool:
        """Reset its prefix cache and its connector, as vLLM does where weights have changed; whether it could."""
        return self._ask(do="reset")["done"]

    def close(self) -> float:
        """Shut it down, its connector first; the seconds that took."""
        return self._ask(do="close")["seconds"]

    def until_free(self, timeout_seconds: float = GAUGE_SECONDS) -> float:
        """Wait until every block is back, by the engine's own gauge; how long it took."""
        return self.until(lambda gauges: gauges["free_blocks"] == gauges["blocks"] and not gauges["requests"],
                          timeout_seconds)  # fmt: skip

    def until(self, holds: Callable[[dict[str, Any]], bool], timeout_seconds: float = GAUGE_SECONDS) -> float:
        began = time.monotonic()
        while not holds(gauges := self.gauges()):
            assert time.monotonic() < began + timeout_seconds, f"{self.name}: {gauges}\n{self.tail()}"
            time.sleep(0.01)
        return time.monotonic() - began

    def _ask(self, **command: Any) -> dict[str, Any]:
        asked = f"{command['do']}-{next(self._ids)}"
        self._answers[asked] = queue.Queue()
        self._tell(id=asked, **command)
        return self._take(asked, ANSWER_SECONDS)

    def _tell(self, **command: Any) -> None:
        assert self.process is not None
        self.process.stdin.write(json.dumps(command).encode() + b"\n")
        self.process.stdin.flush()

    def _take(self, request_id: str, timeout_seconds: float) -> dict[str, Any]:
        try:
            answer = self._answers[request_id].get(timeout=timeout_seconds)
        except queue.Empty:
            raise AssertionError(f"{self.name} does not answer for {request_id!r}:\n{self.tail()}") from None
        self._answers.pop(request_id)
        return answer

    def _read(self, process: Fork) -> None:
        for line in process.stdout:
            answer = json.loads(line)
            waiting = self._answers.get(answer.get("id", ""))
            if waiting is not None:
                waiting.put(answer)
        for waiting in list(self._answers.values()):
            waiting.put({"gone": True})  # the process has ended: nobody waits for its bound


@contextmanager
def running(*engines: Engine) -> Iterator[None]:
    """The engines, started at once and ended in any case."""
    try:
        for engine in engines:
            engine.start()
        for engine in engines:
            engine.wait()
        yield
    finally:
        for engine in engines:
            engine.kill()
