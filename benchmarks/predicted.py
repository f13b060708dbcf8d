#!/usr/bin/env python3
"""What the cost model says of each path, and what comes: bandwidth over run lengths, integrity on.

    benchmarks/predicted.py [PATH ...]      into benchmarks/records/predicted-PATH.json; every path where none is named

Transfers are those of one ``kvlink bench`` command, which is printed before it is run. Predictions for the same bytes
are made from the speeds that a process measures as its first link opens, in some processes one after the other, when
the transfers are over. Some 25 seconds each.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from record import taken_on, write

from kvlink.plan import DIRECT, MAPPED, PACKED, PULLED, RING, STREAM, Setting, Shape, Speeds, predict
from kvlink.transports.calibration import calibrate
from kvlink.transports.ucx import UcxTransport

RECORDS = Path(__file__).resolve().parent / "records"
WAYS = {
    DIRECT: "--transport ucx --path direct",
    PACKED: "--transport ucx --path packed",
    RING: "--transport shared --path ring",
    MAPPED: "--transport shared --path mapped",
    PULLED: "--transport shared --path pulled",
    STREAM: "--transport stream",
}
CASE = "--layers 8 --source-tp 1 --target-tp 1 --requests 5 --no-limit-check"


def start_up(_number: int) -> Speeds:
    """What a link that may choose among all paths finds as it opens, in a process that has opened none."""
    transport = UcxTransport()
    try:
        return calibrate(("auto", None))
    finally:
        transport.close()


def transfers(flags: str) -> list[dict]:
    """The bench's reports, one for each run length."""
    print(f"kvlink bench {flags}", file=sys.stderr, flush=True)
    command = [sys.executable, "-P", "-m", "kvlink.cli", "bench", *flags.split(), "--quiet", "--json", "-"]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if ran.returncode != 0:
        sys.exit(f"kvlink bench ended with status {ran.returncode}")
    return json.loads(ran.stdout)["reports"]


def point(path: str, report: dict, found: list[Speeds]) -> dict[str, object]:
    """One run length, in GB/s."""
    total = report["bytes_per_request"]
    shape = Shape(total, report["runs"]["count"])
    assert report["case"]["path"] == path, f"{path} was asked for, and {report['case']['path']} was taken"
    return {
        "run_bytes": report["runs"]["bytes"],
        "measured": {name: round(rate, 2) for name, rate in report["throughput_gb_s"].items()},
        "predicted": spread(total / predict(path, shape, speeds, Setting()) / 1e9 for speeds in found),
    }


def spread(rates: Iterable[float]) -> dict[str, float]:
    ordered = sorted(rates)
    values = {"median": statistics.median(ordered), "min": ordered[0], "max": ordered[-1]}
    return {name: round(value, 2) for name, value in values.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("path", nargs="*", choices=[*WAYS, []], metavar="PATH", help=f"of {', '.join(WAYS)}")
    parser.add_argument("--tokens", type=int, default=16384, help="of a request, 32 KiB each (%(default)s)")
    parser.add_argument("--run-bytes", default="2048:1048576", metavar="LOW:HIGH", help="doubled (%(default)s)")
    parser.add_argument("--start-ups", type=int, default=5, help="whose predictions are shown (%(default)s)")
    parser.add_argument("--folder", type=Path, default=RECORDS, help="for the records")
    options = parser.parse_args()
    for path in options.path or WAYS:
        flags = f"{WAYS[path]} {CASE} --tokens {options.tokens} --sweep run-bytes={options.run_bytes}"
        record = {"command": f"kvlink bench {flags}", "path": path, **taken_on(), "start_ups": options.start_ups}
        reports = transfers(flags)
        with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as processes:
            found = list(processes.map(start_up, range(options.start_ups)))
        record["gb_s"] = [point(path, report, found) for report in reports]
        write(record, str(options.folder / f"predicted-{path}.json"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
