"""A file descriptor that becomes readable now, or at a time to come: a Linux timerfd."""

from __future__ import annotations

import ctypes
import os
import time

_LIBC = ctypes.CDLL(None, use_errno=True)  # os.timerfd_create is there from Python 3.13 on only


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Timer(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


class Alarm:
    """Wakes whoever waits on `fileno`. Not thread-safe."""

    def __init__(self) -> None:
        self._ringing = False
        self._fd = int(_LIBC.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC))
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")

    def fileno(self) -> int:
        """The descriptor; readable from `ring`, or from the time set, until the next `set`."""
        return self._fd

    def ring(self) -> None:
        """Be readable from now on."""
        if not self._ringing:
            self._ringing = True
            self._arm(1)

    def set(self, delay_seconds: float | None) -> None:
        """Be readable after ``delay_seconds``, or not until `ring`."""
        self._ringing = False
        self._arm(0 if delay_seconds is None else max(1, int(delay_seconds * 1e9)))

    def close(self) -> None:
        """Give the descriptor back."""
        self._ringing = True
        os.close(self._fd)

    def _arm(self, nanoseconds: int) -> None:
        seconds, rest = divmod(nanoseconds, 1_000_000_000)
        timer = _Timer(_Timespec(0, 0), _Timespec(seconds, rest))
        if _LIBC.timerfd_settime(self._fd, 0, ctypes.byref(timer), None) != 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime failed")
