"""A rank's cache: its spec, and where its regions lie."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, NamedTuple, Self

import msgspec
import numpy as np

from kvlink import limits
from kvlink.errors import LayoutError
from kvlink.layout import CacheSpec, DType, Group, Identity, Place, Plane, PlaneKind, check_spec
from kvlink.memory.pools import Pool, allocate_pool
from kvlink.memory.tensors import NamedAxes, Strided, TensorLike, name_axes, read_strided
from kvlink.transports.base import Backing

if TYPE_CHECKING:
    from numpy.typing import NDArray


_DEVICE: Final = re.compile(r"cpu|cuda:\d{1,4}")


class PlaneKey(NamedTuple):
    """Which plane a tensor or pointer is. ``kind`` is ``None`` for a tensor that holds several kinds of its layer.

    ``first_channel``: where its channels begin, if it holds a part of its kind's (a latent's 512, then 64).
    """

    group: str
    layer: int
    kind: PlaneKind | None = None
    first_channel: int = 0


class Span(NamedTuple):
    """One plane by pointer, all but ``channels`` in bytes: it starts at ``address`` and lies within ``length``.

    ``channel_stride`` 0: contiguous; ``channels`` 0: all from its key's ``first_channel`` on.
    """

    address: int
    length: int
    block_stride: int
    slot_stride: int
    head_stride: int = 0
    channel_stride: int = 0
    channels: int = 0


@dataclass(frozen=True, slots=True)
class Region:
    """One stretch of memory to be registered: ``length`` bytes at ``address``. ``owner`` keeps it alive.

    A source may give memory that is not ``writable``; a target may not. ``backing``: the file it lies in, if others may
    map it.
    """

    address: int
    length: int
    owner: object = field(default=None, repr=False, compare=False)
    writable: bool = True
    backing: Backing | None = None

    @property
    def array(self) -> NDArray[np.uint8]:
        """The bytes, writable, for memory of the host only; the array keeps ``owner`` alive."""
        return np.asarray(_Exposed(self))


class _Exposed:
    """Lets NumPy look at a region and hold on to it."""

    def __init__(self, region: Region) -> None:
        self.region = region
        self.__array_interface__ = {
            "version": 3, "typestr": "|u1", "shape": (region.length,), "data": (region.address, False),
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Caches:
    """Spec and addresses of one rank. ``regions[i]`` is where the spec's region i lies.

    ``keepalive`` holds whatever owns the memory (tensors, pools) for as long as this object lives. ``device`` is where
    all of it lies: ``"cpu"``, or one GPU by the driver's number, ``"cuda:0"``.

    Raises:
        LayoutError: the spec is impossible, or does not fit the regions.
    """

    spec: CacheSpec
    regions: tuple[Region, ...]
    keepalive: tuple[object, ...] = field(default=(), repr=False, compare=False)
    device: str = "cpu"

    def __post_init__(self) -> None:
        check_spec(self.spec)
        lengths = tuple(region.length for region in self.regions)
        if lengths != self.spec.region_bytes:
            raise LayoutError(f"region_bytes are {self.spec.region_bytes}, the regions given have {lengths}")
        if not _DEVICE.fullmatch(self.device):
            raise LayoutError(f"a cache lies on 'cpu' or on a GPU such as 'cuda:0', not on {self.device!r}")

    @property
    def on_host(self) -> bool:
        """Whether the CPU may touch the memory."""
        return self.device == "cpu"

    @classmethod
    def standard(cls, spec: CacheSpec, *, shareable: bool = False) -> Self:
        """Allocate zeroed host memory for a spec: one pool on huge pages, each region on pages of its own.

        Args:
            spec: what the cache means.
            shareable: see `allocate_pool`: ranks of this host map it over the shared transport.

        Raises:
            LayoutError: the spec is impossible.
            UnavailableError: the machine does not give that much memory.
        """
        check_spec(spec)
        starts, end = [], 0
        for length in spec.region_bytes:
            starts.append(end)
            end += -(-length // limits.HUGE_PAGE_BYTES) * limits.HUGE_PAGE_BYTES
        pool = allocate_pool(end, shareable=shareable)
        regions = tuple(
            Region(at := pool.address + start, length, pool, backing=pool.backing(at, length))
            for start, length in zip(starts, spec.region_bytes, strict=True)
        )
        return cls(spec, regions, (pool,))

    @classmethod
    def from_tensors(  # noqa: PLR0913 - an engine's tensors, what it says of them, and where they are
        cls,
        tensors: Mapping[PlaneKey, TensorLike],
        groups: Sequence[Group],
        identity: Identity,
        place: Place,
        *,
        axes: str | Mapping[str, str],
        absent: Collection[str] = (),
        device: str | None = None,
    ) -> Self:
        """Describe an engine's tensors by their true strides; nothing is taken from a layout's name.

        Views of one storage become one region, registered once.

        Args:
            tensors: NumPy arrays, torch tensors, CuPy arrays, or what else has their array interfaces, by
                plane. A key without a kind names a tensor with several kinds.
            groups: what the engine says of each group (heads, channels, dtype, block size, blocks), without planes;
                every tensor is held against it. Axis block counts tensor blocks, axis slot their slots (`Group.ratio`).
            identity: the model.
            place: the rank.
            axes: the order of a tensor's dimensions, for all groups or by group name: ``kv`` (K, then V), ``block``,
                ``slot``, ``head``, ``channel``, and ``(kv channel)`` or ``(latent rope channel)`` as the last where
                kinds share it. Such as ``"kv block slot head channel"`` or ``"block head slot (kv channel)"``. A state
                of chunks times width is ``"block head channel slot"``, one without slots ``"block head channel"``.
            absent: names of groups of which this pipeline stage holds no layer; every other has tensors.
            device: such as ``"cuda:0"``; needed only where tensors do not say it themselves.

        Raises:
            LayoutError: a tensor is not what its group and axes say, a group has no tensor, tensors lie on several
                devices, or the whole is impossible.
        """
        by_name = {group.name: group for group in groups}
        placed: list[_Placed] = []
        for key, tensor in tensors.items():
            where = _name(key)
            group = _group_of(key, by_name)
            strided = read_strided(tensor, where)
            device = _one_device(device, strided.device, where)
            named = name_axes(strided, axes if isinstance(axes, str) else _axes_of(key, axes), where)
            _check_tensor(group, strided, named, where)
            _check_elements(key, group, strided, named, where)
            planes = _planes_of(key, group, strided, named, where)
            placed += [replace(plane, writable=strided.writable) for plane in planes]
        _check_registered(placed, groups, absent)
        return cls._assemble(placed, groups, identity, place, tuple(tensors.values()), device or "cpu")

    @classmethod
    def from_pointers(  # noqa: PLR0913 - an engine's memory, what it says of it, and where it is
        cls,
        planes: Mapping[PlaneKey, Span],
        groups: Sequence[Group],
        identity: Identity,
        place: Place,
        *,
        keepalive: Iterable[object] = (),
        absent: Collection[str] = (),
        device: str = "cpu",
    ) -> Self:
        """Describe memory for which an engine gives addresses and strides. Spans that overlap become one region.

        Args:
            planes: a span for each plane; every key has a kind.
            groups: as in `from_tensors`.
            identity: the model.
            place: the rank.
            keepalive: whatever owns the memory, if anything in this process does.
            absent: as in `from_tensors`.
            device: where all of the memory lies, ``"cpu"`` or such as ``"cuda:0"``.

        Raises:
            LayoutError: a key has no kind or no group, or the whole is impossible.
        """
        by_name = {group.name: group for group in groups}
        placed = []
        for key, span in planes.items():
            _group_of(key, by_name)
            if key.kind is None:
                raise LayoutError(f"{_name(key)} has no kind; give K and V a span each")
            if span.address <= 0 or span.length <= 0:
                raise LayoutError(f"{_name(key)} is {span}; address and length must be positive")
            strides = (span.block_stride, span.slot_stride, span.head_stride, span.channel_stride)
            channels = key.first_channel, span.channels
            placed.append(_Placed(key, key.kind, span.address, strides, channels, (span.address, span.length)))
        _check_registered(placed, groups, absent)
        return cls._assemble(placed, groups, identity, place, tuple(keepalive), device)

    def within(self, *pools: Pool) -> Self:
        """The same cache, which lies in shareable ``pools``: ranks of this host map what of it does.

        For caches made from tensors or pointers; `standard` knows its own pool.
        """
        regions = tuple(
            replace(region, backing=next(filter(None, backings), region.backing))
            for region in self.regions
            for backings in [(pool.backing(region.address, region.length) for pool in pools)]
        )
        return replace(self, regions=regions, keepalive=(*self.keepalive, *pools))

    @classmethod
    def _assemble(
        cls,
        placed: Sequence[_Placed],
        groups: Sequence[Group],
        identity: Identity,
        place: Place,
        keepalive: tuple[object, ...],
        device: str,
    ) -> Self:
        regions = _merge(plane.storage for plane in placed)
        starts = [start for start, _ in regions]
        planes: dict[str, list[Plane]] = {group.name: [] for group in groups}
        read_only: set[int] = set()
        for plane in placed:
            region = bisect_right(starts, plane.storage[0]) - 1
            if not plane.writable:
                read_only.add(region)
            block_stride, slot_stride, head_stride, channel_stride = plane.strides
            planes[plane.key.group].append(
                Plane(
                    layer=plane.key.layer,
                    kind=plane.kind,
                    region=region,
                    offset_bytes=plane.address - starts[region],
                    block_stride=block_stride,
                    slot_stride=slot_stride,
                    head_stride=head_stride,
                    channel_stride=channel_stride,
                    first_channel=plane.channels[0],
                    channels=plane.channels[1],
                )
            )
        spec = CacheSpec(
            identity=identity,
            place=place,
            groups=tuple(msgspec.structs.replace(group, planes=tuple(planes[group.name])) for group in groups),
            region_bytes=tuple(length for _, length in regions),
        )
        made = (Region(low, length, keepalive, index not in read_only) for index, (low, length) in enumerate(regions))
        return cls(spec, tuple(made), keepalive, device)


@dataclass(frozen=True, slots=True)
class _Placed:
    """A plane at an address.

    ``strides`` over (block, slot, head, channel) and ``storage`` (address, length) are bytes; ``channels`` is (first,
    count), as in `Plane`.
    """

    key: PlaneKey
    kind: PlaneKind
    address: int
    strides: tuple[int, int, int, int]
    channels: tuple[int, int]
    storage: tuple[int, int]
    writable: bool = True


def _check_registered(placed: Sequence[_Placed], groups: Sequence[Group], absent: Collection[str]) -> None:
    """Every group is registered, or said not to be here: a forgotten one would be left behind silently."""
    present = {plane.key.group for plane in placed}
    for group in groups:
        if (group.name in present) == (group.name in absent):
            what = "is said to be absent, but has" if group.name in absent else "has no"
            raise LayoutError(
                f"groups.{group.name} {what} tensors or pointers; give those of every group, and name in `absent` "
                "those without a layer on this stage"
            )


def _merge(storages: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Overlapping stretches become one. Those that only touch stay apart: they may be separate allocations."""
    merged: list[tuple[int, int]] = []
    for low, length in sorted(set(storages)):
        if merged and low < sum(merged[-1]):
            start, have = merged[-1]
            merged[-1] = (start, max(have, low + length - start))
        else:
            merged.append((low, length))
    return merged


