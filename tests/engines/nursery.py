"""Processes that have imported vLLM already: it takes longer than anything else that an engine does to start.

One process imports it, once, and starts nothing; engines are its forks. A fork is a session of its own, so that all
an engine starts can be found and ended with it. The nursery ends with the process that uses it.
"""

from __future__ import annotations

import atexit
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any

from processes import ENVIRONMENT, end

MAX_ORDER_BYTES = 1 << 16
IMPORT_SECONDS = 300.0


@dataclass
class Fork:
    """A living engine's process: it reads ``stdin``, and answers on ``stdout``."""

    pid: int
    stdin: IO[bytes]
    stdout: IO[bytes]

    def kill(self) -> None:
        """End it and all that it started, as a crash would; returns when it is gone."""
        with suppress(ProcessLookupError):
            watched = os.pidfd_open(self.pid)
            end(self.pid)
            assert select.select([watched], [], [], 30)[0], f"{self.pid} does not end"
            os.close(watched)
        self.stdin.close()


def fork(host: Path, arguments: Sequence[Any], log: Path, environment: Mapping[str, str]) -> Fork:
    """A fork of the nursery of ``host`` (a script that calls `nurse`), its own arguments and environment beside ours.

    ``log`` gets all it prints.
    """
    nursery = _nursery(host)
    order = json.dumps({"arguments": arguments, "environment": dict(environment)}).encode()
    told, telling = os.pipe()
    hearing, answered = os.pipe()
    with log.open("ab") as printed:
        socket.send_fds(nursery, [order], [told, answered, printed.fileno()])
    os.close(told)
    os.close(answered)
    reply = nursery.recv(64)
    assert reply, f"the nursery of {host} has ended; what it said is on standard error"
    return Fork(int(reply), os.fdopen(telling, "wb", 0), os.fdopen(hearing, "rb"))


@cache
def _nursery(host: Path) -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}  # this folder is its
    process = subprocess.Popen(
        [sys.executable, str(host), str(theirs.fileno())], pass_fds=[theirs.fileno()], env=inherited | ENVIRONMENT,
        stdin=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    theirs.close()
    ours.settimeout(IMPORT_SECONDS)
    atexit.register(process.wait, 10)
    atexit.register(ours.close)  # it ends when it reads that we are gone
    return ours


def nurse(run: Any) -> None:
    """Serve forks until whoever asks for them is gone; ``run(arguments, answers)`` is what each does.

    Called by a script once its imports are done, with no thread started; its one argument is the socket.
    """
    asked = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for forks
    children: list[int] = []
    while True:
        order, fds, _, _ = socket.recv_fds(asked, MAX_ORDER_BYTES, 3)
        if not order:
            for child in children:
                end(child)
            return
        child = os.fork()
        if not child:
            break
        for fd in fds:
            os.close(fd)
        asked.send(str(child).encode())
        children.append(child)
    asked.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    told, answered, printed = fds
    for fd, place in ((told, 0), (printed, 1), (printed, 2)):
        os.dup2(fd, place)
    os.close(told)
    os.close(printed)
    random.seed()
    parsed = json.loads(order)
    os.environ.update(parsed["environment"])
    run(*parsed["arguments"], os.fdopen(answered, "w", buffering=1))
