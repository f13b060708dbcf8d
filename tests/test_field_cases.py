"""Cases of the field where a test of their own says most: short stories of two links. See docs/field-cases.md."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from pathlib import Path

import pytest
from engines import Engine, source_engine, target_engine, until
from rank_process import RankProcess

from kvlink import Identity, Offer, Part, State
from kvlink.cli.bench.content import Prompt
from kvlink.errors import CancelledError, ConflictError, KVLinkError, PeerLostError, PeerRestartedError, TransportError
from kvlink.link.sessions import Sessions
from kvlink.transports.faults import DelayChunk, FailRead, Fault
from kvlink.transports.loopback import LoopbackTransport
from kvlink.transports.loopback_fabric import LoopbackFabric
from kvlink.wire import Ask

PROMPT = Prompt(seed=3, tokens=75)
SETTINGS = {"chunk_leaves": 1}
FROM, INTO = (9, 2, 17, 4, 11), (3, 8, 13, 18, 23)


def engines(*faults: Fault, seed: int = 1) -> tuple[Engine, Engine]:
    fabric = LoopbackFabric(seed=seed, faults=faults)
    return source_engine(fabric, settings=SETTINGS), target_engine(fabric, settings=SETTINGS)


def started(source: Engine, target: Engine, key: str = "i:r", deadline_seconds: float = 10.0) -> tuple[Part, Part]:
    """A published request that is being fetched: (source's part, target's part)."""
    source.fill(PROMPT, FROM)
    offer = source.offer(key, FROM, PROMPT.tokens)
    published = source.links[0].publish(offer)
    return published, target.links[0].start_fetch(offer, (INTO,), deadline_seconds=deadline_seconds)


async def test_a1_a5_bytes_in_flight_at_a_cancel_land_before_the_end_is_told_or_never() -> None:
    source, target = engines(DelayChunk(steps=5_000))
    async with source, target:
        _, part = started(source, target)
        await until(lambda: part.state >= State.MOVING)
        await asyncio.sleep(0.01)
        target.links[0].cancel(part, "given to another")
        with pytest.raises(CancelledError):
            await part.wait()
        target.assert_no_block_out()
        target.ranks[0].content.wipe()  # the blocks are another request's now
        await asyncio.sleep(0.7)
        target.assert_untouched()


async def test_a7_closing_a_source_lets_its_reader_finish() -> None:
    source, target = engines(DelayChunk(steps=5_000))
    async with source, target:
        published, part = started(source, target)
        await until(lambda: part.state >= State.MOVING)
        assert (await source.links[0].close(5.0)).cut == ()
        await part.wait()
        assert published.state is State.DONE
        target.assert_holds(PROMPT, INTO)


async def test_b8_ownership_is_recorded_before_the_first_byte_moves() -> None:
    source, target = engines(DelayChunk(steps=2_000_000))
    async with source, target:
        _, part = started(source, target)
        assert target.links[0].stats().memory.reserved == len(INTO)
        await until(lambda: part.state >= State.MOVING)
        assert source.links[0].stats().memory.leased == len(FROM)
        offer = source.offer("i:other", FROM, PROMPT.tokens)
        with pytest.raises(ConflictError, match="belongs to request i:r"):
            target.links[0].start_fetch(offer, ((1, 2, 3, 4, 5),), deadline_seconds=1)
        target.links[0].cancel(part, "enough")
        with pytest.raises(CancelledError):
            await part.wait()
        target.assert_no_block_out()


async def test_c1_a_restarted_source_is_another_peer() -> None:
    """Same address, same place, another incarnation: what the old one offered is refused, retryably."""
    fabric = LoopbackFabric(seed=1)
    async with target_engine(fabric) as target:
        async with source_engine(fabric, incarnation="old") as source:
            offer = source.offer("i:r", FROM, PROMPT.tokens)
            address = source.links[0].address
        async with source_engine(fabric, incarnation="new", settings={"listen": address}):
            with pytest.raises(PeerRestartedError) as caught:
                await target.links[0].fetch(offer, (INTO,), deadline_seconds=5)
        assert caught.value.retryable
        target.assert_no_block_out()
        target.assert_untouched()


async def test_c6_a_source_that_cannot_expose_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def expose(_transport: LoopbackTransport, _exposure: object) -> None:
        raise TransportError("no memory for another exposure")

    monkeypatch.setattr(LoopbackTransport, "expose", expose)
    source, target = engines()
    async with source, target:
        _, part = started(source, target, deadline_seconds=60.0)
        with pytest.raises(KVLinkError) as caught:
            async with asyncio.timeout(5):
                await part.wait()
        assert caught.value.retryable
        target.assert_no_block_out()
        assert source.links[0].stats().memory.leased == 0


async def test_f3_a_chunk_that_is_overtaken_is_waited_for() -> None:
    """All others are here, and the source has vouched for all: a read is whole when every chunk is, in any order."""
    source, target = engines(DelayChunk(chunk=0, steps=100))
    async with source, target:
        published, part = started(source, target)
        await part.wait()
        target.assert_holds(PROMPT, INTO)
        await published.wait()


async def test_f4_nothing_is_written_after_the_install_is_told() -> None:
    """Not even the zeros that were asked for past the last token."""
    source, target = engines()
    async with source, target:
        source.fill(PROMPT, FROM)
        offer = source.offer("i:r", FROM, PROMPT.tokens)
        source.links[0].publish(offer)
        part = target.links[0].start_fetch(offer, (INTO,), deadline_seconds=5, uncovered="zero")
        regions = [region.array for region in target.ranks[0].caches.regions]
        seen: list[bytes] = []
        part.when_ended(lambda _part: seen.extend(region.tobytes() for region in regions))
        await part.wait()
        await asyncio.sleep(0.1)
        assert seen == [region.tobytes() for region in regions]


async def test_g2_no_attempt_id_is_used_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: Counter[int] = Counter()
    send = Sessions.send

    def spied(sessions: Sessions, peer: str, message: object) -> bool:
        if isinstance(message, Ask):
            asked[message.attempt] += 1
        return send(sessions, peer, message)

    monkeypatch.setattr(Sessions, "send", spied)
    source, target = engines(FailRead(nth=1, after_chunks=1), FailRead(nth=2))
    async with source, target:
        given: list[tuple[int, ...]] = [tuple(block + n for block in INTO) for n in range(3)]
        source.fill(PROMPT, FROM)
        offer = source.offer("i:r", FROM, PROMPT.tokens)
        source.links[0].publish(offer)

        async def take(_offer: Offer) -> tuple[tuple[int, ...]]:
            return (given.pop(),)

        await target.links[0].fetch_with_retries(offer, take, give_back=lambda _blocks: None, deadline_seconds=2)
    assert sorted(asked.values()) == [1, 1, 1]


def kept_of_others() -> tuple[int, int]:
    """How many stretches of memory shared with others this process has mapped, and how many descriptors are open."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    shared = [line for line in maps if line.split()[1].endswith("s") and "rank" not in line]
    return len(shared), len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("transport", ["ucx", "stream"])
