"""Memory that the kernel reads out of the source's process, beyond the rules of all transports: whose memory it is,
where it lies there, what becomes of memory that is gone, and that a pair which may not goes by the ring and says why.

That a source may be killed in the middle is test_processes.py's and native/tests/test_pull.cpp's.
"""

from __future__ import annotations

import ctypes
import mmap
import socket
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from peer_process import PeerProcess
from shared_peer import FIND, FOUND, PROOF, WANT_PROOF, FakeSource, Rig
from test_conformance_shared import QUICK, SharedHarness

from kvlink.limits import LEAF_BYTES
from kvlink.testing.harness import MEMORY_BYTES, REGION, expected, scattered_plan
from kvlink.transports.base import Completion, CompletionKind, Exposure, Outcome, Read

NONCE = 0x1234_5678_9ABC_DEF1


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig(path="pulled")
    yield rig
    rig.close()


class Pulled:
    """A source whose memory is this process's, which is the target's, too: the kernel lets it be read."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.memory = np.random.default_rng(4).integers(0, 256, MEMORY_BYTES, dtype=np.uint8)
        self._number = np.array([NONCE], np.uint64)

    def prove(self, number: int = NONCE, address: int | None = None) -> None:
        """Answer what proves whose memory it is, well or not."""
        assert self.rig.hear()[0] == WANT_PROOF
        self.rig.tell(PROOF, offset=self._number.ctypes.data if address is None else address, size=number)

    def place(self, address: int | None = None, size: int = MEMORY_BYTES) -> None:
        """Say where the region lies, truly or not."""
        assert self.rig.hear()[:2] == (FIND, REGION)
        address = self.memory.ctypes.data if address is None else address
        self.rig.tell(FOUND, region=REGION, offset=address, size=size)

    @property
    def expected(self) -> np.ndarray:
        return expected(scattered_plan(), self.memory, np.zeros_like(self.rig.memory))


def test_bytes_come_without_the_sources_doing(rig: Rig) -> None:
    """With digests off nothing is asked of the source but who it is, and where its memory lies."""
    op = rig.read(mappable=False, integrity=False)
    source = Pulled(rig)
    source.prove()
    source.place()
    assert (rig.end_of(op).outcome, rig.end_of(op).path) == (Outcome.OK, "pulled")
    assert np.array_equal(rig.memory, source.expected)
    again = rig.read(mappable=False, integrity=False)  # with its key told anew; who it is is known by now
    source.place()
    assert rig.end_of(again).outcome is Outcome.OK


@pytest.mark.parametrize("spoil", [False, True], ids=["right", "wrong"])
def test_digests_come_from_the_source(rig: Rig, *, spoil: bool) -> None:
    """E3: what was read counts only where its digest is the one that the source computed."""
    op = rig.read(mappable=False)
    source = Pulled(rig)
    source.prove()
    source.place()
    serving = FakeSource(rig)
    if spoil:
        source.memory[:] ^= 0xFF
    serving.offer()
    serving.serve(op)
    end = rig.end_of(op)
    assert end.path == "pulled"
    assert (end.outcome is Outcome.OK) is not spoil
    assert end.outcome is Outcome.OK or end.outcome is Outcome.DIGEST_MISMATCH


# --- whose memory ---------------------------------------------------------------------------------------------------

PROOFS: dict[str, Callable[[Pulled], None]] = {
    "another number": lambda source: source.prove(NONCE ^ 1),
    "no number": lambda source: source.prove(0),
    "a number nowhere": lambda source: source.prove(address=8),
    "a number beyond all memory": lambda source: source.prove(address=(1 << 64) - 4),
}


@pytest.mark.parametrize("bad", PROOFS.values(), ids=PROOFS)
def test_a_source_that_is_not_proven_is_read_by_the_ring(rig: Rig, bad: Callable[[Pulled], None]) -> None:
    """K2: a process that does not hold the number that the source told is not the source's."""
    op = rig.read(mappable=False)
    bad(Pulled(rig))
    serving = FakeSource(rig)
    serving.offer()
    serving.serve(op)
    end = rig.end_of(op)
    assert (end.outcome, end.path) == (Outcome.OK, "ring")
    assert "is not the source" in end.path_reason


def test_a_lane_that_another_process_opened_is_no_proof() -> None:
    """The sockets were made by the test, so that the kernel names the test as whoever is at the other end."""
    with SharedHarness(shareable=False, path="pulled") as harness:
        plan = scattered_plan()
        harness.source.expose(harness.exposure(1, plan))
        end = harness.end_of(harness.start_read(1, plan))
        assert (end.outcome, end.path) == (Outcome.OK, "ring")
        assert "opened the lane, is not the source" in end.path_reason


