"""What the CUDA driver says of itself and its GPUs, before any of them is used. Opened by name; nothing is created."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

_OK = 0
_MAJOR, _MINOR = 75, 76
"""``CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR`` and ``_MINOR``."""


@dataclass(frozen=True, slots=True)
class Driver:
    """``version`` as ``"12.9"``; ``names`` and ``archs`` (such as ``"sm_90"``) of the GPUs that it lets us use."""

    version: str
    names: tuple[str, ...]
    archs: tuple[str, ...]

    @classmethod
    def opened(cls, library: str) -> Driver | None:
        """What there is; ``None`` where there is no driver, or it cannot start.

        Args:
            library: by name or path.
        """
        try:
            cuda = ctypes.CDLL(library)
            count, version = ctypes.c_int(), ctypes.c_int()
            if cuda.cuInit(0) != _OK or cuda.cuDeviceGetCount(ctypes.byref(count)) != _OK:
                return None
            if cuda.cuDriverGetVersion(ctypes.byref(version)) != _OK:
                return None
            told = [_device(cuda, ordinal) for ordinal in range(count.value)]
        except (OSError, AttributeError):
            return None
        number = version.value
        found = [one for one in told if one is not None]
        return cls(
            version=f"{number // 1000}.{number % 1000 // 10}",
            names=tuple(name for name, _ in found),
            archs=tuple(arch for _, arch in found),
        )


def _device(cuda: ctypes.CDLL, ordinal: int) -> tuple[str, str] | None:
    device, name = ctypes.c_int(), ctypes.create_string_buffer(256)
    if cuda.cuDeviceGet(ctypes.byref(device), ordinal) or cuda.cuDeviceGetName(name, len(name), device):
        return None
    numbers = []
    for attribute in (_MAJOR, _MINOR):
        number = ctypes.c_int()
        if cuda.cuDeviceGetAttribute(ctypes.byref(number), attribute, device):
            return None
        numbers.append(number.value)
    return name.value.decode(errors="replace"), f"sm_{numbers[0]}{numbers[1]}"
