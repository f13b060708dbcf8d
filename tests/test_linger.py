"""Waiting awake: what is awaited is taken in when it comes, others are not kept waiting, and it ends soon."""

from __future__ import annotations

import asyncio
import itertools
import os

import pytest

from kvlink import limits
from kvlink.link import linger as room
from kvlink.link.linger import Linger
from kvlink.transports.awake import CROWDED, LATE, wait_awake


class Pipe:
    """Something that an answer comes through, and what was taken in of it."""

    def __init__(self) -> None:
        self.descriptor, self._end = os.pipe()
        self.took: list[bytes] = []

    def answer(self, data: bytes = b"x") -> None:
        os.write(self._end, data)

    def readable(self) -> None:
        self.took.append(os.read(self.descriptor, 100))

    def close(self) -> None:
        os.close(self.descriptor)
        os.close(self._end)


@pytest.fixture
def pipes():
    made = [Pipe() for _ in range(limits.MAX_LINGERED + 1)]
    yield made
    for pipe in made:
        pipe.close()


@pytest.fixture
def looked(monkeypatch):
    """Descriptors of each burst; bursts find nothing, unless they are told to."""
    bursts: list[list[int]] = []
    bursts_find = {"found": LATE}

    def burst(descriptors: list[int], _seconds: float) -> int:
        bursts.append(list(descriptors))
        return bursts_find["found"]

    monkeypatch.setattr(room, "wait_awake", burst)
    monkeypatch.setattr(limits, "LINGER_SECONDS", 5.0)
    return bursts, bursts_find


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_a_wait_says_which_descriptor_is_readable(pipes):
    pipes[1].answer()
    assert wait_awake([pipe.descriptor for pipe in pipes], 5.0) == 1


def test_a_wait_in_which_nothing_comes_ends(pipes):
    assert wait_awake([pipes[0].descriptor], 0.001) in {LATE, CROWDED}


def test_what_is_awaited_is_taken_in_once(pipes, monkeypatch):
    monkeypatch.setattr(limits, "LINGER_SECONDS", 5.0)

    async def story():
        linger = Linger()
        linger.on(pipes[0])
        await turns()
        pipes[0].answer()
        async with asyncio.timeout(5):
            while not pipes[0].took:
                await asyncio.sleep(0)
                linger.on(pipes[0])  # another's computation may have ended it
        pipes[0].answer()
        linger.forget(pipes[0])
        await turns()

    asyncio.run(story())
    assert pipes[0].took == [b"x"]


def test_others_have_their_turn_between_two_bursts(pipes, looked):
    bursts, _ = looked

    async def story():
        Linger().on(pipes[0])
        seen = []
        for _ in range(4):
            await asyncio.sleep(0)
            seen.append(len(bursts))
        return seen

    seen = asyncio.run(story())
    assert all(0 <= later - earlier <= 1 for earlier, later in itertools.pairwise(seen))
    assert seen[-1] > seen[0]


def test_it_ends_by_itself(pipes, looked, monkeypatch):
    bursts, _ = looked
    monkeypatch.setattr(limits, "LINGER_SECONDS", 0.0)

    async def story():
        Linger().on(pipes[0])
        await turns(20)

    asyncio.run(story())
    assert not bursts


def test_whoever_computes_on_the_cpu_has_it_for_a_while(pipes, looked):
    bursts, find = looked
    find["found"] = CROWDED

    async def story():
        linger = Linger()
        linger.on(pipes[0])
        await turns()
        linger.on(pipes[1])
        await turns()

    asyncio.run(story())
    assert bursts == [[pipes[0].descriptor]]


@pytest.mark.parametrize("count", [0, limits.MAX_LINGERED + 1])
def test_nothing_and_much_are_not_waited_for(pipes, looked, count):
    bursts, _ = looked

    async def story():
        linger = Linger()
        for pipe in pipes[:count]:
            linger.on(pipe)
        await turns()

    asyncio.run(story())
    assert not bursts


def test_what_is_forgotten_and_what_has_no_descriptor_are_not_waited_for(pipes, looked):
    bursts, _ = looked

    async def story():
        linger, nowhere = Linger(), Pipe()
        nowhere.close()
        nowhere.descriptor = -1
        linger.on(nowhere)
        linger.on(pipes[0])
        linger.forget(pipes[0])
        Linger(enabled=False).on(pipes[1])
        await turns()

    asyncio.run(story())
    assert not bursts
