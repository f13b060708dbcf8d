"""The GPU check: layouts against the CPU, speed against a copy, NVIDIA's tools where they are, a transfer over UCX."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from layouts import faults
from timing import SHAPES, Timed, measure

from kvlink.errors import KVLinkError, UnavailableError
from kvlink.relayout import Gpu

HERE = Path(__file__)
TOOLS = ("memcheck", "racecheck", "initcheck")
SANITIZER_CASES = 40


@dataclass(frozen=True)
class Row:
    """One line of the table. ``good`` is ``None`` where nothing was checked."""

    what: str
    result: str
    good: bool | None


def layouts(gpu: Gpu, cases: int) -> Row:
    found = list(faults(gpu, cases))
    for fault in found[:10]:
        print(fault, file=sys.stderr)
    return Row(f"{cases} random layouts", f"{len(found)} differ from the CPU" if found else "as on the CPU", not found)


def timings(gpu: Gpu, tokens: int) -> Iterator[Row]:
    for shape in SHAPES:
        for digest in (False, True):
            yield timed_row(measure(gpu, shape, tokens, digest=digest), judged=not gpu.stand_in)


def timed_row(timed: Timed, *, judged: bool) -> Row:
    wanted = "" if timed.threshold is None else f", wanted {timed.threshold:.2f}"
    if not judged:
        return Row(timed.name, "ran; a stand-in has no speed", None)
    text = f"{timed.fraction:.2f} of a copy{wanted}; {timed.gb_s:.0f} GB/s"
    return Row(timed.name, text, None if timed.threshold is None else timed.fast_enough)


def sanitizers() -> Iterator[Row]:
    tool = shutil.which("compute-sanitizer")
    for name in TOOLS:
        if tool is None:
            yield Row(name, "not checked: no compute-sanitizer", None)
            continue
        command = [tool, "--tool", name, "--error-exitcode", "9", sys.executable, str(HERE)]
        ran = subprocess.run([*command, "--only", "layouts", "--cases", str(SANITIZER_CASES)], check=False)
        yield Row(f"{name}, {SANITIZER_CASES} layouts", f"exit code {ran.returncode}", ran.returncode == 0)


def profile() -> Row:
    tool = shutil.which("ncu")
    if tool is None:
        return Row("DRAM bytes", "not measured: no ncu", None)
    metrics = "dram__bytes_read.sum,dram__bytes_write.sum"
    command = [tool, "--clock-control", "none", "--metrics", metrics, "--launch-count", "4", sys.executable, str(HERE)]
    ran = subprocess.run([*command, "--only", "timings"], check=False)
    return Row("DRAM bytes", f"see ncu's own table above (exit code {ran.returncode})", None)


def transfer(tls: str | None, staging: str) -> Row:
    """Two processes, one cache each, KV over UCX."""
    flags = ["--device", "cuda", "--tokens", "8192", "--requests", "5", "--quiet", "--json", "-"]
    if os.environ.get("FAKECUDA_MAX_DELAY_US") is not None or "fakecuda" in os.environ.get("KVLINK_CUDA_LIBRARY", ""):
        flags[3], flags[5] = "64", "2"
    if tls is not None:
        flags += ["--ucx-tls", tls]
    environ = os.environ | {"KVLINK_GPU_STAGING": staging}
    ran = subprocess.run(
        [sys.executable, "-m", "kvlink.cli", "bench", *flags],
        check=False,
        stdout=subprocess.PIPE,
        env=environ,
        text=True,
    )
    what = f"KV over UCX, {staging} staging"
    if ran.returncode == 3:
        return Row(what, "not checked: the machine lacks something (see above)", None)
    if ran.returncode != 0:
        return Row(what, f"failed, exit code {ran.returncode}", False)
    report = json.loads(ran.stdout)
    speed = report["throughput_gb_s"]["median"]
    return Row(what, f"{'verified' if report['verified'] else 'WRONG BYTES'}; {speed:.2f} GB/s", report["verified"])


def table(rows: list[Row]) -> str:
    width = max(len(row.what) for row in rows)
    marks = {True: "ok  ", False: "FAIL", None: "-   "}
    return "\n".join(f"{marks[row.good]} {row.what:<{width}}  {row.result}" for row in rows)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="check.sh", description=__doc__)
    parser.add_argument("--device", default="cuda:0", help="which GPU (%(default)s)")
    parser.add_argument("--cases", type=int, default=2000, help="random layouts (%(default)s)")
    parser.add_argument("--tokens", type=int, default=16384, help="of the timed cases, 128 KiB each (%(default)s)")
    parser.add_argument("--only", choices=("layouts", "timings", "transfer"), help="one part, without NVIDIA's tools")
    options = parser.parse_args(arguments)
    if options.cases < 1 or options.tokens < 1:
        parser.error("--cases and --tokens must be positive")
    return options


def run(options: argparse.Namespace) -> list[Row]:
    gpu = Gpu(options.device)
    print(f"{gpu.name} ({gpu.arch}), driver's CUDA {gpu.native.driver_version}", file=sys.stderr)
    rows = []
    if options.only in (None, "layouts"):
        rows.append(layouts(gpu, options.cases))
    if options.only in (None, "timings"):
        rows += timings(gpu, options.tokens)
    if options.only is None and not gpu.stand_in:
        rows += [*sanitizers(), profile()]
    if options.only in (None, "transfer"):
        rows.append(transfer(None, "host"))
        if not gpu.stand_in:
            rows.append(transfer("cuda_ipc,cuda_copy,sm,tcp", "device"))
    return rows


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    try:
        rows = run(options)
    except UnavailableError as error:
        print(f"cannot check: {error}", file=sys.stderr)
        return 3
    except KVLinkError as error:
        print(f"the check failed: {error}", file=sys.stderr)
        return 1
    print(table(rows))
    return 1 if any(row.good is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