def _planes_of(key: PlaneKey, group: Group, tensor: Strided, axes: NamedAxes, where: str) -> list[_Placed]:
    several = bool(axes.fused) or "kv" in axes.count
    if several and key.kind is not None:
        raise LayoutError(f"{where} is said to be {key.kind.value} alone, but its axes hold kv; leave its kind out")
    if several and key.first_channel:
        raise LayoutError(f"{where} begins at channel {key.first_channel}, but holds several kinds; give them apart")
    if axes.fused:
        return _side_by_side(key, group, tensor, axes)
    kinds = (PlaneKind.K, PlaneKind.V) if several else (key.kind,)
    placed = []
    for index, kind in enumerate(kinds):
        if kind is None:
            raise LayoutError(f"{where} has no kind and its axes no kv; say whether it is K, V or a latent")
        row = group.row_of(kind)
        count = axes.count["channel"] * (tensor.itemsize if row.dtype is DType.OPAQUE else 1)
        count = 0 if count == row.channels else count
        address = tensor.address + index * axes.stride.get("kv", 0)
        placed.append(_Placed(key, kind, address, _strides(axes, tensor), (key.first_channel, count), tensor.storage))
    return placed


def _side_by_side(key: PlaneKey, group: Group, tensor: Strided, axes: NamedAxes) -> list[_Placed]:
    """Kinds that share the channel axis, each with all of its channels."""
    placed, address = [], tensor.address
    for kind in axes.fused:
        placed.append(_Placed(key, kind, address, (*_strides(axes, tensor)[:3], 0), (0, 0), tensor.storage))
        address += group.row_of(kind).nbytes
    return placed


