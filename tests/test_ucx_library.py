"""Which UCX is chosen, and which pairs of UCX are refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvlink.errors import UnavailableError
from kvlink.transports.ucx_library import choose, has_devices, incompatibility, supports_rdma


@pytest.fixture
def devices(tmp_path: Path) -> Path:
    """A machine with an RDMA device."""
    folder = tmp_path / "infiniband"
    (folder / "mlx5_0").mkdir(parents=True)
    return folder


def system_ucx(folder: Path, *, rdma: bool) -> Path:
    (folder / "ucx").mkdir(parents=True)
    library = folder / "libucp.so.0"
    library.touch()
    (folder / "ucx" / ("libuct_ib.so.0" if rdma else "libuct_cma.so.0")).touch()
    return library


def test_auto_is_the_wheel_without_rdma_devices(tmp_path: Path) -> None:
    system_ucx(tmp_path / "lib", rdma=True)
    chosen = choose("auto", devices=tmp_path / "none", folders=[str(tmp_path / "lib")])
    assert (chosen.kind, Path(chosen.name).name) == ("wheel", "libucp.so.0")
    assert "no RDMA devices" in chosen.reason


def test_auto_is_the_system_where_it_can_use_the_devices(tmp_path: Path, devices: Path) -> None:
    plain = tmp_path / "plain"
    system_ucx(plain, rdma=False)
    library = system_ucx(tmp_path / "lib", rdma=True)
    chosen = choose("auto", devices=devices, folders=[str(plain), str(tmp_path / "lib")])
    assert (chosen.kind, chosen.name) == ("system", str(library))


def test_auto_says_that_no_system_ucx_can_use_the_devices(tmp_path: Path, devices: Path) -> None:
    system_ucx(tmp_path / "lib", rdma=False)
    chosen = choose("auto", devices=devices, folders=[str(tmp_path / "lib"), str(tmp_path / "absent")])
    assert chosen.kind == "wheel"
    assert "no system UCX" in chosen.reason


def test_the_wheel_is_known_to_have_no_rdma() -> None:
    assert not supports_rdma(Path(choose("wheel").name))


def test_an_empty_device_folder_is_no_device(tmp_path: Path) -> None:
    assert not has_devices(tmp_path)
    assert not has_devices(tmp_path / "absent")


def test_a_path_that_is_no_file_is_refused_with_the_choices() -> None:
    with pytest.raises(UnavailableError, match="'auto', 'wheel' nor 'system'"):
        choose("/nowhere/libucp.so.0")


def load(origin: str) -> str:
    """What a fresh process says when it opens a transport on ``origin``: one UCX serves a process for good."""
    script = (
        "import sys\n"
        "from kvlink.errors import UnavailableError\n"
        "from kvlink.transports.ucx import UcxTransport\n"
        "try: transport = UcxTransport(ucx_origin=sys.argv[1])\n"
        "except UnavailableError as error: print('unavailable:', error)\n"
        "else: print(transport.capabilities().version); transport.close()\n"
    )
    command = [sys.executable, "-c", script, origin]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()


def test_the_wheel_works() -> None:
    assert load("wheel").startswith("1.")


def test_a_file_that_is_no_library_is_refused_with_the_remedy(tmp_path: Path) -> None:
    broken = tmp_path / "libucp.so.0"
    broken.write_bytes(b"not a library")
    said = load(str(broken))
    assert said.startswith(f"unavailable: cannot load {broken}")
    assert "libucx-cu12" in said


def test_a_library_that_is_not_ucx_is_refused_by_the_missing_symbol() -> None:
    said = load(other_library())
    assert "has no ucp_" in said
    assert "1.13" in said


def other_library() -> str:
    """Some shared library that is loaded here already."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split()[-1]
        if "/libc.so" in path or "/libm.so" in path:
            return path
    raise AssertionError("this process maps neither libc nor libm")


@pytest.mark.parametrize(
    ("local", "remote"),
    [("1.22.0", "1.22.0"), ("1.13.1", "1.13.0"), ("1.22.0-dev", "1.22.1")],
)
def test_pairs_that_work(local: str, remote: str) -> None:
    assert incompatibility(local, remote) is None
    assert incompatibility(remote, local) is None


@pytest.mark.parametrize(("local", "remote"), [("1.22.0", "1.13.1"), ("1.21.0", "1.22.0"), ("1.22.0", "2.22.0")])
def test_pairs_that_cannot_work_are_named(local: str, remote: str) -> None:
    """Both versions are in the reason, whichever side asks."""
    for reason in (incompatibility(local, remote), incompatibility(remote, local)):
        assert reason is not None
        assert local in reason
        assert remote in reason


@pytest.mark.parametrize("text", ["", "new", "1", "1.x", "9" * 5000 + ".1"])
def test_a_version_that_is_none_is_refused(text: str) -> None:
    reason = incompatibility("1.22.0", text)
    assert reason is not None
    assert "the peer states no UCX version" in reason
    assert len(reason) < 200
