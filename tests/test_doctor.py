"""`kvlink doctor`: what it says of a machine, real or made of files, and how the command ends."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import resource
import socket
import sys
from pathlib import Path

import pytest
import stand_in

import kvlink
from kvlink.cli.doctor import choice, containers, gpus, libraries, machine, speed
from kvlink.cli.doctor.findings import Finding, make_report
from kvlink.cli.doctor.partner import CrossRead, Partner


async def doctor(*flags: str, **environment: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvlink.cli", "doctor", *flags, env=os.environ | environment,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode, out.decode(), err.decode()


def by_check(findings) -> dict[str, Finding]:
    return {finding.check: finding for finding in findings}


def files(root: Path, contents: dict[str, str]) -> Path:
    for name, text in contents.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


# --- the command ----------------------------------------------------------------------------------------------------


async def test_every_finding_of_this_machine_is_told_with_figures():
    code, out, err = await doctor("--json", "-")
    assert code == 0, err
    report = json.loads(out)
    assert report["schema"] == "kvlink.doctor/1"
    assert report["works"] is True
    found = {finding["check"]: finding for finding in report["findings"]}
    assert {
        "native.core", "ucx.library", "ucx.transports", "ucx.rdma", "ucx.UCX_RNDV_THRESH", "gpu.device", "gpu.compiler",
        "cpu.cores", "cpu.numa", "memory.size", "memory.locked", "pages.huge", "pages.shared", "pages.reserved",
        "pages.granted", "container.namespaces", "container.tracing", "cma.read",
        "speed.memcpy", "speed.tcp", "speed.tcp_round_trip", "speed.ucx",
        "speed.ucx_round_trip", "link.transport", "link.threads",
    } <= found.keys()  # fmt: skip
    for check in ("speed.memcpy", "speed.tcp", "speed.ucx"):
        assert found[check]["facts"]["gb_s"] > 0
    assert 0 < found["speed.ucx_round_trip"]["facts"]["p50_seconds"] < 1
    chosen = [finding for finding in report["findings"] if finding["check"] == "link.transport"]
    assert [finding["facts"]["run_bytes"] for finding in chosen] == [1024, 16384, 262144]
    for finding in chosen:
        facts = finding["facts"]
        assert facts["measured"] is True
        predicted = {name: value for name, value in facts.items() if name.endswith("_seconds")}
        assert predicted.keys() >= {"shared.ring_seconds", "ucx.direct_seconds", "ucx.packed_seconds"}
        assert min(predicted, key=predicted.get).startswith(facts["transport"])
    assert all(finding["remedy"] for finding in report["findings"] if finding["severity"] in {"slow", "fatal"})


async def test_a_ucx_that_is_not_there_ends_with_code_3_and_its_remedy_unless_nobody_asks_for_it():
    missing = {"KVLINK_UCX_ORIGIN": "/nonexistent/libucp.so.0"}
    code, out, _ = await doctor("--no-measure", **missing)
    assert code == 0
    assert "slower than it could" in out
    code, out, err = await doctor("--no-measure", **missing, KVLINK_TRANSPORTS="ucx")
    assert code == 3
    assert "cannot work here" in out
    (line,) = err.splitlines()
    assert "leave it at auto" in line
    code, out, _ = await doctor(KVLINK_UCX_ORIGIN="/nonexistent/libucp.so.0", KVLINK_TRANSPORTS="stream")
    assert code == 0
    assert "UCX was not measured" in out


async def test_a_setting_of_the_users_is_shown_and_left_alone():
    code, out, _ = await doctor("--no-measure", "--json", "-", UCX_RNDV_THRESH="8k")
    found = {finding["check"]: finding for finding in json.loads(out)["findings"]}
    assert code == 0
    assert found["ucx.UCX_RNDV_THRESH"]["facts"] == {"value": "8k", "from_environment": True}
    assert found["ucx.UCX_TCP_TX_SEG_SIZE"]["facts"] == {"value": "256k", "from_environment": False}


async def test_what_ucx_is_kept_from_by_its_environment_is_blamed_and_its_own_words_stay_out_of_the_json():
    code, out, err = await doctor("--no-measure", "--json", "-", UCX_TLS="nonsense")
    found = {finding["check"]: finding for finding in json.loads(out)["findings"]}
    assert code == 0
    assert "nonsense" in err  # UCX's own words, which it prints to standard output
    assert found["ucx.library"]["severity"] == "slow"
    assert "unset it" in found["ucx.library"]["remedy"]
    assert "pip install" not in found["ucx.library"]["remedy"]


async def test_a_ucx_that_starts_and_reaches_no_other_process_means_that_a_link_which_offers_it_fails():
    code, out, err = await doctor("--json", "-", UCX_TLS="self,sysv")
    found = {finding["check"]: finding for finding in json.loads(out)["findings"]}
    assert code == 3
    assert found["ucx.UCX_TLS"]["severity"] == "note"
    assert found["speed.ucx"]["severity"] == "fatal"
    assert "UCX_TLS=self,sysv" in found["speed.ucx"]["remedy"]
    assert "KVLINK_TRANSPORTS=shared,stream" in err


async def test_a_configuration_that_is_wrong_ends_with_code_2():
    code, _, err = await doctor("--no-measure", KVLINK_LEASE_SECONDS="never")
    assert code == 2
    assert "lease_seconds" in err


# --- findings -------------------------------------------------------------------------------------------------------


def test_a_machine_without_huge_pages_and_with_many_nodes_is_told_what_to_do(tmp_path):
    cpus = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    root = files(tmp_path, {
        "sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n",
        "sys/kernel/mm/transparent_hugepage/shmem_enabled": "always within_size [advise] never deny force\n",
        "sys/devices/system/node/node0/cpulist": cpus,
        "sys/devices/system/node/node1/cpulist": cpus,
        "proc/meminfo": "MemTotal: 100 kB\nMemAvailable: 50 kB\nHugePages_Total: 4\nHugePages_Free: 3\n"
        "Hugepagesize: 2048 kB\n",
    })  # fmt: skip
    found = by_check(machine.look_at_machine(root=root))
    assert found["pages.huge"].severity == "slow"
    assert "madvise" in found["pages.huge"].remedy
    assert found["pages.shared"].severity == "ok"
    assert found["pages.reserved"].facts == {"reserved": 4, "free": 3, "page_bytes": 2048 * 1024}
    assert found["cpu.numa"].severity == "slow"
    assert "numactl" in found["cpu.numa"].remedy
    assert found["memory.size"].facts["available_bytes"] == 50 * 1024


@pytest.mark.parametrize(
    "contents",
    [
        {
            "proc/self/cgroup": "0::/a/b\n",
            "sys/fs/cgroup/a/b/cpu.max": "150000 100000\n", "sys/fs/cgroup/a/b/memory.max": "1000",
        },
        {
            "proc/self/cgroup": "0::/of/the/host\n",
            "sys/fs/cgroup/cpu.max": "150000 100000\n", "sys/fs/cgroup/memory.max": "1000",
        },
        {
            "proc/self/cgroup": "4:memory:/m\n1:cpu,cpuacct:/c\n0::/\n",
            "sys/fs/cgroup/cpu/c/cpu.cfs_quota_us": "150000", "sys/fs/cgroup/cpu/c/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/memory/m/memory.limit_in_bytes": "1000",
        },
    ],
    ids=["v2", "v2 in a container", "v1"],
)  # fmt: skip
def test_limits_of_a_cgroup_are_read(tmp_path, contents):
    root = files(tmp_path, contents)
    assert machine.cgroup_cpus(root) == 1.5
    assert machine.cgroup_memory_bytes(root) == 1000


@pytest.mark.parametrize("text", ["max 100000", "", "nonsense", "100 0"])
def test_a_cgroup_without_a_limit_has_none(tmp_path, text):
    root = files(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": text})
    assert machine.cgroup_cpus(root) is None


@pytest.mark.parametrize(("rdma", "severity"), [(True, "fatal"), (False, "ok")])
def test_a_locked_memory_limit_counts_where_memory_is_pinned(monkeypatch, rdma, severity):
    monkeypatch.setattr(resource, "getrlimit", lambda _limit: (8 * 2**20, 8 * 2**20))
    monkeypatch.setattr(machine, "_may_lock_anything", lambda: False)
    found = by_check(machine.look_at_machine(rdma=rdma))["memory.locked"]
    assert found.severity == severity
    assert (found.remedy is None) == (severity == "ok")


def namespaces(root: Path, **numbers: int) -> None:
    for name, number in numbers.items():
        (root / "proc/self/ns").mkdir(parents=True, exist_ok=True)
        (root / "proc/self/ns" / name).symlink_to(f"{name}:[{number}]")


def test_namespaces_are_numbered_and_a_containers_own_are_told_with_what_they_cost(tmp_path):
    namespaces(tmp_path, net=7, pid=4026531836, ipc=4026531839, user=4026531837)
    found = by_check(containers.look_at_containers(root=tmp_path))["container.namespaces"]
    assert found.severity == "ok"
    assert found.facts == {"net": 7, "pid": 4026531836, "ipc": 4026531839, "user": 4026531837}
    (tmp_path / "proc/self/ns/pid").unlink()
    namespaces(tmp_path, pid=4026532999)
    found = by_check(containers.look_at_containers(root=tmp_path))["container.namespaces"]
    assert found.severity == "note"
    assert "pid of its own" in found.text
    assert "hostPID" in found.remedy
    bare = by_check(containers.look_at_containers(root=tmp_path / "none"))
    assert bare["container.namespaces"].severity == "ok"


@pytest.mark.parametrize(
    ("scope", "status", "severity", "words"),
    [
        ("1", "CapEff:\t0000000000000000\nSeccomp:\t0\n", "note", "ptrace_scope=0"),
        ("1", "CapEff:\t0000000000080000\nSeccomp:\t0\n", "ok", ""),
        ("0", "CapEff:\t0000000000000000\nSeccomp:\t2\n", "note", "seccomp=unconfined"),
        ("0", "CapEff:\t0000000000000000\nSeccomp:\t0\n", "ok", ""),
    ],
)
def test_what_rules_tracing_is_told_without_measuring(tmp_path, scope, status, severity, words):
    root = files(tmp_path, {"proc/sys/kernel/yama/ptrace_scope": scope, "proc/self/status": status})
    found = by_check(containers.look_at_containers(root=root))["container.tracing"]
    assert found.severity == severity
    assert words in (found.remedy or "")


def test_processes_that_do_not_reach_each_other_over_loopback_are_told_what_to_bring_up():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        partner = Partner(cross_read=CrossRead(error=0, seconds=1.0), port=taken.getsockname()[1])
        (finding,) = speed._sockets(partner.port, None)
    assert finding.severity == "fatal"
    assert "ip link set lo up" in finding.remedy


def test_memory_that_no_other_process_may_read_is_told_with_every_way_out():
    finding = speed.judge_cross_read(
        Partner(cross_read=CrossRead(error=errno.EPERM), port=1), scope="1", status="Seccomp:\t2\n"
    )
    assert finding.severity == "slow"
    assert "EPERM" in finding.text
    assert "ring" in finding.text
    assert "ptrace_scope=0" in finding.remedy
    assert "seccomp" in finding.remedy
    assert finding.facts["seccomp_filter"] is True


def test_rdma_devices_without_a_ucx_for_them_say_what_to_install(monkeypatch, tmp_path):
    (tmp_path / "mlx5_0").mkdir()
    monkeypatch.setattr(libraries, "RDMA_DEVICES", tmp_path)
    monkeypatch.setattr(libraries, "has_devices", lambda: True)
    found = by_check(libraries.look_at_libraries(kvlink.Config()))["ucx.rdma"]
    assert found.severity == "slow"
    assert "mlx5_0" in found.text
    assert "libucx0" in found.remedy


def test_one_fatal_finding_means_that_kvlink_does_not_work():
    fine, fatal = Finding(check="a.b", severity="slow", text="x"), Finding(check="a.c", severity="fatal", text="y")
    assert make_report([fine], 0.0).works
    assert not make_report([fine, fatal], 0.0).works


def test_a_transport_that_was_set_and_is_not_known_means_that_no_link_can_be_opened():
    (finding,) = choice.look_at_choice(kvlink.Config(transports=("pigeon",)), measured=False)
    assert finding.severity == "fatal"
    assert "pigeon" in finding.text
    assert finding.remedy


def test_threads_are_said_to_be_kept_to_a_node_where_there_are_several(tmp_path):
    ours = sorted(os.sched_getaffinity(0))
    root = files(tmp_path, {
        "sys/devices/system/node/node0/cpulist": ",".join(map(str, ours)),
        "sys/devices/system/node/node1/cpulist": str(ours[-1] + 1),
    })  # fmt: skip
    for numa, severity in ((True, "ok"), (False, "slow")):
        config = kvlink.Config(numa=numa, copy_threads=5)
        found = by_check(choice.look_at_choice(config, measured=False, root=root))["link.threads"]
        assert found.severity == severity
        assert found.facts == {"nodes": 2, "kept": numa, "copy_threads": 5}


def test_a_gpu_is_told_with_its_driver_and_its_kernels_and_none_is_none(monkeypatch, tmp_path):
    """The driver is the tests' stand-in; the kernels are compiled for the GPU that it claims."""
    fake_driver = stand_in.library()
    monkeypatch.setenv("KVLINK_KERNEL_CACHE", str(tmp_path))
    found = by_check(gpus.look_at_gpus(kvlink.Config(cuda_library=fake_driver)))
    assert found["gpu.device"].severity == "ok"
    assert found["gpu.device"].facts["gpus"] >= 1
    assert found["gpu.device"].facts["driver"]
    assert found["gpu.kernels"].facts["arch"] in found["gpu.device"].facts["archs"]
    again = by_check(gpus.look_at_gpus(kvlink.Config(cuda_library=fake_driver)))
    assert again["gpu.kernels"].facts["kept"] is True
    none = by_check(gpus.look_at_gpus(kvlink.Config(cuda_library="libnosuch.so")))["gpu.device"]
    assert none.severity == "note"
