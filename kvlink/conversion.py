"""`convert`: a cache on this machine into another of any layout, block size, sharding and element type."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING

from kvlink import limits
from kvlink.errors import ConfigError, LayoutError, UnsupportedError
from kvlink.layout import compare_identity, share_of
from kvlink.memory import Caches
from kvlink.plan import assign_legs, plan_leg
from kvlink.relayout import Gpu, move_local, native_plan

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Blocks = Sequence[Sequence[int] | NDArray[np.int64]]


def convert(  # noqa: PLR0913 - two sides and their blocks, and the range
    source: Caches | Sequence[Caches],
    target: Caches | Sequence[Caches],
    *,
    source_blocks: Blocks,
    target_blocks: Blocks,
    tokens: int,
    first_token: int | Sequence[int] = 0,
    threads: int | None = None,
    stream: object = None,
) -> int:
    """Write the KV of some tokens from one cache into another, in the other's layout and element type.

    A local operation: no link, no peer. What of the target holds other tokens or other blocks is left as it is, as are
    slots past the last token. Bits are the same whatever the CPU: values are rounded to nearest even; fp8 and int8
    saturate; NaN becomes one pattern a type. The GIL is released while bytes move.

    Blocking, and not cancellable. An error is raised before the first byte is written.

    Args:
        source: a rank's cache, or those of all ranks of one engine. `Caches.from_tensors` takes NumPy arrays, torch
            tensors, CuPy arrays, and whatever has ``__array_interface__`` or ``__cuda_array_interface__``.
        target: the same, in other memory of the same device: of the host, or of one GPU.
        source_blocks: block ids, one list for each group of a source in order; entry i of a list holds the positions
            from ``i * block_size`` on. All ranks of an engine use the same lists.
        target_blocks: the same for the target.
        tokens: one past the last position.
        first_token: first position: one for all groups, or one for each of the source's.
        threads: at most this many CPUs work on it; ``None`` for those this process may use, up to
            `limits.DEFAULT_MOVE_THREADS`. Not on a GPU.
        stream: on a GPU, the stream (its handle, or torch's or CuPy's) whose work so far comes first: what wrote the
            source, and what still uses the target. Without it the caller has seen to both. What is launched after the
            return, on any stream, sees what was written.

    Returns:
        Bytes read from the source.

    Raises:
        MismatchError: the two sides are not of one model, or state a group differently.
        UnsupportedError: the source lacks something that the target holds, or a pair of types, scales or shardings
            would lose meaning silently.
        LayoutError: a block list or the range is impossible, or the two sides share memory.
        UnavailableError: the caches lie on a GPU, and there is no driver, or no NVRTC to compile its kernels with.
        GpuError: the GPU's driver failed; the target's blocks hold anything.
        ConfigError: ``threads`` is not positive.
    """
    sources, targets = _ranks(source, "source"), _ranks(target, "target")
    device = _device_of((*sources, *targets))
    workers = _threads(threads)
    for one, other in product(sources, targets):
        compare_identity(
            one.spec.identity,
            other.spec.identity,
            source_peer=str(one.spec.place),
            target_peer=str(other.spec.place),
        )
        _check_apart(one, other)
    plans = []
    for leg in assign_legs([share_of(one.spec) for one in sources], [share_of(other.spec) for other in targets]):
        one, other = sources[leg.source], targets[leg.target]
        plan = plan_leg(
            one.spec,
            other.spec,
            leg.groups,
            source_blocks=source_blocks,
            target_blocks=target_blocks,
            first_token=first_token,
            tokens=tokens,
        )
        plans.append((native_plan(plan), _regions(one), _regions(other)))
    if device == "cpu":
        for native, read, written in plans:
            move_local(native, read, written, threads=workers)
    else:
        gpu = Gpu(device)
        for native, _, _ in plans:
            gpu.prepare(native)
        for native, read, written in plans:
            gpu.relayout(native, read, written, stream=stream)
    return sum(native.total_bytes for native, _, _ in plans)


def _ranks(caches: Caches | Sequence[Caches], side: str) -> tuple[Caches, ...]:
    ranks = (caches,) if isinstance(caches, Caches) else tuple(caches)
    if not ranks:
        raise LayoutError(f"no {side} cache is given; pass one, or all ranks of an engine", stage="convert")
    return ranks


def _device_of(ranks: Sequence[Caches]) -> str:
    devices = {rank.device for rank in ranks}
    if len(devices) > 1:
        raise UnsupportedError(
            f"the caches lie on {' and '.join(sorted(devices))}, and one device converts; copy one side to where the "
            "other is, or move it with a link",
            stage="convert",
        )
    (device,) = devices
    return device


def _check_apart(source: Caches, target: Caches) -> None:
    for (index, one), (other_index, other) in product(enumerate(source.regions), enumerate(target.regions)):
        if one.address < other.address + other.length and other.address < one.address + one.length:
            raise LayoutError(
                f"source region {index} of {source.spec.place} and target region {other_index} of {target.spec.place} "
                "share memory, and a cache cannot be converted onto itself; allocate the target apart",
                stage="convert",
            )


def _regions(caches: Caches) -> list[tuple[int, int]]:
    return [(region.address, region.length) for region in caches.regions]


def _threads(threads: int | None) -> int:
    if threads is None:
        return min(limits.DEFAULT_MOVE_THREADS, len(os.sched_getaffinity(0)))
    if threads < 1:
        raise ConfigError(f"threads is {threads}; at least one has to do it")
    return threads
