"""Processes that a test starts to stop, resume and kill them, and what they do at their beginning to end with it."""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG = 1
F_SEAL_FUTURE_WRITE = 0x0010  # Linux 5.1; Python has no name for it yet


class Child:
    """A process, seen from outside. Whoever derives from it starts ``process``."""

    process: subprocess.Popen[bytes]

    def kill(self) -> float:
        """SIGKILL; returns when, by the monotonic clock."""
        at = time.monotonic()
        self.process.kill()
        self.process.wait()
        return at

    def stop(self) -> float:
        """SIGSTOP, and wait until it holds; returns when."""
        at = time.monotonic()
        self.process.send_signal(signal.SIGSTOP)
        stat = Path(f"/proc/{self.process.pid}/stat")
        while stat.read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.001)
        return at

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)


def end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends: a stopped one does not see its input end."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the parent is gone already")


def take_standard_output() -> int:
    """A descriptor for answers; what libraries print, as UCX does, goes to standard error from now on."""
    answers = os.dup(1)
    os.dup2(2, 1)
    return answers


def seal(descriptor: int) -> None:
    """Let peers map this file read-only: it shrinks no more, and new mappings of it cannot write."""
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | F_SEAL_FUTURE_WRITE)
