"""Makes what a link stands on, by its configuration: the transports it names, and the GPU that its cache lies on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvlink.errors import ConfigError
from kvlink.link.rank import check_device
from kvlink.relayout import Gpu
from kvlink.transports.shared import SharedTransport
from kvlink.transports.stream import StreamTransport
from kvlink.transports.ucx import UcxTransport

if TYPE_CHECKING:
    from kvlink.config import Config
    from kvlink.memory import Caches
    from kvlink.transports.base import Transport


def gpu_of(config: Config, caches: Caches) -> Gpu:
    """The GPU that a cache lies on, with the kernels of plain copies, which gather for whoever reads.

    Raises:
        ConfigError: a transport that is configured cannot reach it.
        UnavailableError: there is no driver, no such GPU, or no NVRTC.
        GpuError: the driver does not let it be used.
    """
    check_device(config, caches)
    gpu = Gpu(caches.device, config.cuda_library)
    gpu.load(None)
    return gpu


def make_transport(name: str, config: Config, gpu: Gpu | None) -> Transport:
    """A transport by its name in ``config.transports``.

    Raises:
        ConfigError: there is none of that name.
        UnavailableError: the machine lacks what it needs.
    """
    if name == "ucx":
        return UcxTransport(
            ucx_origin=config.ucx_origin,
            ucx_tls=config.ucx_tls,
            path=config.path,
            gpu=None if gpu is None else gpu.native,
            staging_on_gpu=config.gpu_staging == "device",
            heartbeat_seconds=config.heartbeat_seconds,
            peer_lost_seconds=config.peer_lost_seconds,
        )
    if name == "stream":
        return StreamTransport(
            lanes=config.stream_lanes,
            heartbeat_seconds=config.heartbeat_seconds,
            peer_lost_seconds=config.peer_lost_seconds,
        )
    if name == "shared":
        return SharedTransport(
            heartbeat_seconds=config.heartbeat_seconds,
            peer_lost_seconds=config.peer_lost_seconds,
        )
    raise ConfigError(
        f"transports names {name!r}; known are 'ucx', 'stream' and 'shared'. A loopback is made by the caller: "
        "open_link(..., transports=[...])"
    )
