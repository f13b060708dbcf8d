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
    advise.add_argument("--ratios", metavar="LIST", help="prefill workers to try, as 1,2,4 (every number)")
    advise.add_argument("--links-gb-s", metavar="LIST", help="links to try the best split over, GB/s; 'none' for none")
    simulate = commands.add_parser(
        "simulate",
        help="one split of a fleet against as many co-located workers, with failures, rollouts, cancels",
        description=f"Simulates a trace on co-located workers and on one split of the same workers. {_EXITS}",
    )
    _add_common(simulate)
    simulate.add_argument("--prefill-workers", type=int, metavar="N", help="of all workers (half of them)")
    happenings = simulate.add_argument_group("what happens meanwhile, to both")
    happenings.add_argument(
        "--fail", action="append", default=[], metavar="WORKER@AT+DOWN", help="worker 2 at 60 s for 30 s: 2@60+30"
    )
    happenings.add_argument("--switch-at", type=float, metavar="S", help="roll a new revision out, in two waves")
    happenings.add_argument("--cancelled", type=float, default=0.0, metavar="PART", help="requests whose user leaves")
    happenings.add_argument("--elastic", action="store_true", help="let workers change pools (split only)")


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
    out.add_argument("--png", type=Path, metavar="FOLDER", help="the plots, into a folder that is there")
    out.add_argument("--quiet", action="store_true", help="no progress on standard error")


def _add_workload(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--requests", type=int, default=limits.MAX_TRACE_REQUESTS, metavar="N", help="the trace's first N (all)"
    )
    group.add_argument("--faster", type=float, default=1.0, metavar="X", help="arrivals X times as often (%(default)s)")
    group.add_argument(
        "--spread-ties", action="store_true", help="spread requests that share a time stamp up to the next stamp"
    )
    group.add_argument(
        "--rate", type=float, default=1.0, metavar="R", help="arrivals a second, if the trace has no times"
    )
    group.add_argument("--block-tokens", type=int, default=512, metavar="N", help="of a hash id (%(default)s)")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of all that is drawn (%(default)s)")


def _add_fleet(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--model", choices=MODEL_NAMES, default="llama-3-70b", help="(%(default)s)")
    group.add_argument("--device", choices=DEVICE_NAMES, default="h100-sxm", help="(%(default)s)")
    group.add_argument("--devices", type=int, default=4, metavar="N", help="of one worker (%(default)s)")
    group.add_argument("--workers", type=int, default=8, metavar="N", help="in all (%(default)s)")
    group.add_argument("--link-gb-s", type=float, metavar="R", help="of one worker, 1e9 bytes/s (50)")
    group.add_argument(
        "--records", type=Path, nargs="+", default=[], metavar="FILE",
        help="kvlink bench results of one transport, to fit the transfer to; without --link-gb-s over their own wire",
    )  # fmt: skip
    group.add_argument("--token-budget", type=int, default=2048, metavar="N", help="of one step (%(default)s)")
    group.add_argument(
        "--growth-tokens", type=int, default=512, metavar="N", help="room promised beyond the prompt (%(default)s)"
    )
    group.add_argument("--flops-fraction", type=float, default=0.5, metavar="P", help="of the peak (%(default)s)")
    group.add_argument("--memory-fraction", type=float, default=0.7, metavar="P", help="of bandwidth (%(default)s)")


def _add_rules(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--ttft-slo", type=float, default=10.0, metavar="S", help="first token, seconds (%(default)s)")
    group.add_argument("--tpot-slo", type=float, default=0.1, metavar="S", help="each later one (%(default)s)")
    group.add_argument("--attainment", type=float, default=0.95, metavar="P", help="of requests (%(default)s)")
    group.add_argument("--long-prompt", type=int, default=2048, metavar="N", help="tokens above it (%(default)s)")
    group.add_argument("--long-decode", type=int, default=256, metavar="N", help="tokens above it (%(default)s)")
    group.add_argument(
        "--operating-cost", type=float, default=0.05, metavar="P", help="goodput two pools must gain (%(default)s)"
    )
