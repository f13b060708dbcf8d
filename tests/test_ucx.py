"""UCX beyond the common rules: real stops and kills in mid-transfer, and clocks."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest
from peer_process import PeerProcess
from ucx_pair import BLOCK_BYTES, QUICK, Target, exposure, join, shuffled_blocks

from kvlink.errors import TransportError
from kvlink.testing.harness import REGION, expected, scattered_plan
from kvlink.transports.base import CompletionKind, Exposure, Outcome, Read
from kvlink.transports.ucx import UcxTransport

BIG_BYTES = 256 * 1024 * 1024
MARK = 0xA5


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    """What to close at the end, last first."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def pair(request: pytest.FixtureRequest, closing: ExitStack) -> tuple[Target, PeerProcess]:
    """A connected pair; the parameter is (transports, bytes of each memory, seconds of silence borne)."""
    tls, length, silence = request.param
    source = PeerProcess(length=length, ucx_tls=tls, **{**QUICK, "peer_lost_seconds": silence})
    closing.callback(source.close)
    target = Target(length, ucx_tls=tls, peer_lost_seconds=silence)
    closing.callback(target.transport.close)
    join(target, source)
    return target, source


def pairs(length: int, silence: float, **tls: str | None) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("pair", [(name, length, silence) for name in tls.values()], indirect=True, ids=tls)


over_tcp = pairs(2 << 20, 0.6, tcp="tcp")
either = pairs(2 << 20, 0.6, tcp="tcp", default=None)
big_over_tcp = pairs(BIG_BYTES, 10.0, tcp="tcp")
big_either = pairs(BIG_BYTES, 10.0, tcp="tcp", default=None)


