"""`benchmarks/requests.py` at tiny sizes: every mode runs and says what it is for. No figure of speed is asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent.parent / "benchmarks" / "requests.py"


def measured(mode: str, *flags: str) -> dict:
    run = subprocess.run(
        [sys.executable, str(PROGRAM), mode, "--json", "-", "--blocks", "64", *flags],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)["result"]


@pytest.mark.parametrize("transport", ["stream", "ucx"])
def test_one_block_wakes_python_at_most_twelve_times_on_both_sides_together(transport):
    """And as often whatever its size: a request of 32 blocks' bytes is no more."""
    small = measured("latency", "--requests", "40", "--transport", transport)
    large = measured("latency", "--requests", "40", "--transport", transport, "--heads", "8")
    for result in (*small.values(), *large.values()):
        assert 0 < result["latency_s"]["p50"] <= result["latency_s"]["p99"]
        assert result["ucx_round_trip_s"]["p50"] > 0
        assert 1 <= result["python_wake_ups"]["both"] <= 12


def test_thousands_are_compared_and_none_fails():
    result = measured("steady", "--requests", "200", "--in-flight", "32")
    assert result["failed"] == 0
    assert len(result["thousands"]) == 2
    assert result["last_over_first"]["target_resident_bytes"] < 1.5


def test_every_source_is_read():
    result = measured("fair", "--sources", "3", "--requests", "90", "--in-flight", "6", "--seconds", "60")
    assert result["requests_done"] == {"min": 30, "median": 30, "max": 30}


def test_an_idle_pair_is_looked_at():
    result = measured("idle", "--seconds", "0.2")
    assert set(result["share_of_a_core"]) == {"source", "target"}


def test_a_computation_beside_a_link_is_held_to_one_beside_movers():
    """`benchmarks/beside.py`: both turns count, and the movers keep to the shares that they were told."""
    program = PROGRAM.parent / "beside.py"
    flags = ["--seconds", "0.3", "--rounds", "1", "--transport", "shared", "--json", "-"]
    run = subprocess.run(
        [sys.executable, str(program), *flags], capture_output=True, text=True, timeout=100, check=False
    )
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)["result"]
    assert result["gb_s"] > 0
    (turn,) = result["rounds"]
    assert result["ratio"]["median"] == turn["link"]["products"] / turn["movers"]["products"] > 0
    told = sorted(turn["link"]["source"] + turn["link"]["target"], reverse=True)
    for used, share in zip(sorted(turn["movers"]["movers"], reverse=True), told, strict=False):
        assert used <= share + 0.2
