"""The bridge: both pumps, both flows, each end polled once, refusals that end parts, close, fork."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest
from engines import IDENTITY

from kvlink import Bridge, Caches, Config, Offer, Part, Place, Roster, Standing, State, Ticket
from kvlink.cli.bench.content import SOURCE_CANARY, TARGET_CANARY, CacheContent, Prompt
from kvlink.errors import CancelledError, ClosedError, ConfigError, ConflictError, LayoutError, UnknownRequestError
from kvlink.layout import DType, heads_of_rank, standard_spec
from kvlink.transports.base import Transport
from kvlink.transports.faults import DelayChunk, FailRead, Fault
from kvlink.transports.loopback import LoopbackTransport
from kvlink.transports.loopback_fabric import LoopbackFabric

PROMPT = Prompt(seed=7, tokens=75)
FROM, INTO = (9, 2, 17, 4, 11), (3, 8, 13, 18, 23)


@dataclass
class Rank:
    """A bridge, its memory, and what it has returned so far."""

    bridge: Bridge
    content: CacheContent
    ended: list[Part] = field(default_factory=list)

    @property
    def roster(self) -> Roster:
        return Roster.of([self.bridge.card])

    def offer(self, key: str, **fields: object) -> Offer:
        return Offer(key=key, roster=self.roster, blocks=(FROM,), tokens=PROMPT.tokens, **fields)

    def assert_no_block_out(self) -> None:
        memory = self.bridge.stats().memory
        assert (memory.held, memory.leased, memory.reserved, memory.landed, memory.draining) == (0, 0, 0, 0, 0)


class Pair:
    """Two bridges in this process. The loopback's ends belong to one thread, so there both are run by `poll`."""

    def __init__(self, kind: str, faults: Sequence[Fault] = ()) -> None:
        self.pump = "thread" if kind == "ucx thread" else "caller"
        self._fabric = LoopbackFabric(1, faults) if kind == "loopback" else None
        self.source = self._open("prefill", "nhd", SOURCE_CANARY)
        self.target = self._open("decode", "hnd", TARGET_CANARY)
        self.source.content.fill(PROMPT, FROM)

    def _open(self, engine: str, layout: str, canary: int, tp: tuple[int, int] = (0, 1)) -> Rank:
        place = Place(engine=engine, incarnation="1", tp_rank=tp[0], tp_size=tp[1])
        spec = standard_spec(
            layout,
            identity=IDENTITY,
            place=place,
            layers=range(IDENTITY.num_layers),
            heads=heads_of_rank(IDENTITY.num_kv_heads, tp[1], tp[0]),
            block_size=16,
            num_blocks=32,
            dtype=DType.BFLOAT16,
        )
        caches = Caches.standard(spec)
        content = CacheContent(spec, [region.array for region in caches.regions], canary)
        content.wipe()
        transports: list[Transport] | None = None
        if self._fabric is not None:
            transports = [LoopbackTransport(self._fabric, str(place))]
        return Rank(Bridge.open(Config(), caches, pump=self.pump, transports=transports), content)

    def poll(self) -> None:
        for rank in (self.source, self.target):
            rank.ended += rank.bridge.poll()

    def until(self, condition: Callable[[], bool], timeout_seconds: float = 10.0) -> None:
        deadline = time.monotonic() + timeout_seconds
        while not condition():
            assert time.monotonic() < deadline
            self.poll()
            time.sleep(0.001)

    def run(self, *parts: Part) -> None:
        """Poll until all of ``parts`` have been returned; each once."""
        self.until(lambda: all(part in self.source.ended + self.target.ended for part in parts))
        self.poll()
        ended = self.source.ended + self.target.ended
        assert len(ended) == len(set(map(id, ended)))

    def close(self) -> None:
        self.target.bridge.close(0)
        self.source.bridge.close(0)


KINDS = ["loopback", "ucx caller", "ucx thread"]


@pytest.fixture(params=KINDS)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    opened = Pair(request.param)
    yield opened
    opened.close()


@pytest.fixture
def threaded() -> Iterator[Pair]:
    opened = Pair("ucx thread")
    yield opened
    opened.close()


@pytest.fixture
def stuck() -> Iterator[Pair]:
    """A transfer that starts here stays in its middle."""
    opened = Pair("loopback", [DelayChunk(steps=1 << 40)])
    yield opened
    opened.close()