def start_big_read(target: Target, source: PeerProcess, *, integrity: bool = False) -> int:
    """A read that is under way: some of it has landed, and hardly all of it."""
    plan = shuffled_blocks(BIG_BYTES)
    source.memory[:] = 1
    source.expose(exposure(plan))
    op = target.read(plan, integrity=integrity)
    first = target.memory[:: BLOCK_BYTES // 2]
    while not first.any():
        pass
    return op


def test_closing_gives_the_descriptors_back_while_somebody_still_holds_the_transport() -> None:
    UcxTransport(**QUICK).close()  # what UCX opens once a process stays
    before = len(os.listdir("/proc/self/fd"))
    transport = UcxTransport(**QUICK)
    assert len(os.listdir("/proc/self/fd")) > before + 3
    transport.close()
    assert len(os.listdir("/proc/self/fd")) <= before + 3, "what is left serves the completions"
    assert transport.poll() == []


# --- in mid-transfer ------------------------------------------------------------------------------------------------


@big_over_tcp
def test_a_source_stopped_in_mid_transfer_changes_no_byte_after_the_cut_off(pair: tuple[Target, PeerProcess]) -> None:
    """A1, A2, A5: gets are outstanding, their source is stopped, cut off, and resumed: nothing lands late."""
    target, source = pair
    read = start_big_read(target, source)
    source.stop()
    time.sleep(0.1)
    assert not target.transport.poll(), "gets are outstanding, so nothing may have ended"
    cut = target.end_of(target.transport.cut_off("source", 1), within_seconds=5)
    assert [completion.op for completion in target.seen] == [read, cut.op]
    assert (target.seen[0].outcome, cut.outcome) == (Outcome.CUT_OFF, Outcome.OK)
    assert 0 < target.memory[:: BLOCK_BYTES // 2].sum() < 2 * BIG_BYTES // BLOCK_BYTES
    target.memory[:] = MARK
    source.resume()
    time.sleep(0.5)
    assert (target.memory == MARK).all()
    plan = shuffled_blocks(8 * BLOCK_BYTES)
    source.expose(exposure(plan, 2))
    assert target.end_of(target.read(plan, 2)).outcome is Outcome.OK, "the endpoint is made anew"


@big_either
def test_a_source_killed_in_mid_transfer_is_lost_within_its_bound(pair: tuple[Target, PeerProcess]) -> None:
    """C5, C7: the read ends first, as lost, whoever noticed the death."""
    target, source = pair
    read = start_big_read(target, source, integrity=True)
    source.kill()
    target.wait(lambda completion: completion.kind is CompletionKind.PEER_LOST, within_seconds=5)
    assert [(completion.op, completion.outcome) for completion in target.seen] == [
        (read, Outcome.PEER_LOST),
        (0, Outcome.PEER_LOST),
    ]
    with pytest.raises(TransportError, match="not connected"):
        target.read(shuffled_blocks(BLOCK_BYTES), 2)


@either
def test_both_sides_read_from_each_other(pair: tuple[Target, PeerProcess]) -> None:
    """Roles are per attempt: one pair, both directions at once, every byte right."""
    target, source = pair
    mine, theirs = scattered_plan(0), scattered_plan(1)
    source.memory[:] = np.random.default_rng(1).integers(0, 256, len(source.memory), np.uint8)
    target.memory[:] = np.random.default_rng(2).integers(0, 256, len(target.memory), np.uint8)
    # Lane 0 and lane 1 touch different bytes of the target's side, but the same of the source's: read from copies.
    after_mine = expected(mine, source.memory, target.memory)
    source.expose(exposure(mine, 1))
    assert target.end_of(target.read(mine, 1)).outcome is Outcome.OK
    assert np.array_equal(target.memory, after_mine)
    after_theirs = expected(theirs, target.memory, source.memory)
    target.transport.expose(
        Exposure(peer="source", attempt=2, plan=theirs, lease_seconds=9, integrity=True, chunk_leaves=4)
    )
    source.read(Read(peer="target", attempt=2, plan=theirs, integrity=True, chunk_leaves=4, max_rereads=0))
    while not (ended := source.poll()):
        time.sleep(0.001)
    assert ended[0].outcome is Outcome.OK
    assert np.array_equal(source.memory, after_theirs)


@pairs(2 << 20, 10.0, tcp="tcp")
def test_a_cut_off_by_force_harms_neither_direction(pair: tuple[Target, PeerProcess]) -> None:
    """A4, C7: an endpoint closed by force, again and again, leaves the peer's own reads, and ours, working."""
    target, source = pair
    plan = scattered_plan()
    attempt = 0
    for _ in range(3):
        attempt += 3
        source.stop()
        read = target.read(plan, attempt, integrity=False)
        target.end_of(target.transport.cut_off("source", attempt))
        assert target.end_of(read).outcome is Outcome.CUT_OFF
        source.resume()
        target.transport.expose(
            Exposure(peer="source", attempt=attempt + 1, plan=plan, lease_seconds=9, integrity=True, chunk_leaves=4)
        )
        source.read(Read(peer="target", attempt=attempt + 1, plan=plan, integrity=True, chunk_leaves=4, max_rereads=0))
        while not (ended := source.poll()):
            time.sleep(0.001)
        assert ended[0].outcome is Outcome.OK
        source.expose(exposure(plan, attempt + 2))
        assert target.end_of(target.read(plan, attempt + 2)).outcome is Outcome.OK


@pytest.mark.parametrize("tls", [None, "tcp"])
def test_both_sides_live_in_one_process(tls: str | None, closing: ExitStack) -> None:
    source, target = Target(2 << 20, ucx_tls=tls), Target(2 << 20, ucx_tls=tls)
    closing.callback(source.transport.close)
    closing.callback(target.transport.close)
    ours, theirs = socket.socketpair()
    op = target.transport.connect("source", source.transport.address(), ours.detach())
    assert source.end_of(source.transport.connect("target", target.transport.address(), theirs.detach())).op
    target.end_of(op)
    target.transport.import_key("source", source.transport.export_key(REGION))
    source.memory[:] = np.random.default_rng(1).integers(0, 256, len(source.memory), np.uint8)
    plan = scattered_plan()
    after = expected(plan, source.memory, target.memory)
    source.transport.expose(exposure(plan))
    assert target.end_of(target.read(plan)).outcome is Outcome.OK
    assert np.array_equal(target.memory, after)


# --- time -----------------------------------------------------------------------------------------------------------


@over_tcp
def test_a_held_interpreter_is_neither_silence_nor_a_lapse(pair: tuple[Target, PeerProcess]) -> None:
    """B9: both sides' interpreters are held for longer than silence and lease; the read, and then the lease, go on."""
    target, source = pair
    plan = scattered_plan()
    source.expose(exposure(plan, lease_seconds=0.5))
    read = target.read(plan)
    source.send("hold_gil", seconds=1.3)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e6)
    end = time.monotonic() + 1.3
    while time.monotonic() < end:
        pass
    sys.setswitchinterval(interval)
    source.answer()
    assert target.end_of(read).outcome is Outcome.OK
    assert source.lease("target", 1).held, "renewed after the read's end, for its commit"
    target.end_of(target.transport.cut_off("source", 1))
    time.sleep(0.7)
    assert not source.lease("target", 1).held, "no longer, once the target has let go"
    assert [completion.kind for completion in source.poll()] == [CompletionKind.LEASE_LAPSED]


@over_tcp
def test_a_lease_lapses_for_good_when_its_target_stops(pair: tuple[Target, PeerProcess]) -> None:
    """A6, C7: the target here is the other process: stopped for longer than the lease, less than silence."""
    target, source = pair  # of the channel; this test's attempt goes the other way
    plan = shuffled_blocks(1 << 20)
    target.transport.expose(
        Exposure(peer="source", attempt=7, plan=plan, lease_seconds=0.2, integrity=False, chunk_leaves=1)
    )
    source.stop()
    lapsed = target.event(CompletionKind.LEASE_LAPSED)
    assert (lapsed.op, lapsed.peer, lapsed.attempt) == (0, "source", 7)
    source.resume()
    source.read(Read(peer="target", attempt=7, plan=plan, integrity=True, chunk_leaves=1, max_rereads=0))
    while not (ended := source.poll()):
        time.sleep(0.001)
    assert ended[0].outcome is Outcome.SOURCE_FAILED
    assert "lapsed" in ended[0].detail
    assert not target.transport.lease("source", 7).held


def test_a_process_that_was_stopped_does_not_take_its_own_sleep_for_silence(closing: ExitStack) -> None:
    """C7: what its living peer sent meanwhile is in the socket, and counts."""
    source = PeerProcess(ucx_tls="tcp", **{**QUICK, "peer_lost_seconds": 0.2})
    closing.callback(source.close)
    target = Target(2 << 20, ucx_tls="tcp", peer_lost_seconds=10.0)
    closing.callback(target.transport.close)
    join(target, source)
    for _ in range(3):
        source.stop()
        time.sleep(0.4)
        source.resume()
        time.sleep(0.1)
    assert source.poll() == []
    plan = scattered_plan()
    source.expose(exposure(plan))
    assert target.end_of(target.read(plan)).outcome is Outcome.OK
