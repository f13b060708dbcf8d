"""Links over memory shared within a host: what they map goes with its peer, and where they cannot share they say so.

That every byte arrives is test_lanes_link.py's.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import msgspec
import pytest
from engines import source_engine, target_engine

from kvlink.cli.bench.content import Prompt
from kvlink.errors import PeerIncompatibleError
from kvlink.transports.shared import SharedAddress, SharedTransport

PROMPT = Prompt(seed=5, tokens=150)
BLOCKS = tuple(range(2, 12))
SHARED = {"transports": ("shared",)}


def pool_mappings() -> list[str]:
    """Read-only mappings that this process has of pools: those of its peers."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if "kvlink-pool" in line and " r--s " in line]


async def test_a_lost_peers_memory_is_not_mapped_any_more() -> None:
    """C4: what was mapped of a peer is unmapped when the peer is lost, and nothing keeps its file open."""
    async with target_engine(None, settings=SHARED) as target:
        async with source_engine(None, settings=SHARED, shareable=True) as source:
            source.fill(PROMPT, BLOCKS)
            offer = source.offer("i:1", BLOCKS, PROMPT.tokens)
            source.links[0].publish(offer)
            await target.links[0].fetch(offer, (BLOCKS,), deadline_seconds=20)
            assert pool_mappings()
            opened = len(os.listdir("/proc/self/fd"))
        async with asyncio.timeout(5):
            while pool_mappings():
                await asyncio.sleep(0.01)
        assert len(os.listdir("/proc/self/fd")) < opened


@pytest.mark.parametrize("change", [{"boot": "another"}, {"namespace": "0:1"}, {"version": 9}], ids=str)
async def test_ranks_that_cannot_share_take_the_next_transport(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, object]
) -> None:
    """Both ends see from the addresses alone that the pair cannot share, and agree on another; the reason says why."""
    told = SharedTransport.address

    def elsewhere(transport: SharedTransport) -> bytes:
        own = msgspec.msgpack.decode(told(transport), type=SharedAddress)
        return msgspec.msgpack.encode(msgspec.structs.replace(own, **change))

    monkeypatch.setattr(SharedTransport, "address", elsewhere)
    both = {"transports": ("shared", "stream")}
    async with source_engine(None, settings=both) as source, target_engine(None, settings=both) as target:
        source.fill(PROMPT, BLOCKS)
        offer = source.offer("i:1", BLOCKS, PROMPT.tokens)
        source.links[0].publish(offer)
        result = await target.links[0].fetch(offer, (BLOCKS,), deadline_seconds=20)
        assert result.transport == "stream"
        assert "not shared" in result.transport_reason
        target.assert_holds(PROMPT, BLOCKS)


async def test_ranks_that_can_only_share_and_cannot_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing else is left, the request fails with the reason."""
    monkeypatch.setattr(SharedTransport, "refusal", lambda *_: "the ranks run on different hosts")
    async with source_engine(None, settings=SHARED) as source, target_engine(None, settings=SHARED) as target:
        offer = source.offer("i:1", BLOCKS, PROMPT.tokens)
        published = source.links[0].publish(offer)
        with pytest.raises(PeerIncompatibleError, match="different hosts"):
            await target.links[0].fetch(offer, (BLOCKS,), deadline_seconds=20)
        source.links[0].cancel(published, "nobody can take it")  # else closing waits for somebody
