"""Retries: one table over errors, a policy within bounds, and fetches that are tried again into fresh blocks."""

from __future__ import annotations

import asyncio

import hypothesis.strategies as st
import pytest
from engines import Engine, source_engine, target_engine, until
from hypothesis import given

from kvlink import Offer, RetryPolicy, State, errors
from kvlink.cli.bench.content import Prompt
from kvlink.errors import (
    BusyError,
    ConfigError,
    DeadlineError,
    IndeterminateError,
    IntegrityError,
    KVLinkError,
    MismatchError,
    TransferError,
    TransportError,
    UnknownRequestError,
)
from kvlink.protocol import AGAIN, Again, again
from kvlink.transports.base import TransportFull
from kvlink.transports.faults import DelayChunk, FailRead, FlipByte
from kvlink.transports.loopback_fabric import LoopbackFabric

PROMPT = Prompt(seed=11, tokens=75)
FROM = (9, 2, 17, 4, 11)
QUICK = RetryPolicy(first_pause_seconds=0.001, max_pause_seconds=0.01)
ERRORS = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, KVLinkError)]


# --- the table and the policy ---------------------------------------------------------------------------------------


def test_the_table_has_one_row_for_every_error_and_agrees_with_what_the_classes_say() -> None:
    assert set(AGAIN) == set(ERRORS)
    for cls in ERRORS:
        if cls.default_retryable:
            assert AGAIN[cls] is not Again.NEVER, cls
        elif cls not in (KVLinkError, TransferError):  # their own word decides
            assert AGAIN[cls] is not Again.HERE, cls


def test_an_error_may_take_back_that_it_is_worth_a_try_but_never_promise_it() -> None:
    assert again(TransportError("refused", retryable=False)) is Again.NEVER
    assert again(TransferError("replaced", retryable=True)) is Again.HERE
    assert again(TransferError("whatever")) is Again.NEVER
    assert again(TransportFull("full")) is Again.HERE
    assert again(MismatchError("model", "a", "b")) is Again.ELSEWHERE


def test_g3_what_is_indeterminate_is_never_tried_again_whatever_it_says_of_itself() -> None:
    # G3
    assert QUICK.pause(IndeterminateError("?", retryable=True), tries=1, elapsed_seconds=0, draw=0) is None


@given(
    tries=st.integers(1, 12),
    elapsed=st.floats(0, 100),
    draw=st.floats(0, 1, exclude_max=True),
    hint=st.floats(0, 10),
    jitter=st.floats(0, 1),
)
def test_pauses_stay_within_count_time_and_growth(tries, elapsed, draw, hint, jitter) -> None:
    policy = RetryPolicy(
        max_tries=8, total_seconds=40, first_pause_seconds=0.2, max_pause_seconds=3, jitter=jitter
    )  # fmt: skip
    error = BusyError("full", retry_after_seconds=hint)
    pause = policy.pause(error, tries=tries, elapsed_seconds=elapsed, draw=draw)
    if pause is None:
        assert tries >= 8 or elapsed + hint + 3 >= 40
        return
    assert tries < 8
    assert elapsed + pause < 40
    full = min(0.2 * 2 ** (tries - 1), 3)
    assert hint + full * (1 - jitter) - 1e-9 <= pause <= hint + full + 1e-9


def test_a_policy_out_of_its_range_is_refused() -> None:
    for wrong in ({"max_tries": 0}, {"total_seconds": 0}, {"first_pause_seconds": 9.0}, {"jitter": 1.5}):
        with pytest.raises(ConfigError):
            RetryPolicy(**wrong)


# --- over the link --------------------------------------------------------------------------------------------------


class Allocator:
    """An engine's: never gives a block twice, and knows what came back."""

    def __init__(self, size: int = 5) -> None:
        self.free = list(range(32))
        self.size = size
        self.given: list[tuple[int, ...]] = []
        self.back: list[tuple[int, ...]] = []

    async def take(self, _offer: Offer) -> tuple[tuple[int, ...], ...]:
        blocks = tuple(self.free[: self.size])
        del self.free[: self.size]
        self.given.append(blocks)
        return (blocks,)

    def give_back(self, blocks) -> None:
        self.back.append(blocks[0])


def published(source: Engine, key: str) -> Offer:
    source.fill(PROMPT, FROM)
    offer = source.offer(key, FROM, PROMPT.tokens)
    for link in source.links:
        link.publish(offer)
    return offer


async def test_g2_a_retry_is_a_fresh_attempt_into_fresh_blocks() -> None:
    """G2: and the blocks of the failed tries come back, each once, after their cut-off."""
    fabric = LoopbackFabric(seed=1, faults=[FailRead(nth=1), FlipByte(chunk=0, read=2)])
    async with source_engine(fabric) as source, target_engine(fabric) as target:
        offer, engine = published(source, "i:r"), Allocator()
        (link,) = target.links

        def give_back(blocks) -> None:
            memory = link.stats().memory
            assert (memory.reserved, memory.landed, memory.draining) == (0, 0, 0)
            engine.give_back(blocks)

        result = await link.fetch_with_retries(
            offer, engine.take, give_back=give_back, deadline_seconds=20, policy=QUICK
        )
        assert (result.state, result.tries, result.attempts, result.legs) == (State.DONE, 3, 3, 1)
        assert engine.back == engine.given[:2]
        assert target.ranks[0].content.check(PROMPT, engine.given[2]) is None
        counters = link.stats().counters
        assert (counters["fetches_retried"], counters["attempts_started"], counters["sources_changed"]) == (2, 3, 0)


