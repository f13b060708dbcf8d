"""A plan for the terminal."""

from __future__ import annotations

from rich.console import Console

from kvlink.cli.output import print_table
from kvlink.planning.advice import Plan
from kvlink.planning.report import tables


def show(plan: Plan, console: Console) -> None:
    """Print a plan: verdict first, then what it rests on."""
    console.print(f"{plan.verdict.upper()}: {tables.verdict_words(plan)}\n", soft_wrap=True)
    print_table(*tables.reasons_table(plan), console)
    print_table(*tables.runs_table(plan), console)
    print_table(*tables.pools_table((plan.baseline, plan.best_split)), console)
    print_table(*tables.moves_table(plan.best_split), console)
    if plan.links:
        print_table(*tables.links_table(plan), console)
        console.print(tables.crossover_words(plan) + "\n", soft_wrap=True)
    print_table(*tables.workload_table(plan), console)
    console.print(f"{tables.LEVEL}:", soft_wrap=True)
    for source in plan.sources:
        console.print(f"- {source}", soft_wrap=True)
