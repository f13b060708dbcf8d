"""`benchmarks/peers/compare.py` at a tiny size: it moves, compares every byte, and names who could not take part."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from kvlink import cli
from kvlink.cli.bench import peers

COMPARE = Path(__file__).parent.parent / "benchmarks" / "peers" / "compare.py"
TINY = ["--fragments", "64K", "--scenes", "tcp", "--rounds", "2", "--pool-mib", "16", "--move-mib", "4", "--json", "-"]


def test_kvlink_takes_part_and_absent_peers_are_named():
    run = subprocess.run(
        [sys.executable, str(COMPARE), *TINY, "--peers-python", sys.executable, "--transports", "stream,nonsense"],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    record = json.loads(run.stdout)
    (size,) = record["sizes"]
    assert size["payload_bytes"] == 4 << 20
    assert set(size["results"]) == {"kvlink stream-off", "kvlink stream-on", "limit socket"}
    assert set(size["ratios"]["over_limit"]) == {"kvlink stream-off", "kvlink stream-on"}
    assert all(len(result["rounds_gb_s"]) == 2 for result in size["results"].values())
    if size["ratios"]["best_peer"] is None:  # this environment has no peers, as usual
        assert "ModuleNotFoundError" in size["absent"]["mooncake"]
        assert "ModuleNotFoundError" in size["absent"]["nixl"]
    assert "not measured" in run.stderr


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--fragments", "65536"], "argument --fragments: '65536' is no multiple of 2K; give sizes as 64K,1M"),
        (["--fragments", "3K"], "'3K' is no multiple"),
        (["--scenes", "bogus"], "argument --scenes: 'bogus' is no scene; known are tcp, host"),
        (["--rounds", "0"], "argument --rounds: '0' is no whole number"),
        (["--pool-mib", "1", "--move-mib", "64"], "--move-mib 64 of --pool-mib 1"),
        (["--fragments", "4K,1M", "--move-mib", "8"], "--move-mib 8 of --pool-mib 512"),
        (["--contenders", "kvlink,bogus"], "--contenders: 'bogus' begins no contender's name"),
        (["--peers-python", "/nonexistent/python"], "--peers-python /nonexistent/python cannot be run"),
        (["--json", "/nonexistent/x"], "--json /nonexistent/x cannot be written"),
    ],
)
def test_what_cannot_be_compared_is_refused_by_its_flag(capsys, monkeypatch, flags, words):
    """In this process: nothing may be started before."""
    monkeypatch.setattr(sys, "argv", ["compare.py", *flags])
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(COMPARE), run_name="__main__")
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_a_bench_is_shown_beside_the_peers_that_were_asked_for(capsys, monkeypatch, tmp_path):
    """The peer here can be imported where the bench looks, and fails where it runs: it is named with its own words."""
    (tmp_path / "mooncake.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    for bound, small in (("_ROUNDS", 2), ("_POOL_MIB", 16), ("_MOVE_MIB", 4)):
        monkeypatch.setattr(peers, bound, small)
    flags = ["--transport", "stream", "--layers", "2", "--tokens", "256", "--requests", "1", "--no-limit-check"]
    assert cli.main(["bench", *flags, "--compare", "mooncake", "--json", "-"]) == 0
    said = capsys.readouterr()
    report = json.loads(said.out)
    assert report["verified"] is True
    beside = report["peers"]
    assert beside["fragment_bytes"] == report["runs"]["bytes"] == 64 << 10
    assert beside["results"].keys() >= {"kvlink stream-off", "kvlink stream-on", "limit socket"}
    assert not any("nixl" in name for name in [*beside["results"], *beside["absent"]])
    if "mooncake write" not in beside["results"]:  # not here, as usual
        assert "ModuleNotFoundError" in beside["absent"]["mooncake"]
    assert "comparing with mooncake in fragments of 64 KiB" in said.err


def test_a_wrong_byte_is_found(tmp_path):
    script = f"""
import sys; sys.path.insert(0, {str(COMPARE.parent)!r})
from contender import Case, Content, Memory
make = lambda side: Case(side=side, scene="tcp", fragment_bytes=4096, planes=4, blocks=100, settings={{}})
source, target = Memory(make("source")), Memory(make("target"))
for memory in (source, target): Content(memory.case, memory.planes).prepare()
theirs, ours = [7, 3, 99], [0, 50, 2]
for plane_a, plane_b in zip(source.planes, target.planes):
    for a, b in zip(theirs, ours):
        plane_b[b * 4096 : (b + 1) * 4096] = plane_a[a * 4096 : (a + 1) * 4096]
target.planes[2][50 * 4096 + 4095] ^= 1
content = Content(target.case, target.planes)
print(content.wrong(theirs, ours), content.touched())
target.planes[1][77 * 4096] ^= 1
print(content.touched())
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.split() == ["1", "0", "1"]
