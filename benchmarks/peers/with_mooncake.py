"""Mooncake Transfer Engine's side, over TCP: batches of 1,024 fragments (4,096 fail), lists made before the clock."""

from __future__ import annotations

import time

from contender import Case, Contender, main
from mooncake.engine import TransferEngine

BATCH = 1024


class Mooncake(Contender):
    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self._engine = TransferEngine()
        self._check(self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""), "initialize")
        self._check(self._engine.register_memory(self.memory.address, self.memory.whole.nbytes), "register_memory")

    async def open(self) -> tuple[str, dict[str, str], dict[str, str]]:
        card = f"127.0.0.1:{self._engine.get_rpc_port()} {self.memory.address}"
        return card, {"read": "read by the target, tcp", "write": "write by the source, tcp"}, {}

    async def meet(self, card: str) -> None:
        self._peer, address = card.split()
        self._address = int(address)

    async def move(self, mode: str, theirs: list[int], ours: list[int], offer: str) -> float:
        call = self._engine.batch_transfer_sync_read if mode == "read" else self._engine.batch_transfer_sync_write
        own = (self.memory.address + self.memory.offsets(ours)).tolist()
        other = (self._address + self.memory.offsets(theirs)).tolist()
        starts = range(0, len(own), BATCH)
        batches = [(own[i : i + BATCH], other[i : i + BATCH]) for i in starts]
        sizes = [self.case.fragment_bytes] * BATCH
        start = time.monotonic()
        for here, there in batches:
            self._check(call(self._peer, here, there, sizes[: len(here)]), mode)
        return time.monotonic() - start

    @staticmethod
    def _check(result: int, what: str) -> None:
        if result != 0:
            raise RuntimeError(f"{what} returned {result}")


main(Mooncake)
