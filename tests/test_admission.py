"""Admission: whole demands or nothing, at once or in order, fair between tenants, and never a block too many."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvlink.cluster import Admission, Admitted, Busy, Demand, TooLarge, Waiting

FOREVER = 1e9


def demand(key, *blocks, tenant=None, priority=0, deadline=float("inf"), wait=FOREVER):
    return Demand(key=key, blocks=blocks, tenant=tenant, priority=priority, deadline=deadline, waits_until=wait)


def keys(verdicts, kind):
    return [verdict.key for verdict in verdicts if isinstance(verdict, kind)]


def drained(admission, held):
    """Give back what is held, one by one, and say in which order the rest got in."""
    order, queue = [], list(held)
    while queue:
        came = keys(admission.give_back(queue.pop(0), 1.0), Admitted)
        order += came
        queue += came
    return order


def test_h1_a_demand_gets_all_its_pools_or_nothing_of_any() -> None:
    # H1
    admission = Admission([10, 4])
    assert keys(admission.ask(demand("a", 5, 3), 0), Admitted) == ["a"]
    (verdict,) = admission.ask(demand("b", 5, 2), 0)  # the first pool has room, the second has not
    assert isinstance(verdict, Waiting)
    assert verdict.room.free == admission.room.free == (5, 1)


def test_h1_every_verdict_tells_the_room_as_it_is_then() -> None:
    # H1
    admission = Admission([8])
    rooms = [admission.ask(demand(key, blocks), 0)[0].room for key, blocks in (("a", 5), ("b", 4), ("c", 9))]
    assert [(room.total, room.free, room.waiting) for room in rooms] == [
        ((8,), (3,), 0),
        ((8,), (3,), 1),
        ((8,), (3,), 1),
    ]


def test_h2_what_can_never_fit_is_refused_at_once_and_names_the_pool() -> None:
    # H2
    admission = Admission([10, 4])
    admission.ask(demand("first", 10, 4), 0)
    (verdict,) = admission.ask(demand("huge", 1, 5), 0)
    assert isinstance(verdict, TooLarge)
    assert verdict.pool == 1
    assert "huge" not in admission


def test_h2_what_has_grown_to_fit_is_not_refused() -> None:
    # H2
    admission = Admission([2])
    assert keys(admission.ask(demand("a", 3), 0), TooLarge) == ["a"]
    admission.grow([1])
    assert keys(admission.ask(demand("a", 3), 0), Admitted) == ["a"]


def test_who_does_not_wait_hears_busy_with_a_hint_from_the_rate_at_which_blocks_come_back() -> None:
    admission = Admission([10])
    admission.ask(demand("a", 5), 0)
    admission.ask(demand("b", 5), 0)
    (first,) = admission.ask(demand("c", 4, wait=0), 0)
    assert isinstance(first, Busy)
    assert first.retry_after_seconds == 1.0  # nothing has come back so far
    admission.give_back("a", 10.0)
    admission.ask(demand("d", 5), 10.0)
    (second,) = admission.ask(demand("e", 4, wait=0), 12.0)
    assert second.retry_after_seconds == pytest.approx(4 * 2.0 / 5)


def test_who_does_not_wait_does_not_overtake_who_does() -> None:
    admission = Admission([10])
    admission.ask(demand("a", 8), 0)
    admission.ask(demand("large", 6), 0)
    assert keys(admission.ask(demand("small", 1, wait=0), 0), Busy) == ["small"]
    assert keys(admission.ask(demand("urgent", 1, wait=0, priority=1), 0), Admitted) == ["urgent"]


def test_the_queue_goes_by_priority_then_deadline_then_arrival() -> None:
    admission = Admission([1])
    admission.ask(demand("first", 1), 0)
    for waiting in (
        demand("late", 1, deadline=90),
        demand("soon", 1, deadline=50),
        demand("soon too", 1, deadline=50),
        demand("urgent", 1, priority=3),
    ):
        admission.ask(waiting, 0)
    assert drained(admission, ["first"]) == ["urgent", "soon", "soon too", "late"]


def test_h3_a_tenant_below_its_fair_share_goes_before_one_at_it_whatever_its_priority() -> None:
    # H3
    admission = Admission([4])
    for index in range(4):
        admission.ask(demand(f"a{index}", 1, tenant="a"), 0)
    admission.ask(demand("a4", 1, tenant="a", priority=9), 0)
    admission.ask(demand("b0", 1, tenant="b"), 0)
    assert keys(admission.give_back("a0", 1), Admitted) == ["b0"]


def test_h3_two_tenants_that_both_wait_end_with_half_the_room_each() -> None:
    # H3
    admission = Admission([10])
    for index in range(30):
        admission.ask(demand(f"a{index}", 1, tenant="a", priority=5), 0)
    for index in range(30):
        admission.ask(demand(f"b{index}", 1, tenant="b"), 0)
    for index in range(10):
        admission.give_back(f"a{index}", 1)
    assert (admission.held_by("a"), admission.held_by("b")) == ((5,), (5,))


def test_h3_a_full_queue_makes_room_at_the_expense_of_the_tenant_that_fills_it() -> None:
    # H3
    admission = Admission([1], max_waiting=4)
    admission.ask(demand("first", 1), 0)
    for index in range(4):
        admission.ask(demand(f"a{index}", 1, tenant="a"), 0)
    verdicts = admission.ask(demand("b0", 1, tenant="b"), 0)
    assert keys(verdicts, Busy) == ["a3"]  # the last of a's
    assert keys(verdicts, Waiting) == ["b0"]
    assert keys(admission.ask(demand("a4", 1, tenant="a"), 0), Busy) == ["a4"]
    assert admission.room.waiting == 4


def test_b6_waiting_ends_on_its_own_tick_and_lets_others_in() -> None:
    # B6
    admission = Admission([4])
    admission.ask(demand("a", 2), 0)
    admission.ask(demand("large", 4, wait=5), 0)
    admission.ask(demand("small", 2), 0)
    assert admission.next_timer() == 5
    assert admission.expire(4.9) == ()
    verdicts = admission.expire(5)
    assert keys(verdicts, Busy) == ["large"]
    assert keys(verdicts, Admitted) == ["small"]


def test_a_demand_does_not_wait_past_its_deadline() -> None:
    admission = Admission([1])
    admission.ask(demand("a", 1), 0)
    admission.ask(demand("b", 1, deadline=3), 0)
    assert keys(admission.expire(3), Busy) == ["b"]


class Machine(RuleBasedStateMachine):
    """Any sequence of events: what is held never exceeds the room, whole demands only, nobody is forgotten."""

    def __init__(self) -> None:
        super().__init__()
        self.total = [6, 3]
        self.admission = Admission(self.total, max_waiting=4)
        self.demands: dict[str, Demand] = {}
        self.state: dict[str, str] = {}
        self.now = 0.0

    def take(self, verdicts) -> None:
        for verdict in verdicts:
            before = self.state.get(verdict.key)
            assert before in (None, "waiting"), "a verdict on a demand that had its last one"
            if isinstance(verdict, Admitted):
                self.state[verdict.key] = "held"
            elif isinstance(verdict, Waiting):
                self.state[verdict.key] = "waiting"
            else:
                self.state.pop(verdict.key, None)

    @rule(
        blocks=st.tuples(st.integers(0, 7), st.integers(0, 4)),
        tenant=st.sampled_from(["a", "b", None]),
        priority=st.integers(0, 2),
        wait=st.integers(0, 5),
        deadline=st.integers(1, 9),
    )
    def ask(self, blocks, tenant, priority, wait, deadline) -> None:
        key = str(len(self.demands))
        asked = demand(
            key, *blocks, tenant=tenant, priority=priority, wait=self.now + wait, deadline=self.now + deadline
        )
        self.demands[key] = asked
        verdicts = self.admission.ask(asked, self.now)
        if any(wanted > total for wanted, total in zip(blocks, self.total, strict=True)):
            assert [type(verdict) for verdict in verdicts] == [TooLarge]
        assert key in [verdict.key for verdict in verdicts], "no verdict on the demand itself"
        self.take(verdicts)

    @precondition(lambda self: self.state)
    @rule(data=st.data())
    def give_back(self, data) -> None:
        key = data.draw(st.sampled_from(sorted(self.state)))
        del self.state[key]
        self.take(self.admission.give_back(key, self.now))
        assert self.admission.give_back(key, self.now) == ()

    @rule(step=st.floats(0.1, 4))
    def time(self, step) -> None:
        self.now += step
        self.take(self.admission.expire(self.now))
        assert (self.admission.next_timer() or FOREVER) > self.now

    @rule(more=st.integers(0, 1))
    def grow(self, more) -> None:
        self.total = [self.total[0] + more, self.total[1]]
        self.take(self.admission.grow([more, 0]))

    @invariant()
    def room_is_what_is_not_held(self) -> None:
        held = [self.demands[key].blocks for key, state in self.state.items() if state == "held"]
        room = self.admission.room
        for pool, total in enumerate(self.total):
            assert room.total[pool] == total
            assert room.free[pool] == total - sum(blocks[pool] for blocks in held) >= 0
        assert room.waiting == sum(state == "waiting" for state in self.state.values()) <= 4

    @invariant()
    def nobody_waits_for_an_empty_house(self) -> None:
        if "held" not in self.state.values():
            assert "waiting" not in self.state.values()


Machine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestMachine = Machine.TestCase
