"""Routing, waiting, batching and pools: the fleet's decisions, one by one."""

from __future__ import annotations

import pytest

from kvlink import limits
from kvlink.cluster import (
    Candidate,
    Line,
    PoolLoad,
    PoolState,
    Wish,
    prefill_chunks,
    rollout_waves,
    route,
    worker_to_move,
)


def candidate(name="a", **changes):
    return Candidate(**{"name": name, "identity": "m@1", "total_tokens": 1000, "free_tokens": 1000} | changes)


WISH = Wish(identity="m@1", tokens=100, excluded_domains=frozenset({"rack1"}))


@pytest.mark.parametrize(
    ("changes", "why", "waits"),
    [
        ({"identity": "m@2"}, "it serves m@2, not m@1", False),
        ({"healthy": False}, "it does not answer", False),
        ({"state": PoolState.DRAINING}, "it is draining", False),
        ({"state": PoolState.DRAINED}, "it is drained", False),
        ({"domain": "rack1"}, "failure domain rack1 is excluded", False),
        ({"total_tokens": 99}, "too large: 100 tokens with growth, 99 when empty", False),
        ({"free_tokens": 99}, "no room now", True),
    ],
)
def test_who_may_not_take_a_request_is_told_why(changes, why, waits):
    choice = route(WISH, [candidate(**changes)])
    assert (choice.name, choice.refused, choice.waits) == (None, (("a", why),), waits)
    assert f"a: no, {why}" in choice.explain()


def test_room_for_the_whole_is_just_enough():
    assert route(WISH, [candidate(free_tokens=100, domain="rack2")]).name == "a"


def test_a_worker_without_a_known_domain_is_not_excluded():
    assert route(WISH, [candidate(domain=None)]).name == "a"


def test_any_identity_will_do_where_none_is_asked_for():
    assert route(Wish(identity=None, tokens=1), [candidate(identity="x")]).name == "a"


@pytest.mark.parametrize("term", ["work_seconds", "queue_seconds", "transfer_seconds"])
def test_every_predicted_second_counts(term):
    choice = route(WISH, [candidate("a", **{term: 2.0}), candidate("b", **{term: 1.0})])
    assert choice.name == "b"
    assert [score.seconds for score in choice.scores] == [1.0, 2.0]


def test_an_adapter_that_must_be_loaded_costs_its_loading():
    wish = Wish(identity="m@1", tokens=1, adapter="lora")
    loaded = candidate("b", adapters=frozenset({"lora"}), work_seconds=limits.ADAPTER_LOAD_SECONDS * 0.9)
    assert route(wish, [candidate("a"), loaded]).name == "b"


def test_a_tenant_waits_behind_others_where_it_holds_much():
    alone = candidate("a", queue_seconds=1.0, tenant_share=0.5)
    among = candidate("b", queue_seconds=1.2, tenant_share=0.0)
    assert route(WISH, [alone, among]).name == "b"


def test_who_meets_the_deadline_goes_before_who_does_not():
    """Both late: the fewer seconds."""
    slow, fast = candidate("slow", work_seconds=3.0), candidate("fast", queue_seconds=2.0)
    assert route(Wish(identity="m@1", tokens=1, seconds_left=2.5), [slow, fast]).name == "fast"
    choice = route(Wish(identity="m@1", tokens=1, seconds_left=1.0), [slow, fast])
    assert choice.name == "fast"
    assert choice.explain().count("after its deadline") == 2


def test_equal_candidates_are_taken_by_name_whatever_their_order():
    pair = [candidate("b"), candidate("a")]
    assert route(WISH, pair).name == route(WISH, pair[::-1]).name == "a"


def test_an_explanation_names_every_term_that_counts():
    shown = route(WISH, [candidate(work_seconds=1, queue_seconds=2, transfer_seconds=3, prefix_tokens=64)]).explain()
    assert "a: 6.000 s = work 1.000 (64 tokens of prefix there) + queue 2.000 + transfer 3.000" in shown


