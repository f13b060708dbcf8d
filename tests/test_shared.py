"""Shared memory beyond the rules of all transports and of those with lanes (test_lanes.py): spoiled slots, files that
lie, rings and regions that break its protocol."""

from __future__ import annotations

import mmap
import os
import socket
import tempfile
from collections.abc import Iterator

import numpy as np
import pytest
from shared_peer import (
    GIVE_REGION,
    MAP,
    PAGE,
    PROOF,
    RING,
    SEALS,
    SLOT_BYTES,
    SLOTS,
    WANT_PROOF,
    WANT_RING,
    FakeSource,
    FakeTarget,
    Rig,
    file_of,
)

from kvlink.errors import TransportError
from kvlink.limits import LEAF_BYTES
from kvlink.testing.harness import MEMORY_BYTES, REGION, expected, scattered_plan
from kvlink.transports.base import Backing, Outcome
from kvlink.transports.shared import SharedTransport


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
    assert rig.hear()[0] == WANT_PROOF
    rig.tell(PROOF)  # nor can it be pulled
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


def test_more_asks_than_slots_lose_the_peer(rig: Rig) -> None:
    rig.expose()
    FakeTarget(rig).ask(1, 0, LEAF_BYTES, count=SLOTS + 1)
    assert "more asks" in rig.lost()


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
