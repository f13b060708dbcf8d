"""Software that KVLink moves bytes with: the native core, UCX and its settings, RDMA."""

from __future__ import annotations

import os
from collections.abc import Iterator

from kvlink.cli.doctor.findings import Fact, Finding, Severity
from kvlink.config import AUTO, Config
from kvlink.errors import KVLinkError
from kvlink.relayout import move_variants
from kvlink.transports.ucx import UcxTransport
from kvlink.transports.ucx_library import RDMA_DEVICES, has_devices
from kvlink.transports.ucx_ping import ucx_settings

_NARROWING = ("UCX_TLS", "UCX_NET_DEVICES")
"""What of UCX's own environment takes transports or devices away from it."""
_WITHOUT_UCX = "do without it: KVLINK_TRANSPORTS=shared,stream"
_SYSTEM_UCX = "apt install libucx0 (Debian, Ubuntu), dnf install ucx ucx-ib (Fedora), or your NIC vendor's"


def look_at_libraries(config: Config) -> Iterator[Finding]:
    """Load what a link would load, and say what it is.

    Args:
        config: whose UCX is loaded, by which transports.
    """
    yield Finding(check="native.core", severity="ok", text=f"native core, moving with {move_variants()[0]}")
    yield from _ucx(config)
    yield from _narrowed()
    yield from _settings()


def _ucx(config: Config) -> Iterator[Finding]:
    try:
        transport = UcxTransport(ucx_origin=config.ucx_origin, ucx_tls=config.ucx_tls)
    except KVLinkError as error:
        # A link does not open without a transport it was told to have; left to choose, it goes on without.
        severity: Severity = "fatal" if "ucx" in config.transports else "slow" if AUTO in config.transports else "note"
        text = f"UCX cannot be used: {error}"
        yield Finding(check="ucx.library", severity=severity, text=text, remedy=ucx_remedy(config))
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


def ucx_remedy(config: Config) -> str:
    """What to do about a UCX that does not load, start or connect: first, what somebody set."""
    ways = []
    if config.ucx_tls is not None:
        ways.append(f"ucx_tls is {config.ucx_tls!r}: leave it out, or name transports that are here, tcp among them")
    ways += [
        f"{name}={os.environ[name]} is in the environment: unset it, or name what is here, tcp among it"
        for name in _NARROWING
        if name in os.environ
    ]
    if config.ucx_origin != AUTO:
        ways.append(f"ucx_origin is {config.ucx_origin!r}: leave it at auto")
    return "; or ".join([*(ways or ["pip install libucx-cu12"]), _WITHOUT_UCX])


def _narrowed() -> Iterator[Finding]:
    for name in _NARROWING:
        if value := os.environ.get(name):
            text = f"{name}={value} from your environment narrows what UCX uses"
            facts: dict[str, Fact] = {"value": value, "from_environment": True}
            remedy = f"unset {name} unless UCX must not use more"
            yield Finding(check=f"ucx.{name}", severity="note", text=text, remedy=remedy, facts=facts)


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
