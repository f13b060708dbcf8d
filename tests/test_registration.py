"""Many large regions are registered one at a time, while the loop goes on; all or none (field case I4)."""

from __future__ import annotations

import asyncio
import logging
import threading

import numpy as np
import pytest
from engines import IDENTITY

from kvlink import Caches, Config, DType, Group, Place, PlaneKey, limits, open_link
from kvlink.errors import TransportError
from kvlink.transports.loopback import LoopbackTransport
from kvlink.transports.loopback_fabric import LoopbackFabric

LAYERS = 6
SECONDS = 5.0


class SlowTransport(LoopbackTransport):
    """Registers a region only when it is told to, and keeps who was at it."""

    def __init__(self, fabric: LoopbackFabric) -> None:
        super().__init__(fabric, "slow")
        self.turns = threading.Semaphore(0)
        self.begun = threading.Semaphore(0)
        self.inside, self.most_inside = 0, 0
        self.registered: set[int] = set()
        self.fails_at: int | None = None

    def register(self, region: int, *arguments: object) -> None:
        self.inside += 1
        self.most_inside = max(self.most_inside, self.inside)
        self.begun.release()
        assert self.turns.acquire(timeout=SECONDS)
        self.inside -= 1
        if region == self.fails_at:
            raise TransportError("no more memory may be locked")
        super().register(region, *arguments)  # type: ignore[arg-type]
        self.registered.add(region)

    def unregister(self, region: int) -> None:
        super().unregister(region)
        self.registered.discard(region)

    async def has_begun(self) -> None:
        """One more region: the loop goes on, or this would not return."""
        assert await asyncio.to_thread(self.begun.acquire, timeout=SECONDS)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> SlowTransport:
    monkeypatch.setattr(limits, "REGISTERED_ASIDE_BYTES", 1)
    return SlowTransport(LoopbackFabric(seed=1))


def caches() -> Caches:
    """A region a layer."""
    tensors = [np.zeros((2, 4, 16, 4, 32), np.float16) for _ in range(LAYERS)]
    group = Group(
        name="full", heads=(0, 1, 2, 3), channels=32, dtype=DType.FLOAT16, block_size=16, num_blocks=4, planes=()
    )
    by_plane = {PlaneKey("full", layer): tensor for layer, tensor in enumerate(tensors)}
    identity = type(IDENTITY)(model="tiny", num_layers=LAYERS, num_kv_heads=4, head_dim=32)
    place = Place(engine="e", incarnation="1")
    return Caches.from_tensors(by_plane, [group], identity, place, axes="kv block slot head channel")


async def test_regions_are_registered_one_at_a_time_while_the_loop_goes_on_i4(
    slow: SlowTransport, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """I4: whoever shares the loop is served between any two looks at it, and progress is told."""
    monkeypatch.setattr(limits, "PROGRESS_SECONDS", 0.0)
    caplog.set_level(logging.INFO, "kvlink.link")
    opening = asyncio.create_task(open_link(Config(), caches(), transports=[slow]).__aenter__())
    for _ in range(LAYERS):
        await slow.has_begun()
        assert not opening.done()
        slow.turns.release()
    link = await opening
    assert (slow.most_inside, slow.registered) == (1, set(range(LAYERS)))
    told = [record.getMessage() for record in caplog.records if "are registered" in record.getMessage()]
    assert told[0].startswith(f"1 of {LAYERS} regions")
    assert len(told) == LAYERS
    await link.close()


async def test_a_registration_that_fails_leaves_none(slow: SlowTransport) -> None:
    slow.fails_at = LAYERS - 1
    for _ in range(LAYERS):
        slow.turns.release()
    with pytest.raises(TransportError, match="locked"):
        await open_link(Config(), caches(), transports=[slow]).__aenter__()
    assert slow.registered == set()


async def test_who_stops_waiting_returns_once_nothing_is_registered(slow: SlowTransport) -> None:
    """Cancelled twice, too: a call that the kernel is in cannot be stopped, and its region must not stay behind."""
    opening = asyncio.create_task(open_link(Config(), caches(), transports=[slow]).__aenter__())
    await slow.has_begun()
    slow.turns.release()
    await slow.has_begun()
    for _ in range(2):
        opening.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not opening.done()
    slow.turns.release()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert (slow.inside, slow.registered) == (0, set())
