"""Whole requests over memory shared within a host, on both paths: links open the lane; every byte is compared."""

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


@pytest.mark.parametrize("listen", ["tcp://127.0.0.1:0", "unix://{path}"], ids=["tcp", "unix"])
@pytest.mark.parametrize("shareable", [True, False], ids=["mapped", "ring"])
async def test_a_fetch_installs_every_byte(listen: str, tmp_path: Path, *, shareable: bool) -> None:
    """Two layouts; the control connection may be TCP, the lane is a Unix socket all the same."""
    listens = (listen.format(path=tmp_path / name) for name in ("source", "target"))
    settings = [{**SHARED, "listen": each} for each in listens]
    async with (
        source_engine(None, settings=settings[0], shareable=shareable) as source,
        target_engine(None, settings=settings[1], layout="hnd") as target,
    ):
        source.fill(PROMPT, BLOCKS)
        offer = source.offer("i:1", BLOCKS, PROMPT.tokens)
        published = source.links[0].publish(offer)
        result = await target.links[0].fetch(offer, (BLOCKS[::-1],), deadline_seconds=20)
        await published.wait()
        path = "mapped" if shareable else "ring"
        assert (result.transport, result.path, result.integrity) == ("shared", path, True)
        assert result.path_reason
        target.assert_holds(PROMPT, BLOCKS[::-1])
        source.assert_no_block_out()


@pytest.mark.parametrize("integrity", [True, False])
@pytest.mark.parametrize("shareable", [True, False], ids=["mapped", "ring"])
async def test_many_fetches_run_side_by_side(*, shareable: bool, integrity: bool) -> None:
    """Several requests of several ranks at a time: each whole, none mixed up with another."""
    settings = {**SHARED, "integrity": integrity}
    async with (
        source_engine(None, tp=2, num_blocks=64, settings=settings, shareable=shareable) as source,
        target_engine(None, num_blocks=64, settings=settings) as target,
    ):
        prompts = {index: Prompt(seed=index, tokens=120) for index in range(6)}
        rooms = {index: tuple(range(10 * index, 10 * index + 8)) for index in prompts}
        for index, prompt in prompts.items():
            source.fill(prompt, rooms[index])
        offers = {index: source.offer(f"i:{index}", rooms[index], 120) for index in prompts}
        for offer in offers.values():
            for link in source.links:
                link.publish(offer)
        await asyncio.gather(*(target.links[0].fetch(offers[i], (rooms[5 - i],), deadline_seconds=20) for i in prompts))
        for index, prompt in prompts.items():
            assert target.ranks[0].content.check(prompt, rooms[5 - index]) is None


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
        source.links[0].publish(offer)
        with pytest.raises(PeerIncompatibleError, match="different hosts"):
            await target.links[0].fetch(offer, (BLOCKS,), deadline_seconds=20)
