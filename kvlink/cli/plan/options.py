"""The command lines of ``kvlink advise`` and ``kvlink simulate``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from kvlink import limits

MODEL_NAMES: Final = ("deepseek-v3", "llama-3-70b", "llama-3-8b", "qwen3-32b")
DEVICE_NAMES: Final = ("a100-80gb", "h100-sxm", "h200-sxm", "l40s")
_EXITS: Final = "Exit codes: 0 done, whatever the verdict, 1 ran and failed, 2 bad arguments, 3 something is missing."


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``advise`` and ``simulate`` to the command line."""
    advise = commands.add_parser(
        "advise",
        help="should this traffic be split: every ratio of pools, links of other rates, a verdict",
        description="Simulates a trace on co-located workers and on every split of the same workers, then the best "
        f"split over links of other rates, and says accept, tune or reject, and why. {_EXITS}",
    )
    _add_common(advise)
    advise.add_argument(
        "--ratios", metavar="LIST", help="numbers of prefill workers to try, as 1,2,4 (all; of many workers some)"
    )
    advise.add_argument(
        "--links-gb-s",
        metavar="LIST",
        help="links to try the best split over, GB/s each, as 12.5,25,50; none for no other (0.5 to 50)",
    )
    simulate = commands.add_parser(
        "simulate",
        help="one split of a fleet against as many co-located workers, with failures, rollouts, cancels",
        description=f"Simulates a trace on co-located workers and on one split of the same workers. {_EXITS}",
    )
    _add_common(simulate)
    simulate.add_argument(
        "--prefill-workers", type=int, metavar="N", help="workers that only prefill (half of --workers)"
    )
    happenings = simulate.add_argument_group("what happens meanwhile, to both")
    happenings.add_argument(
        "--fail",
        action="append",
        default=[],
        metavar="WORKER@AT+DOWN",
        help="worker 2 (from 0, prefill first) dies at 60 s and is back 30 s later: 2@60+30",
    )
    happenings.add_argument(
        "--switch-at",
        type=float,
        metavar="S",
        help="all workers restart with a new revision from second S on, in two waves",
    )
    happenings.add_argument(
        "--cancelled",
        type=float,
        default=0.0,
        metavar="PART",
        help="part of the requests, 0 to 1, whose user leaves before the end (0)",
    )
    happenings.add_argument(
        "--elastic", action="store_true", help="let workers change between prefill and decode (split only)"
    )


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "trace",
        metavar="TRACE",
        help="JSON lines with input_length and output_length, a CSV with two such columns, or a description like "
        "synthetic:rate=2,prompt=4000,decode=200,requests=1000,spread=0.5",
    )
    _add_workload(parser.add_argument_group("the traffic"))
    _add_fleet(parser.add_argument_group("the fleet"))
    _add_rules(parser.add_argument_group("what is asked of it"))
    out = parser.add_argument_group("what comes out")
    out.add_argument("--json", metavar="FILE", help="the plan as JSON; - is standard output")
    out.add_argument("--html", type=Path, metavar="FILE", help="one self-contained page")
    out.add_argument(
        "--png", type=Path, metavar="FOLDER", help="the plots, into a folder, which is made where there is none"
    )
    out.add_argument("--quiet", action="store_true", help="no progress on standard error")


def _add_workload(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--requests",
        type=int,
        default=limits.MAX_TRACE_REQUESTS,
        metavar="N",
        help="simulate the trace's first N requests (all)",
    )
    group.add_argument(
        "--faster", type=float, default=1.0, metavar="X", help="requests arrive X times as often (%(default)s)"
    )
    group.add_argument(
        "--spread-ties", action="store_true", help="spread requests that share a time stamp up to the next stamp"
    )
    group.add_argument(
        "--rate",
        type=float,
        default=1.0,
        metavar="R",
        help="requests a second, where the trace has no times (%(default)s)",
    )
    group.add_argument(
        "--block-tokens",
        type=int,
        default=512,
        metavar="N",
        help="tokens for which one of the trace's hash ids stands (%(default)s)",
    )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="seed of everything random (%(default)s)")


def _add_fleet(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--model", choices=MODEL_NAMES, default="llama-3-70b", help="model that is served (%(default)s)")
    group.add_argument("--device", choices=DEVICE_NAMES, default="h100-sxm", help="GPU (%(default)s)")
    group.add_argument("--devices", type=int, default=4, metavar="N", help="GPUs of one worker (%(default)s)")
    group.add_argument(
        "--workers", type=int, default=8, metavar="N", help="workers in all, prefill and decode together (%(default)s)"
    )
    group.add_argument("--link-gb-s", type=float, metavar="R", help="network of one worker, 1e9 bytes/s (50)")
    group.add_argument(
        "--records", type=Path, nargs="+", default=[], metavar="FILE",
        help="results of kvlink bench --json over one transport: transfers take as long as measured there, and with "
        "--link-gb-s the part of that link which was reached there (without records: an assumed part of it)",
    )  # fmt: skip
    group.add_argument(
        "--token-budget",
        type=int,
        default=2048,
        metavar="N",
        help="most tokens of one engine step, prompt and decode together (%(default)s)",
    )
    group.add_argument(
        "--growth-tokens",
        type=int,
        default=512,
        metavar="N",
        help="KV room that a request is promised beyond its prompt, tokens (%(default)s)",
    )
    group.add_argument(
        "--flops-fraction",
        type=float,
        default=0.5,
        metavar="P",
        help="part of the GPU's peak FLOP/s that is reached (%(default)s)",
    )
    group.add_argument(
        "--memory-fraction",
        type=float,
        default=0.7,
        metavar="P",
        help="part of its memory bandwidth that is reached (%(default)s)",
    )


def _add_rules(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--ttft-slo",
        type=float,
        default=10.0,
        metavar="S",
        help="bound on the time to first token, seconds (%(default)s)",
    )
    group.add_argument(
        "--tpot-slo",
        type=float,
        default=0.1,
        metavar="S",
        help="bound on the mean time of each later token, seconds (%(default)s)",
    )
    group.add_argument(
        "--attainment",
        type=float,
        default=0.95,
        metavar="P",
        help="part of the requests that must meet both (%(default)s)",
    )
    group.add_argument(
        "--long-prompt", type=int, default=2048, metavar="N", help="a prompt of more tokens is long (%(default)s)"
    )
    group.add_argument(
        "--long-decode", type=int, default=256, metavar="N", help="a decode of more tokens is long (%(default)s)"
    )
    group.add_argument(
        "--operating-cost",
        type=float,
        default=0.05,
        metavar="P",
        help="gain in goodput below which a split is not worth running: 0.05 is 5%% (%(default)s)",
    )