def fetch_stuck(pair: Pair, key: str = "1:stuck") -> tuple[Part, Part]:
    offer = pair.source.offer(key, ttl_seconds=1.0)
    published = pair.source.bridge.publish(offer)
    fetched = pair.target.bridge.fetch(offer, (INTO,), deadline_seconds=60)
    pair.until(lambda: fetched.state >= State.MOVING)
    return published, fetched


def test_fetch(pair: Pair) -> None:
    offer = pair.source.offer("1:fetch")
    published = pair.source.bridge.publish(offer)
    fetched = pair.target.bridge.fetch(offer, (INTO,), deadline_seconds=10)
    pair.run(published, fetched)
    assert (published.state, fetched.state) == (State.DONE, State.DONE)
    assert pair.target.content.check(PROMPT, INTO) is None
    pair.target.bridge.release(fetched.key)
    pair.target.assert_no_block_out()
    pair.source.assert_no_block_out()


def test_push(pair: Pair) -> None:
    ticket = Ticket(key="1:push", roster=pair.target.roster, blocks=(), tokens=PROMPT.tokens)
    expected = pair.target.bridge.expect(ticket, pair.source.roster, (INTO,), deadline_seconds=10)
    announced = pair.source.bridge.announce("1:push", ttl_seconds=10)
    pair.until(lambda: expected.state is State.READY)
    announced.ready(blocks=(FROM,), tokens=PROMPT.tokens)
    announced.seal()
    pair.run(expected, announced)
    assert (expected.state, announced.state) == (State.DONE, State.DONE)
    assert pair.target.content.check(PROMPT, INTO) is None
    pair.source.assert_no_block_out()


def test_a_push_that_is_streamed(pair: Pair) -> None:
    """What an engine says from its own thread, in one breath or not; blocks as they come."""
    ticket = Ticket(key="1:push", roster=pair.target.roster, blocks=(), tokens=PROMPT.tokens)
    expected = pair.target.bridge.expect(ticket, pair.source.roster, (INTO,), deadline_seconds=10)
    announced = pair.source.bridge.announce("1:push", ttl_seconds=10, max_tokens=PROMPT.tokens)
    pair.until(lambda: expected.state is State.READY)
    announced.ready(tokens=16, layers=1, blocks=(list(FROM[:1]),))
    announced.ready(layers=2)
    pair.until(lambda: expected.state is State.MOVING)
    announced.ready(tokens=16)
    announced.ready(tokens=PROMPT.tokens, blocks=(FROM,))
    announced.seal()
    pair.run(expected, announced)
    assert (expected.state, announced.state) == (State.DONE, State.DONE)
    assert "exposed" in expected.result.phases
    assert pair.target.content.check(PROMPT, INTO) is None
    pair.source.assert_no_block_out()


def test_a_request_with_a_replica_and_its_recovery_point(pair: Pair) -> None:
    with pytest.raises(ConfigError):
        pair.source.bridge.publish(pair.source.offer("1:r"), replicas=-1)
    offer = pair.source.offer("1:r")
    published = pair.source.bridge.publish(offer, replicas=1)
    fetched = pair.target.bridge.fetch(offer, (INTO,), deadline_seconds=10)
    pair.run(fetched)
    assert pair.target.content.check(PROMPT, INTO) is None
    pair.target.bridge.release(fetched.key)
    again = pair.target.bridge.fetch(published.replicas[0], (INTO,), deadline_seconds=10)
    pair.run(published, again)
    assert (published.state, again.state) == (State.DONE, State.DONE)
    pair.source.assert_no_block_out()
    point = pair.source.bridge.recovery_point("1:r")
    assert (point.standing, point.replicas[0].key) == (Standing.INSTALLED, again.key)
    pair.source.bridge.release("1:r")
    with pytest.raises(UnknownRequestError):
        pair.source.bridge.recovery_point("1:r")


def test_two_ranks_that_learn_of_each_other_after_opening() -> None:
    pair = Pair("ucx thread")
    pair.target.bridge.close(0)
    targets = [pair._open("decode", "hnd", TARGET_CANARY, (rank, 2)) for rank in range(2)]
    try:
        roster = Roster.of(target.bridge.card for target in targets)
        for target in targets:
            target.bridge.set_siblings(roster)
        offer = pair.source.offer("1:tp2")
        published = pair.source.bridge.publish(offer)
        for target in targets:
            target.bridge.fetch(offer, (INTO,), deadline_seconds=10)
        pair.until(lambda: published.state.ended and all(target.bridge.stats().parts_live == 0 for target in targets))
        assert published.state is State.DONE
        assert [target.content.check(PROMPT, INTO) for target in targets] == [None, None]
    finally:
        for target in targets:
            target.bridge.close(0)
        pair.source.bridge.close(0)


