"""``python -m kvlink.testing.simulator --seeds 20000``: a campaign; ends with 1 if an invariant broke."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kvlink.testing.simulator.campaign import Campaign, keep, run_on_all_cores
from kvlink.testing.simulator.simulation import simulate


def main(arguments: list[str] | None = None) -> int:
    """Run a campaign; print what it came to."""
    parser = argparse.ArgumentParser(prog="python -m kvlink.testing.simulator", description=main.__doc__)
    parser.add_argument("--seeds", type=int, default=20_000, help="how many")
    parser.add_argument("--start", type=int, default=0, help="the first; the same seeds do the same things")
    parser.add_argument("--workers", type=int, help="processes; one a core by default")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="add failing seeds to this file of regressions")
    parser.add_argument("--trace", type=int, metavar="SEED", help="run one seed and print all that happens")
    asked = parser.parse_args(arguments)
    if asked.trace is not None:
        outcome = simulate(asked.trace, trace=True)
        print(*outcome.trace, outcome.finding or "no violation", sep="\n")  # noqa: T201 - a command's output
        return int(outcome.finding is not None)
    total = Campaign()
    for batch in run_on_all_cores(range(asked.start, asked.start + asked.seeds), asked.workers):
        total.add(batch)
        for failure in batch.failures:
            print(failure, flush=True)  # noqa: T201 - as above
    print(str(total).splitlines()[0])  # noqa: T201 - as above
    if asked.keep is not None:
        keep(asked.keep, total.failures)
    return int(bool(total.failures))


if __name__ == "__main__":
    sys.exit(main())
