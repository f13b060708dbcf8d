"""Sources of a stream that lie, or differ from each other: nothing is installed, nothing of others is touched."""

from __future__ import annotations

import pytest
from engines import source_engine, target_engine, until
from msgspec.structs import replace
from test_protocol_target import CAPACITY, ROOT
from test_streaming import PROMPT, TOKENS, Push

from kvlink import State, limits, wire
from kvlink.errors import ConflictError, LayoutError
from kvlink.layout import Frontier
from kvlink.protocol import CutOff, End, ReadEnded, Received, Tick, Timing, target
from kvlink.transports.loopback_fabric import LoopbackFabric


class Resting:
    """One leg of a stream at its target, resting, with its clock."""

    def __init__(self, timing: Timing) -> None:
        self.now = 0.0
        self.part, _ = target.begin("key", [("A", 1)], deadline_seconds=60.0, now=0.0, timing=timing, stream=True)
        self.hear(wire.Lease(attempt=1, lease_seconds=2.5, total_bytes=0, capacity=CAPACITY))

    def hear(self, message: object) -> list:
        return self.see(Received("A", message))

    def see(self, event: object) -> list:
        self.part, actions = target.step(self.part, event, self.now)
        return list(actions)

    def wait(self, seconds: float) -> list:
        done: list = []
        until = self.now + seconds
        while (timer := target.next_timer(self.part)) is not None and timer <= until:
            self.now = max(self.now, timer)
            done += self.see(Tick())
        self.now = until
        return done


@pytest.mark.parametrize("empty", [False, True], ids=["parked", "empty increments"])
def test_no_word_of_a_source_keeps_a_target_waiting_for_ever(*, empty: bool) -> None:
    """It lives, says so for ever, and never seals."""
    timing = Timing(rest_seconds=60.0, stream_seconds=600.0)
    leg = Resting(timing)
    done: list = []
    for number in range(1, 100):
        if empty:
            advance = wire.Advance(attempt=1, number=number, frontier=Frontier(), blocks=((),), total_bytes=0)
            leg.hear(advance)
            leg.see(ReadEnded(1, number=number))
        else:
            leg.hear(wire.Parked(attempt=1, park_seconds=60.0))
        done += leg.wait(20.0)
        if any(isinstance(action, CutOff) for action in done):
            break
    assert timing.stream_seconds - 20 <= leg.now <= timing.stream_seconds + 20
    assert leg.part.failure is not None
    assert leg.part.failure.end is End.EXPIRED


def test_seals_of_two_sources_that_differ_are_not_installed() -> None:
    """One share of 50 positions beside one of 60 is no request's KV."""
    part, _ = target.begin("key", [("A", 1), ("B", 9)], deadline_seconds=60.0, now=0.0, timing=Timing(), stream=True)
    actions: tuple = ()
    for peer, attempt, content in (("A", 1, "fifty"), ("B", 9, "sixty")):
        for event in (
            Received(peer, wire.Lease(attempt=attempt, lease_seconds=2.5, total_bytes=0, capacity=CAPACITY)),
            Received(
                peer,
                wire.Advance(
                    attempt=attempt,
                    number=1,
                    frontier=Frontier.whole(50),
                    blocks=((1,),),
                    total_bytes=1,
                    sealed=content,
                ),
            ),
            ReadEnded(attempt, ROOT, number=1),
        ):
            part, actions = target.step(part, event, 0.0)
    assert [action.attempt for action in actions if isinstance(action, CutOff)] == [1, 9]
    assert part.failure is not None
    assert part.failure.error.code == ConflictError.code


async def test_two_ranks_that_seal_at_different_positions_install_nothing() -> None:
    fabric = LoopbackFabric(seed=1)
    async with source_engine(fabric, tp=2) as source, target_engine(fabric) as target_side:
        blocks, into = tuple(range(2, 12)), tuple(range(20, 10, -1))
        source.fill(PROMPT, blocks)
        given = [link.announce("i:1", ttl_seconds=20, max_tokens=TOKENS) for link in source.links]
        taken = target_side.links[0].expect(
            target_side.ticket("i:1", TOKENS), source.roster, (into,), deadline_seconds=20
        )
        await until(lambda: taken.state is State.READY)
        for part, tokens in zip(given, (64, TOKENS), strict=True):
            part.ready(blocks=(blocks,), tokens=tokens)
        await until(lambda: taken.state is State.MOVING)
        for part in given:
            part.seal()
        with pytest.raises(ConflictError, match="differ"):
            await taken.wait()
        await until(lambda: all(part.state.ended for part in given))
        source.assert_no_block_out()
        target_side.assert_no_block_out()


