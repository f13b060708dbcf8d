"""`benchmarks/predicted.py` at a tiny size: it measures what it predicts. No figure of speed is asserted."""

import json
import os
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parent.parent / "benchmarks" / "predicted.py"


def test_each_run_length_has_what_was_measured_and_what_start_ups_predict(tmp_path: Path) -> None:
    flags = ["--tokens", "256", "--run-bytes", "65536:131072", "--start-ups", "2", "--folder", str(tmp_path)]
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}  # it imports neighbours
    run = subprocess.run(
        [sys.executable, str(PROGRAM), "stream", *flags],
        capture_output=True, text=True, timeout=100, check=False, env=inherited,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    (file,) = tmp_path.iterdir()
    assert file.name == "predicted-stream.json"
    record = json.loads(file.read_text())
    assert record["command"] in run.stderr
    assert [point["run_bytes"] for point in record["gb_s"]] == [65536, 131072]
    for point in record["gb_s"]:
        for rates in (point["measured"], point["predicted"]):
            assert 0 < rates["min"] <= rates["median"] <= rates["max"]
