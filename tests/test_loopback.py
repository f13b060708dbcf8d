"""The loopback beyond the rules all transports keep: determinism, scripted faults, leases, waking by descriptor."""

from __future__ import annotations

import os
import select
from dataclasses import dataclass

import numpy as np
import pytest

from kvlink.errors import ClosedError, TransportError
from kvlink.limits import CUT_OFF_GRACE_SECONDS, PEER_LOST_SECONDS, RENEWAL_LINGER_SECONDS
from kvlink.testing.clock import VirtualClock
from kvlink.testing.harness import MEMORY_BYTES, REGION, expected, scattered_plan
from kvlink.transports.base import Completion, CompletionKind, Exposure, Outcome, Read, RegionKey, TransportFull
from kvlink.transports.faults import (
    DelayChunk,
    DropRenewals,
    FailConnect,
    FailRead,
    FailRegister,
    Fault,
    FlipByte,
    KillPeer,
    RefuseReads,
    StopPeer,
)
from kvlink.transports.loopback import LoopbackFabric, LoopbackTransport

CHUNKS = 13
"""Of the plan that every test reads: 800,000 bytes in chunks of 64 KiB."""


@dataclass
class Pair:
    fabric: LoopbackFabric
    clock: VirtualClock
    source: LoopbackTransport
    target: LoopbackTransport
    source_memory: np.ndarray
    target_memory: np.ndarray

    def expose(self, attempt: int, lane: int = 0, lease_seconds: float = 2.5, integrity: bool = True) -> None:
        self.source.expose(
            Exposure(
                peer="target",
                attempt=attempt,
                plan=scattered_plan(lane),
                lease_seconds=lease_seconds,
                integrity=integrity,
                chunk_leaves=4,
            )
        )

    def read(self, attempt: int, lane: int = 0, max_rereads: int = 2) -> int:
        plan = scattered_plan(lane)
        return self.target.read(
            Read(peer="source", attempt=attempt, plan=plan, integrity=True, chunk_leaves=4, max_rereads=max_rereads)
        )

    def start(self, attempt: int = 1, lane: int = 0, **exposure: float) -> int:
        self.expose(attempt, lane, **exposure)
        return self.read(attempt, lane)

    def poll_until_quiet(self, polls: int = 60) -> list[Completion]:
        return [completion for _ in range(polls) for completion in self.target.poll()]


def make_pair(*faults: Fault, seed: int = 1, chunks_per_poll: int = 4) -> Pair:
    clock = VirtualClock()
    fabric = LoopbackFabric(seed, faults, clock=clock, chunks_per_poll=chunks_per_poll)
    random = np.random.default_rng(5)
    memories = [random.integers(0, 256, MEMORY_BYTES, dtype=np.uint8) for _ in range(2)]
    source, target = LoopbackTransport(fabric, "source"), LoopbackTransport(fabric, "target")
    for end, memory in zip((source, target), memories, strict=True):
        end.register(REGION, memory.ctypes.data, MEMORY_BYTES)
    target.connect("source", source.address(), None)
    source.connect("target", target.address(), None)
    for end in (source, target):
        (connected,) = end.poll()
        assert (connected.kind, connected.outcome) == (CompletionKind.CONNECTED, Outcome.OK)
    target.import_key("source", source.export_key(REGION))
    return Pair(fabric, clock, source, target, *memories)


def only(completions: list[Completion]) -> Completion:
    (completion,) = completions
    return completion


# --- determinism ------------------------------------------------------------------------------------------------------


def history(seed: int) -> tuple[list[list[Completion]], list[int]]:
    pair = make_pair(FlipByte(chunk=3, on_try=1), DelayChunk(steps=2, chunk=5), seed=seed)
    pair.start(1, 0)
    pair.start(2, 1)
    polls, landed = [], []
    for _ in range(30):
        polls.append(pair.target.poll())
        landed.append(int(np.sum(pair.target_memory, dtype=np.int64)))
    return polls, landed


