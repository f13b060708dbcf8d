"""What an embedder, or a claim, can get wrong: typed errors at once, nothing half-done, no part without an end."""

from __future__ import annotations

import numpy as np
import pytest
from engines import IDENTITY, source_engine, target_engine

from kvlink import Caches, Config, DType, Group, Place, PlaneKey, Roster, open_link
from kvlink.cli.bench.content import Prompt
from kvlink.errors import ConfigError, ConflictError, KVLinkError, LayoutError, PeerUnreachableError, SchemaError
from kvlink.link import sockets
from kvlink.transports.loopback import LoopbackTransport
from kvlink.transports.loopback_fabric import LoopbackFabric
from kvlink.wire import Address

PROMPT = Prompt(seed=5, tokens=20)
BLOCKS, INTO = (3, 9), (5, 7)


async def test_a_refetch_into_other_blocks_is_a_conflict_until_the_first_are_released() -> None:
    """G5: never the old outcome for new blocks."""
    fabric = LoopbackFabric(seed=1)
    async with source_engine(fabric) as source, target_engine(fabric) as target:
        source.fill(PROMPT, BLOCKS)
        offer = source.offer("i:other", BLOCKS, PROMPT.tokens)
        source.links[0].publish(offer)
        await target.links[0].fetch(offer, (INTO,), deadline_seconds=10)
        with pytest.raises(ConflictError, match="release it"):
            target.links[0].start_fetch(offer, ((1, 2),), deadline_seconds=10)
        for wrong in ((), ((9, 64),), ((9, -1),)):
            with pytest.raises(LayoutError):
                target.links[0].start_fetch(offer, wrong, deadline_seconds=10)


async def test_read_only_memory_can_be_read_from_and_never_installed_into() -> None:
    fabric = LoopbackFabric(seed=2)
    async with source_engine(fabric) as source:
        group = Group(name="full", heads=(0,), channels=32, dtype=DType.FLOAT16, block_size=16, num_blocks=4, planes=())
        frozen = np.frombuffer(bytes(3 * 2 * 4 * 16 * 32 * 2), dtype=np.float16).reshape(3, 2, 4, 16, 1, 32)
        caches = Caches.from_tensors(
            {PlaneKey("full", layer): frozen[layer] for layer in range(3)},
            [group],
            IDENTITY,
            Place(engine="decode", incarnation="r"),
            axes="kv block slot head channel",
        )
        assert not any(region.writable for region in caches.regions)
        async with open_link(Config(), caches, transports=[LoopbackTransport(fabric, "frozen")]) as link:
            offer = source.offer("i:frozen", BLOCKS, PROMPT.tokens)
            with pytest.raises(LayoutError, match="read-only"):
                link.start_fetch(offer, ((0, 1),), deadline_seconds=10)


@pytest.mark.parametrize("ttl", [float("nan"), 0.0, -1.0, float("inf")])
async def test_a_time_to_live_must_be_a_time(ttl: float) -> None:
    fabric = LoopbackFabric(seed=3)
    async with source_engine(fabric) as source:
        with pytest.raises(ConfigError, match="ttl_seconds"):
            source.links[0].announce("i:ttl", ttl_seconds=ttl)
        with pytest.raises(ConfigError, match="ttl_seconds"):
            source.links[0].publish(source.offer("i:ttl", BLOCKS, PROMPT.tokens, ttl_seconds=ttl))
        source.assert_no_block_out()


async def test_block_ids_are_whole_numbers_and_nothing_is_rounded() -> None:
    fabric = LoopbackFabric(seed=4)
    async with source_engine(fabric) as source, target_engine(fabric) as target:
        offer = source.offer("i:float", BLOCKS, PROMPT.tokens)
        with pytest.raises(LayoutError, match="whole block ids"):
            target.links[0].start_fetch(offer, ((10.7, 11.2),), deadline_seconds=10)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="uncovered"):
            target.links[0].start_fetch(offer, (INTO,), deadline_seconds=10, uncovered="bogus")  # type: ignore[arg-type]
        part = source.links[0].announce("i:push", ttl_seconds=5)
        with pytest.raises(LayoutError, match="whole block ids"):
            part.ready(blocks=((1.5, 2),), tokens=20)  # type: ignore[arg-type]
        source.links[0].cancel(part, "done here")
        target.assert_no_block_out()


@pytest.mark.parametrize("address", ["tcp://a..b:80", "tcp://.:80", f"tcp://{'x' * 64}:80"])
def test_an_address_that_no_resolver_takes_is_no_address(address: str) -> None:
    with pytest.raises(SchemaError):
        Address.parse(address)


@pytest.mark.parametrize("failure", [OSError(24, "Too many open files"), RuntimeError("our own fault")])
async def test_c5_a_dial_that_fails_in_any_way_ends_its_part(
    monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    fabric = LoopbackFabric(seed=5)
    async with source_engine(fabric) as source, target_engine(fabric) as target:
        source.fill(PROMPT, BLOCKS)
        offer = source.offer("i:dial", BLOCKS, PROMPT.tokens)
        source.links[0].publish(offer)

        def fail(_family: int) -> None:
            raise failure

        with monkeypatch.context() as patched:
            patched.setattr(sockets, "_new_socket", fail)
            with pytest.raises(PeerUnreachableError):
                await target.links[0].fetch(offer, (INTO,), deadline_seconds=10)
        target.assert_no_block_out()
        await target.links[0].fetch(offer, (INTO,), deadline_seconds=10)
        target.assert_holds(PROMPT, INTO)


def test_an_empty_roster_says_what_it_needs() -> None:
    with pytest.raises(KVLinkError, match="needs the card"):
        Roster.of([])
