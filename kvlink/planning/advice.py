"""Is splitting prefill from decode worth it for this traffic? Always against as many co-located devices.

Every number comes from simulation over a roofline of public data sheets: evidence level ``simulated``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from typing import Final, Literal

import msgspec

from kvlink.planning.cost import Assumptions
from kvlink.planning.decision import PDDecision, evaluate_pd_decision
from kvlink.planning.ledger import LedgerEntry
from kvlink.planning.mix import RequestMix, summarize_request_mix
from kvlink.planning.models import Device, Model
from kvlink.planning.simulation.results import SimulationResult, Spread, spread
from kvlink.planning.simulation.run import simulate
from kvlink.planning.simulation.scenario import Objectives, Scenario
from kvlink.planning.split import plan_pd_split
from kvlink.planning.trace import Trace
from kvlink.planning.volume import capacity, kv_bytes_per_token, transfer_bound_seconds

SCHEMA: Final = "kvlink.plan/1"
LINKS_GB_S: Final = (0.5, 1.0, 2.5, 5.0, 12.5, 25.0, 50.0)
CROSSOVER_STEPS: Final = 2
"""Links tried between those two that the crossover lies between."""
WEAK_NETWORK_PART: Final = 0.25
"""Of the TTFT objective: a hand-over that takes more of it at its 95th percentile is a weak network's."""
QUIET_REQUESTS: Final = 1.0
"""In flight at a co-located worker on average: below it there is hardly anyone whom a prompt could disturb."""

Step = Callable[[str, int], None]
"""Told what is simulated, and how many requests of it have arrived."""


class Verdict(StrEnum):
    """What to do."""

    ACCEPT = "accept"
    TUNE = "tune"
    REJECT = "reject"


class ReasonName(StrEnum):
    """The five reasons not to split."""

    SMALL_LOAD = "small load meets its SLO already"
    SHORT_PROMPTS = "short prompts"
    WEAK_NETWORK = "weak network"
    LOW_TRAFFIC = "low traffic"
    OPERATING_COST = "operating cost"


class Reason(msgspec.Struct, frozen=True, kw_only=True):
    """One of the five, whether it applies, and by which figures."""

    name: ReasonName
    applies: bool
    figures: str