async def test_a_stream_that_ends_before_the_prefix_does_touches_no_block_of_the_prefix() -> None:
    """The blocks of a prefix are other requests', too: not even what it leaves uncovered is zeroed there."""
    fabric = LoopbackFabric(seed=1)
    async with source_engine(fabric) as source, target_engine(fabric) as target_side:
        blocks, into = tuple(range(2, 12)), tuple(range(20, 10, -1))
        source.fill(PROMPT, blocks)
        given = source.links[0].announce("i:1", ttl_seconds=20, max_tokens=TOKENS)
        ticket = target_side.ticket("i:1", TOKENS, first_token=96)
        taken = target_side.links[0].expect(ticket, source.roster, (into,), deadline_seconds=20, uncovered="zero")
        await until(lambda: taken.state is State.READY)
        given.ready(blocks=(blocks,), tokens=50)
        await until(lambda: taken.state is State.MOVING)
        given.seal()
        with pytest.raises(LayoutError, match="ends at position 50"):
            await taken.wait()
        target_side.assert_untouched()
        target_side.assert_no_block_out()


LIES = {
    "backwards": {"frontier": Frontier.whole(32)},
    "beyond the room": {"frontier": Frontier.whole(TOKENS + 1)},
    "a torn frontier": {"frontier": Frontier(100, 1, 90)},
    "other groups": {"blocks": ((), ())},
    "a block that is not there": {"frontier": Frontier.whole(100), "blocks": ((1 << 40, 3, 4),)},
    "a null block": {"frontier": Frontier.whole(100), "blocks": ((-1, 3, 4),)},
    "no block for it": {"frontier": Frontier.whole(100)},
    "blocks without end": {"blocks": ((1,) * limits.MAX_BLOCKS_PER_REQUEST,)},
    "another size": {"frontier": Frontier.whole(80), "blocks": ((9,),), "total_bytes": 1},
    "another content": {"sealed": "0" * 32},
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
async def test_an_increment_that_cannot_be_ends_its_request_alone(lie: dict[str, object]) -> None:
    fabric = LoopbackFabric(seed=1)
    async with source_engine(fabric) as source, target_engine(fabric) as target_side:
        push = Push(source, target_side)
        await push.some(64)
        half = source.links[0]._driver.source
        (attempt,) = half._works["i:1"].outgoing
        honest = wire.Advance(attempt=attempt[1], number=2, frontier=Frontier.whole(64), blocks=((),), total_bytes=0)
        half.sessions.send(attempt[0], replace(honest, **lie))
        await until(lambda: push.taken.state.ended)
        assert push.taken.state is State.FAILED
        target_side.assert_no_block_out()


async def test_increments_out_of_turn_or_of_others_change_nothing() -> None:
    fabric = LoopbackFabric(seed=1)
    async with source_engine(fabric) as source, target_engine(fabric) as target_side:
        push = Push(source, target_side)
        await push.some(64)
        half = source.links[0]._driver.source
        ((peer, attempt),) = half._works["i:1"].outgoing
        for number, other in ((1, 0), (3, 0), (limits.MAX_INCREMENTS, 0), (2, 1), (2, 1 << 62)):
            advance = wire.Advance(
                attempt=attempt + other, number=number, frontier=Frontier.whole(TOKENS), blocks=((),), total_bytes=9
            )
            half.sessions.send(peer, advance)
        for message in (
            wire.Landed(attempt=attempt, increments=limits.MAX_INCREMENTS),
            wire.Landed(attempt=attempt + 1, increments=1),
        ):
            target_side.links[0]._driver.target.sessions.send(str(source.roster.place(0)), message)
        await until(lambda: source.links[0].stats().counters["messages_late"] == 1)  # the last of them
        push.given.ready(tokens=TOKENS)
        push.given.seal()
        await push.taken.wait()
        target_side.assert_holds(PROMPT, push.into)
        await push.given.wait()
        source.assert_no_block_out()