# --- the line ---------------------------------------------------------------------------------------------------------


def nobody_holds(_):
    return 0.0


def order_of(line, share_of=nobody_holds):
    order = []
    while (key := line.head(share_of)) is not None:
        order.append(key)
        line.leave(key)
    return order


def test_the_line_goes_by_priority_then_deadline_then_arrival():
    line = Line()
    for key, priority, deadline in (("late", 0, 9), ("first", 0, 5), ("second", 0, 5), ("vip", 1, 99)):
        line.join(key, priority=priority, deadline=deadline)
    assert (len(line), "vip" in line) == (4, True)
    assert order_of(line) == ["vip", "first", "second", "late"]


def test_a_tenant_above_its_share_waits_for_those_below_h3():
    """H3: one tenant fills the line and the fleet; the other goes first, whatever its priority."""
    line = Line()
    for index in range(3):
        line.join(f"greedy{index}", tenant="greedy", priority=5)
    line.join("modest", tenant="modest")
    held = {"greedy": 0.6, "modest": 0.1}
    assert line.head(held.__getitem__) == "modest"
    line.leave("modest")
    assert line.head(held.__getitem__) == "greedy0"


def test_who_has_left_is_not_found_and_may_come_back_at_the_end():
    line = Line()
    for key in "abc":
        line.join(key)
    assert (line.leave("a"), line.leave("a")) == (True, False)
    line.join("a")
    assert order_of(line) == ["b", "c", "a"]
    assert (len(line), line.head(nobody_holds)) == (0, None)


# --- batching ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("remaining", "decoding", "budget", "most", "chunks"),
    [
        ([100], 0, 512, 8, (100,)),
        ([1000, 50], 0, 512, 8, (512,)),
        ([100, 1000, 50], 12, 512, 18, (100, 400)),
        ([10, 10, 10], 0, 512, 2, (10, 10)),
        ([10, 10], 7, 512, 8, (10,)),
        ([10], 8, 512, 8, ()),
        ([10], 600, 512, 700, (1,)),
        ([], 3, 512, 8, ()),
    ],
)
def test_a_step_fills_its_budget_in_order(remaining, decoding, budget, most, chunks):
    assert prefill_chunks(remaining, decoding=decoding, token_budget=budget, max_running=most) == chunks


def test_prompts_behind_a_full_step_are_not_looked_at():
    def remaining():
        yield 512
        pytest.fail("the budget is used up")

    assert prefill_chunks(remaining(), decoding=0, token_budget=512, max_running=8) == (512,)


# --- pools ------------------------------------------------------------------------------------------------------------


def test_a_rollout_leaves_a_pair_of_either_revision_in_service():
    assert rollout_waves([("p0", "p1", "p2"), ("d0", "d1")]) == (("p0", "p1", "d0"), ("p2", "d1"))


def test_single_workers_go_in_the_first_wave_and_empty_waves_are_left_out():
    assert rollout_waves([("p0",), ("d0",)]) == (("p0", "d0"),)
    assert rollout_waves([("p0",), ("d0", "d1")]) == (("p0", "d0"), ("d1",))


def load(pressure, *active):
    return PoolLoad(pressure=pressure, active=active)


@pytest.mark.parametrize(
    ("prefill", "decode", "moved"),
    [
        (load(1.0, "p0"), load(0.5, "d0", "d1"), "d0"),
        (load(0.5, "p0", "p1"), load(1.0, "d0"), "p0"),
        (load(0.99, "p0"), load(0.1, "d0", "d1"), None),
        (load(2.0, "p0"), load(0.51, "d0", "d1"), None),
        (load(2.0, "p0"), load(0.0, "d0"), None),
        (load(0.1, "p0", "p1"), load(0.1, "d0", "d1"), None),
    ],
)
def test_a_worker_moves_from_an_idle_pool_to_a_pressed_one(prefill, decode, moved):
    assert worker_to_move(prefill, decode) == moved
