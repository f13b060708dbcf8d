"""The raw limits: UCX gets of the same fragments, one after the other, and plain sockets that carry as many bytes.

Neither installs, checks, or knows of a request: they are what KVLink's figures are held against.
"""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import threading
import time

import numpy as np
from contender import Case, Contender, main

from kvlink.errors import KVLinkError
from kvlink.plan import CopyPlan, Segment
from kvlink.transports.base import RegionKey
from kvlink.transports.ucx import UcxProbe

SOCKETS = 2  # as many as stream has lanes
CALL_BYTES = 1 << 20
BUFFER_BYTES = 128 << 20  # past any cache


class Limits(Contender):
    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self._buffers: list[np.ndarray] = []

    async def open(self) -> tuple[str, dict[str, str], dict[str, str]]:
        modes, absent, key = {}, {}, None
        if self.case.scene == "tcp":
            modes["socket"] = f"{SOCKETS} plain sockets, memory in one piece"
        else:
            try:
                self._probe = UcxProbe()
                self._probe.register(0, self.memory.address, self.memory.whole.nbytes)
                key = self._probe.export_key(0)
                if self.case.side == "source":
                    self._probe.serve()
                modes["ucx-get"] = "UCX gets over CMA, one a fragment, one at a time"
            except KVLinkError as error:
                absent["ucx-get"] = str(error)
        card = {"port": self._listener.getsockname()[1]}
        if key is not None:
            card |= {
                "address": base64.b64encode(self._probe.address()).decode(),
                "region": [key.address, key.length, base64.b64encode(key.key).decode()],
            }
        return json.dumps(card), modes, absent

    async def meet(self, card: str) -> None:
        told = json.loads(card)
        if self.case.scene == "tcp":
            if self.case.side == "source":
                threading.Thread(target=self._serve, daemon=True).start()
            else:
                self._sockets = [socket.create_connection(("127.0.0.1", told["port"])) for _ in range(SOCKETS)]
                self._buffers = [np.ones(BUFFER_BYTES, np.uint8) for _ in range(SOCKETS)]
        elif self.case.side == "target" and "region" in told:  # else UCX is absent, and was said to be
            address, length, key = told["region"]
            self._probe.import_key(RegionKey(region=0, address=address, length=length, key=base64.b64decode(key)))
            self._probe.connect(base64.b64decode(told["address"]))

    def _serve(self) -> None:
        for _ in range(SOCKETS):
            sock, _ = self._listener.accept()
            threading.Thread(target=self._send, args=(sock,), daemon=True).start()

    def _send(self, sock: socket.socket) -> None:
        """Whatever memory there is, as much as was asked for."""
        whole = memoryview(self.memory.whole)
        while len(asked := sock.recv(8, socket.MSG_WAITALL)) == 8:
            left, at = int.from_bytes(asked, "little"), 0
            while left > 0:
                piece = whole[at : at + min(CALL_BYTES, left, len(whole) - at)]
                sock.sendall(piece)
                left, at = left - len(piece), (at + len(piece)) % len(whole)

    async def move(self, mode: str, theirs: list[int], ours: list[int], offer: str) -> float:
        if mode == "socket":
            return await asyncio.get_running_loop().run_in_executor(None, self._receive, ours)
        plan = self._plan(theirs, ours)
        return self._probe.get(plan, max_run_bytes=self.case.fragment_bytes, window=1)

    def _receive(self, ours: list[int]) -> float:
        """As many bytes as the fragments have, each socket a share, into memory in one piece that nobody compares."""
        total = self.case.planes * len(ours) * self.case.fragment_bytes
        shares = [total // SOCKETS] * (SOCKETS - 1) + [total - total // SOCKETS * (SOCKETS - 1)]
        start = time.monotonic()
        threads = [
            threading.Thread(target=self._take, args=(sock, buffer, share))
            for sock, buffer, share in zip(self._sockets, self._buffers, shares, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.monotonic() - start

    @staticmethod
    def _take(sock: socket.socket, buffer: np.ndarray, left: int) -> None:
        sock.sendall(left.to_bytes(8, "little"))
        view, at = memoryview(buffer), 0
        while left > 0:
            count = sock.recv_into(view[at : at + min(CALL_BYTES, left)], flags=socket.MSG_WAITALL)
            if count == 0:
                raise ConnectionError("the other side of the plain sockets is gone")
            left -= count
            at = (at + count) % len(view)
            at = 0 if len(view) - at < CALL_BYTES else at

    def _plan(self, theirs: list[int], ours: list[int]) -> CopyPlan:
        source, target = self.memory.offsets(theirs), self.memory.offsets(ours)
        segment = Segment(
            bases=np.zeros((1, 4), np.int64), pieces=np.stack([source, target], 1), nest=(),
            run_bytes=self.case.fragment_bytes,
        )  # fmt: skip
        return CopyPlan(segments=(segment,), total_bytes=len(source) * self.case.fragment_bytes)


main(Limits)
