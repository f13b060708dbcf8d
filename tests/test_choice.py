"""Which transport and which path a pair takes: what is predicted from given speeds, and who is never chosen."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from geometries import rank_spec
from hypothesis import given
from hypothesis import strategies as st

from kvlink.link import choice
from kvlink.link.choice import Candidate, choose
from kvlink.plan import (
    DIRECT,
    MAPPED,
    PACKED,
    PULLED,
    RING,
    STREAM,
    TYPICAL,
    Rate,
    Setting,
    Shape,
    predict,
)
from kvlink.transports import calibration
from kvlink.transports.base import Way
from kvlink.transports.ucx import UcxTransport

PATHS = (DIRECT, PACKED, RING, MAPPED, PULLED, STREAM)
MIB = 1 << 20

shapes = st.builds(Shape, st.integers(1, 1 << 40), st.integers(1, 1 << 24))
settings = st.builds(Setting, near=st.booleans(), rdma=st.booleans(), integrity=st.booleans(), lanes=st.integers(1, 8))


def of_runs(run_bytes: int, total_bytes: int = 64 * MIB) -> Shape:
    return Shape(total_bytes, total_bytes // run_bytes)


# --- predictions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("run_bytes", "faster"), [(256, PACKED), (16 * 1024, PACKED), (MIB, DIRECT), (8 * MIB, DIRECT)]
)
def test_short_runs_are_packed_and_long_ones_got_one_by_one(run_bytes, faster):
    """I3: an operation a run costs more than gathering, until runs are long."""
    seconds = {path: predict(path, of_runs(run_bytes), TYPICAL, Setting()) for path in (DIRECT, PACKED)}
    assert min(seconds, key=seconds.__getitem__) == faster


@given(st.sampled_from(PATHS), shapes, settings)
def test_more_bytes_more_runs_and_digests_never_take_less(path, shape, setting):
    seconds = predict(path, shape, TYPICAL, setting)
    assert seconds > 0
    assert predict(path, replace(shape, total_bytes=2 * shape.total_bytes), TYPICAL, setting) >= seconds
    assert predict(path, replace(shape, runs=2 * shape.runs), TYPICAL, setting) >= seconds
    assert predict(path, shape, TYPICAL, replace(setting, integrity=True)) >= seconds * (1 - 1e-9) or setting.integrity


def test_two_ranks_of_one_host_share_its_cores():
    """Sockets' work at both ends is worth two cores; one host with one core needs twice as long."""
    one, two = (predict(STREAM, of_runs(MIB), replace(TYPICAL, cpus=cpus), Setting(lanes=1)) for cpus in (1, 2))
    assert one == pytest.approx(2 * two, rel=0.2)
    far = [predict(STREAM, of_runs(MIB), replace(TYPICAL, cpus=cpus), Setting(near=False)) for cpus in (1, 2)]
    assert far[0] == far[1]


def test_a_prediction_is_what_the_slower_side_has_to_do():
    speeds = replace(TYPICAL, send=Rate(1e-9, 1e-6), receive=Rate(2e-9, 3e-6), cpus=64)
    shape = Shape(1_000_000, 100)
    setting = Setting(integrity=False, lanes=1)
    assert predict(STREAM, shape, speeds, setting) == pytest.approx(1_000_000 * 2e-9 + 100 * 3e-6)


def test_rdma_is_faster_than_sockets_between_hosts_and_ucx_over_tcp_is_not():
    shape = of_runs(MIB)
    stream = predict(STREAM, shape, TYPICAL, Setting(near=False))
    assert predict(DIRECT, shape, TYPICAL, Setting(near=False, rdma=True, integrity=False)) < stream
    assert predict(DIRECT, shape, TYPICAL, Setting(near=False)) > stream


# --- the choice -----------------------------------------------------------------------------------------------------

ways = st.lists(st.builds(Way, st.sampled_from(PATHS), st.floats(1e-6, 10.0)), max_size=2).map(tuple)
refusals = st.one_of(st.none(), st.just("they run on different hosts"))


@st.composite
def common(draw):
    names = draw(st.lists(st.sampled_from(["shared", "ucx", "stream", "mine"]), unique=True, min_size=1))
    return [Candidate(name=name, refusal=draw(refusals), ways=draw(ways)) for name in names]


