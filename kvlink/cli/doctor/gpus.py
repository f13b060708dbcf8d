"""GPUs: the driver, the devices, and whether KVLink's kernels can be had for them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from kvlink.cli.doctor.findings import Fact, Finding
from kvlink.cli.doctor.machine import ROOT, read
from kvlink.config import Config
from kvlink.errors import KVLinkError
from kvlink.relayout import kernel_cache
from kvlink.relayout.cuda_driver import Driver
from kvlink.relayout.nvrtc import compile_cubin, nvrtc_version

_USUAL_ARCH = "sm_90"
"""What is compiled for where there is no GPU, to see that it can be."""


def look_at_gpus(config: Config, *, root: Path = ROOT) -> Iterator[Finding]:
    """Say what there is, under the configuration's driver.

    Args:
        config: says which library the driver is.
        root: where ``/proc`` is.
    """
    loaded = read(root / "proc/driver/nvidia/version").splitlines()[:1]
    driver = Driver.opened(config.cuda_library)
    archs = [] if driver is None else driver.archs
    if driver is None or not archs:
        text = "an NVIDIA driver is loaded, and no GPU can be opened" if loaded else "no NVIDIA GPU: none of it is used"
        remedy = "in a container, start it with --gpus; see nvidia-smi for the driver's own word" if loaded else None
        yield Finding(check="gpu.device", severity="slow" if loaded else "note", text=text, remedy=remedy)
    else:
        facts: dict[str, Fact] = {"gpus": len(archs), "driver": driver.version, "archs": ", ".join(archs)}
        names = ", ".join(f"{name} ({arch})" for name, arch in zip(driver.names, archs, strict=True))
        text = f"{len(archs)} GPU: {names}; CUDA driver {driver.version}"
        yield Finding(check="gpu.device", severity="ok", text=text, facts=facts)
    yield from _kernels(dict.fromkeys(archs))


def _kernels(archs: dict[str, None]) -> Iterator[Finding]:
    """Of the architectures that are here; without one, only whether they could be compiled."""
    try:
        version = nvrtc_version()
    except KVLinkError as error:
        remedy = "pip install kvlink[cuda]" if archs else None
        yield Finding(check="gpu.compiler", severity="slow" if archs else "note", text=str(error), remedy=remedy)
        return
    text = f"NVRTC {version}, which compiles the kernels"
    yield Finding(check="gpu.compiler", severity="ok", text=text, facts={"version": version})
    for arch in archs or [_USUAL_ARCH]:
        yield _kernels_for(arch, here=bool(archs))


def _kernels_for(arch: str, *, here: bool) -> Finding:
    began = time.monotonic()
    try:
        kept = kernel_cache.is_kept(arch)
        size = len(kernel_cache.cubin(arch) if here else compile_cubin(arch))
    except KVLinkError as error:
        remedy = "install a CUDA (NVRTC) that knows this GPU: pip install --upgrade kvlink[cuda]"
        return Finding(check="gpu.kernels", severity="slow" if here else "note", text=str(error), remedy=remedy)
    took = time.monotonic() - began
    how = "kept from an earlier start" if kept else f"compiled in {took:.1f} s" + (" and kept" if here else "")
    text = f"kernels for {arch}: {how}, {size / 1024:.0f} KiB"
    facts: dict[str, Fact] = {"arch": arch, "kept": kept, "seconds": took, "bytes": size}
    return Finding(check="gpu.kernels", severity="ok", text=text, facts=facts)
