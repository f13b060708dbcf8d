"""The stand-in for a CUDA driver (tests/fakecuda): built once, steered by ctypes, and caches in its memory."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from kvlink._native import _kvlink
from kvlink.memory import Caches, Region
from kvlink.relayout import Gpu

HERE = Path(__file__).parent
SOURCES = HERE / "fakecuda"
KERNELS = HERE.parent / "native" / "src"
HOLDINGS = ("contexts", "modules", "streams", "events", "device memory", "pinned memory")
ILLEGAL_ADDRESS = 700
OUT_OF_MEMORY = 2
UNHEEDED = "FAKECUDA_UNHEEDED"
"""An entry of the driver that does nothing in all of this process, and claims that it did; for field_mutants."""


@cache
def library() -> str:
    """Path of the stand-in, compiled by the host's C++ compiler if these sources have not been yet."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None or not KERNELS.is_dir():
        pytest.fail("the stand-in driver is built from a checkout (native/src) by a C++20 compiler: set CXX")
    sources = sorted(SOURCES.glob("*.cpp"))
    texts = [
        path.read_bytes() for path in (*sources, *sorted(SOURCES.glob("*.hpp")), *sorted(KERNELS.glob("**/*.hpp")))
    ]
    name = hashlib.sha256(b"\0".join(texts)).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"kvlink-fakecuda-{os.geteuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    built = folder / f"libfakecuda-{name}.so"
    if not built.exists():
        with tempfile.TemporaryDirectory(dir=folder) as place:
            made = Path(place) / built.name
            flags = ["-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-pthread", "-shared"]
            command = [compiler, *flags, f"-I{KERNELS}", *map(str, sources), "-o", str(made)]
            subprocess.run(command, check=True, capture_output=True, text=True)
            made.replace(built)
    return str(built)


class StandIn:
    """Steers the library in this process."""

    def __init__(self) -> None:
        self.library = library()
        self._c = ctypes.CDLL(self.library)
        self._c.fakecuda_called.restype = ctypes.c_char_p
        self.skip(os.environ.get(UNHEEDED, ""))

    def fail(self, nth: int, status: int = OUT_OF_MEMORY) -> None:
        """The ``nth`` call of the driver from now on fails (0: none); counting begins anew."""
        self._c.fakecuda_fail(ctypes.c_long(nth), status)

    def called(self) -> list[str]:
        """Entries of the driver called since `fail`, in order."""
        names: list[str] = []
        while (name := self._c.fakecuda_called(ctypes.c_long(len(names) + 1))) is not None:
            names.append(name.decode())
        return names

    def skip(self, entry: str, nth: int = 0) -> None:
        """The ``nth`` call of ``entry`` (all, for 0) does nothing and claims that it did."""
        self._c.fakecuda_skip(entry.encode(), ctypes.c_long(nth))

    def delays(self, seed: int, max_microseconds: int) -> None:
        self._c.fakecuda_delays(ctypes.c_ulong(seed), max_microseconds)

    def stall(self, stream: int, milliseconds: int) -> None:
        self._c.fakecuda_stall(ctypes.c_void_p(stream), milliseconds)

    def mend(self) -> None:
        self._c.fakecuda_mend()

    def held(self) -> dict[str, int]:
        counts = (ctypes.c_int * len(HOLDINGS))()
        self._c.fakecuda_live(counts)
        return {name: count for name, count in zip(HOLDINGS, counts, strict=True) if count}

    def reset(self) -> None:
        self.fail(0)
        self.skip(os.environ.get(UNHEEDED, ""))
        self.delays(1, 0)
        self.mend()


class OnDevice:
    """One cache copied to the stand-in's memory."""

    def __init__(self, gpu: Gpu, caches: Caches) -> None:
        self._gpu = gpu.native
        self.stream = _kvlink.CudaStream(self._gpu)
        self.memory = [_kvlink.CudaMemory(gpu.native, region.length) for region in caches.regions]
        regions = [
            Region(memory.address, region.length, memory)
            for memory, region in zip(self.memory, caches.regions, strict=True)
        ]
        self.caches = Caches(caches.spec, tuple(regions), tuple(self.memory), "cuda:0")
        self.write([region.array for region in caches.regions])
        self.stream.synchronize()

    def write(self, contents: list[np.ndarray]) -> None:
        """Queued on `stream`; pageable memory is copied aside at once."""
        for memory, content in zip(self.memory, contents, strict=True):
            self.stream.copy_to_device(memory.address, content)

    def read(self) -> list[np.ndarray]:
        """What is there now, whatever is queued."""
        stream = _kvlink.CudaStream(self._gpu)
        out = []
        for memory in self.memory:
            content = np.empty(memory.nbytes, np.uint8)
            stream.copy_to_host(content, memory.address)
            out.append(content)
        stream.synchronize()
        return out