@given(common(), shapes, st.booleans())
def test_what_is_refused_is_never_chosen_and_the_same_question_has_the_same_answer(candidates, shape, by_cost):
    name, reason = choose(candidates, shape, by_cost=by_cost)
    assert choose(candidates, shape, by_cost=by_cost) == (name, reason)
    usable = [one for one in candidates if one.refusal is None]
    if not usable:
        assert name is None
        assert all(one.name in reason for one in candidates)
        return
    chosen = next(one for one in usable if one.name == name)
    assert all(f"not {one.name}: {one.refusal}" in reason for one in candidates if one.refusal is not None)
    if by_cost:
        best = [one.best.seconds for one in usable if one.best]
        assert chosen.best is not None or not best
        assert chosen.best is None or chosen.best.seconds == min(best)
    else:
        assert chosen is usable[0]


def test_the_reason_gives_every_candidates_figure():
    shape = of_runs(1024)
    candidates = [
        Candidate(name="shared", refusal="the ranks run on different hosts"),
        Candidate(name="ucx", ways=(Way(DIRECT, 0.0098), Way(PACKED, 0.0031))),
        Candidate(name="stream", ways=(Way(STREAM, 0.0062),)),
    ]
    name, reason = choose(candidates, shape, by_cost=True)
    assert name == "ucx"
    figures, refusal = reason.rsplit("; ", 1)
    assert figures == "ucx packed 3.1 ms predicted for 64 MiB in runs of 1 KiB; stream 6.2 ms"
    assert refusal == "not shared: the ranks run on different hosts"


def test_a_list_that_was_set_counts_as_it_stands():
    candidates = [
        Candidate(name="stream", ways=(Way(STREAM, 1.0),)),
        Candidate(name="shared", ways=(Way(RING, 0.1),)),
    ]
    assert choose(candidates, of_runs(1024), by_cost=False)[0] == "stream"
    assert choose(candidates, of_runs(1024), by_cost=True)[0] == "shared"
    assert choose(candidates[:1], of_runs(1024), by_cost=False) == ("stream", "only one stated that both have")


# --- what is measured -----------------------------------------------------------------------------------------------


def test_this_machine_is_measured_once_a_process(monkeypatch):
    transport = UcxTransport()
    speeds = calibration.calibrate(("auto", None))
    transport.close()
    assert speeds.measured
    assert speeds.get != TYPICAL.get or speeds.copy != TYPICAL.copy
    for rate in (speeds.copy, speeds.gather, speeds.scatter, speeds.digest, speeds.get, speeds.send, speeds.receive):
        assert 0 < rate.byte_seconds < 1e-6  # slower than a megabyte a second is no machine
        assert 0 <= rate.run_seconds < 1e-3
    monkeypatch.setattr(calibration, "_measure", None)
    assert calibration.calibrate(("auto", None)) is speeds


def test_what_cannot_be_measured_stays_typical():
    speeds = calibration.calibrate(("/nonexistent/libucp.so.0", None))
    assert (speeds.get, speeds.slot_get_byte_seconds) == (TYPICAL.get, TYPICAL.slot_get_byte_seconds)


def test_a_machine_that_is_busy_is_not_measured_to_the_end():
    speeds = calibration._measure(None, until=0.0)
    assert speeds == replace(TYPICAL, cpus=speeds.cpus, measured=True)


def test_a_peers_cache_is_not_searched_for_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A spec of thousands of planes that overlap would keep the loop for hours, before anything is asked."""
    source, target = rank_spec(), rank_spec()
    searched = []
    monkeypatch.setattr(choice, "alias_classes", lambda spec: searched.append(spec) or (0,) * len(spec.groups))
    assert choice.shape_of_pair(source, target).total_bytes > 0
    assert len(searched) == 1
    assert searched[0] is target


def test_a_measurement_that_is_kept_from_its_core_counts_what_it_ran() -> None:
    """Ranks of an engine start together: each would take the others' turns for its own copies' length."""
    assert calibration._timed(time.sleep, 0.2) < 0.1
