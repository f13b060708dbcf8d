"""The command itself, small: two processes over UCX, one over loopback, both flows, reshaped, verified."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

SMALL = [
    "--layers", "2", "--kv-heads", "4", "--head-dim", "16", "--tokens", "300", "--requests", "3", "--json", "-",
]  # fmt: skip
RESHAPED = [
    "--source-tp", "2", "--target-tp", "4", "--source-block-size", "16", "--target-block-size", "64",
    "--source-layout", "nhd", "--target-layout", "hnd",
]  # fmt: skip
REVERSED = [
    "--source-tp", "4", "--target-tp", "2", "--source-block-size", "64", "--target-block-size", "16",
    "--source-layout", "hnd", "--target-layout", "nhd",
]  # fmt: skip


STARTED: list[asyncio.subprocess.Process] = []


async def bench(*flags: str) -> asyncio.subprocess.Process:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvlink.cli", "bench", *flags,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        # A shell that runs these tests in its background has them ignore SIGINT, and whom they start, too.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    STARTED.append(process)
    return process


@pytest.fixture(autouse=True)
async def no_command_is_left() -> AsyncIterator[None]:
    """Ends what a failed test has left running: its workers end with it."""
    yield
    while STARTED:
        process = STARTED.pop()
        if process.returncode is None:
            process.kill()
            await process.wait()


async def finished(*flags: str) -> dict:
    process = await bench(*flags)
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, err.decode()
    return json.loads(out)


@pytest.mark.parametrize("transport", ["ucx", "stream", "loopback"])
@pytest.mark.parametrize("flow", ["fetch", "push"])
@pytest.mark.parametrize("shape", [RESHAPED, REVERSED], ids=["2-to-4", "4-to-2"])
async def test_every_byte_crosses_and_is_verified(transport, flow, shape):
    report = await finished(*SMALL, *shape, "--transport", transport, "--flow", flow)
    assert report["verified"] is True
    assert report["requests"] == {"completed": 3, "failed": 0, "retried": 0}
    assert report["case"]["transport"] == transport
    assert report["bytes_per_request"] == 300 * 2 * 2 * 4 * 16 * 2
    assert report["limit"]["name"] == {"ucx": "ucx_get", "stream": "socket", "loopback": "memcpy"}[transport]
    assert report["throughput_gb_s"]["min"] > 0
    assert 0 < report["fraction_of_limit"] < 10
    assert (report["environment"]["ucx_version"] is not None) == (transport == "ucx")


@pytest.mark.parametrize("transport", ["stream", "loopback"])
async def test_what_a_push_leaves_to_do_after_its_last_layer_is_reported(transport):
    report = await finished(*SMALL, *RESHAPED, "--transport", transport, "--flow", "push", "--layer-ms", "3")
    assert report["verified"] is True
    streamed = report["streamed"]
    assert streamed["layer_seconds"] == 0.003
    assert streamed["exposed_until"] == "installed", "one host has one clock"
    assert 0 < streamed["exposed_s"]["p50"] <= streamed["exposed_s"]["p95"]
    assert streamed["exposed_in_layers"] == pytest.approx(
        streamed["exposed_s"]["p50"] / streamed["layer_transfer_s"], rel=0.5
    )
    assert report["fraction_of_limit"] is None, "computing is no transfer"


@pytest.mark.parametrize("flow", ["fetch", "push"])
async def test_chunks_lost_altered_and_late_by_chance_are_tried_again_and_verified(flow):
    faults = "drop=0.5,corrupt=0.1,delay=0.2"
    report = await finished(
        *SMALL, *RESHAPED, "--transport", "loopback", "--flow", flow, "--fault", faults, "--tries", "20", "--seed", "4"
    )
    assert report["verified"] is True
    assert report["case"]["fault"] == faults
    assert report["requests"]["completed"] == 3
    assert report["requests"]["retried"] > 0


@pytest.mark.parametrize("flow", ["fetch", "push"])
async def test_requests_whose_target_is_killed_are_done_by_its_successor(flow):
    """C7: at some moment of the move; whoever was done before the blow got away."""
    report = await finished(
        *SMALL[:-4], "--json", "-", "--requests", "7", "--flow", flow, "--kill-target-every", "2", "--process-per-rank"
    )
    assert report["verified"] is True
    assert report["case"]["kill_target_every"] == 2
    assert report["requests"]["completed"] == 7
    assert report["requests"]["retried"] > 0


@pytest.mark.parametrize(
    ("topology", "engines"), [("many-to-one:3", (3, 1)), ("one-to-many:3", (1, 3)), ("pairwise:2", (2, 2))]
)
async def test_several_engines_on_a_side_read_and_are_read_at_once(topology, engines):
    report = await finished(
        *SMALL[:-4], "--json", "-", "--requests", "6", "--concurrency", "3", "--topology", topology, "--target-tp", "4",
        "--transport", "stream",
    )  # fmt: skip
    assert report["verified"] is True
    assert report["requests"] == {"completed": 6, "failed": 0, "retried": 0}
    assert (report["case"]["source_engines"], report["case"]["target_engines"]) == engines
    spread = report["between_engines_gb_s"]
    assert 0 < spread["min"] <= spread["median"] <= spread["max"]


async def test_a_trace_in_many_processes_with_stages_and_requests_in_flight(tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps({"input_length": n}) + "\n" for n in (70, 1, 64, 333, 5, 128)))
    report = await finished(
        *SMALL[:-4], "--json", "-", "--trace", str(trace), "--process-per-rank", "--source-pp", "2",
        "--source-tp", "1", "--target-tp", "2", "--concurrency", "3", "--target-layout", "fused", "--integrity", "off",
    )  # fmt: skip
    assert report["verified"] is True
    assert report["requests"]["completed"] == 6
    assert report["case"]["tokens"] == (70 + 1 + 64 + 333 + 5 + 128) // 6
    assert report["limit"] is None
    assert report["fraction_of_limit"] is None


async def test_the_table_and_the_file_tell_of_the_same_run(tmp_path):
    path = tmp_path / "bench.json"
    process = await bench(*SMALL[:-1], str(path), "--transport", "loopback", "--no-limit-check")
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, err.decode()
    assert "every byte of every target cache" in out.decode()
    assert json.loads(path.read_text())["verified"] is True


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
async def test_no_process_is_left_whatever_ends_the_command(how):
    process = await bench(*SMALL, "--requests", "100000")
    workers: set[int] = set()
    for _ in range(400):
        workers = {pid for pid in children_of(process.pid) if "bench.worker" in command_of(pid)}
        if len(workers) == 2:
            break
        await asyncio.sleep(0.02)
    assert len(workers) == 2
    process.send_signal(how)
    await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode != 0
    for _ in range(500):
        if not any("bench.worker" in command_of(pid) for pid in workers):
            return
        await asyncio.sleep(0.02)
    pytest.fail(f"workers {workers} are left")


async def test_a_worker_killed_in_mid_run_ends_the_command_with_code_1_and_its_name():
    process = await bench(*SMALL, "--requests", "100000")
    for _ in range(400):
        workers = [pid for pid in children_of(process.pid) if "bench.worker" in command_of(pid)]
        if len(workers) == 2:
            break
        await asyncio.sleep(0.02)
    os.kill(workers[0], signal.SIGKILL)
    _, err = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 1
    assert b"process 0 was killed by signal 9" in err


async def test_two_halves_that_meet_over_tcp(monkeypatch, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("sixteen bytes at the least")
    monkeypatch.setenv("KVLINK_SECRET_FILE", str(secret))
    serving = await bench("--serve", "127.0.0.1:0")
    said = (await asyncio.wait_for(serving.stderr.readline(), 30)).decode()
    port = said.split(" port ")[1].split(":")[0]
    report = await finished(*SMALL, "--connect", f"127.0.0.1:{port}")
    assert report["verified"] is True
    await asyncio.wait_for(serving.communicate(), 30)
    assert serving.returncode == 0


async def test_a_half_that_stays_serves_every_point_of_a_sweep():
    serving = await bench("--serve", "127.0.0.1:0", "--open", "--stay")
    said = (await asyncio.wait_for(serving.stderr.readline(), 30)).decode()
    port = said.split(" port ")[1].split(":")[0]
    sweep = await finished(*SMALL, "--open", "--connect", f"127.0.0.1:{port}", "--sweep", "tokens=64:128")
    assert sweep["verified"] is True
    assert [report["case"]["tokens"] for report in sweep["reports"]] == [64, 128]
    ended = 0
    while ended < 2:
        said = (await asyncio.wait_for(serving.stderr.readline(), 30)).decode()
        ended += int(said.split("ended, verified: ")[1].split(";")[0])
    serving.send_signal(signal.SIGINT)
    await asyncio.wait_for(serving.communicate(), 30)


async def test_an_ucx_that_is_not_there_ends_with_code_3():
    process = await bench(*SMALL, "--ucx-origin", "/nonexistent/libucp.so.0")
    _, err = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 3
    assert len(err.decode().splitlines()) == 1


async def test_transports_that_ucx_has_not_are_named_with_the_way_out():
    process = await bench(*SMALL, "--ucx-tls", "nonsense")
    _, err = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 3
    assert "'nonsense' is what ucx_tls or UCX_TLS lets it use: leave that out" in err.decode()


@pytest.mark.parametrize(
    ("flags", "redirected", "words"),
    [
        ("--json /dev/full", "", "--json /dev/full: No space left"),
        ("--json -", ">/dev/full", "standard output: No space left"),
        ("", ">/dev/full", "standard output: No space left"),
        ("--json -", ">&-", "standard output: it is closed"),
        ("", ">&-", "standard output: it is closed"),
        ("--json -", "| true", "standard output: Broken pipe"),
        ("", "| true", "standard output: Broken pipe"),
    ],
)
async def test_a_result_that_cannot_be_written_ends_with_code_1_and_one_line(flags, redirected, words):
    command = f"set -o pipefail; {sys.executable} -m kvlink.cli bench {' '.join(SMALL[:-2])} {flags}"
    process = await asyncio.create_subprocess_exec(
        "bash", "-c", f"{command} --transport loopback --no-limit-check --requests 1 {redirected}",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    _, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 1, err.decode()
    (line,) = err.decode().splitlines()
    assert words in line


def children_of(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


async def test_the_workers_are_of_the_installed_kvlink_wherever_the_user_stands(tmp_path):
    """As in README's first command: run from a clone, whose kvlink folder has no native core."""
    decoy = tmp_path / "kvlink"
    decoy.mkdir()
    (decoy / "__init__.py").write_text("raise SystemExit('the decoy was imported')")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "kvlink.cli", "bench", *SMALL,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, cwd=tmp_path, env=environment,
    )  # fmt: skip
    _, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, err.decode()


async def test_a_cap_is_kept_by_every_transfer():
    """8 MB at 0.08 Gbit/s (10 MB a second) take no less than their share of a second."""
    shape = ["--source-tp", "1", "--target-tp", "1", "--model", "llama-3-8b", "--layers", "8", "--tokens", "256"]
    report = await finished(
        "--transport", "stream", "--max-gbps", "0.08", *shape, "--requests", "1", "--no-limit-check", "--json", "-"
    )
    assert report["verified"]
    assert report["case"]["max_gbps"] == 0.08
    assert report["throughput_gb_s"]["max"] < 0.0106
