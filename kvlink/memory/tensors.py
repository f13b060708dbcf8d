"""What a tensor says of itself: address, shape, true strides, and the storage it is a view of.

NumPy arrays, and whatever else has one, answer by ``__array_interface__``; torch tensors, and whatever looks like one,
by ``data_ptr()`` and ``stride()``; arrays on a GPU by ``__cuda_array_interface__``. Neither library is imported for
another's sake.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np

from kvlink.errors import LayoutError
from kvlink.layout import PlaneKind

_AXES: Final = frozenset({"kv", "block", "slot", "head", "channel"})
_NEEDED: Final = frozenset({"block", "channel"})
_FUSED: Final = re.compile(r"\(([a-z_ ]+) channel\)$")
"""Kinds that share the channel axis, side by side."""
_DLPACK_CUDA: Final = 2


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


@runtime_checkable
class ArrayLike(Protocol):
    """What NumPy looks at without a copy: https://numpy.org/doc/stable/reference/arrays.interface.html."""

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """Address, shape, strides and element type."""


@runtime_checkable
class CudaArrayLike(Protocol):
    """What CuPy and others offer: https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Address, shape, strides and element type."""


TensorLike = np.ndarray[Any, np.dtype[Any]] | TorchLike | ArrayLike | CudaArrayLike


@dataclass(frozen=True, slots=True, kw_only=True)
class Strided:
    """One tensor, in bytes. ``storage``: address and length of the memory it is a view of.

    ``writable`` is what NumPy says; a torch tensor always is. ``device`` is ``"cpu"``, ``"cuda:0"``, or ``""`` where
    the tensor does not say which GPU.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    dtype_name: str
    storage: tuple[int, int]
    writable: bool = True
    device: str = "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedAxes:
    """A tensor's axes by name: ``count`` and ``stride`` (bytes). ``fused``: kinds that share the channel axis."""

    count: dict[str, int]
    stride: dict[str, int]
    fused: tuple[PlaneKind, ...] = ()


def read_strided(tensor: TensorLike, where: str) -> Strided:
    """Read a tensor's true geometry.

    Raises:
        LayoutError: it is no tensor that is known here, or has a negative stride.
    """
    if isinstance(tensor, np.ndarray):
        found = _read_numpy(tensor)
    elif isinstance(tensor, TorchLike):
        found = _read_torch(tensor)
    elif isinstance(tensor, CudaArrayLike):
        found = _read_cuda_array(tensor)
    elif isinstance(tensor, ArrayLike):
        found = _read_numpy(np.asarray(tensor))
    else:
        raise LayoutError(f"{where} is a {type(tensor).__name__}; pass a NumPy array, a torch tensor or a CuPy array")
    if any(stride < 0 for stride in found.strides):
        raise LayoutError(f"{where} has negative strides {found.strides}; pass it unflipped")
    return found


def name_axes(tensor: Strided, axes: str, where: str) -> NamedAxes:
    """Name a tensor's axes; a last axis ``(kv channel)``, or ``(latent rope channel)``, holds kinds side by side.

    Raises:
        LayoutError: the names do not fit the tensor, or channels that kinds share are not contiguous.
    """
    shared = _FUSED.search(axes)
    names = [*axes[: shared.start()].split(), "channel"] if shared else axes.split()
    fused = _kinds(shared.group(1), where) if shared else ()
    doubled = bool(fused) and "kv" in names
    if len(set(names)) != len(names) or not _NEEDED <= set(names) <= _AXES or doubled:
        raise LayoutError(
            f"axes of {where} are {axes!r}; name block and channel, and slot, head or kv where there are any, once "
            "each; '(kv channel)' as the last says that K and V share the channel axis"
        )
    if len(names) != len(tensor.shape):
        raise LayoutError(f"{where} has shape {tensor.shape}; axes {axes!r} name {len(names)} dimensions")
    count = dict(zip(names, tensor.shape, strict=True))
    stride = dict(zip(names, tensor.strides, strict=True))
    if fused and count["channel"] > 1 and stride["channel"] != tensor.itemsize:
        raise LayoutError(
            f"{where}: channels lie {stride['channel']} bytes apart, elements have {tensor.itemsize}; the channels of "
            "kinds that share an axis must be contiguous (check the order of axes)"
        )
    if count.get("kv", 2) != 2:
        raise LayoutError(f"{where}: axis kv has {count['kv']} entries; it holds K, then V")
    return NamedAxes(count=count, stride=stride, fused=fused)


def _kinds(words: str, where: str) -> tuple[PlaneKind, ...]:
    names = [name for word in words.split() for name in (("k", "v") if word == "kv" else (word,))]
    known = [kind.value for kind in PlaneKind]
    if not set(names) <= set(known) or len(set(names)) != len(names):
        raise LayoutError(f"axes of {where} name kinds {names}; known are {known}, each once")
    return tuple(PlaneKind(name) for name in names)


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
        writable=array.flags.writeable,
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
        device=str(getattr(tensor, "device", "cpu")),
    )


def _read_cuda_array(tensor: CudaArrayLike) -> Strided:
    """The storage is what this view reaches: the interface knows no other, and views that overlap are joined later."""
    facts = tensor.__cuda_array_interface__
    address, read_only = facts["data"]
    dtype, shape = np.dtype(facts["typestr"]), tuple(facts["shape"])
    strides = facts.get("strides")
    if strides is None:
        strides = tuple(int(np.prod(shape[axis + 1 :], dtype=np.int64)) * dtype.itemsize for axis in range(len(shape)))
    reach = sum(max(0, count - 1) * max(0, stride) for count, stride in zip(shape, strides, strict=True))
    return Strided(
        address=address,
        shape=shape,
        strides=tuple(strides),
        itemsize=dtype.itemsize,
        dtype_name=dtype.name,
        storage=(address, reach + dtype.itemsize),
        writable=not read_only,
        device=_dlpack_device(tensor),
    )


def _dlpack_device(tensor: object) -> str:
    """``(2, n)`` is CUDA's device n: https://dmlc.github.io/dlpack/latest/c_api.html."""
    ask = getattr(tensor, "__dlpack_device__", None)
    if ask is None:
        return ""
    kind, ordinal = ask()
    return f"cuda:{int(ordinal)}" if int(kind) == _DLPACK_CUDA else ""
