"""What a tensor says of itself: address, shape, true strides, and the storage it is a view of.

NumPy arrays answer by ``__array_interface__``; torch tensors, and whatever looks like one, by ``data_ptr()`` and
``stride()``. Neither library is imported for the other's sake.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np

from kvlink.errors import LayoutError

_AXES: Final = frozenset({"kv", "block", "slot", "head", "channel"})
_NEEDED: Final = frozenset({"block", "slot", "channel"})
_FUSED: Final = "(kv channel)"


class _Storage(Protocol):
    def data_ptr(self) -> int: ...
    def nbytes(self) -> int: ...


@runtime_checkable
class TorchLike(Protocol):
    """The part of ``torch.Tensor`` that is read."""

    @property
    def shape(self) -> Sequence[int]:
        """Entries a dimension."""

    @property
    def dtype(self) -> object:
        """Printed as ``torch.bfloat16``."""

    def data_ptr(self) -> int:
        """Address of the first element."""

    def stride(self) -> Sequence[int]:
        """Elements between neighbours, a dimension."""

    def element_size(self) -> int:
        """Bytes of an element."""

    def untyped_storage(self) -> _Storage:
        """The memory it is a view of."""


TensorLike = np.ndarray[Any, np.dtype[Any]] | TorchLike


@dataclass(frozen=True, slots=True, kw_only=True)
class Strided:
    """One tensor, in bytes. ``storage``: address and length of the memory it is a view of."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    dtype_name: str
    storage: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedAxes:
    """A tensor's axes by name: ``count`` and ``stride`` (bytes). ``fused``: K and V lie in the channel axis."""

    count: dict[str, int]
    stride: dict[str, int]


def read_strided(tensor: TensorLike, where: str) -> Strided:
    """Read a tensor's true geometry.

    Raises:
        LayoutError: it is neither kind of tensor, or has a negative stride.
    """
    if isinstance(tensor, np.ndarray):
        found = _read_numpy(tensor)
    elif isinstance(tensor, TorchLike):
        found = _read_torch(tensor)
    else:
        raise LayoutError(f"{where} is a {type(tensor).__name__}; pass a NumPy array or a torch tensor")
    if any(stride < 0 for stride in found.strides):
        raise LayoutError(f"{where} has negative strides {found.strides}; pass it unflipped")
    return found


def name_axes(tensor: Strided, axes: str, where: str) -> NamedAxes:
    """Name a tensor's axes and split a fused ``(kv channel)`` axis in two.

    Raises:
        LayoutError: the names do not fit the tensor, or channels are not contiguous.
    """
    words = axes.replace(_FUSED, _FUSED.replace(" ", "+")).split()
    fused = words[-1:] == [_FUSED.replace(" ", "+")]
    names = [*words[:-1], "channel"] if fused else words
    stated = [*names, "kv"] if fused else names
    if len(set(stated)) != len(stated) or not _NEEDED <= set(stated) <= _AXES:
        raise LayoutError(
            f"axes of {where} are {axes!r}; name block, slot and channel, and head or kv where there are any, once "
            f"each; {_FUSED!r} as the last says that K and V share the channel axis"
        )
    if len(names) != len(tensor.shape):
        raise LayoutError(f"{where} has shape {tensor.shape}; axes {axes!r} name {len(names)} dimensions")
    count = dict(zip(names, tensor.shape, strict=True))
    stride = dict(zip(names, tensor.strides, strict=True))
    if count["channel"] > 1 and stride["channel"] != tensor.itemsize:
        raise LayoutError(
            f"{where}: channels lie {stride['channel']} bytes apart, elements have {tensor.itemsize}; "
            "a token's channels must be contiguous (check the order of axes)"
        )
    if fused:
        if count["channel"] % 2:
            raise LayoutError(f"{where}: {count['channel']} channels do not hold K and V of equal size")
        count["channel"] //= 2
        count["kv"], stride["kv"] = 2, count["channel"] * tensor.itemsize
    if count.get("kv", 2) != 2:
        raise LayoutError(f"{where}: axis kv has {count['kv']} entries; it holds K, then V")
    return NamedAxes(count=count, stride=stride)


def _read_numpy(array: np.ndarray[Any, np.dtype[Any]]) -> Strided:
    root = array
    while isinstance(root.base, np.ndarray):
        root = root.base
    low = high = _address(root)
    for count, stride in zip(root.shape, root.strides, strict=True):
        reach = max(0, count - 1) * stride
        low, high = low + min(0, reach), high + max(0, reach)
    return Strided(
        address=_address(array),
        shape=array.shape,
        strides=array.strides,
        itemsize=array.itemsize,
        dtype_name=array.dtype.name,
        storage=(low, high + root.itemsize - low),
    )


def _address(array: np.ndarray[Any, np.dtype[Any]]) -> int:
    return int(array.__array_interface__["data"][0])


def _read_torch(tensor: TorchLike) -> Strided:
    itemsize, storage = tensor.element_size(), tensor.untyped_storage()
    return Strided(
        address=tensor.data_ptr(),
        shape=tuple(tensor.shape),
        strides=tuple(stride * itemsize for stride in tensor.stride()),
        itemsize=itemsize,
        dtype_name=str(tensor.dtype).rpartition(".")[2],
        storage=(storage.data_ptr(), storage.nbytes()),
    )