def test_poll_returns_at_most_the_limit_and_stays_readable_for_the_rest(threaded: Pair) -> None:
    bridge = threaded.source.bridge
    parts = [bridge.publish(threaded.source.offer(f"1:limit{index}")) for index in range(5)]
    for part in parts:
        bridge.cancel(part, "enough")
    threaded.until(lambda: bridge.stats().parts_live == 0)
    ended = [*threaded.source.ended]
    while select.select([bridge], [], [], 0)[0]:
        batch = bridge.poll(limit=2)
        assert len(batch) <= 2
        ended += batch
    assert sorted(part.key for part in ended) == [part.key for part in parts]


def test_its_descriptor_wakes_a_select(threaded: Pair) -> None:
    bridge = threaded.source.bridge
    part = bridge.publish(threaded.source.offer("1:wake"))
    assert not select.select([bridge], [], [], 0)[0]
    threading.Timer(0.05, bridge.cancel, (part, "woken")).start()
    assert select.select([bridge], [], [], 10)[0]
    assert bridge.poll() == [part]
    assert not select.select([bridge], [], [], 0)[0]


def test_a_refused_verb_ends_its_part(pair: Pair) -> None:
    first = pair.source.bridge.publish(pair.source.offer("1:twice"))
    second = pair.source.bridge.publish(pair.source.offer("1:twice"))
    third = pair.target.bridge.fetch(pair.source.offer("1:what"), ("no block",), deadline_seconds=10)
    pair.run(second, third)
    assert second.state is third.state is State.FAILED
    assert isinstance(second.result.error, ConflictError)
    assert isinstance(third.result.error, LayoutError)
    assert first.state is State.READY
    pair.target.assert_no_block_out()


def test_b5_a_bad_frontier_fails_the_part_and_its_target_is_told(pair: Pair) -> None:
    ticket = Ticket(key="1:bad", roster=pair.target.roster, blocks=(), tokens=PROMPT.tokens)
    expected = pair.target.bridge.expect(ticket, pair.source.roster, (INTO,), deadline_seconds=10)
    announced = pair.source.bridge.announce("1:bad", ttl_seconds=10, max_tokens=PROMPT.tokens)
    pair.until(lambda: expected.state is State.READY)
    announced.ready(blocks=(FROM,), tokens=PROMPT.tokens + 1)
    pair.run(announced, expected)
    assert announced.state is expected.state is State.FAILED
    assert isinstance(announced.result.error, LayoutError)
    assert isinstance(expected.result.error, LayoutError)
    pair.source.assert_no_block_out()
    pair.target.assert_no_block_out()
    again = pair.source.bridge.announce("1:again", ttl_seconds=10)
    again.seal()  # nothing was made ready
    pair.run(again)
    assert isinstance(again.result.error, LayoutError)


def test_cancel_ends_both_sides(stuck: Pair) -> None:
    published, fetched = fetch_stuck(stuck)
    stuck.source.bridge.cancel(published, "prefill aborted")
    stuck.run(published, fetched)
    for part in (published, fetched):
        assert part.state is State.CANCELLED
        assert isinstance(part.result.error, CancelledError)
        assert "prefill aborted" in str(part.result.error)
    stuck.source.assert_no_block_out()
    stuck.target.assert_no_block_out()


def test_quiesce_blocks_until_no_block_is_touched(stuck: Pair) -> None:
    _, fetched = fetch_stuck(stuck)
    assert stuck.target.bridge.quiesce([fetched], timeout_seconds=5)
    assert fetched.state is State.CANCELLED
    stuck.target.assert_no_block_out()
    stuck.run(fetched)