def _strides(axes: NamedAxes, tensor: Strided) -> tuple[int, int, int, int]:
    channel = axes.stride["channel"]
    contiguous = channel == tensor.itemsize or axes.count["channel"] == 1
    return axes.stride["block"], axes.stride.get("slot", 0), axes.stride.get("head", 0), 0 if contiguous else channel


def _check_tensor(group: Group, tensor: Strided, axes: NamedAxes, where: str) -> None:
    stated = {"block": group.tensor_blocks, "slot": group.tensor_slots, "head": len(group.heads)}
    for axis, want in stated.items():
        have = axes.count.get(axis, 1)
        if have != want:
            raise LayoutError(
                f"{where}: axis {axis} has {have} entries, groups.{group.name} states {want}; "
                "check the order of axes and what the group states"
            )


def _check_elements(key: PlaneKey, group: Group, tensor: Strided, axes: NamedAxes, where: str) -> None:
    """Kinds that share a row are held against its bytes, a kind of its own against its dtype."""
    if axes.fused:
        want = sum(group.row_of(kind).nbytes for kind in axes.fused)
        have = axes.count["channel"] * tensor.itemsize
        if have != want:
            raise LayoutError(
                f"{where}: the channel axis has {have} bytes, the rows of {' and '.join(axes.fused)} in "
                f"groups.{group.name} take {want}; check channels and dtypes"
            )
    kinds = axes.fused or ((key.kind,) if key.kind is not None else (PlaneKind.K, PlaneKind.V))
    dtypes = {group.row_of(kind).dtype for kind in kinds}
    if len(dtypes) > 1:  # a row of several dtypes is an array of bytes to its engine
        return
    (dtype,) = dtypes
    named = tensor.dtype_name if tensor.dtype_name in set(DType) else None
    if dtype is not DType.OPAQUE and (tensor.itemsize != dtype.itemsize or named not in (None, dtype.value)):
        raise LayoutError(
            f"{where} holds {tensor.dtype_name} ({tensor.itemsize} bytes), groups.{group.name} states "
            f"{dtype.value} ({dtype.itemsize} bytes)"
        )


def _one_device(stated: str | None, found: str, where: str) -> str:
    """One rank has one device: kernels and streams are a device's."""
    if not found and stated is None:
        raise LayoutError(f"{where} does not say which GPU it lies on; state it: device='cuda:0'")
    if found and stated not in (None, found):
        raise LayoutError(f"{where} lies on {found}, the others (or `device`) on {stated}; a rank has one device")
    return found or str(stated)


def _group_of(key: PlaneKey, groups: Mapping[str, Group]) -> Group:
    if key.group not in groups:
        raise LayoutError(f"{_name(key)} is of no group given; groups are {sorted(groups)}")
    return groups[key.group]


def _axes_of(key: PlaneKey, axes: Mapping[str, str]) -> str:
    if key.group not in axes:
        raise LayoutError(f"no axes are given for group {key.group!r}; they are for {sorted(axes)}")
    return axes[key.group]


def _name(key: PlaneKey) -> str:
    kind = f" {key.kind.value}" if key.kind is not None else ""
    return f"the tensor of groups.{key.group} layer {key.layer}{kind}"
