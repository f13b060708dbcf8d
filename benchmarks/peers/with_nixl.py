"""NIXL's side: prepared descriptor lists over all fragments, one prepared transfer a request, as its connectors do."""

from __future__ import annotations

import asyncio
import base64
import time

import numpy as np
from contender import Case, Contender, main
from nixl._api import nixl_agent, nixl_agent_config


class Nixl(Contender):
    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self._progress = bool(case.settings["progress_thread"])
        self._agent = nixl_agent(case.side, nixl_agent_config(enable_prog_thread=self._progress))
        self._agent.register_memory([(self.memory.address, self.memory.whole.nbytes, 0, "")], "DRAM")
        self._pump: asyncio.Task[None] | None = None

    async def open(self) -> tuple[str, dict[str, str], dict[str, str]]:
        card = f"{self.memory.address} " + base64.b64encode(self._agent.get_agent_metadata()).decode()
        return card, {"read": "READ by the target", "write": "WRITE by the source"}, {}

    async def meet(self, card: str) -> None:
        address, metadata = card.split()
        name = self._agent.add_remote_agent(base64.b64decode(metadata))
        name = name.decode() if isinstance(name, bytes) else name
        self._own = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", self._fragments(self.memory.address))
        self._other = self._agent.prep_xfer_dlist(name, self._fragments(int(address)))

    async def offer(self, mode: str, turn: int, blocks: list[int]) -> str:
        if not self._progress:
            self._pump = asyncio.create_task(self._progressing())
        return ""

    async def _progressing(self) -> None:
        """The other side of a transfer, without a progress thread: asking for notifications is what progresses.

        Over TCP nothing moves unless both sides do, so it asks without a pause; within a host only connecting needs it.
        """
        pause = 0.0 if self.case.scene == "tcp" else 0.002
        while True:
            until = time.monotonic() + (0.001 if pause == 0 else 0)
            self._agent.get_new_notifs()
            while time.monotonic() < until:
                self._agent.get_new_notifs()
            await asyncio.sleep(pause)

    async def move(self, mode: str, theirs: list[int], ours: list[int], offer: str) -> float:
        own, other = self._indices(ours), self._indices(theirs)
        start = time.monotonic()
        handle = self._agent.make_prepped_xfer(mode.upper(), self._own, own, self._other, other)
        state = self._agent.transfer(handle)
        while state == "PROC":
            state = self._agent.check_xfer_state(handle)
        seconds = time.monotonic() - start
        self._agent.release_xfer_handle(handle)
        if state != "DONE":
            raise RuntimeError(f"transfer ended {state}")
        return seconds

    async def finish(self, mode: str, turn: int) -> None:
        if self._pump is not None:
            self._pump.cancel()
            self._pump = None

    def _fragments(self, address: int):  # noqa: ANN202 - nixl's own type
        size, count = self.case.fragment_bytes, self.case.planes * self.case.blocks
        table = np.zeros((count, 3), np.uint64)
        table[:, 0] = address + np.arange(count, dtype=np.uint64) * np.uint64(size)
        table[:, 1] = size
        return self._agent.get_xfer_descs(table, "DRAM")

    def _indices(self, blocks: list[int]) -> np.ndarray:
        return (self.memory.offsets(blocks) // self.case.fragment_bytes).astype(np.int32)


main(Nixl)
