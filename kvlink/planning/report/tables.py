"""The tables of a plan, as text cells: for the terminal and for the page alike."""

from __future__ import annotations

from collections.abc import Sequence

from kvlink.planning.advice import Plan
from kvlink.planning.report.page import Page, Table
from kvlink.planning.report.plots import plots_of
from kvlink.planning.simulation.results import SimulationResult, Spread

LEVEL = "evidence level: simulated, over public data sheets; nothing here was measured"


def runs_table(plan: Plan) -> Table:
    """One row a configuration, the baseline first."""
    titles = ("configuration", "goodput", "in time", "TTFT p50/p95/p99 s", "TPOT p50/p95/p99 ms", "E2E p95 s",
              "line p95 s", "recomputed")  # fmt: skip
    rows = []
    for run in (*plan.together, *plan.splits):
        mark = " (baseline)" if run == plan.baseline else " (best split)" if run == plan.best_split else ""
        rows.append((
            run.configuration + mark, f"{run.goodput_rps:.3f} /s", f"{run.attainment:.1%}", _three(run.ttft, 1),
            _three(run.tpot, 1e3), _number(run.e2e.p95), _number(run.line_seconds.p95), f"{run.recomputed_tokens:,}",
        ))  # fmt: skip
    return titles, rows


def pools_table(runs: Sequence[SimulationResult]) -> Table:
    """One row a pool."""
    titles = ("configuration", "pool", "workers", "running steps", "queue p50/p95/p99 s", "peak room")
    return titles, [
        (
            run.configuration, pool.name, str(pool.workers), f"{pool.utilisation:.0%}", _three(pool.queue_seconds, 1),
            f"{pool.peak_room:.0%}",
        )
        for run in runs
        for pool in run.pools
    ]  # fmt: skip


def moves_table(run: SimulationResult) -> Table:
    """What moved between the pools, and prefixes."""
    moves, prefixes = run.moves, run.prefixes
    rows = []
    if moves is not None:
        rows += [
            ("KV of a request, GB, p50/p95/p99", _three(moves.bytes_per_request, 1e-9)),
            ("KV moved in all, TB", f"{moves.total_bytes / 1e12:.2f}"),
            ("transfer and install, s, p50/p95/p99", _three(moves.seconds, 1)),
            ("waiting for a link, s, p50/p95/p99", _three(moves.wait_seconds, 1)),
        ]
    rows += [
        ("prompt tokens found in a cache", f"{prefixes.hit_tokens:.1%}"),
        (f"TTFT of {prefixes.warm_requests:,} warm requests, s", _three(prefixes.warm_ttft, 1)),
        (f"TTFT of {prefixes.cold_requests:,} cold requests, s", _three(prefixes.cold_ttft, 1)),
    ]
    return (run.configuration, ""), rows


def workload_table(plan: Plan) -> Table:
    """The trace and its KV by the formulas."""
    load, volume, mix = plan.workload, plan.volume, plan.workload.mix
    rate = f", {load.requests / load.seconds:.2f} a second" if load.seconds else ""
    return ("workload", ""), [
        ("requests", f"{load.requests:,} in {load.seconds:,.0f} s{rate}"),
        ("prompt tokens, p50/p95/p99", _three(load.prompt_tokens, 1, ",.0f")),
        ("decode tokens, p50/p95/p99", _three(load.decode_tokens, 1, ",.0f")),
        (
            "mix",
            f"{mix['prefill_heavy']:,} prefill-heavy, {mix['decode_heavy']:,} decode-heavy, {mix['mixed']:,} mixed",
        ),
        ("by plan_pd_split", ", ".join(f"{count:,} {name}" for name, count in load.pools.items())),
        ("KV of a token", f"{volume.bytes_per_token:,} bytes"),
        ("KV of a prompt, GB, p50/p95/p99", _three(volume.bytes_per_request, 1e-9)),
        ("least transfer time, s, p50/p95/p99", _three(volume.bound_seconds, 1)),
        ("room of a worker", f"{volume.worker_room_tokens:,} tokens: {volume.worker_room_requests:,} median requests"),
    ]


def reasons_table(plan: Plan) -> Table:
    """The five reasons not to split."""
    return ("reason not to split", "applies", "figures"), [
        (reason.name.value, "yes" if reason.applies else "no", reason.figures) for reason in plan.reasons
    ]


def links_table(plan: Plan) -> Table:
    """The best split over other links."""
    return ("link, GB/s", "goodput", "TTFT p95 s", "E2E p95 s"), [
        (f"{p.link_gb_s:g}", f"{p.goodput_rps:.3f} /s", _number(p.ttft_p95), _number(p.e2e_p95)) for p in plan.links
    ]


def crossover_words(plan: Plan) -> str:
    """Where the split catches up with the baseline, in words."""
    if plan.crossover_gb_s is not None:
        return f"The split reaches the co-located goodput from a link of about {plan.crossover_gb_s:.2g} GB/s on."
    if all(point.goodput_rps >= plan.baseline.goodput_rps for point in plan.links):
        return "The split reaches the co-located goodput over every link tried."
    return "The split reaches the co-located goodput over no link tried, or not for good."


def verdict_words(plan: Plan) -> str:
    """The decision in figures, and what to do."""
    decision = plan.decision
    return (
        f"{plan.best_split.configuration} against {plan.baseline.configuration}: goodput "
        f"{decision['throughput_gain']:+.3f} requests/s, p95 end to end {decision['latency_delta_ms'] / 1e3:+.2f} s. "
        f"{plan.advice}"
    )


def page_of(plan: Plan) -> bytes:
    """The whole plan as one page.

    Raises:
        UnavailableError: matplotlib is not installed.
    """
    page = Page(f"Is splitting worth it? {plan.trace}, {plan.model.name}", LEVEL)
    page.paragraph(
        f"{plan.workers} workers of {plan.devices_per_worker} x {plan.device.name}. A request is in time if its first "
        f"token comes within {plan.objectives.ttft_seconds:g} s and each later one within "
        f"{plan.objectives.tpot_seconds * 1e3:g} ms on average; goodput counts those."
    )
    page.verdict(plan.verdict.value, verdict_words(plan))
    page.table(reasons_table(plan))
    page.heading("Plots")
    page.plots(plots_of(plan))
    page.heading("Configurations on the same devices")
    page.table(runs_table(plan))
    page.heading("Pools")
    page.table(pools_table((plan.baseline, plan.best_split)))
    page.heading("Hand-over and prefixes")
    page.table(moves_table(plan.best_split))
    if plan.links:
        page.heading("Other links")
        page.paragraph(crossover_words(plan))
        page.table(links_table(plan))
    page.heading("Workload")
    page.table(workload_table(plan))
    page.heading("Some routing choices")
    page.verbatim("\n\n".join(plan.best_split.explanations) or "no prefix was found in a cache")
    page.heading("Where the numbers come from")
    page.bullets(plan.sources)
    return page.render()


def _three(spread: Spread, scale: float, form: str = ".3g") -> str:
    """p50 / p95 / p99."""
    values = (spread.p50, spread.p95, spread.p99)
    if spread.p50 is None:
        return ""
    return " / ".join("" if value is None else _plain(value * scale, form) for value in values)


def _number(value: float | None) -> str:
    return "" if value is None else _plain(value, ".3g")


def _plain(value: float, form: str) -> str:
    """Without exponents: people compare lengths of numbers."""
    return f"{value:,.0f}" if abs(value) >= 1000 and form == ".3g" else f"{value:{form}}"
