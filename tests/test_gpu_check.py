"""The host's half of benchmarks/gpu/check.sh: arguments, cases, comparison, table and exit codes, on the stand-in."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvlink.relayout import Gpu

HOME = Path(__file__).parent.parent / "benchmarks" / "gpu"


@pytest.fixture(scope="module")
def rooms():
    """The check's own modules, which no package holds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HOME))
        yield {name: importlib.import_module(name) for name in ("cases", "layouts", "timing", "check")}
        for name in ("cases", "layouts", "timing", "check"):
            del sys.modules[name]


def test_layouts_agree_with_the_cpu_in_all_forms(driver, rooms):
    driver.delays(9, 100)
    assert list(rooms["layouts"].faults(Gpu(), 12)) == []


def test_a_kernel_that_does_not_run_is_found(driver, rooms):
    driver.skip("cuLaunchKernel")
    try:
        found = list(rooms["layouts"].faults(Gpu(), 3))
    finally:
        driver.skip("")
    assert len(found) == 3
    assert found[0].startswith("seed 1 (digest): the target's pool differs")


def test_cases_come_from_their_seed_alone(rooms):
    draw = rooms["cases"].draw
    one, again, other = draw(5), draw(5), draw(6)
    assert (one.source, one.target) == (again.source, again.target)
    assert one.source != other.source
    assert all(
        (left == right).all() for left, right in zip(one.pool(one.source), again.pool(again.source), strict=True)
    )


def test_speed_is_judged_on_a_gpu_only_and_against_its_threshold(rooms):
    check, timed = rooms["check"], rooms["timing"].Timed
    slow, fast, digest = timed("pages", 0.5, 1000, 0.9), timed("pages", 0.95, 2000, 0.9), timed("x", 0.5, 1, None)
    assert [check.timed_row(it, judged=True).good for it in (slow, fast, digest)] == [False, True, None]
    assert check.timed_row(slow, judged=False).good is None
    text = check.table([check.timed_row(slow, judged=True), check.Row("layouts", "as on the CPU", True)])
    assert text.splitlines() == [
        "FAIL pages    0.50 of a copy, wanted 0.90; 1000 GB/s",
        "ok   layouts  as on the CPU",
    ]


def script(*arguments, **environ):
    return subprocess.run(
        ["bash", str(HOME / "check.sh"), *arguments], capture_output=True, text=True, check=False, timeout=100,
        env=os.environ | {"PYTHON": sys.executable} | environ,
    )  # fmt: skip


def test_the_script_runs_one_part_and_prints_its_table_last(driver):
    ran = script("--only", "layouts", "--cases", "3")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-1] == "ok   3 random layouts  as on the CPU"


@pytest.mark.parametrize(
    ("arguments", "environ", "code", "says"),
    [
        (["--cases", "0"], {}, 2, "must be positive"),
        (["--wheels", "/nowhere"], {}, 2, "no folder /nowhere"),
        (["--cases", "1"], {"KVLINK_CUDA_LIBRARY": "/nowhere/libcuda.so.1"}, 3, "no CUDA driver"),
        (["--device", "cuda:9"], {}, 3, "no GPU cuda:9"),
    ],
)
def test_what_is_wrong_is_said_in_one_line_with_its_exit_code(driver, arguments, environ, code, says):
    ran = script(*arguments, **environ)
    assert ran.returncode == code, ran.stderr
    assert says in ran.stderr