def test_the_same_seed_gives_the_same_history():
    assert history(3) == history(3)


def test_another_seed_gives_another_order_and_the_same_end():
    (_, first), (_, second) = history(3), history(4)
    assert first != second
    assert first[-1] == second[-1]


def test_nothing_moves_but_in_a_poll_of_the_target():
    pair = make_pair()
    before = pair.target_memory.copy()
    pair.start()
    for _ in range(5):
        pair.clock.advance(1.0)
        assert pair.source.poll() == []
    assert np.array_equal(pair.target_memory, before)


# --- scripted faults --------------------------------------------------------------------------------------------------


def test_a_flip_strikes_only_the_read_it_names():
    pair = make_pair(FlipByte(chunk=0, on_try=None, read=2))
    pair.start(1, 0)
    pair.start(2, 1)
    ends = {end.attempt: end for end in pair.poll_until_quiet()}
    assert (ends[1].outcome, ends[1].rereads) == (Outcome.OK, 0)
    assert (ends[2].outcome, ends[2].rereads, ends[2].root) == (Outcome.DIGEST_MISMATCH, 2, None)


def test_a_flip_of_the_last_re_read_still_fails():
    pair = make_pair(FlipByte(chunk=2, on_try=1), FlipByte(chunk=2, on_try=2))
    pair.expose(1)
    pair.read(1, max_rereads=1)
    end = only(pair.poll_until_quiet())
    assert (end.outcome, end.rereads, end.bad_leaf // 4) == (Outcome.DIGEST_MISMATCH, 1, 2)


@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize("after_chunks", [0, 1, CHUNKS - 1])
def test_every_nth_read_may_fail_after_some_chunks(nth: int, after_chunks: int):
    pair = make_pair(FailRead(nth=nth, after_chunks=after_chunks))
    for attempt in (1, 2, 3):
        pair.start(attempt, lane=0)
        end = only(pair.poll_until_quiet())
        assert end.outcome is (Outcome.FAILED if attempt == nth else Outcome.OK)
    assert pair.target.arm(), "a failed read leaves nothing to do"


def test_every_nth_registration_may_fail_and_registers_nothing():
    pair = make_pair(FailRegister(nth=3))
    memory = np.zeros(4096, np.uint8)
    with pytest.raises(TransportError, match="fault injected"):
        pair.source.register(7, memory.ctypes.data, memory.nbytes)
    with pytest.raises(TransportError, match="not registered"):
        pair.source.export_key(7)
    pair.source.register(7, memory.ctypes.data, memory.nbytes)
    assert pair.source.export_key(7).length == 4096


def test_every_nth_connect_may_fail_and_leaves_no_peer():
    pair = make_pair(FailConnect(nth=3))
    third = LoopbackTransport(pair.fabric, "third")
    third.connect("source", pair.source.address(), None)
    assert only(third.poll()).outcome is Outcome.UNREACHABLE
    third.connect("source", pair.source.address(), None)
    assert only(third.poll()).outcome is Outcome.OK


def test_a_delayed_chunk_is_late_by_polls_and_holds_its_read_back():
    prompt, late = make_pair(), make_pair(DelayChunk(steps=20, chunk=4))
    for pair in (prompt, late):
        pair.start()
    needed = [next(n for n in range(60) if pair.target.poll()) for pair in (prompt, late)]
    assert needed[1] - needed[0] >= 15


def test_a_refused_read_is_accepted_when_another_has_ended():
    pair = make_pair(RefuseReads(active=1))
    pair.start(1)
    pair.expose(2)
    with pytest.raises(TransportFull):
        pair.read(2)
    assert only(pair.poll_until_quiet()).attempt == 1
    pair.read(2)
    assert only(pair.poll_until_quiet()).outcome is Outcome.OK


def test_a_peer_killed_in_mid_read_is_lost_at_once():
    pair = make_pair(KillPeer(end="source", after_chunks=5))
    pair.start()
    read, lost = pair.poll_until_quiet()
    assert (read.kind, read.outcome) == (CompletionKind.READ, Outcome.PEER_LOST)
    assert 0 < read.bytes_moved < 800_000
    assert lost.kind is CompletionKind.PEER_LOST


def test_a_peer_stopped_in_mid_read_is_lost_by_silence_alone():
    pair = make_pair(StopPeer(end="source", after_chunks=5))
    pair.start()
    assert pair.poll_until_quiet() == []
    pair.clock.advance(PEER_LOST_SECONDS - 0.01)
    assert pair.poll_until_quiet() == []
    pair.clock.advance(0.01)
    read, lost = pair.poll_until_quiet()
    assert (read.outcome, lost.kind) == (Outcome.PEER_LOST, CompletionKind.PEER_LOST)


def test_a_peer_resumed_in_time_goes_on():
    pair = make_pair(StopPeer(end="source", after_chunks=5))
    after = expected(scattered_plan(), pair.source_memory, pair.target_memory)
    pair.start(lease_seconds=2.5)
    pair.poll_until_quiet()
    pair.clock.advance(1.0)
    pair.fabric.resume("source")
    assert only(pair.poll_until_quiet()).outcome is Outcome.OK
    assert np.array_equal(pair.target_memory, after)


def test_a_killed_end_may_have_a_successor_of_its_name_under_another_address():
    pair = make_pair()
    old = pair.source.export_key(REGION)
    pair.fabric.kill("source")
    successor = LoopbackTransport(pair.fabric, "source")
    successor.register(REGION, pair.source_memory.ctypes.data, MEMORY_BYTES)
    assert successor.address() != pair.source.address()
    pair.target.poll()
    pair.target.connect("source", successor.address(), None)
    with pytest.raises(TransportError, match="not one this peer gave"):  # C1: keys of the dead are of no use
        pair.target.import_key("source", old)


# --- cut-off ----------------------------------------------------------------------------------------------------------


def test_bytes_in_flight_land_between_the_call_and_its_completion():
    pair = make_pair(DelayChunk(steps=5))
    pair.start()
    pair.target.poll()
    before = pair.target_memory.copy()
    pair.target.cut_off("source", 1)
    seen: list[Completion] = []
    while not seen:
        seen = pair.target.poll()
    assert [completion.kind for completion in seen] == [CompletionKind.READ, CompletionKind.CUT_OFF]
    assert 0 < seen[0].bytes_moved <= 4 * 65_536
    assert not np.array_equal(pair.target_memory, before), "a driver that frees blocks at cut_off() would be caught"


def test_past_its_grace_a_cut_off_drops_what_is_in_flight_and_fails_the_siblings():
    pair = make_pair(StopPeer(end="source", after_chunks=6))
    pair.start(1, 0)
    pair.start(2, 1)
    pair.poll_until_quiet()
    pair.target.cut_off("source", 1)
    assert pair.poll_until_quiet() == []
    pair.clock.advance(CUT_OFF_GRACE_SECONDS)
    outcomes = {end.attempt: end.outcome for end in pair.poll_until_quiet() if end.kind is CompletionKind.READ}
    assert outcomes == {1: Outcome.CUT_OFF, 2: Outcome.FAILED}


# --- leases -----------------------------------------------------------------------------------------------------------


def test_a_lease_is_renewed_for_as_long_as_its_read_runs():
    pair = make_pair(DelayChunk(steps=30, chunk=0))
    pair.start(lease_seconds=1.0)
    seen: list[Completion] = []
    while not seen:
        pair.clock.advance(0.7)
        seen = pair.target.poll()
    assert only(seen).outcome is Outcome.OK
    assert pair.source.lease("target", 1).held


def test_renewals_linger_after_a_read_that_ended_well_and_no_longer_than_that():
    """A slow sibling leg must not cost this one its lease before the commit."""
    pair = make_pair()
    pair.start(lease_seconds=1.0)
    assert only(pair.poll_until_quiet()).outcome is Outcome.OK
    pair.clock.advance(RENEWAL_LINGER_SECONDS + 0.9)
    assert pair.source.lease("target", 1).held
    pair.clock.advance(0.1)
    assert not pair.source.lease("target", 1).held


def test_a_cut_off_ends_the_lingering_renewals():
    pair = make_pair()
    pair.start(lease_seconds=1.0)
    pair.poll_until_quiet()
    pair.clock.advance(3.0)
    pair.target.cut_off("source", 1)
    pair.clock.advance(0.9)
    assert pair.source.lease("target", 1).held
    pair.clock.advance(0.1)
    assert not pair.source.lease("target", 1).held


def test_lingering_renewals_count_for_as_long_as_they_lasted_however_late_that_is_asked():
    pair = make_pair()
    pair.start(lease_seconds=1.0)
    pair.poll_until_quiet()
    pair.clock.advance(RENEWAL_LINGER_SECONDS)
    pair.target.poll()
    pair.clock.advance(0.9)
    assert pair.source.lease("target", 1).held


def test_a_lease_whose_renewals_are_lost_lapses_and_ends_the_read():
    pair = make_pair(DropRenewals(end="target"))
    pair.start(lease_seconds=1.0)
    pair.target.poll()
    pair.clock.advance(1.0)
    assert only(pair.poll_until_quiet()).outcome is Outcome.SOURCE_FAILED
    assert [event.kind for event in pair.source.poll()] == [CompletionKind.LEASE_LAPSED]


def test_a_lease_lapses_when_its_reader_is_stopped():
    pair = make_pair()
    pair.start(lease_seconds=1.0)
    pair.target.poll()
    pair.fabric.stop("target")
    pair.clock.advance(1.0)
    pair.fabric.resume("target")
    assert not pair.source.lease("target", 1).held
    assert only(pair.poll_until_quiet()).outcome is Outcome.SOURCE_FAILED


def test_a_read_that_starts_late_does_not_renew_what_has_lapsed():
    """A6, with nobody having looked at the lease in between."""
    pair = make_pair()
    pair.expose(1, lease_seconds=1.0)
    pair.clock.advance(1.5)
    pair.read(1)
    assert only(pair.poll_until_quiet()).outcome is Outcome.SOURCE_FAILED


def test_renewals_count_until_the_moment_their_reader_stopped():
    pair = make_pair(DelayChunk(steps=1000, chunk=0))
    pair.start(lease_seconds=1.0)
    pair.clock.advance(0.9)
    pair.fabric.stop("target")
    pair.clock.advance(0.9)
    assert pair.source.lease("target", 1).held


def test_bytes_of_a_lapsed_lease_are_never_vouched_for():
    """A6: a chunk in flight when the lease ends may land; the read does not end in OK."""
    pair = make_pair(DelayChunk(steps=10, chunk=CHUNKS - 1), DropRenewals(end="target"))
    pair.start(lease_seconds=1.0)
    for _ in range(8):
        pair.target.poll()
    pair.clock.advance(1.0)
    end = only(pair.poll_until_quiet())
    assert (end.outcome, end.root) == (Outcome.SOURCE_FAILED, None)


def test_a_source_that_withdraws_under_a_read_ends_it():
    pair = make_pair()
    pair.start()
    pair.target.poll()
    pair.target.poll()
    assert pair.source.withdraw("target", 1).held
    assert only(pair.poll_until_quiet()).outcome is Outcome.SOURCE_FAILED


def test_a_region_unregistered_under_a_read_ends_it():
    pair = make_pair()
    pair.start()
    pair.target.poll()
    pair.source.unregister(REGION)
    assert only(pair.poll_until_quiet()).outcome is Outcome.SOURCE_FAILED


def test_an_exposure_without_digests_does_not_serve_a_read_that_wants_them():
    pair = make_pair()
    pair.expose(1, integrity=False)
    pair.read(1)
    end = only(pair.poll_until_quiet())
    assert (end.outcome, "without digests" in end.detail) == (Outcome.SOURCE_FAILED, True)


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_keys_a_peer_never_gave_are_refused():
    pair = make_pair()
    key = pair.source.export_key(REGION)
    for forged in (
        RegionKey(region=REGION, address=key.address + 1, length=key.length, key=key.key),
        RegionKey(region=REGION, address=key.address, length=key.length * 2, key=key.key),
        RegionKey(region=-1, address=key.address, length=key.length, key=key.key),
    ):
        with pytest.raises(TransportError, match="not one this peer gave"):
            pair.target.import_key("source", forged)


@pytest.mark.parametrize(
    ("region", "address", "length"), [(9, 0, 10), (9, 4096, 0), (-1, 4096, 10), (REGION, 4096, 10)]
)
def test_memory_that_cannot_be_is_not_registered(region: int, address: int, length: int):
    pair = make_pair()
    with pytest.raises(TransportError, match=f"region {region} "):
        pair.target.register(region, address, length)


def test_an_attempt_is_exposed_and_read_once_at_a_time():
    pair = make_pair()
    pair.start()
    with pytest.raises(TransportError, match="exposed already"):
        pair.expose(1)
    with pytest.raises(TransportError, match="being read already"):
        pair.read(1)


def test_connect_takes_the_channel_over_whatever_happens():
    pair = make_pair()
    for name in ("source", "elsewhere"):
        here, there = os.pipe()
        os.close(there)
        try:
            pair.target.connect(name, b"nowhere", here)
        except TransportError:
            assert name == "source"
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(here)


def test_a_closed_end_refuses_by_name():
    pair = make_pair()
    pair.target.close()
    assert pair.target.poll() == []
    assert pair.target.arm()
    with pytest.raises(ClosedError, match="'target' is closed"):
        pair.read(1)


# --- waking -----------------------------------------------------------------------------------------------------------


def readable(end: LoopbackTransport, within_seconds: float) -> bool:
    return bool(select.select([end.fileno()], [], [], within_seconds)[0])


@pytest.mark.parametrize("event", [CompletionKind.LEASE_LAPSED, CompletionKind.PEER_LOST])
def test_time_wakes_a_driver_that_waits_on_the_descriptor(event: CompletionKind):
    """A lapse and a silence come with no call of anybody: the descriptor tells when to poll."""
    fabric = LoopbackFabric(1, peer_lost_seconds=0.02 if event is CompletionKind.PEER_LOST else 1000.0)
    source, target = LoopbackTransport(fabric, "source"), LoopbackTransport(fabric, "target")
    memory = np.zeros(MEMORY_BYTES, np.uint8)
    source.register(REGION, memory.ctypes.data, MEMORY_BYTES)
    source.connect("target", target.address(), None)
    source.poll()
    lease_seconds = 0.02 if event is CompletionKind.LEASE_LAPSED else 1000.0
    source.expose(
        Exposure(
            peer="target",
            attempt=1,
            plan=scattered_plan(),
            lease_seconds=lease_seconds,
            integrity=True,
            chunk_leaves=4,
        )
    )
    fabric.stop("target")
    seen: list[CompletionKind] = []
    while event not in seen:
        if source.arm():
            assert readable(source, 5.0)
        seen += [completion.kind for completion in source.poll()]
    for end in (source, target):
        end.close()


def test_a_driver_sleeps_while_its_source_is_stopped_and_wakes_when_it_goes_on():
    pair = make_pair(StopPeer(end="source", after_chunks=5))
    pair.start()
    pair.poll_until_quiet()
    assert pair.target.arm()
    assert not readable(pair.target, 0.0)
    pair.fabric.resume("source")
    assert readable(pair.target, 5.0)
