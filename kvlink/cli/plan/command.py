"""Runs ``kvlink advise`` and ``kvlink simulate``."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kvlink import limits
from kvlink.cli.output import check_outputs, write_file, write_pictures, write_result
from kvlink.cli.plan.progress import Progress
from kvlink.cli.plan.show import show
from kvlink.errors import ConfigError
from kvlink.planning.advice import CROSSOVER_STEPS, LINKS_GB_S, Plan, Rules, baseline_budgets, make_plan
from kvlink.planning.cost import Assumptions
from kvlink.planning.models import DEVICES, MODELS
from kvlink.planning.report.plots import plots_of
from kvlink.planning.report.tables import page_of
from kvlink.planning.simulation.scenario import (
    DEFAULT_LINK_BYTES_PER_SECOND,
    Elastic,
    Failure,
    Objectives,
    Scenario,
    Switch,
)
from kvlink.planning.trace import Trace, read_trace, synthetic_trace
from kvlink.planning.transfer import TransferModel, assumed_transfer, fit_transfer, read_record

SYNTHETIC: Final = "synthetic:"
MANY_WORKERS: Final = 12
"""Up to here ``advise`` tries every ratio, beyond it about as many, evenly."""
_FAILURE: Final = re.compile(r"(\d+)@([\d.]+)\+([\d.]+)")


def run(arguments: argparse.Namespace) -> bool:
    """Read, simulate, write; always ``True``: a verdict is an answer, not a failure.

    Raises:
        ConfigError: an argument or the trace is wrong.
        UnavailableError: SimPy or matplotlib is not installed.
    """
    check_outputs(arguments)
    trace, scenario, rules = _trace(arguments), _scenario(arguments), _rules(arguments)
    advise = arguments.command == "advise"
    ratios = _ratios(arguments.ratios, scenario.workers) if advise else (_prefill_workers(arguments),)
    links = _links(arguments.links_gb_s) if advise else ()
    runs = len(baseline_budgets(scenario)) + len(ratios) + len(links) + (CROSSOVER_STEPS if links else 0)
    with Progress(runs * len(trace.arrivals), quiet=arguments.quiet) as progress:
        plan = make_plan(trace, scenario, ratios=ratios, links_gb_s=links, rules=rules, step=progress.step)
        progress.say("drawing")
        _write_plots(plan, arguments)
    write_result(plan, arguments.json, lambda console: show(plan, console))
    return True


def _write_plots(plan: Plan, arguments: argparse.Namespace) -> None:
    if arguments.png is not None:
        write_pictures(arguments.png, plots_of(plan))
    if arguments.html is not None:
        write_file("--html", arguments.html, page_of(plan))


def _trace(arguments: argparse.Namespace) -> Trace:
    if arguments.requests < 1 or arguments.block_tokens < 1:
        raise ConfigError("--requests and --block-tokens must be 1 or more")
    if arguments.trace.startswith(SYNTHETIC):
        trace = synthetic_trace(arguments.trace.removeprefix(SYNTHETIC), seed=arguments.seed)
    else:
        trace = read_trace(
            Path(arguments.trace),
            requests=arguments.requests,
            block_tokens=arguments.block_tokens,
            rate=arguments.rate,
            seed=arguments.seed,
        )
    return (trace.spread_ties() if arguments.spread_ties else trace).faster(arguments.faster)


def _scenario(arguments: argparse.Namespace) -> Scenario:
    simulate = arguments.command == "simulate"
    prefill = _prefill_workers(arguments) if simulate else 0
    return Scenario(
        workers=arguments.workers,
        prefill_workers=prefill,
        model=MODELS[arguments.model],
        device=DEVICES[arguments.device],
        devices=arguments.devices,
        assumptions=Assumptions(
            flops_fraction=_part("--flops-fraction", arguments.flops_fraction),
            memory_fraction=_part("--memory-fraction", arguments.memory_fraction),
        ),
        transfer=_transfer(arguments.records, arguments.link_gb_s),
        objectives=Objectives(
            ttft_seconds=_positive("--ttft-slo", arguments.ttft_slo),
            tpot_seconds=_positive("--tpot-slo", arguments.tpot_slo),
            attainment=_part("--attainment", arguments.attainment),
        ),
        token_budget=arguments.token_budget,
        growth_tokens=arguments.growth_tokens,
        failures=tuple(map(_failure, arguments.fail)) if simulate else (),
        switch=Switch(at_seconds=arguments.switch_at) if simulate and arguments.switch_at is not None else None,
        elastic=Elastic() if simulate and arguments.elastic else None,
        cancelled=arguments.cancelled if simulate else 0.0,
        seed=arguments.seed,
    )


def _rules(arguments: argparse.Namespace) -> Rules:
    if not arguments.operating_cost >= 0:
        raise ConfigError(f"--operating-cost is {arguments.operating_cost}; it must not be negative")
    return Rules(
        long_prompt_tokens=arguments.long_prompt,
        long_decode_tokens=arguments.long_decode,
        operating_cost=arguments.operating_cost,
    )


def _transfer(files: Sequence[Path], link_gb_s: float | None) -> TransferModel:
    link = None if link_gb_s is None else _positive("--link-gb-s", link_gb_s) * 1e9
    if not files:
        return assumed_transfer(DEFAULT_LINK_BYTES_PER_SECOND if link is None else link)
    return fit_transfer([read_record(path) for path in files], link)


def _prefill_workers(arguments: argparse.Namespace) -> int:
    given: int | None = arguments.prefill_workers
    if given is None:
        given = arguments.workers // 2
    if not 1 <= given < arguments.workers:
        raise ConfigError(
            f"--prefill-workers {given}: of --workers {arguments.workers} one must prefill and one decode"
        )
    return given


def _ratios(text: str | None, workers: int) -> tuple[int, ...]:
    if not 2 <= workers <= limits.MAX_SIMULATED_WORKERS:
        raise ConfigError(f"--workers {workers}: a split takes from 2 to {limits.MAX_SIMULATED_WORKERS}")
    if text is None:
        return tuple(sorted({max(round(workers * i / MANY_WORKERS), 1) for i in range(1, MANY_WORKERS)} - {workers}))
    ratios = tuple(sorted({int(number) for number in _numbers("--ratios", text) if number.is_integer()}))
    if not ratios or not 1 <= min(ratios) <= max(ratios) < workers:
        raise ConfigError(f"--ratios {text}: whole numbers from 1 to {workers - 1}, as --workers is {workers}")
    return ratios


def _links(text: str | None) -> tuple[float, ...]:
    if text == "none":
        return ()
    return LINKS_GB_S if text is None else tuple(_positive("--links-gb-s", n) for n in _numbers("--links-gb-s", text))


def _numbers(flag: str, text: str) -> list[float]:
    try:
        return [float(item) for item in text.split(",")]
    except ValueError:
        raise ConfigError(f"{flag} {text!r}: give numbers with commas between them") from None


def _failure(text: str) -> Failure:
    found = _FAILURE.fullmatch(text)
    if found is None:
        raise ConfigError(f"--fail {text!r}: give WORKER@AT+DOWN, as 2@60+30")
    worker, at, down = found.groups()
    try:
        return Failure(worker=int(worker), at_seconds=float(at), down_seconds=float(down))
    except ValueError:
        raise ConfigError(f"--fail {text!r}: give WORKER@AT+DOWN, as 2@60+30") from None


def _positive(flag: str, value: float) -> float:
    if not 0 < value < float("inf"):
        raise ConfigError(f"{flag} is {value}; it must be above zero")
    return value


def _part(flag: str, value: float) -> float:
    if not 0 < value <= 1:
        raise ConfigError(f"{flag} is {value}; it is a part, above 0 and up to 1")
    return value
