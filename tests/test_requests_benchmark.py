"""`benchmarks/requests.py` at tiny sizes: every mode runs and says what it is for. No figure of speed is asserted."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent.parent / "benchmarks"


def run_program(program: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}  # it imports neighbours
    return subprocess.run(
        [sys.executable, str(PROGRAMS / program), *arguments],
        capture_output=True, text=True, timeout=100, check=False, env=inherited | environment,
    )  # fmt: skip


def recorded(mode: str, *flags: str) -> dict:
    run = run_program("requests.py", mode, "--json", "-", "--blocks", "64", *flags)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def measured(mode: str, *flags: str) -> dict:
    return recorded(mode, *flags)["result"]


@pytest.mark.parametrize("transport", ["stream", "ucx"])
def test_one_block_wakes_python_at_most_twelve_times_on_both_sides_together(transport):
    """And as often whatever its size: a request of 32 blocks' bytes is no more."""
    small = measured("latency", "--requests", "40", "--transport", transport)
    large = measured("latency", "--requests", "40", "--transport", transport, "--heads", "8")
    for result in (*small.values(), *large.values()):
        assert 0 < result["latency_s"]["p50"] <= result["latency_s"]["p99"]
        assert result["ucx_round_trip_s"]["p50"] > 0
        assert 1 <= result["python_wake_ups"]["both"] <= 12


def test_both_ends_run_on_the_loop_that_is_asked_for_and_the_record_says_which():
    """uvloop does not tell when it is woken: what is not counted is null, not nothing."""
    own, other = (recorded("latency", "--requests", "20", "--loop", loop) for loop in ("asyncio", "uvloop"))
    assert (own["loop"], other["loop"]) == ("asyncio", "uvloop")
    for cores, seen in own["result"].items():
        assert seen["python_wake_ups"]["both"] >= 1
        assert other["result"][cores]["python_wake_ups"] is None
        assert 0 < other["result"][cores]["latency_s"]["p50"] <= other["result"][cores]["latency_s"]["p99"]


def test_a_loop_that_is_not_installed_is_refused_with_the_remedy(tmp_path):
    (tmp_path / "uvloop.py").write_text("raise ImportError")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    run = run_program("requests.py", "latency", "--loop", "uvloop", PYTHONPATH=path)
    assert run.returncode == 2
    assert "uvloop is not installed in this environment; pip install uvloop" in run.stderr


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["latency", "--requests", "0"], "argument --requests: '0' is no whole number from 1 on"),
        (["steady", "--requests", "1"], "--requests 1: steady takes 2 or more"),
        (["fair", "--requests", "9", "--sources", "10"], "--requests 9: fair takes 10 or more"),
        (["steady", "--blocks", "8"], "--blocks 8: each request in flight has a block of its own"),
        (["idle", "--seconds", "nan"], "argument --seconds: 'nan' is no number of seconds above 0"),
        (["latency", "--json", "/nonexistent/x"], "argument --json: the file /nonexistent/x cannot be written"),
        (["latency", "--transport", "bogus"], "argument --transport: invalid choice: 'bogus'"),
    ],
)
def test_what_cannot_be_measured_is_refused_by_its_flag(capsys, monkeypatch, flags, words):
    """In this process: nothing may be started before."""
    monkeypatch.syspath_prepend(str(PROGRAMS))
    monkeypatch.setattr(sys, "argv", ["requests.py", *flags])
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(PROGRAMS / "requests.py"), run_name="__main__")
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_thousands_are_compared_and_none_fails():
    result = measured("steady", "--requests", "200", "--in-flight", "32", "--rounds", "2")
    assert result["failed"] == 0
    assert [len(one["thousands"]) for one in result["rounds"]] == [2, 2]
    assert result["last_over_first"]["target_resident_bytes"] < 1.5


def test_every_source_is_read():
    result = measured("fair", "--sources", "3", "--requests", "90", "--in-flight", "6", "--seconds", "60")
    assert result["requests_done"] == {"min": 30, "median": 30, "max": 30}


def test_an_idle_pair_is_looked_at():
    result = measured("idle", "--seconds", "0.2")
    assert set(result["share_of_a_core"]) == {"source", "target"}


def test_a_computation_beside_a_link_is_held_to_one_beside_movers():
    """`benchmarks/beside.py`: both turns count, and the movers keep to the shares that they were told."""
    flags = ["--seconds", "0.3", "--rounds", "1", "--transport", "shared", "--json", "-"]
    run = run_program("beside.py", *flags)
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)["result"]
    assert result["gb_s"] > 0
    (turn,) = result["rounds"]
    assert result["ratio"]["median"] == turn["link"]["products"] / turn["movers"]["products"] > 0
    told = sorted(turn["link"]["source"] + turn["link"]["target"], reverse=True)
    for used, share in zip(sorted(turn["movers"]["movers"], reverse=True), told, strict=False):
        assert used <= share + 0.2
