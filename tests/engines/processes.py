"""What the processes of engines have in common."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several engines share these cores
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # no process for a single rank: see `engine_host` on how they wait
    "VLLM_CPU_CI_ENV": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


def family(session: int) -> list[int]:
    """Every process of a session: an engine and its workers."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == session:
                found.append(int(entry.name))
    return found


def end(session: int) -> None:
    """Kill every process of a session, as a crash would."""
    for process in family(session):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