def test_a_source_that_the_kernel_does_not_let_us_read_is_read_by_the_ring() -> None:
    """K2: of a process that is not dumpable nobody reads the memory who may not trace everything."""
    source, target = (PeerProcess(kind="shared", **QUICK) for _ in range(2))
    channel, far_channel = socket.socketpair()
    try:
        source.call("forbid_reading")
        target.call("give_up_tracing")
        target.open(kind="shared", path="pulled", **QUICK)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind("")
            listener.listen()
            name = listener.getsockname()
            source.connect("target", target.address, far_channel, lane_name=name)
            lane, _ = listener.accept()
        target.connect("source", source.address, channel, lane)
        _wait(target, CompletionKind.CONNECTED)
        _wait(source, CompletionKind.CONNECTED)
        target.call("import_key", peer="source", key=source.key())
        plan = scattered_plan()
        for attempt in (1, 2):
            source.expose(
                Exposure(peer="target", attempt=attempt, plan=plan, lease_seconds=5, integrity=False, chunk_leaves=4)
            )
            target.read(Read(peer="source", attempt=attempt, plan=plan, integrity=False, chunk_leaves=4, max_rereads=0))
            end = _wait(target, CompletionKind.READ)
            assert (end.outcome, end.path) == (Outcome.OK, "ring")
            assert "does not let this process read" in end.path_reason
    finally:
        source.close()
        target.close()


def _wait(peer: PeerProcess, kind: CompletionKind) -> Completion:
    while True:
        for completion in peer.poll():
            if completion.kind is kind:
                return completion


# --- where it lies --------------------------------------------------------------------------------------------------

PLACES: dict[str, Callable[[Pulled], None]] = {
    "shorter than its key": lambda source: source.place(size=MEMORY_BYTES - 1),
    "nowhere, with bytes": lambda source: source.place(address=0),
    "beyond all addresses": lambda source: source.place(address=(1 << 64) - MEMORY_BYTES + 1),
    "of another region": lambda source: (source.rig.hear(), source.rig.tell(FOUND, region=5, offset=8, size=9)),
    "with a second proof": lambda source: source.rig.tell(PROOF, offset=8, size=NONCE),
}


@pytest.mark.parametrize("bad", PLACES.values(), ids=PLACES)
def test_a_place_that_cannot_be_loses_the_peer(rig: Rig, bad: Callable[[Pulled], object]) -> None:
    """D6: what is told of a region holds what its key says, and is no more than memory could be."""
    rig.read(mappable=False, integrity=False)
    source = Pulled(rig)
    source.prove()
    bad(source)
    rig.lost()
    assert not rig.memory.any()


def test_a_region_that_the_source_does_not_have_comes_by_the_ring(rig: Rig) -> None:
    op = rig.read(mappable=False)
    source = Pulled(rig)
    source.prove()
    source.place(address=0, size=0)
    serving = FakeSource(rig)
    serving.offer()
    serving.serve(op)
    end = rig.end_of(op)
    assert (end.outcome, end.path) == (Outcome.OK, "ring")
    assert "where region" in end.path_reason


@pytest.mark.parametrize("kept", [0, LEAF_BYTES, MEMORY_BYTES // 4], ids=["none", "a leaf", "a quarter"])
def test_memory_that_is_gone_fails_the_read_as_the_sources_fault(rig: Rig, kept: int) -> None:
    """D6: memory that the source has given back is an error with a name, and none of it is taken for what was read."""
    op = rig.read(mappable=False, integrity=False)
    source = Pulled(rig)
    source.prove()
    region = mmap.mmap(-1, MEMORY_BYTES)
    address = np.frombuffer(region, np.uint8).ctypes.data
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.munmap(ctypes.c_void_p(address + kept), ctypes.c_size_t(MEMORY_BYTES - kept)) == 0
    source.place(address=address)
    end = rig.end_of(op)
    assert (end.outcome, end.path) == (Outcome.SOURCE_FAILED, "pulled")
    assert "no memory any more" in end.detail
    assert end.bytes_moved < scattered_plan().total_bytes
    libc.mmap(ctypes.c_void_p(address), ctypes.c_size_t(MEMORY_BYTES), 0, 0x32, -1, ctypes.c_long(0))  # for its owner


def test_where_a_region_lies_is_told_on_the_lane_alone_and_only_when_asked(rig: Rig) -> None:
    """Keys, which travel with the handshake, hold no address; a region that is not there is nowhere."""
    assert rig.transport.export_key(REGION).address == 0
    for region, told in ((REGION, (rig.memory.ctypes.data, MEMORY_BYTES)), (5, (0, 0)), (1 << 31, (0, 0))):
        rig.tell(FIND, region=region)
        assert rig.hear() == (FOUND, region, *told, [])
    rig.transport.unregister(REGION)
    rig.tell(FIND, region=REGION)
    assert rig.hear() == (FOUND, REGION, 0, 0, [])


def test_a_source_proves_itself_by_a_number_that_lies_in_its_memory(rig: Rig) -> None:
    rig.tell(WANT_PROOF)
    word, _, address, number, _ = rig.hear()
    assert word == PROOF
    assert number != 0
    assert ctypes.c_uint64.from_address(address).value == number
