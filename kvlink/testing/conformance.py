"""The rules every transport keeps, as tests that run against any of them (see `kvlink.transports.base`).

The author of a transport writes a `kvlink.testing.harness.Harness`, and this::

    from kvlink.testing.conformance import Ability, Harness, TransportConformance

    class TestMyTransport(TransportConformance):
        cannot = {Ability.FLIP: "nothing comes between this wire and the memory"}

        def open_harness(self) -> Harness:
            return MyHarness()

and, in conftest.py, ``pytest.register_assert_rewrite("kvlink.testing.conformance")`` for readable failures.

Tests that need an ability named in ``cannot`` are not there, rather than skipped. Needs ``kvlink[test]``.
A name in brackets (A1, C7) is the failure of other systems that the rule is there for.
"""

from __future__ import annotations

import select
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import ClassVar, TypeVar

import numpy as np
import pytest
import xxhash

from kvlink.errors import TransportError
from kvlink.limits import LEAF_BYTES, MAX_ACTIVE_READS
from kvlink.plan import CopyPlan
from kvlink.testing.harness import (
    CHUNK_LEAVES,
    MEMORY_BYTES,
    Ability,
    Harness,
    Source,
    expected,
    moved,
    scattered_plan,
    wire_bytes,
)
from kvlink.transports.base import Completion, CompletionKind, Outcome, Read, TransportFull

__all__ = ["Ability", "Harness", "Source", "TransportConformance"]

MARK = 0xA5
"""What the target's memory is filled with after a cut-off: any byte that lands late shows."""
LATE_SECONDS = 0.3
"""How long late bytes are waited for."""

Rule = TypeVar("Rule", bound=Callable[..., None])


def needs(ability: Ability) -> Callable[[Rule], Rule]:
    """Mark a rule that only a harness with this ability can check."""

    def mark(rule: Rule) -> Rule:
        vars(rule)["kvlink_needs"] = ability
        return rule

    return mark


def xxh3(data: bytes) -> int:
    """XXH3-64, from another implementation than ours."""
    return xxhash.xxh3_64_intdigest(data)


def root_of(wire: bytes) -> int:
    """The root digest of bytes in wire order, as docs/architecture.md defines it."""
    leaves = (xxh3(wire[start : start + LEAF_BYTES]) for start in range(0, len(wire), LEAF_BYTES))
    return xxh3(b"".join(leaf.to_bytes(8, "little") for leaf in leaves))


def kinds(completions: list[Completion]) -> list[CompletionKind]:
    """What completions are about, in order."""
    return [completion.kind for completion in completions]


