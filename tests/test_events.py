"""Events: every end of a part once, with a cause of its own; peers that come and go; a bound on all of it."""

from __future__ import annotations

import asyncio

import pytest
from engines import Engine, source_engine, target_engine, until

from kvlink import State, errors
from kvlink.cli.bench.content import Prompt
from kvlink.errors import KVLinkError
from kvlink.observe import Cause, Events, PartEnded, PeerConnected, PeerDisconnected, cause_of
from kvlink.transports.base import TransportFull
from kvlink.transports.faults import DelayChunk, FailRead, FlipByte
from kvlink.transports.loopback_fabric import LoopbackFabric
from kvlink.wire import Installed

PROMPT = Prompt(seed=17, tokens=75)
FROM, INTO = (9, 2, 17, 4, 11), (3, 8, 13, 18, 23)


def ends(engine: Engine) -> list[tuple[str, str, str]]:
    (link,) = engine.links
    return [(e.side, e.end, e.cause.value) for e in link.events.take() if isinstance(e, PartEnded)]


async def fetched(source: Engine, target: Engine, key: str = "i:r", **fields: object) -> None:
    """Publish and fetch, however it ends on either side."""
    source.fill(PROMPT, FROM)
    offer = source.offer(key, FROM, PROMPT.tokens)
    published = source.links[0].publish(offer)
    part = target.links[0].start_fetch(offer, (INTO,), **{"deadline_seconds": 20, **fields})
    await asyncio.gather(part.wait(), return_exceptions=True)
    if part.state is not State.DONE:
        source.links[0].cancel(published, "no more tries")
    await asyncio.gather(published.wait(), return_exceptions=True)


@pytest.mark.parametrize(
    ("faults", "fields", "end", "cause"),
    [
        ([], {}, "done", "done"),
        ([FlipByte(chunk=0)], {}, "failed", "integrity"),
        ([FailRead(nth=1)], {}, "failed", "transport"),
        ([DelayChunk(steps=1_000_000)], {"deadline_seconds": 0.1}, "expired", "expired"),
    ],
)
async def test_a_fetch_ends_with_a_cause_of_its_own(faults, fields, end, cause) -> None:
    fabric = LoopbackFabric(seed=1, faults=faults)
    async with source_engine(fabric) as source, target_engine(fabric) as target:
        await fetched(source, target, **fields)
        assert ends(target) == [("target", end, cause)]
        assert ends(target) == []  # each once
        stats = target.links[0].stats()
        assert stats.ends[f"target_{cause}"] == stats.counters[f"parts_{end}"] == 1
        assert sum(stats.ends.values()) == 1
        assert len(ends(source)) == 1


async def test_refused_declined_cancelled_and_lost_are_apart() -> None:
    fabric = LoopbackFabric(seed=2, faults=[DelayChunk(steps=1_000_000)])
    settings = {"park_seconds": 0.05}
    async with source_engine(fabric, settings=settings) as source, target_engine(fabric) as target:
        (link,) = target.links
        nobody = source.offer("i:nobody", FROM, PROMPT.tokens)
        await asyncio.gather(link.fetch(nobody, (INTO,), deadline_seconds=20), return_exceptions=True)
        declined = source.offer("i:declined", FROM, PROMPT.tokens)
        published = source.links[0].publish(declined)
        link.decline(declined, "cached here")
        await asyncio.gather(published.wait(), return_exceptions=True)
        late = source.links[0].publish(source.offer("i:late", FROM, PROMPT.tokens, ttl_seconds=0.05))
        await asyncio.gather(late.wait(), return_exceptions=True)
        for key, name in (("i:cancelled", None), ("i:lost", "prefill")):
            offer = source.offer(key, FROM, PROMPT.tokens)
            source.links[0].publish(offer)
            part = link.start_fetch(offer, (INTO,), deadline_seconds=20)
            await until(lambda part=part: part.state is State.MOVING)
            if name is None:
                link.cancel(part, "the client went away")
            else:
                await source.links[0].pause(0)
            await asyncio.gather(part.wait(), return_exceptions=True)
        assert [cause for _, _, cause in ends(target)][:2] == ["refused", "cancelled"]
        assert [cause for _, _, cause in ends(source)][:2] == ["declined", "expired"]


async def test_a_source_that_is_never_told_is_indeterminate_and_apart_from_all_else(monkeypatch) -> None:
    """G3: it committed, and the target's word is lost on every try."""
    fabric = LoopbackFabric(seed=5)
    settings = {"commit_ttl_seconds": 0.1}
    async with source_engine(fabric, settings=settings) as source, target_engine(fabric) as target:
        sessions = target.links[0]._driver.target.sessions
        send = sessions.send
        monkeypatch.setattr(sessions, "send", lambda peer, told: isinstance(told, Installed) or send(peer, told))
        await fetched(source, target)
        assert ends(target) == [("target", "done", "done")]
        assert ends(source) == [("source", "indeterminate", "indeterminate")]


def test_every_error_has_a_cause() -> None:
    for cls in vars(errors).values():
        if isinstance(cls, type) and issubclass(cls, KVLinkError) and cls is not errors.MismatchError:
            assert cause_of(cls("x")) in Cause
    assert cause_of(TransportFull("x")) is Cause.TRANSPORT
    assert cause_of(errors.PeerRestartedError("x")) is Cause.PEER


async def test_peers_come_and_go_with_a_reason() -> None:
    fabric = LoopbackFabric(seed=3)
    async with source_engine(fabric) as source, target_engine(fabric) as target:
        await fetched(source, target)
        source_place = str(source.ranks[0].caches.spec.place)
        await source.links[0].close()
        await until(lambda: target.links[0].stats().sessions == 0)
        events = target.links[0].events.take()
        (up,) = [event for event in events if isinstance(event, PeerConnected)]
        (down,) = [event for event in events if isinstance(event, PeerDisconnected)]
        assert (up.peer, up.side, up.transport) == (source_place, "target", "loopback")
        assert (down.peer, down.code) == (source_place, "peer_lost")
        assert up.at_seconds < down.at_seconds


async def test_a_subscriber_is_called_until_it_ends_it_and_its_faults_harm_nobody() -> None:
    fabric = LoopbackFabric(seed=4)
    async with source_engine(fabric) as source, target_engine(fabric) as target:
        seen: list[str] = []

        def fail(_event: object) -> None:
            raise RuntimeError("the embedder's own")

        events = target.links[0].events
        events.subscribe(fail)
        end = events.subscribe(lambda event: seen.append(type(event).__name__))
        await fetched(source, target)
        assert seen == ["PeerConnected", "PartEnded"]
        end()
        end()
        target.links[0].release("i:r")
        await fetched(source, target, "i:r2")
        assert len(seen) == 2
        assert [type(event) for event in events.take()] == [PeerConnected, PartEnded, PartEnded]


def test_events_that_nobody_takes_are_dropped_oldest_first_and_counted() -> None:
    events = Events(capacity=2)
    for at in range(5):
        events.emit(
            PeerDisconnected(at_seconds=float(at), peer="p", side="source", code="peer_lost", why="")
        )  # fmt: skip
    assert events.dropped == 3
    assert [event.at_seconds for event in events.take(1)] == [3.0]
    assert [event.at_seconds for event in events.take()] == [4.0]
