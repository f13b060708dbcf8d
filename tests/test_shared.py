"""Shared memory beyond the common rules: spoiled slots, peers that break the protocol, and sleep."""

from __future__ import annotations

import mmap
import os
import resource
import socket
import tempfile
import time
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from shared_peer import (
    GIVE_REGION,
    MAP,
    PAGE,
    RING,
    SEALS,
    SLOT_BYTES,
    SLOTS,
    WANT_RING,
    FakeSource,
    FakeTarget,
    Rig,
    file_of,
)
from test_conformance_shared import SharedHarness

from kvlink.errors import PeerIncompatibleError, SchemaError, TransportError
from kvlink.limits import LEAF_BYTES
from kvlink.testing.harness import MEMORY_BYTES, REGION, expected, scattered_plan
from kvlink.transports.base import Backing, CompletionKind, Outcome
from kvlink.transports.shared import SharedAddress, SharedTransport


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.close()


# --- bytes that arrive wrong ----------------------------------------------------------------------------------------


def test_a_slot_that_arrives_wrong_is_asked_for_again(rig: Rig) -> None:
    """E3: found by its digest, named, read again, and mended."""
    op = rig.read(mappable=False, max_rereads=1)
    source = FakeSource(rig)
    source.offer()
    spoiled, _ = source.answer(spoil=True)
    source.serve(op)
    end = rig.end_of(op)
    assert (end.outcome, end.rereads, end.bad_leaf, end.path) == (Outcome.OK, 1, spoiled // LEAF_BYTES, "ring")
    assert np.array_equal(rig.memory, expected(scattered_plan(), source.memory, np.zeros_like(rig.memory)))


def test_a_slot_that_arrives_wrong_every_time_fails_the_read(rig: Rig) -> None:
    """E3: re-reads are bounded."""
    op = rig.read(mappable=False, max_rereads=1)
    source = FakeSource(rig)
    source.offer()
    source.serve(op, spoil=True)
    assert rig.end_of(op).outcome is Outcome.DIGEST_MISMATCH


# --- a source that breaks the protocol ------------------------------------------------------------------------------


def test_answers_that_nobody_asked_for_lose_the_peer_and_land_nowhere(rig: Rig) -> None:
    """A count that runs ahead of what was asked is no answer, whatever the slots hold."""
    rig.read(mappable=False)
    source = FakeSource(rig)
    source.ring[:] = b"\xee" * len(source.ring)
    source.offer()
    source.ask()
    source.publish(1 << 31)
    assert "nobody asked" in rig.lost()
    assert not rig.memory.any()


def test_a_source_that_cannot_serve_fails_the_read(rig: Rig) -> None:
    op = rig.read(mappable=False)
    source = FakeSource(rig)
    source.offer()
    source.answer(reason=2)
    end = rig.end_of(op)
    assert (end.outcome, "lapsed" in end.detail) == (Outcome.SOURCE_FAILED, True)


@pytest.mark.parametrize("which", ["page", "ring"])
@pytest.mark.parametrize("how", ["unsealed", "short", "no memory file"])
def test_a_ring_that_could_break_us_is_not_mapped(rig: Rig, which: str, how: str) -> None:
    """C4: what could shrink under us, or is too small, or is a disk's, is refused before it is touched: no SIGBUS."""
    rig.read(mappable=False)
    source = FakeSource(rig)
    size = PAGE if which == "page" else SLOTS * SLOT_BYTES
    with tempfile.TemporaryFile() as disk:
        disk.truncate(size)
        bad = {
            "unsealed": lambda: file_of(size, seals=0)[0],
            "short": lambda: file_of(size // 4)[0],
            "no memory file": disk.fileno,
        }[how]()
        source.offer(**{which: bad})
        assert "memory" in rig.lost()
    assert not rig.memory.any()


REGIONS = {
    "unsealed": lambda: (file_of(MEMORY_BYTES, seals=0)[0], 0, MEMORY_BYTES),
    "sealed against nothing but growth": lambda: (file_of(MEMORY_BYTES, seals=4)[0], 0, MEMORY_BYTES),
    "shorter than told": lambda: (file_of(MEMORY_BYTES - PAGE)[0], 0, MEMORY_BYTES),
    "told to be shorter than its key": lambda: (file_of(MEMORY_BYTES)[0], 0, MEMORY_BYTES - 1),
    "from beyond its end on": lambda: (file_of(MEMORY_BYTES)[0], PAGE, MEMORY_BYTES),
    "from far beyond its end on": lambda: (file_of(MEMORY_BYTES)[0], (1 << 64) - PAGE, MEMORY_BYTES),
}


@pytest.mark.parametrize("made", REGIONS.values(), ids=REGIONS)
def test_a_region_that_lies_about_itself_is_not_mapped(rig: Rig, made) -> None:
    """D6: sizes are the file's own, never the peer's word."""
    rig.read(mappable=True)
    assert rig.hear()[:2] == (MAP, REGION)
    descriptor, offset, size = made()
    rig.tell(GIVE_REGION, descriptor, region=REGION, offset=offset, size=size)
    os.close(descriptor)
    rig.lost()
    assert not rig.memory.any()


def test_a_region_that_is_not_given_after_all_comes_by_the_ring(rig: Rig) -> None:
    op = rig.read(mappable=True)
    rig.hear()
    rig.tell(GIVE_REGION, region=REGION)
    source = FakeSource(rig)
    source.offer()
    source.serve(op)
    assert (rig.end_of(op).outcome, rig.end_of(op).path) == (Outcome.OK, "ring")


FRAMES = {
    "of an unknown kind": lambda rig: rig.tell(99),
    "with a region that nobody asked for": lambda rig: rig.tell(GIVE_REGION, file_of(PAGE)[0], region=1, size=PAGE),
    "with a ring that nobody wanted": lambda rig: rig.tell(RING, file_of(PAGE)[0], file_of(PAGE)[0]),
    "that wants a ring and has no page": lambda rig: rig.tell(WANT_RING),
    "that wants a ring by an unsealed page": lambda rig: rig.tell(WANT_RING, file_of(PAGE, seals=0)[0]),
    "with files that nobody asked for": lambda rig: rig.tell(MAP, *(file_of(PAGE)[0] for _ in range(3))),
}


@pytest.mark.parametrize("bad", FRAMES.values(), ids=FRAMES)
def test_a_frame_that_makes_no_sense_loses_the_peer(rig: Rig, bad) -> None:
    """Nothing of it is kept: not even the files."""
    before = len(os.listdir("/proc/self/fd"))
    bad(rig)
    rig.lost()
    assert len(os.listdir("/proc/self/fd")) <= before + 3  # the test's own


# --- a target that breaks the protocol ------------------------------------------------------------------------------

BAD_ASKS = {
    "beyond the plan": lambda total: (1, 0, -(-total // LEAF_BYTES) * LEAF_BYTES),
    "far beyond the plan": lambda _: (1, 1 << 40, (1 << 40) + LEAF_BYTES),
    "within a leaf": lambda _: (1, 8, LEAF_BYTES),
    "ending within a leaf": lambda _: (1, 0, 100),
    "of nothing": lambda _: (1, 0, 0),
    "backwards": lambda _: (1, LEAF_BYTES, 0),
    "negative": lambda _: (1, -LEAF_BYTES, LEAF_BYTES),
    "larger than a slot": lambda _: (1, 0, SLOT_BYTES + LEAF_BYTES),
    "with flags from nowhere": lambda _: (1, 0, LEAF_BYTES, 7),
}


@pytest.mark.parametrize("bad", BAD_ASKS.values(), ids=BAD_ASKS)
def test_an_ask_for_what_is_not_exposed_loses_the_peer_and_gets_nothing(rig: Rig, bad) -> None:
    """K2: wire offsets inside the exposure's plan are all that a target can name; never memory."""
    rig.memory[:] = 0x5A
    total = rig.expose()
    target = FakeTarget(rig)
    target.ask(*bad(total))
    assert "ask for bytes" in rig.lost()
    assert b"\x5a" not in mmap.mmap(target.files[1], SLOTS * SLOT_BYTES, prot=mmap.PROT_READ)[:]


def test_more_asks_than_slots_lose_the_peer(rig: Rig) -> None:
    rig.expose()
    FakeTarget(rig).ask(1, 0, LEAF_BYTES, count=SLOTS + 1)
    assert "more asks" in rig.lost()


def test_an_attempt_of_another_peer_is_not_served(rig: Rig) -> None:
    """K2: exposures are by peer; others are answered with why not."""
    target = FakeTarget(rig)
    target.ask(77, 0, LEAF_BYTES)
    assert target.answered() == 1


def test_what_is_given_to_a_peer_cannot_be_written_by_it(rig: Rig) -> None:
    """K2: pages and rings are sealed before they are handed out."""
    for descriptor in FakeTarget(rig).files:
        with pytest.raises(OSError, match="permitted"):
            mmap.mmap(descriptor, 0)
        with pytest.raises(OSError, match="permitted"):
            os.ftruncate(descriptor, 0)


def test_a_region_without_a_file_is_not_given(rig: Rig) -> None:
    for region in (REGION, 5, 1 << 31):
        rig.tell(MAP, region=region)
        assert rig.hear() == (GIVE_REGION, region, 0, 0, [])


# --- registration and addresses -------------------------------------------------------------------------------------


def test_memory_that_a_peer_could_spoil_is_not_registered_as_shareable(rig: Rig) -> None:
    """Unsealed, or not holding the region: refused, and nothing is registered under the number."""
    descriptor, memory = file_of(2 * PAGE, seals=0)
    address = np.frombuffer(memory, np.uint8).ctypes.data
    with pytest.raises(TransportError, match="sealed"):
        rig.transport.register(9, address, PAGE, Backing(descriptor, 0))
    sealed, _ = file_of(2 * PAGE, seals=SEALS)
    for offset in (2 * PAGE, PAGE + 1, 1 << 63):
        with pytest.raises(TransportError, match="does not have"):
            rig.transport.register(9, address, PAGE, Backing(sealed, offset))
    rig.transport.register(9, address, PAGE)


def test_addresses_that_cannot_work_are_refused_and_sockets_taken_over(rig: Rig) -> None:
    """J3: the reason is named; every descriptor that was given is closed."""
    own = msgspec.msgpack.decode(rig.transport.address(), type=SharedAddress)
    cases = [
        (msgspec.msgpack.encode(msgspec.structs.replace(own, boot="other")), 1, PeerIncompatibleError),
        (msgspec.msgpack.encode(msgspec.structs.replace(own, version=9)), 1, PeerIncompatibleError),
        (b"\xc1", 1, SchemaError),
        (rig.transport.address(), 0, TransportError),
        (rig.transport.address(), 2, TransportError),
    ]
    for address, lanes, error in cases:
        pairs = [socket.socketpair() for _ in range(1 + lanes)]
        with pytest.raises(error):
            rig.transport.connect("other", address, pairs[0][0].detach(), [ours.detach() for ours, _ in pairs[1:]])
        for _, theirs in pairs:
            theirs.settimeout(5)
            assert theirs.recv(1) == b""
            theirs.close()


def test_a_lane_over_tcp_is_refused(rig: Rig) -> None:
    """Descriptors cannot travel over it."""
    channel, far = socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        lane = socket.create_connection(listener.getsockname()[:2])
        with pytest.raises(TransportError, match="Unix"):
            rig.transport.connect("other", rig.transport.address(), channel.detach(), [lane.detach()])
    far.close()


def test_its_listener_goes_with_it() -> None:
    transport = SharedTransport()
    path = transport.lane_path(transport.address())
    transport.close()
    with socket.socket(socket.AF_UNIX) as sock, pytest.raises(ConnectionRefusedError):
        sock.connect(path)


# --- threads --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shareable", [True, False], ids=["mapped", "ring"])
def test_a_held_interpreter_stops_nothing(*, shareable: bool) -> None:
    """B9: the source's GIL is held for longer than silence is borne; heartbeats and payload go on."""
    with SharedHarness(shareable=shareable) as harness:
        plan = scattered_plan()
        harness.source.expose(harness.exposure(1, plan, lease_seconds=0.5))
        harness.source.peer.send("hold_gil", seconds=1.2)
        op = harness.start_read(1, plan)
        assert harness.end_of(op).outcome is Outcome.OK
        harness.let_pass(1.0)
        assert harness.source.peer.answer() is None
        assert harness.source.lease(1).held
        assert [completion.op for completion in harness.seen] == [op]


@pytest.mark.parametrize("reading", [False, True])
def test_it_sleeps_while_there_is_nothing_to_move(*, reading: bool) -> None:
    """Idle, or waiting for a source that is stopped: the thread sleeps, heartbeats apart."""
    with SharedHarness(shareable=False) as harness:
        plan = scattered_plan()
        harness.source.expose(harness.exposure(1, plan))
        harness.end_of(harness.start_read(1, plan))  # the ring is there
        if reading:
            harness.source.expose(harness.exposure(2, plan))
            harness.source.stop()
            harness.start_read(2, plan)
        time.sleep(0.05)
        before = resource.getrusage(resource.RUSAGE_SELF)
        time.sleep(0.4)
        after = resource.getrusage(resource.RUSAGE_SELF)
        spent = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
        assert spent < 0.04, "a tenth of a core, at a heartbeat every 50 ms"


def test_a_lost_lane_is_a_lost_peer(rig: Rig) -> None:
    rig.read(mappable=True)
    rig.lane.close()
    assert rig.completion(CompletionKind.READ).outcome is Outcome.PEER_LOST
    assert "lane" in rig.lost()
