"""Software that KVLink moves bytes with: the native core, UCX and its settings, RDMA, CUDA."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

from kvlink.cli.doctor.findings import Fact, Finding, Severity
from kvlink.cli.doctor.machine import ROOT, read
from kvlink.config import AUTO, Config
from kvlink.errors import KVLinkError
from kvlink.relayout import move_variants
from kvlink.relayout.nvrtc import nvrtc_version
from kvlink.transports.ucx import UcxTransport
from kvlink.transports.ucx_library import RDMA_DEVICES, has_devices
from kvlink.transports.ucx_ping import ucx_settings

_SYSTEM_UCX = "apt install libucx0 (Debian, Ubuntu), dnf install ucx ucx-ib (Fedora), or your NIC vendor's"
_CUDA_OK = 0


def look_at_libraries(config: Config, *, root: Path = ROOT) -> Iterator[Finding]:
    """Load what a link would load, and say what it is.

    Args:
        config: whose UCX is loaded, by which transports.
        root: where ``/proc`` is.
    """
    yield Finding(check="native.core", severity="ok", text=f"native core, moving with {move_variants()[0]}")
    yield from _ucx(config)
    yield from _settings()
    yield from _gpu(root)


def _ucx(config: Config) -> Iterator[Finding]:
    try:
        transport = UcxTransport(ucx_origin=config.ucx_origin, ucx_tls=config.ucx_tls)
    except KVLinkError as error:
        # A link does not open without a transport it was told to have; left to choose, it goes on without.
        severity: Severity = "fatal" if "ucx" in config.transports else "slow" if AUTO in config.transports else "note"
        remedy = "pip install libucx-cu12, or do without: KVLINK_TRANSPORTS=stream"
        yield Finding(check="ucx.library", severity=severity, text=f"UCX cannot be used: {error}", remedy=remedy)
        return
    capabilities = transport.capabilities()
    transport.close()
    transports, _, reason = capabilities.detail.partition("; ")
    facts: dict[str, Fact] = {"version": capabilities.version, "origin": capabilities.origin, "transports": transports}
    text = f"UCX {capabilities.version} ({capabilities.origin}), {reason}"
    yield Finding(check="ucx.library", severity="ok", text=text, facts=facts)
    yield Finding(check="ucx.transports", severity="ok", text=f"UCX has here: {transports}", facts=facts)
    yield _rdma(capabilities.rdma)


def _rdma(usable: bool) -> Finding:
    devices: list[str] = sorted(device.name for device in RDMA_DEVICES.iterdir()) if has_devices() else []
    facts: dict[str, Fact] = {"devices": ", ".join(devices), "usable": usable}
    if usable:
        return Finding(check="ucx.rdma", severity="ok", text=f"RDMA through {', '.join(devices)}", facts=facts)
    if not devices:
        text = "no RDMA device: between hosts, the stream transport (TCP) is the way"
        return Finding(check="ucx.rdma", severity="note", text=text, facts=facts)
    text = f"RDMA devices ({', '.join(devices)}), and this UCX is built without RDMA, as every wheel is"
    remedy = f"{_SYSTEM_UCX}; ucx_origin auto then takes it"
    return Finding(check="ucx.rdma", severity="slow", text=text, remedy=remedy, facts=facts)


def _settings() -> Iterator[Finding]:
    for setting in ucx_settings():
        check = f"ucx.{setting.name}"
        facts: dict[str, Fact] = {"value": setting.value, "from_environment": setting.from_environment}
        if not setting.from_environment:
            text = f"{setting.name}={setting.value}, set by KVLink: {setting.why}"
            yield Finding(check=check, severity="ok", text=text, facts=facts)
            continue
        text = f"{setting.name}={setting.value} from your environment, which KVLink leaves alone"
        remedy = f"unset it unless you know better; KVLink's own value is good for this: {setting.why}"
        yield Finding(check=check, severity="note", text=text, remedy=remedy, facts=facts)


def _gpu(root: Path) -> Iterator[Finding]:
    version = read(root / "proc/driver/nvidia/version").splitlines()[:1]
    names = gpu_names()
    if not names:
        text = (
            "an NVIDIA driver is loaded, and no GPU can be opened"
            if version
            else "no NVIDIA GPU: caches in host memory"
        )
        remedy = "in a container, start it with --gpus; see nvidia-smi for the driver's own word" if version else None
        yield Finding(check="gpu.device", severity="slow" if version else "note", text=text, remedy=remedy)
    else:
        facts = {"gpus": len(names), "driver": version[0] if version else None}
        yield Finding(check="gpu.device", severity="ok", text=f"{len(names)} GPU: {', '.join(names)}", facts=facts)
    try:
        nvrtc = nvrtc_version()
    except KVLinkError as error:
        severity: Severity = "slow" if names else "note"
        remedy = "pip install kvlink[cuda]" if names else None
        yield Finding(check="gpu.compiler", severity=severity, text=str(error), remedy=remedy)
    else:
        text = f"NVRTC {nvrtc}, which compiles the kernels"
        yield Finding(check="gpu.compiler", severity="ok", text=text, facts={"version": nvrtc})


def gpu_names() -> list[str]:
    """Names of the GPUs that the driver lets this process use; none where there is no driver."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count = ctypes.c_int()
    if cuda.cuInit(0) != _CUDA_OK or cuda.cuDeviceGetCount(ctypes.byref(count)) != _CUDA_OK:
        return []
    names = []
    for index in range(count.value):
        name = ctypes.create_string_buffer(256)
        if cuda.cuDeviceGetName(name, len(name), index) == _CUDA_OK:
            names.append(name.value.decode(errors="replace"))
    return names