async def test_retries_end_with_the_policys_count_and_say_so() -> None:
    fabric = LoopbackFabric(seed=2, faults=[FlipByte(chunk=0)])
    async with source_engine(fabric) as source, target_engine(fabric) as target:
        offer, engine = published(source, "i:r"), Allocator()
        with pytest.raises(IntegrityError) as last:
            await target.links[0].fetch_with_retries(
                offer, engine.take, give_back=engine.give_back, deadline_seconds=20, policy=QUICK
            )
        assert "after 3 tries" in last.value.__notes__[0]
        assert engine.back == engine.given
        target.assert_no_block_out()


async def test_what_makes_no_sense_is_not_tried_again() -> None:
    fabric = LoopbackFabric(seed=3)
    async with source_engine(fabric, settings={"park_seconds": 0.05}) as source, target_engine(fabric) as target:
        engine = Allocator()
        unknown = source.offer("i:nobody", FROM, PROMPT.tokens)
        with pytest.raises(UnknownRequestError):
            await target.links[0].fetch_with_retries(
                unknown, engine.take, give_back=engine.give_back, deadline_seconds=20, policy=QUICK
            )
        assert len(engine.given) == 1


async def test_another_source_is_the_callers_choice() -> None:
    """Its policy is asked before each retry, also where only another source can help."""
    fabric = LoopbackFabric(seed=4)
    settings = {"park_seconds": 0.05}
    async with (
        source_engine(fabric, settings=settings) as source,
        Engine("spare", fabric, canary=source.canary) as spare,
        target_engine(fabric) as target,
    ):
        engine, asked = Allocator(), []
        gone, there = source.offer("i:gone", FROM, PROMPT.tokens), published(spare, "s:there")

        def next_offer(last: Offer, error: KVLinkError) -> Offer:
            asked.append((last.key, error.code))
            return there

        (link,) = target.links
        result = await link.fetch_with_retries(
            gone, engine.take, give_back=engine.give_back, deadline_seconds=20, policy=QUICK, next_offer=next_offer
        )
        assert asked == [("i:gone", "unknown_request")]
        assert (result.key, result.tries) == ("s:there", 2)
        assert link.stats().counters["sources_changed"] == 1


async def test_one_rank_of_several_does_not_turn_to_another_source_alone() -> None:
    fabric = LoopbackFabric(seed=5)
    async with source_engine(fabric) as source, target_engine(fabric, tp=2) as target:
        engine = Allocator()
        with pytest.raises(ConfigError, match="2 ranks"):
            await target.links[0].fetch_with_retries(
                source.offer("i:r", FROM, PROMPT.tokens),
                engine.take,
                give_back=engine.give_back,
                deadline_seconds=20,
                next_offer=lambda last, _error: last,
            )
        assert engine.given == []


async def test_each_rank_of_a_part_may_have_its_own_tries() -> None:
    fabric = LoopbackFabric(seed=6, faults=[FailRead(nth=1)])
    async with source_engine(fabric) as source, target_engine(fabric, tp=2) as target:
        offer = published(source, "i:r")
        engines = [Allocator(), Allocator()]
        results = await asyncio.gather(
            *(
                link.fetch_with_retries(
                    offer, engine.take, give_back=engine.give_back, deadline_seconds=20, policy=QUICK
                )
                for link, engine in zip(target.links, engines, strict=True)
            )
        )
        assert sorted(result.tries for result in results) == [1, 2]
        for rank, engine in zip(target.ranks, engines, strict=True):
            assert rank.content.check(PROMPT, engine.given[-1]) is None


async def test_a_target_without_room_is_tried_again_after_its_hint() -> None:
    """Reservations go with retries: room comes back by itself, and *busy* counts as a try."""
    fabric = LoopbackFabric(seed=7)
    async with source_engine(fabric) as source, target_engine(fabric) as target:
        offer = published(source, "i:r")
        (link,) = target.links
        link.lend([range(8)])
        await link.reserve("i:other", tokens=100, ttl_seconds=0.05)

        async def take(offer: Offer):
            return (await link.reserve(offer.key, tokens=offer.tokens)).blocks

        result = await link.fetch_with_retries(
            offer, take, give_back=lambda _blocks: None, deadline_seconds=20, policy=QUICK
        )
        assert result.tries == 2


async def test_a_cancelled_wait_gives_the_blocks_back_after_the_cut_off() -> None:
    fabric = LoopbackFabric(seed=8, faults=[DelayChunk(steps=1_000_000)])
    async with source_engine(fabric) as source, target_engine(fabric) as target:
        offer, engine = published(source, "i:r"), Allocator()
        (link,) = target.links
        task = asyncio.create_task(
            link.fetch_with_retries(offer, engine.take, give_back=engine.give_back, deadline_seconds=20)
        )
        await until(lambda: link.stats().memory.reserved > 0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine.back == engine.given
        target.assert_no_block_out()


async def test_all_tries_together_have_their_bound() -> None:
    fabric = LoopbackFabric(seed=9, faults=[DelayChunk(steps=1_000_000)], cut_off_grace_seconds=0.01)
    async with source_engine(fabric) as source, target_engine(fabric) as target:
        offer, engine = published(source, "i:r"), Allocator()
        policy = RetryPolicy(max_tries=9, total_seconds=0.5, first_pause_seconds=0.001, max_pause_seconds=0.01)
        (link,) = target.links
        began = asyncio.get_running_loop().time()
        with pytest.raises(DeadlineError):
            await link.fetch_with_retries(
                offer, engine.take, give_back=engine.give_back, deadline_seconds=0.2, policy=policy
            )
        assert 2 <= len(engine.given) <= 3  # 0.2 s, 0.2 s, and what was left
        assert asyncio.get_running_loop().time() - began < 3
