"""Many seeds, over the cores; failing ones with their traces, and kept."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from time import process_time

from kvlink.testing.simulator.simulation import Outcome, simulate

_BATCH = 250


@dataclass(slots=True)
class Campaign:
    """What many seeds came to.

    Attributes:
        seeds, events, requests, done: how many seeds ran, what happened in them, requests, and requests made whole.
        cpu_seconds: spent simulating, on all cores together.
        failures: every seed that broke an invariant, with its trace.
    """

    seeds: int = 0
    events: int = 0
    requests: int = 0
    done: int = 0
    cpu_seconds: float = 0.0
    failures: list[Outcome] = field(default_factory=list)

    def __str__(self) -> str:
        per_seed = 1000.0 * self.cpu_seconds / max(1, self.seeds)
        figures = (
            f"{self.seeds} seeds, {self.events} events, {self.done} of {self.requests} requests whole, "
            f"{per_seed:.2f} ms a seed, {len(self.failures)} violations"
        )
        return "\n".join((figures, *map(str, self.failures)))

    def add(self, other: Campaign) -> None:
        """Count another's seeds among ours."""
        self.seeds += other.seeds
        self.events += other.events
        self.requests += other.requests
        self.done += other.done
        self.cpu_seconds += other.cpu_seconds
        self.failures += other.failures


def run(seeds: Iterable[int]) -> Campaign:
    """Run these seeds here; one that fails is run again with a trace."""
    campaign = Campaign()
    began = process_time()
    for seed in seeds:
        outcome = simulate(seed)
        campaign.seeds += 1
        campaign.events += outcome.events
        campaign.requests += outcome.requests
        campaign.done += outcome.done
        if outcome.finding is not None:
            campaign.failures.append(simulate(seed, trace=True))
    campaign.cpu_seconds = process_time() - began
    return campaign


def run_on_all_cores(seeds: Iterable[int], workers: int | None = None) -> Iterator[Campaign]:
    """Run many seeds, a batch a process at a time; each batch as it ends.

    Args:
        seeds: which.
        workers: processes; one a core by default.
    """
    workers = workers or os.cpu_count() or 1
    todo = list(seeds)
    batches = [todo[first : first + _BATCH] for first in range(0, len(todo), _BATCH)]
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(run, batches)


def kept(path: Path) -> list[int]:
    """Seeds that once failed, by `keep`."""
    return [entry["seed"] for entry in json.loads(path.read_text())] if path.exists() else []


def keep(path: Path, failures: Iterable[Outcome]) -> None:
    """Add failing seeds, and what they found, to a file of regressions. Seeds that are there stay as they are."""
    entries = json.loads(path.read_text()) if path.exists() else []
    known = {entry["seed"] for entry in entries}
    entries += [{"seed": one.seed, "found": one.finding} for one in failures if one.seed not in known]
    path.write_text(json.dumps(entries, indent=1) + "\n")