def test_close_says_what_it_cut_and_poll_still_tells_their_ends(stuck: Pair) -> None:
    _, fetched = fetch_stuck(stuck)
    report = stuck.target.bridge.close(0.05)
    assert report.cut == ("1:stuck",)
    assert stuck.target.bridge.poll() == [fetched]
    assert fetched.state is State.CANCELLED
    assert stuck.target.bridge.poll() == []
    assert stuck.target.bridge.close() is report
    with pytest.raises(ClosedError):
        stuck.target.bridge.fetch(stuck.source.offer("1:late"), (INTO,), deadline_seconds=10)
    with pytest.raises(ClosedError):
        stuck.target.bridge.fileno()


def test_threads_that_close_at_once_all_get_the_one_report(threaded: Pair) -> None:
    bridge, start = threaded.target.bridge, threading.Barrier(4)
    reports = []

    def close() -> None:
        start.wait(10)
        reports.append(bridge.close(0.05))

    threads = [threading.Thread(target=close) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(reports) == 4
    assert all(report is reports[0] for report in reports)


def test_what_was_submitted_before_a_close_gets_its_end(threaded: Pair) -> None:
    bridge = threaded.source.bridge
    parts = [bridge.publish(threaded.source.offer(f"1:racing{index}")) for index in range(20)]
    bridge.close(0)
    assert {part.key for part in bridge.poll()} == {part.key for part in parts}


def test_use_after_a_fork_raises_and_leaves_the_parent_working(pair: Pair) -> None:
    part = pair.source.bridge.publish(pair.source.offer("1:forked"))
    bridge = pair.source.bridge
    calls: list[Callable[[], object]] = [
        lambda: bridge.publish(pair.source.offer("1:other")),
        lambda: bridge.cancel(part, "from a child"),
        bridge.poll,
        bridge.fileno,
        bridge.stats,
        bridge.close,
    ]
    child = os.fork()
    if child == 0:  # nothing but an exit code leaves this process
        raised = 0
        try:
            for call in calls:
                try:
                    call()
                except ClosedError:
                    raised += 1
        finally:
            os._exit(raised)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == len(calls)
    fetched = pair.target.bridge.fetch(pair.source.offer("1:forked"), (INTO,), deadline_seconds=10)
    pair.run(part, fetched)
    assert fetched.state is State.DONE


def test_tries_of_a_request_are_one_part_with_fresh_blocks_each() -> None:
    """G2: and the failed try's blocks come back once, before the end is told."""
    pair = Pair("loopback", [FailRead(nth=1)])
    try:
        offer = pair.source.offer("i:t")
        published = pair.source.bridge.publish(offer)
        rooms, back = iter([INTO, (0, 1, 5, 6, 7)]), []
        part = pair.target.bridge.fetch_with_retries(
            offer, lambda _offer: (next(rooms),), give_back=back.append, deadline_seconds=10
        )
        pair.run(part, published)
        assert part.state is State.DONE
        assert part.result is not None
        assert (part.result.tries, part.result.attempts) == (2, 2)
        assert back == [(INTO,)]
        assert pair.target.content.check(PROMPT, (0, 1, 5, 6, 7)) is None
        pair.target.assert_no_block_out()
    finally:
        pair.close()


@pytest.mark.parametrize("started", [False, True])
def test_a_request_of_several_tries_is_cancelled_with_the_try_that_runs(started: bool) -> None:
    """C6: the end is told once, after the cut-off, and nothing is tried again."""
    pair = Pair("loopback", [DelayChunk(steps=10**9)])
    try:
        offer = pair.source.offer("i:t")
        pair.source.bridge.publish(offer)
        back = []
        part = pair.target.bridge.fetch_with_retries(
            offer, lambda _offer: (INTO,), give_back=back.append, deadline_seconds=60
        )
        if started:
            pair.until(lambda: pair.target.bridge.stats().memory.reserved > 0)
        pair.target.bridge.cancel(part, "the user left")
        pair.run(part)
        assert part.state is State.CANCELLED
        assert len(back) == int(started)
        pair.target.assert_no_block_out()
        assert pair.target.bridge.stats().counters["fetches_retried"] == 0
    finally:
        pair.close()


def test_what_the_callers_own_functions_raise_ends_the_part() -> None:
    pair = Pair("loopback")
    try:
        part = pair.target.bridge.fetch_with_retries(
            pair.source.offer("i:t"), lambda _offer: 1 / 0, give_back=print, deadline_seconds=10
        )
        pair.run(part)
        assert part.state is State.FAILED
        assert "ZeroDivisionError" in str(part.result.error)
    finally:
        pair.close()