async def test_c4_nothing_of_a_dead_peer_stays_mapped_or_open(transport: str) -> None:
    shape = {"identity": Identity(model="tiny", num_layers=2, num_kv_heads=4, head_dim=32), "num_blocks": 32}
    settings = {"transports": (transport,)}
    async with target_engine(None, layout="nhd", settings=settings, **shape) as target:
        (link,) = target.links
        kept = []
        for life in range(3):
            source = RankProcess()
            try:
                await source.open("prefill", f"life{life}", layout="nhd", **shape, **settings)
                source.content.fill(PROMPT, FROM)
                offer = source.offer(f"i:{life}", FROM, PROMPT.tokens)
                await source.publish(offer)
                await link.fetch(offer, (INTO,), deadline_seconds=10)
                link.release(f"i:{life}")
                source.kill()
                await until(lambda: link.stats().sessions == 0)
            finally:
                source.close()
            await asyncio.sleep(0.3)
            kept.append(kept_of_others())
        assert kept[2] <= kept[0], "something stays of each that dies"


async def test_c4_a_peer_lost_on_its_control_connection_is_let_go_at_the_transport() -> None:
    source, target = engines()
    async with source, target:
        published, part = started(source, target)
        await part.wait()
        await published.wait()
        sessions = target.links[0]._driver.target.sessions
        (session,) = sessions._live.values()
        transport = session.pump.transport
        assert isinstance(transport, LoopbackTransport)
        session.connection.fail(PeerLostError("reset", peer=session.peer))
        await until(lambda: session.wire_name not in transport._peers)
