"""KVLink's side: one link for each transport and integrity setting, over the same cache; a request is one fetch.

The clock runs from the call of `Link.start_fetch`, with the offer in hand, to the installed result.
"""

from __future__ import annotations

import base64
import json
import time

import numpy as np
from contender import Case, Contender, main

import kvlink
from kvlink.errors import KVLinkError
from kvlink.layout import standard_spec

HEADS, CHANNELS = 8, 128
SLOT_BYTES = HEADS * CHANNELS * 2
GROUP = "full"


class KVLink(Contender):
    def __init__(self, case: Case) -> None:
        self.case = case
        self._slots = case.fragment_bytes // SLOT_BYTES
        layers = case.planes // 2
        self._identity = kvlink.Identity(model="peers", num_layers=layers, num_kv_heads=HEADS, head_dim=CHANNELS)
        self._links: dict[str, kvlink.Link] = {}
        self._rosters: dict[str, kvlink.Roster] = {}
        self._parts: dict[int, kvlink.Part] = {}
        if case.settings["memory"] == "kvlink":
            self._caches = kvlink.Caches.standard(self._spec(layers), shareable=True)
            self.planes = [region.array for region in self._caches.regions]
        else:
            super().__init__(case)
            self._caches = self._engines_own(layers)

    async def open(self) -> tuple[str, dict[str, str], dict[str, str]]:
        modes, absent = {}, {}
        for mode, stated in self._modes().items():
            try:
                config = kvlink.Config(**stated)
                link = self._links[mode] = await kvlink.open_link(config, self._caches)
            except KVLinkError as error:
                absent[mode] = str(error)
            else:
                modes[mode] = f"{stated['transports'][0]}, integrity {'on' if stated['integrity'] else 'off'}"
                link.set_siblings(kvlink.Roster.of([link.card]))
        cards = {mode: base64.b64encode(link.card).decode() for mode, link in self._links.items()}
        return json.dumps(cards), modes, absent

    def _modes(self) -> dict[str, dict[str, object]]:
        tls = "tcp" if self.case.scene == "tcp" else None
        return {
            f"{transport}-{'on' if integrity else 'off'}": {
                "transports": (transport,),
                "integrity": integrity,
                "ucx_tls": tls,
            }
            for transport in self.case.settings["transports"]
            for integrity in (False, True)
        }

    async def meet(self, card: str) -> None:
        for mode, text in json.loads(card).items():
            if mode in self._links:
                self._rosters[mode] = kvlink.Roster.of([base64.b64decode(text)])

    async def offer(self, mode: str, turn: int, blocks: list[int]) -> str:
        link = self._links[mode]
        roster = kvlink.Roster.of([link.card])
        key = kvlink.request_key(roster.incarnation, f"{mode}-{turn}")
        tokens = len(blocks) * self._slots
        offer = kvlink.Offer(key=key, roster=roster, blocks=(tuple(blocks),), tokens=tokens)
        self._parts[turn] = link.publish(offer)
        return json.dumps(offer.to_params())

    async def move(self, mode: str, theirs: list[int], ours: list[int], offer: str) -> float:
        claim = kvlink.Offer.from_params(json.loads(offer))
        start = time.monotonic()
        part = self._links[mode].start_fetch(claim, (tuple(ours),), deadline_seconds=60)
        await part.wait()
        seconds = time.monotonic() - start
        self._links[mode].release(claim.key)
        return seconds

    async def finish(self, mode: str, turn: int) -> None:
        part = self._parts.pop(turn, None)
        if part is not None:
            await part.wait()

    async def close(self) -> None:
        for link in self._links.values():
            await link.close()

    def _place(self) -> kvlink.Place:
        return kvlink.Place(engine=self.case.side, incarnation="1")

    def _spec(self, layers: int) -> kvlink.CacheSpec:
        return standard_spec(
            "apart", identity=self._identity, place=self._place(), layers=range(layers), heads=range(HEADS),
            block_size=self._slots, num_blocks=self.case.blocks, dtype=kvlink.DType.FLOAT16, group=GROUP,
        )  # fmt: skip

    def _engines_own(self, layers: int) -> kvlink.Caches:
        """The cache as an engine that allocated it itself would tell it: by its tensors."""
        shape = (self.case.blocks, self._slots, HEADS, CHANNELS)
        kinds = (kvlink.PlaneKind.K, kvlink.PlaneKind.V)
        tensors = {
            kvlink.PlaneKey(GROUP, layer, kind): self.planes[2 * layer + index].view(np.float16).reshape(shape)
            for layer in range(layers)
            for index, kind in enumerate(kinds)
        }
        group = self._spec(layers).groups[0]
        bare = kvlink.Group(
            name=GROUP, heads=group.heads, channels=CHANNELS, dtype=group.dtype, block_size=self._slots,
            num_blocks=self.case.blocks, planes=(),
        )  # fmt: skip
        return kvlink.Caches.from_tensors(
            tensors, [bare], self._identity, self._place(), axes="block slot head channel"
        )


main(KVLink)
