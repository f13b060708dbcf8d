"""Makes what a link stands on, by its configuration: its transports, and the GPU that its cache lies on."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvlink.config import AUTO
from kvlink.errors import ConfigError, UnavailableError
from kvlink.link.rank import check_device
from kvlink.plan import TYPICAL, Speeds
from kvlink.relayout import Gpu
from kvlink.transports import numa, shared, ucx
from kvlink.transports.calibration import calibrate
from kvlink.transports.engine import NativeTransport, Pace
from kvlink.transports.shared import SharedTransport
from kvlink.transports.stream import StreamTransport
from kvlink.transports.ucx import UcxTransport

if TYPE_CHECKING:
    from kvlink.config import Config
    from kvlink.memory import Caches
    from kvlink.transports.base import Transport

_log: Final = logging.getLogger("kvlink.link")

ALL: Final = ("shared", "ucx", "stream")
"""What ``auto`` stands for, where the cache is in host memory; the order only breaks ties."""


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


def make_transports(config: Config, gpu: Gpu | None) -> list[Transport]:
    """The transports of a link, best first as far as that was set.

    Set to ``auto`` it has all that this machine has, and what it lacks is only logged: `kvlink doctor` tells of it.
    Blocks while this machine is measured, see `kvlink.transports.calibration`.

    Raises:
        ConfigError: there is none of a name that was set.
        UnavailableError: the machine lacks what one needs that was set, or all.
    """
    stated = config.transports != (AUTO,)
    names = config.transports if stated else ALL if gpu is None else ("ucx",)
    speeds = _speeds(config, names, gpu)
    pace = None if config.max_bytes_per_second is None else Pace(config.max_bytes_per_second)
    made: list[NativeTransport[Any]] = []
    lacking: UnavailableError | None = None
    try:
        for name in names:
            try:
                transport = _make_transport(name, config, gpu, speeds)
                made.append(transport)
                if pace is not None:
                    transport.pace_by(pace)
            except UnavailableError as error:
                if stated:
                    raise
                _log.info("going on without %s: %s", name, error)
                lacking = error
    except BaseException:
        for done in made:
            done.close()
        raise
    if not made and lacking is not None:
        raise lacking
    return list(made)


def keep_near(transports: Sequence[Transport], config: Config, caches: Caches, root: Path = numa.ROOT) -> str:
    """Keep the threads that move bytes to the NUMA node of the cache, where that can be said; what was done, in words.

    Args:
        transports: of the link; those made by a caller, and not native, are left alone.
        config: may forbid it.
        caches: where they lie counts.
        root: where ``/sys`` is.
    """
    if not config.numa:
        return "left alone: numa is off"
    machine = numa.nodes(root)
    used = _nodes_of(config, caches, root) if len(machine) > 1 else ()
    cpus, said = numa.near(used, machine, numa.allowed_cpus())
    if cpus is not None:
        for transport in transports:
            if isinstance(transport, NativeTransport):
                transport.keep_to(cpus)
    _log.debug("%s", said)
    return said


def _nodes_of(config: Config, caches: Caches, root: Path) -> Collection[int]:
    if caches.on_host:
        return numa.nodes_of_memory((region.address, region.length) for region in caches.regions)
    node = numa.node_of_gpu(config.cuda_library, int(caches.device.rpartition(":")[2]), root)
    return () if node is None else (node,)


def _speeds(config: Config, names: Sequence[str], gpu: Gpu | None) -> Speeds:
    """Measured only where there is something to choose; a GPU's bytes go one way."""
    gets = "ucx" in names and gpu is None
    several = len(names) > 1 or (config.path == AUTO and (gets or "shared" in names))
    if not config.calibrate or not several:
        return TYPICAL
    return calibrate((config.ucx_origin, config.ucx_tls) if gets else None)


def _path(config: Config, choices: Collection[str]) -> str:
    """What was set, where the transport has it."""
    return config.path if config.path in choices else AUTO


def _make_transport(name: str, config: Config, gpu: Gpu | None, speeds: Speeds) -> NativeTransport[Any]:
    """One, by its name.

    Raises:
        ConfigError: there is none of that name.
        UnavailableError: the machine lacks what it needs.
    """
    if name == "ucx":
        return UcxTransport(
            ucx_origin=config.ucx_origin,
            ucx_tls=config.ucx_tls,
            path=_path(config, ucx.PATH_CHOICES),
            speeds=speeds,
            gpu=None if gpu is None else gpu.native,
            staging_on_gpu=config.gpu_staging == "device",
            heartbeat_seconds=config.heartbeat_seconds,
            peer_lost_seconds=config.peer_lost_seconds,
        )
    if name == "stream":
        return StreamTransport(
            lanes=config.stream_lanes,
            speeds=speeds,
            heartbeat_seconds=config.heartbeat_seconds,
            peer_lost_seconds=config.peer_lost_seconds,
        )
    if name == "shared":
        return SharedTransport(
            path=_path(config, shared.PATH_CHOICES),
            integrity=config.integrity,
            copy_threads=config.copy_threads,
            speeds=speeds,
            heartbeat_seconds=config.heartbeat_seconds,
            peer_lost_seconds=config.peer_lost_seconds,
        )
    raise ConfigError(
        f"transports names {name!r}; known are 'ucx', 'stream' and 'shared'. A loopback is made by the caller: "
        "open_link(..., transports=[...])"
    )
