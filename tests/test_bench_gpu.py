"""`kvlink bench --device cuda`: both halves in processes of their own, on the stand-in driver with delayed streams."""

import json
import subprocess
import sys

import pytest
from stand_in import library

CASE = [
    "--layers", "2", "--kv-heads", "4", "--head-dim", "64", "--tokens", "300", "--requests", "3",
    "--source-tp", "2", "--target-layout", "hnd", "--target-block-size", "32", "--quiet", "--json", "-",
]  # fmt: skip


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    return tmp_path_factory.mktemp("kernels")


def bench(monkeypatch, kernels, *options, driver=None):
    monkeypatch.setenv("KVLINK_CUDA_LIBRARY", driver or library())
    monkeypatch.setenv("KVLINK_KERNEL_CACHE", str(kernels))
    monkeypatch.setenv("FAKECUDA_SEED", "3")
    monkeypatch.setenv("FAKECUDA_MAX_DELAY_US", "400")
    command = [sys.executable, "-m", "kvlink.cli", "bench", *CASE, *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.parametrize("flow", ["fetch", "push"])
def test_a_bench_on_a_gpu_is_verified_and_says_that_it_was_a_stand_in(monkeypatch, kernels, flow):
    ran = bench(monkeypatch, kernels, "--device", "cuda", "--flow", flow)
    assert ran.returncode == 0, ran.stderr
    report = json.loads(ran.stdout)
    assert report["verified"]
    assert report["evidence_level"] == "stand_in"
    assert report["environment"]["gpu"] == "stand-in for a GPU (sm_90)"
    assert (report["case"]["device"], report["case"]["path"]) == ("cuda:0", "packed")


def test_a_machine_without_a_driver_is_told_what_it_lacks(monkeypatch, kernels):
    ran = bench(monkeypatch, kernels, "--device", "cuda", driver="/nowhere/libcuda.so.1")
    assert ran.returncode == 3
    assert "no CUDA driver" in ran.stderr


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--device", "gpu"], "host, cuda, or cuda:N"),
        (["--device", "cuda", "--transport", "stream"], "by ucx only"),
        (["--device", "cuda", "--path", "direct"], "always packed: drop it"),
    ],
)
def test_devices_that_cannot_be_are_refused_by_the_flag(monkeypatch, kernels, options, says):
    ran = bench(monkeypatch, kernels, *options)
    assert ran.returncode == 2
    assert says in ran.stderr