class TransportConformance:
    """Subclass, name it ``Test...``, and give it `open_harness`.

    Attributes:
        cannot: abilities the harness lacks, each with the reason.
    """

    cannot: ClassVar[Mapping[Ability, str]] = {}

    def __init_subclass__(cls) -> None:
        for name in dir(cls):
            if getattr(getattr(cls, name), "kvlink_needs", None) in cls.cannot:
                setattr(cls, name, None)

    @abstractmethod
    def open_harness(self) -> Harness:
        """A fresh connected pair; the kit closes it."""

    @pytest.fixture
    def harness(self) -> Iterator[Harness]:
        """A fresh pair, with random bytes on both sides."""
        with self.open_harness() as harness:
            random = np.random.default_rng(2)
            harness.source.memory[:] = random.integers(0, 256, MEMORY_BYTES, dtype=np.uint8)
            harness.memory[:] = random.integers(0, 256, MEMORY_BYTES, dtype=np.uint8)
            yield harness

    # --- moving -------------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("integrity", [True, False])
    def test_bytes_land_exactly_where_the_plan_says(self, harness: Harness, *, integrity: bool) -> None:
        """OK means: the plan's bytes are there, every other byte of the region is as it was, and the root is right."""
        plan = scattered_plan()
        after = expected(plan, harness.source.memory, harness.memory)
        harness.source.expose(harness.exposure(1, plan, integrity=integrity))
        end = harness.end_of(harness.start_read(1, plan, integrity=integrity))
        assert (end.kind, end.peer, end.attempt) == (CompletionKind.READ, harness.source.name, 1)
        assert (end.outcome, end.detail) == (Outcome.OK, "")
        assert (end.bytes_moved, end.rereads, end.bad_leaf) == (plan.total_bytes, 0, None)
        assert end.root == (root_of(wire_bytes(plan, harness.source.memory)) if integrity else None)
        assert np.array_equal(harness.memory, after)

    def test_an_empty_plan_completes(self, harness: Harness) -> None:
        """Nothing to move is moved, and has the root of zero bytes."""
        plan = CopyPlan(segments=(), total_bytes=0)
        harness.source.expose(harness.exposure(1, plan))
        end = harness.end_of(harness.start_read(1, plan))
        assert (end.outcome, end.bytes_moved, end.root) == (Outcome.OK, 0, root_of(b""))

    def test_reads_run_side_by_side(self, harness: Harness) -> None:
        """Each of several reads ends once, with its own bytes."""
        plans = {attempt: scattered_plan(lane) for attempt, lane in ((1, 0), (2, 1))}
        after = harness.memory
        for attempt, plan in plans.items():
            after = expected(plan, harness.source.memory, after)
            harness.source.expose(harness.exposure(attempt, plan))
        ops = {attempt: harness.start_read(attempt, plan) for attempt, plan in plans.items()}
        for attempt, op in ops.items():
            assert harness.end_of(op).root == root_of(wire_bytes(plans[attempt], harness.source.memory))
        harness.let_pass(0.05)
        assert sorted(completion.op for completion in harness.seen) == sorted(ops.values())
        assert np.array_equal(harness.memory, after)

    # --- refusals -----------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("offsets", [(MEMORY_BYTES, 0), (0, MEMORY_BYTES)], ids=["source", "target"])
    def test_a_plan_that_leaves_a_region_is_refused(self, harness: Harness, offsets: tuple[int, int]) -> None:
        """D6: refused before anything starts, on whichever side it is that it leaves."""
        self._refused(harness, lambda: harness.start_read(1, moved(scattered_plan(), offsets)))

    def test_an_exposure_that_leaves_a_region_is_refused(self, harness: Harness) -> None:
        """The source checks its own side, too; the attempt is not exposed."""
        plan = moved(scattered_plan(), (MEMORY_BYTES, 0))
        with pytest.raises(TransportError):
            harness.source.expose(harness.exposure(1, plan))
        assert not harness.source.lease(1).held

    def test_a_read_from_a_stranger_is_refused(self, harness: Harness) -> None:
        """A peer that was never connected is an error of the call, not of the transport."""
        plan = scattered_plan()
        stranger = Read(peer="stranger", attempt=1, plan=plan, integrity=True, chunk_leaves=CHUNK_LEAVES, max_rereads=0)
        self._refused(harness, lambda: harness.target.read(stranger))

    def test_a_full_transport_refuses_and_changes_nothing(self, harness: Harness) -> None:
        """TransportFull leaves no trace: every accepted read ends once, and reads are accepted again (C6)."""
        plan = scattered_plan(pieces=1)
        harness.source.stop()
        ops: list[int] = []

        def fill() -> None:
            while len(ops) <= MAX_ACTIVE_READS:
                ops.append(harness.start_read(len(ops) + 1, plan))

        with pytest.raises(TransportFull):
            fill()
        harness.source.resume()
        for op in ops:
            harness.end_of(op)
        harness.let_pass(0.05)
        assert sorted(completion.op for completion in harness.seen) == ops
        self._serves(harness, attempt=5000)

    # --- digest -------------------------------------------------------------------------------------------------------

    @needs(Ability.READ_ELSEWHERE)
    def test_bytes_that_differ_on_every_try_fail_the_read(self, harness: Harness) -> None:
        """E3: re-reads are bounded; the end names the first leaf that differs, and gives no root.

        The source exposes another stretch of its memory under the attempt than the target reads.
        """
        plan = scattered_plan(pieces=3)
        elsewhere = moved(plan, (17, 0))
        harness.source.memory[:] = 0
        first_run = plan.segments[0].pieces[0, 0] + plan.segments[0].bases[0, 1]
        harness.source.memory[first_run + 20] = 1  # one byte of leaf 0 and nothing else tells the two apart
        harness.source.expose(harness.exposure(1, elsewhere))
        end = harness.end_of(harness.start_read(1, plan, max_rereads=2))
        assert (end.outcome, end.bad_leaf, end.rereads, end.root) == (Outcome.DIGEST_MISMATCH, 0, 2, None)

    @needs(Ability.FLIP)
    @pytest.mark.parametrize("chunk", [0, 5, 12])
    def test_a_byte_flipped_on_the_way_is_read_again(self, harness: Harness, chunk: int) -> None:
        """One bad try is found, named, and mended."""
        plan = scattered_plan()
        after = expected(plan, harness.source.memory, harness.memory)
        harness.flip(chunk, on_try=1)
        harness.source.expose(harness.exposure(1, plan))
        end = harness.end_of(harness.start_read(1, plan))
        assert (end.outcome, end.rereads) == (Outcome.OK, 1)
        assert end.bad_leaf is not None
        assert end.bad_leaf // CHUNK_LEAVES == chunk
        assert end.root == root_of(wire_bytes(plan, harness.source.memory))
        assert np.array_equal(harness.memory, after)

    @needs(Ability.FLIP)
    def test_a_byte_flipped_on_every_try_fails_the_read(self, harness: Harness) -> None:
        """Re-reads are bounded per chunk, and the leaf is named."""
        plan = scattered_plan()
        harness.flip(5, on_try=None)
        harness.source.expose(harness.exposure(1, plan))
        end = harness.end_of(harness.start_read(1, plan, max_rereads=3))
        assert (end.outcome, end.rereads, end.root) == (Outcome.DIGEST_MISMATCH, 3, None)
        assert end.bad_leaf is not None
        assert end.bad_leaf // CHUNK_LEAVES == 5

    # --- lease --------------------------------------------------------------------------------------------------------

    def test_the_lease_answers_with_the_root(self, harness: Harness) -> None:
        """While and after the read the lease is held; its root is the one the target found."""
        plan = scattered_plan()
        harness.source.expose(harness.exposure(1, plan))
        assert harness.source.lease(1).held
        end = harness.end_of(harness.start_read(1, plan))
        assert harness.source.lease(1) == harness.source.withdraw(1)
        assert end.root == root_of(wire_bytes(plan, harness.source.memory))

    def test_a_withdrawn_attempt_is_held_no_more(self, harness: Harness) -> None:
        """`withdraw` gives the last word once; after it, and for attempts never exposed, nothing is held."""
        plan = scattered_plan()
        harness.source.expose(harness.exposure(1, plan))
        assert harness.source.withdraw(1).held
        assert not harness.source.withdraw(1).held
        assert not harness.source.lease(1).held
        assert not harness.source.withdraw(99).held
        end = harness.end_of(harness.start_read(1, plan))
        assert end.outcome is Outcome.SOURCE_FAILED

    def test_a_read_of_what_is_not_exposed_fails(self, harness: Harness) -> None:
        """C6: the source says so, and the target's read ends."""
        end = harness.end_of(harness.start_read(1, scattered_plan()))
        assert (end.outcome, end.root) == (Outcome.SOURCE_FAILED, None)

    def test_a_lapsed_lease_stays_lapsed(self, harness: Harness) -> None:
        """A6: once unrenewed for its length it never is held again, whoever renews it later; reported once."""
        plan = scattered_plan()
        harness.source.expose(harness.exposure(1, plan, lease_seconds=harness.short_lease_seconds))
        reported = harness.source_event(CompletionKind.LEASE_LAPSED)
        assert [(event.peer, event.attempt) for event in reported] == [(harness.target_name, 1)]
        assert not harness.source.lease(1).held
        assert harness.end_of(harness.start_read(1, plan)).outcome is Outcome.SOURCE_FAILED
        assert not harness.source.lease(1).held
        assert not harness.source.withdraw(1).held
        assert harness.source.completions() == []

    def test_a_lease_lapses_while_its_owner_is_stopped(self, harness: Harness) -> None:
        """C7: time that a stopped source slept through counts, though nobody could renew."""
        plan = scattered_plan()
        harness.source.expose(harness.exposure(1, plan, lease_seconds=harness.short_lease_seconds))
        harness.source.stop()
        harness.let_pass(2 * harness.short_lease_seconds)
        harness.source.resume()
        assert not harness.source.lease(1).held

    # --- cut-off ------------------------------------------------------------------------------------------------------

    def test_cutting_off_what_does_not_run_completes(self, harness: Harness) -> None:
        """Idle, finished, unknown, of a stranger, twice: each cut-off ends once, in OK."""
        plan = scattered_plan()
        harness.source.expose(harness.exposure(1, plan))
        harness.end_of(harness.start_read(1, plan))
        source, target = harness.source.name, harness.target
        attempts = [(source, 1), (source, 1), (source, 77), ("stranger", 1)]
        ops = [target.cut_off(peer, attempt) for peer, attempt in attempts]
        for op, (peer, attempt) in zip(ops, attempts, strict=True):
            end = harness.end_of(op)
            assert (end.kind, end.outcome) == (CompletionKind.CUT_OFF, Outcome.OK)
            assert (end.peer, end.attempt) == (peer, attempt)

    @pytest.mark.parametrize("polls", [0, 1, 2])
    def test_no_byte_lands_after_the_cut_off_of_a_running_read(self, harness: Harness, polls: int) -> None:
        """A1, A2, A5: READ ends first, then CUT_OFF, each once; from then on the blocks are another's."""
        plan = scattered_plan()
        harness.source.expose(harness.exposure(1, plan))
        read = harness.start_read(1, plan)
        for _ in range(polls):
            harness.seen += harness.target.poll()
        self._cut_off_and_watch(harness, read, {Outcome.CUT_OFF, Outcome.OK})
        self._serves(harness, attempt=2)

    @pytest.mark.parametrize("integrity", [True, False])
    def test_no_byte_lands_after_the_cut_off_of_a_stopped_source(self, harness: Harness, *, integrity: bool) -> None:
        """A1, A3: the target's cut-off needs no answer from a source that is stopped, and holds when it resumes."""
        plan = scattered_plan()
        harness.source.expose(harness.exposure(1, plan, integrity=integrity))
        harness.source.stop()
        read = harness.start_read(1, plan, integrity=integrity)
        harness.let_pass(0.05)
        outcomes = {Outcome.CUT_OFF} if integrity else {Outcome.CUT_OFF, Outcome.OK}  # memory may be read all the same
        self._cut_off_and_watch(harness, read, outcomes)

    def test_siblings_of_a_cut_off_read_end_too(self, harness: Harness) -> None:
        """A4: of two reads of a stopped source one is cut off; the other ends by itself, once, and then is quiet."""
        plans = {attempt: scattered_plan(lane) for attempt, lane in ((1, 0), (2, 1))}
        for attempt, plan in plans.items():
            harness.source.expose(harness.exposure(attempt, plan))
        harness.source.stop()
        ops = {attempt: harness.start_read(attempt, plan) for attempt, plan in plans.items()}
        harness.let_pass(0.05)
        assert harness.cut_off(1).outcome is Outcome.OK
        harness.source.resume()
        sibling = harness.end_of(ops[2])
        assert sibling.outcome is not Outcome.CUT_OFF
        after = harness.memory.copy()
        harness.let_pass(LATE_SECONDS)
        assert np.array_equal(harness.memory, after)
        assert [len(harness.of(op)) for op in ops.values()] == [1, 1]

    def test_cut_offs_of_one_attempt_all_complete(self, harness: Harness) -> None:
        """Asked twice while it runs, it ends twice, after the one READ."""
        plan = scattered_plan()
        harness.source.expose(harness.exposure(1, plan))
        harness.source.stop()
        read = harness.start_read(1, plan)
        harness.let_pass(0.05)
        cuts = [harness.target.cut_off(harness.source.name, 1) for _ in range(2)]
        for op in cuts:
            harness.end_of(op)
        assert [completion.op for completion in harness.seen] == [read, *cuts]

    # --- peers --------------------------------------------------------------------------------------------------------

    def test_a_killed_peer_is_lost_once_after_its_reads(self, harness: Harness) -> None:
        """C5, C7: every read ends, then one PEER_LOST; nothing lands later; a successor is served."""
        plans = {attempt: scattered_plan(lane) for attempt, lane in ((1, 0), (2, 1))}
        for attempt, plan in plans.items():
            harness.source.expose(harness.exposure(attempt, plan))
        harness.source.stop()
        ops = [harness.start_read(attempt, plan) for attempt, plan in plans.items()]
        harness.source.kill()
        lost = harness.event(CompletionKind.PEER_LOST)
        assert (lost.op, lost.peer) == (0, harness.source.name)
        assert kinds(harness.seen) == [CompletionKind.READ, CompletionKind.READ, CompletionKind.PEER_LOST]
        assert sorted(completion.op for completion in harness.seen[:2]) == ops
        assert all(completion.outcome is Outcome.PEER_LOST for completion in harness.seen[:2])
        harness.memory[:] = MARK
        assert harness.cut_off(1).outcome is Outcome.OK
        harness.let_pass(LATE_SECONDS)
        assert (harness.memory == MARK).all()
        self._refused(harness, lambda: harness.start_read(3, plans[1]))
        harness.replace_source()
        self._serves(harness, attempt=4)

    def test_a_silent_peer_is_lost_and_may_come_back(self, harness: Harness) -> None:
        """C7: stopped for longer than silence is borne; resumed, nothing lands, its leases are over, and it serves."""
        plan = scattered_plan()
        harness.source.expose(harness.exposure(1, plan))
        harness.source.stop()
        read = harness.start_read(1, plan)
        harness.event(CompletionKind.PEER_LOST)
        assert kinds(harness.seen) == [CompletionKind.READ, CompletionKind.PEER_LOST]
        assert harness.of(read)[0].outcome is Outcome.PEER_LOST
        harness.memory[:] = MARK
        harness.source.resume()
        harness.let_pass(LATE_SECONDS)
        assert (harness.memory == MARK).all()
        reported = harness.source_event(CompletionKind.PEER_LOST)
        assert kinds(reported) == [CompletionKind.LEASE_LAPSED, CompletionKind.PEER_LOST]
        assert not harness.source.lease(1).held
        harness.reconnect()
        self._serves(harness, attempt=2)

    @pytest.mark.parametrize("stopped", [False, True])
    def test_disconnecting_completes(self, harness: Harness, *, stopped: bool) -> None:
        """Its reads end with CUT_OFF, then DISCONNECTED, whether or not the peer answers; the peer loses us."""
        plan = scattered_plan()
        harness.source.expose(harness.exposure(1, plan))
        harness.source.stop()
        read = harness.start_read(1, plan)
        harness.let_pass(0.05)
        if not stopped:
            harness.source.resume()
        end = harness.end_of(harness.target.disconnect(harness.source.name))
        assert (end.kind, end.outcome) == (CompletionKind.DISCONNECTED, Outcome.OK)
        assert kinds(harness.seen) == [CompletionKind.READ, CompletionKind.DISCONNECTED]
        assert stopped is False or harness.of(read)[0].outcome is Outcome.CUT_OFF
        harness.memory[:] = MARK
        harness.source.resume()
        reported = harness.source_event(CompletionKind.PEER_LOST)
        assert kinds(reported) == [CompletionKind.LEASE_LAPSED, CompletionKind.PEER_LOST]
        assert not harness.source.lease(1).held
        harness.let_pass(LATE_SECONDS)
        assert (harness.memory == MARK).all()
        harness.reconnect()
        self._serves(harness, attempt=2)

    def test_connecting_to_nobody_ends(self, harness: Harness) -> None:
        """C2: CONNECTED says so, or PEER_LOST follows; either way no half-open peer is left."""
        end = harness.end_of(harness.connect_to_nobody())
        assert (end.kind, end.peer) == (CompletionKind.CONNECTED, "nobody")
        if end.outcome is Outcome.OK:
            assert harness.event(CompletionKind.PEER_LOST).peer == "nobody"
        self._serves(harness, attempt=1)

    # --- driving ------------------------------------------------------------------------------------------------------

    def test_its_descriptor_is_enough_to_wait_for(self, harness: Harness) -> None:
        """A driver that polls only when the descriptor is readable, or `arm` says so, sees every end."""
        plan, target = scattered_plan(), harness.target
        while not target.arm():
            target.poll()
        assert select.select([target.fileno()], [], [], 0.0)[0] == [], "armed, with nothing to report"
        harness.source.expose(harness.exposure(1, plan))
        read = harness.start_read(1, plan)
        while not harness.of(read):
            if target.arm():
                assert select.select([target.fileno()], [], [], 10.0)[0], "nothing woke the driver"
            harness.seen += target.poll()
        assert harness.of(read)[0].outcome is Outcome.OK

    def test_completions_come_in_order_and_no_more_than_asked_for(self, harness: Harness) -> None:
        """`poll(1)` gives one at a time; while more are waiting, `arm` says so."""
        ops = [harness.target.cut_off(harness.source.name, attempt) for attempt in (11, 12, 13)]
        ended: list[int] = []
        while len(ended) < len(ops):
            while harness.target.arm():  # until the next one is waiting; each of them must come
                assert select.select([harness.target.fileno()], [], [], 10.0)[0], "nothing woke the driver"
            batch = harness.target.poll(1)
            assert len(batch) == 1
            ended.append(batch[0].op)
        assert ended == ops
        assert harness.target.arm()

    def test_every_operation_ends_once(self, harness: Harness) -> None:
        """C5, C6: a few hundred reads, exposed or not, cut off or not, with a loss in between: one end each."""
        random = np.random.default_rng(7)
        ops: list[int] = []
        plan = scattered_plan(pieces=2)
        for attempt in range(1, 121):
            if random.random() < 0.7:
                harness.source.expose(harness.exposure(attempt, plan))
            ops.append(harness.start_read(attempt, plan))
            if random.random() < 0.3:
                ops.append(harness.target.cut_off(harness.source.name, int(random.integers(1, attempt + 1))))
            if random.random() < 0.3:
                harness.seen += harness.target.poll(int(random.integers(1, 5)))
        harness.source.kill()
        ops.append(harness.target.disconnect(harness.source.name))
        for op in ops:
            harness.end_of(op)
        harness.let_pass(0.05)
        ended = sorted(completion.op for completion in harness.seen if completion.op)
        assert ended == ops

    @pytest.mark.parametrize("stopped", [False, True])
    def test_closing_ends_what_runs(self, harness: Harness, *, stopped: bool) -> None:
        """A7: `close` returns with reads running, of a stopped peer too; nothing lands after it; twice is once."""
        plan = scattered_plan()
        harness.source.expose(harness.exposure(1, plan))
        if stopped:
            harness.source.stop()
        harness.start_read(1, plan)
        harness.close_target()
        harness.memory[:] = MARK
        harness.source.resume()
        harness.close_target()
        reported = harness.source_event(CompletionKind.PEER_LOST)
        assert kinds(reported) == [CompletionKind.LEASE_LAPSED, CompletionKind.PEER_LOST]
        assert not harness.source.lease(1).held
        assert (harness.memory == MARK).all()

    # --- shared -------------------------------------------------------------------------------------------------------

    def _refused(self, harness: Harness, call: Callable[[], int]) -> None:
        """The call raises, and nothing comes of it."""
        before, seen = harness.memory.copy(), len(harness.seen)
        with pytest.raises(TransportError):
            call()
        harness.let_pass(0.05)
        assert len(harness.seen) == seen
        assert np.array_equal(harness.memory, before)

    def _serves(self, harness: Harness, attempt: int) -> None:
        """The pair still moves bytes rightly."""
        plan = scattered_plan(1)
        after = expected(plan, harness.source.memory, harness.memory)
        harness.source.expose(harness.exposure(attempt, plan))
        assert harness.end_of(harness.start_read(attempt, plan)).outcome is Outcome.OK
        assert np.array_equal(harness.memory, after)

    def _cut_off_and_watch(self, harness: Harness, read: int, outcomes: set[Outcome]) -> None:
        """Cut off attempt 1, give its blocks to another, let the source go on: no byte changes."""
        cut = harness.cut_off(1)
        harness.memory[:] = MARK
        assert (cut.kind, cut.outcome) == (CompletionKind.CUT_OFF, Outcome.OK)
        assert [completion.op for completion in harness.seen] == [read, cut.op]
        assert harness.of(read)[0].outcome in outcomes
        harness.source.resume()
        harness.let_pass(LATE_SECONDS)
        assert (harness.memory == MARK).all(), "bytes landed after the cut-off"
        assert [completion.op for completion in harness.seen if completion.op] == [read, cut.op]
