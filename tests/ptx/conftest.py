"""The PTX tests need NVRTC (217 MB: extra ``cuda``, part of ``dev``). Where there is none they are left out, aloud."""

from kvlink.errors import UnavailableError
from kvlink.relayout.nvrtc import compile_kernels

collect_ignore_glob = []
REASON = ""

try:
    compile_kernels("sm_80", "int8", "int8")
except UnavailableError as error:
    REASON = str(error)
    collect_ignore_glob.append("test_*")


def pytest_report_header() -> str | None:
    return f"PTX tests left out: {REASON}" if REASON else None