class Rules(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the verdict turns on.

    Attributes:
        long_prompt_tokens: a prompt above it is long.
        long_decode_tokens: a decode above it is long.
        operating_cost: part of the baseline's goodput that two pools must gain to be worth running.
    """

    long_prompt_tokens: int = 2048
    long_decode_tokens: int = 256
    operating_cost: float = 0.05


class Volume(msgspec.Struct, frozen=True, kw_only=True):
    """KV by the formula, before anything is simulated; see `kvlink.planning.volume` for what the bound leaves out."""

    bytes_per_token: int
    bytes_per_request: Spread
    bound_seconds: Spread
    worker_room_tokens: int
    worker_room_requests: int


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """The trace in numbers. ``pools``: how many requests `plan_pd_split` puts into each."""

    requests: int
    seconds: float
    prompt_tokens: Spread
    decode_tokens: Spread
    mix: RequestMix
    pools: dict[str, int]


class LinkPoint(msgspec.Struct, frozen=True, kw_only=True):
    """The best split again, over another link."""

    link_gb_s: float
    goodput_rps: float
    ttft_p95: float | None
    e2e_p95: float | None


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The answer, with all that it rests on.

    Attributes:
        baseline: all devices co-located, at the best of the step sizes tried.
        together: the co-located runs, by step size; ``baseline`` is one of them.
        splits: the same devices split, by number of prefill workers.
        best: index of the best split: highest goodput, then lowest p95.
        links: the best split over links of other rates; empty where they were not asked for.
        crossover_gb_s: the link from which on the best split's goodput reaches the baseline's; ``None``: at no rate
            tried, or at all of them (see ``links``).
        advice: what to do next, in words.
        sources: where the numbers come from.
    """

    schema: Literal["kvlink.plan/1"] = SCHEMA
    evidence_level: Literal["simulated"] = "simulated"
    trace: str
    model: Model
    device: Device
    devices_per_worker: int
    workers: int
    objectives: Objectives
    rules: Rules
    assumptions: Assumptions
    workload: Workload
    volume: Volume
    baseline: SimulationResult
    together: tuple[SimulationResult, ...]
    splits: tuple[SimulationResult, ...]
    best: int
    links: tuple[LinkPoint, ...]
    crossover_gb_s: float | None
    decision: PDDecision
    verdict: Verdict
    reasons: tuple[Reason, ...]
    advice: str
    sources: tuple[str, ...]

    @property
    def best_split(self) -> SimulationResult:
        """The split that the verdict is about."""
        return self.splits[self.best]


def make_plan(
    trace: Trace,
    scenario: Scenario,
    *,
    ratios: Sequence[int],
    links_gb_s: Sequence[float] = (),
    rules: Rules | None = None,
    step: Step | None = None,
) -> Plan:
    """Simulate the co-located baseline and each split of the same workers, and judge.

    Args:
        trace: the workload.
        scenario: the fleet; its own ``prefill_workers`` is not read.
        ratios: numbers of prefill workers to try, each from 1 to one less than all.
        links_gb_s: rates of a worker's link (1e9 bytes/s) over which the best split is tried again, and a few more
            between those two where it crosses the baseline.
        rules: what the verdict turns on.
        step: told of progress.

    Raises:
        ConfigError: (a ValueError) the scenario cannot be.
        UnavailableError: SimPy is not installed.
    """
    rules = rules or Rules()
    tell = step or (lambda _, __: None)
    workload, volume = summarize(trace, rules), measure_volume(trace, scenario)
    together = tuple(
        _run(trace, msgspec.structs.replace(scenario.split(0), token_budget=budget), f"co-located, {budget}", tell)
        for budget in baseline_budgets(scenario)
    )
    baseline = _best(together)
    splits = tuple(
        _run(trace, scenario.split(count), f"{count} prefill + {scenario.workers - count} decode", tell)
        for count in ratios
    )
    best = splits.index(_best(splits))
    links = _over_links(trace, scenario.split(ratios[best]), links_gb_s, baseline.goodput_rps, tell)
    decision = evaluate_pd_decision(baseline, splits[best])
    reasons = judge(baseline, splits[best], scenario, workload, rules)
    verdict = _verdict(decision, baseline, reasons)
    return Plan(
        trace=trace.name,
        model=scenario.model,
        device=scenario.device,
        devices_per_worker=scenario.devices,
        workers=scenario.workers,
        objectives=scenario.objectives,
        rules=rules,
        assumptions=scenario.assumptions,
        workload=workload,
        volume=volume,
        baseline=baseline,
        together=together,
        splits=splits,
        best=best,
        links=links,
        crossover_gb_s=crossover(links, baseline.goodput_rps),
        decision=decision,
        verdict=verdict,
        reasons=reasons,
        advice=_advice(verdict, decision, baseline, splits[best], scenario),
        sources=_sources(scenario),
    )


def baseline_budgets(scenario: Scenario) -> tuple[int, ...]:
    """Tokens of a step with which the co-located baseline is tried: smaller prompt chunks disturb decode less.

    Without them a split would be compared with a baseline that nobody has tuned.
    """
    return tuple(sorted({max(scenario.token_budget // part, 1) for part in (1, 2, 4)}))


def _best(runs: Sequence[SimulationResult]) -> SimulationResult:
    """Highest goodput, then lowest p95."""
    return max(runs, key=lambda run: (run.goodput_rps, -run.p95_latency_ms))


def _run(trace: Trace, scenario: Scenario, words: str, tell: Step) -> SimulationResult:
    return simulate(trace, scenario, progress=lambda arrived: tell(words, arrived))


def _over_link(trace: Trace, scenario: Scenario, link_gb_s: float, tell: Step) -> LinkPoint:
    transfer = msgspec.structs.replace(scenario.transfer, bytes_per_second=scenario.transfer.fraction * link_gb_s * 1e9)
    result = _run(trace, msgspec.structs.replace(scenario, transfer=transfer), f"{link_gb_s:g} GB/s links", tell)
    return LinkPoint(
        link_gb_s=link_gb_s, goodput_rps=result.goodput_rps, ttft_p95=result.ttft.p95, e2e_p95=result.e2e.p95
    )


def _over_links(
    trace: Trace, scenario: Scenario, links_gb_s: Sequence[float], baseline_rps: float, tell: Step
) -> tuple[LinkPoint, ...]:
    """The split over each link, and over a few more where its goodput passes the baseline's."""
    points = [_over_link(trace, scenario, link, tell) for link in sorted(links_gb_s)]
    for _ in range(CROSSOVER_STEPS):
        crossed = _crossed(points, baseline_rps)
        if crossed is None:
            break
        middle = float(f"{math.sqrt(crossed[0].link_gb_s * crossed[1].link_gb_s):.2g}")
        if middle in (crossed[0].link_gb_s, crossed[1].link_gb_s):
            break
        points.append(_over_link(trace, scenario, middle, tell))
        points.sort(key=lambda point: point.link_gb_s)
    return tuple(points)


def _crossed(links: Sequence[LinkPoint], baseline_rps: float) -> tuple[LinkPoint, LinkPoint] | None:
    """The neighbours between which the split's goodput rises to the baseline's."""
    for low, high in itertools.pairwise(links):
        if low.goodput_rps < baseline_rps <= high.goodput_rps:
            return low, high
    return None


def crossover(links: Sequence[LinkPoint], baseline_rps: float) -> float | None:
    """Where the split's goodput rises to the baseline's, between two rates on a logarithmic axis."""
    crossed = _crossed(links, baseline_rps)
    if crossed is None:
        return None
    low, high = crossed
    part = (baseline_rps - low.goodput_rps) / (high.goodput_rps - low.goodput_rps)
    return math.exp(math.log(low.link_gb_s) * (1 - part) + math.log(high.link_gb_s) * part)


def summarize(trace: Trace, rules: Rules) -> Workload:
    """The trace in numbers."""
    ledger = [
        LedgerEntry(name=a.name, prompt_tokens=a.prompt_tokens, decode_tokens=a.decode_tokens) for a in trace.arrivals
    ]
    split = plan_pd_split(ledger, rules.long_prompt_tokens, rules.long_decode_tokens)
    return Workload(
        requests=len(ledger),
        seconds=trace.seconds,
        prompt_tokens=spread(entry.prompt_tokens for entry in ledger),
        decode_tokens=spread(entry.decode_tokens for entry in ledger),
        mix=summarize_request_mix(ledger, rules.long_prompt_tokens),
        pools={
            "prefill_pool": len(split["prefill_pool"]),
            "decode_pool": len(split["decode_pool"]),
            "shared_pool": len(split["shared_pool"]),
        },
    )


def measure_volume(trace: Trace, scenario: Scenario) -> Volume:
    """KV of the trace's prompts by the formula, and the least time each takes over the scenario's link."""
    token = kv_bytes_per_token(scenario.model, tensor_parallel=scenario.devices)
    sizes = [arrival.prompt_tokens * token for arrival in trace.arrivals]
    typical = sorted(a.prompt_tokens + a.decode_tokens for a in trace.arrivals)[len(sizes) // 2]
    room = capacity(
        scenario.model,
        scenario.device,
        devices=scenario.devices,
        request_tokens=typical,
        memory_fraction=scenario.assumptions.usable_memory,
    )
    return Volume(
        bytes_per_token=token,
        bytes_per_request=spread(sizes),
        bound_seconds=spread(transfer_bound_seconds(size, scenario.transfer.bytes_per_second) for size in sizes),
        worker_room_tokens=room.tokens,
        worker_room_requests=room.requests,
    )


def judge(
    baseline: SimulationResult, split: SimulationResult, scenario: Scenario, workload: Workload, rules: Rules
) -> tuple[Reason, ...]:
    """The five reasons not to split, each with the figures by which it applies or does not."""
    objectives = scenario.objectives
    assert split.moves is not None
    hand_over = (split.moves.seconds.p95 or 0.0) + (split.moves.wait_seconds.p95 or 0.0)
    in_flight = baseline.throughput_rps * (baseline.e2e.mean or 0.0) / scenario.workers
    median_prompt = workload.prompt_tokens.p50 or 0.0
    gain = split.goodput_rps / baseline.goodput_rps - 1 if baseline.goodput_rps else math.inf
    return (
        Reason(
            name=ReasonName.SMALL_LOAD,
            applies=baseline.attainment >= objectives.attainment,
            figures=f"co-located, {baseline.attainment:.1%} of requests meet both objectives; "
            f"{objectives.attainment:.0%} are asked for",
        ),
        Reason(
            name=ReasonName.SHORT_PROMPTS,
            applies=median_prompt <= rules.long_prompt_tokens,
            figures=f"median prompt {median_prompt:,.0f} tokens; long is above {rules.long_prompt_tokens:,}",
        ),
        Reason(
            name=ReasonName.WEAK_NETWORK,
            applies=hand_over > WEAK_NETWORK_PART * objectives.ttft_seconds,
            figures=f"hand-over p95 {hand_over:.2f} s, waiting for links included; "
            f"{WEAK_NETWORK_PART:.0%} of the TTFT objective is {WEAK_NETWORK_PART * objectives.ttft_seconds:.2f} s",
        ),
        Reason(
            name=ReasonName.LOW_TRAFFIC,
            applies=in_flight < QUIET_REQUESTS,
            figures=f"{in_flight:.2f} requests in flight at a co-located worker; below {QUIET_REQUESTS:g} is low",
        ),
        Reason(
            name=ReasonName.OPERATING_COST,
            applies=gain < rules.operating_cost,
            figures=f"goodput {gain:+.1%}; running two pools is set to cost {rules.operating_cost:.0%}",
        ),
    )


def _verdict(decision: PDDecision, baseline: SimulationResult, reasons: Iterable[Reason]) -> Verdict:
    """Accept a gain beyond its cost without a worse tail; tune such a gain with a worse tail; reject the rest."""
    cost = next(reason for reason in reasons if reason.name is ReasonName.OPERATING_COST)
    if cost.applies:
        unmet = not next(reason for reason in reasons if reason.name is ReasonName.SMALL_LOAD).applies
        return Verdict.TUNE if decision["keep_split"] and unmet and baseline.goodput_rps else Verdict.REJECT
    return Verdict.ACCEPT if decision["keep_split"] else Verdict.TUNE


def _advice(
    verdict: Verdict, decision: PDDecision, baseline: SimulationResult, split: SimulationResult, scenario: Scenario
) -> str:
    if verdict is Verdict.ACCEPT:
        return f"Split: {split.configuration}. Measure it before you rely on it: this is a simulation."
    if verdict is Verdict.REJECT:
        return f"Keep {scenario.workers} co-located workers."
    if not decision["keep_split"]:
        pool = max(split.pools, key=lambda pool: pool.queue_seconds.p95 or 0.0)
        return (
            f"{split.configuration} serves more requests in time, but the slowest 5% take "
            f"{decision['latency_delta_ms'] / 1e3:.1f} s longer; the longer queue is {pool.name}'s. "
            "Try more workers there, a smaller token budget, or more workers in all."
        )
    return (
        f"{split.configuration} is better than co-located by too little to pay for itself "
        f"({split.attainment:.1%} against {baseline.attainment:.1%} in time). Try other ratios, or more workers in all."
    )


def _sources(scenario: Scenario) -> tuple[str, ...]:
    rules, device, model = scenario.assumptions, scenario.device, scenario.model
    sheet = (
        f"{device.name}, data sheet: {device.peak_flops / 1e12:g} TFLOP/s dense bfloat16, "
        f"{device.memory_bytes_per_second / 1e12:g} TB/s memory, {device.memory_bytes / 1e9:g} GB"
    )
    assumed = (
        f"assumed, not measured: {rules.flops_fraction:.0%} of peak FLOP/s, {rules.memory_fraction:.0%} of memory "
        f"bandwidth, {rules.step_overhead_seconds * 1e3:g} ms a step, {rules.usable_memory:.0%} of memory usable"
    )
    published = f"{model.name}, published configuration: {model.parameters / 1e9:g}e9 parameters, {model.layers} layers"
    return sheet, assumed, published, f"transfer, {scenario.transfer.origin}"
