"""A peer of the shared transport that a test plays itself, to break the rules: frames, files and words as native code
has them (native/src/shared_wire.hpp)."""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import struct
import time

import msgspec
import numpy as np
import xxhash
from child import F_SEAL_FUTURE_WRITE
from watching import Played

from kvlink.errors import KVLinkError, PeerIncompatibleError, SchemaError, TransportError
from kvlink.limits import LEAF_BYTES
from kvlink.testing.harness import MEMORY_BYTES, REGION, scattered_plan, wire_bytes
from kvlink.transports.base import Read, RegionKey
from kvlink.transports.shared import MAPPABLE, SharedAddress, SharedTransport

BELL, MAP, GIVE_REGION, WANT_RING, RING, WANT_PROOF, PROOF, FIND, FOUND = range(1, 10)
FRAME = struct.Struct("<IIQQQ")
SLOTS, SLOT_BYTES = 8, 256 * 1024
LARGEST_ASK_BYTES = SLOT_BYTES
WORDS_BYTES, ASK_BYTES, ANSWER_BYTES = 128, 64, 192
SEALS = fcntl.F_SEAL_SHRINK | F_SEAL_FUTURE_WRITE
PAGE = 4096


def file_of(size: int, *, seals: int = SEALS) -> tuple[int, mmap.mmap]:
    """A memfd and our own, writable mapping of it."""
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    memory = mmap.mmap(descriptor, size)
    if seals:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor, memory


class Rig(Played):
    """A transport whose only peer is the test. Both are this one process, so that the kernel lets either read it."""

    def __init__(self, path: str = "auto") -> None:
        transport = SharedTransport(path=path, heartbeat_seconds=0.05, peer_lost_seconds=30.0)
        super().__init__(transport, socket.socketpair(), socket.socketpair(), chunk_leaves=4)

    def read(self, *, mappable: bool = True, max_rereads: int = 0, integrity: bool = True) -> int:
        """Start reading the kit's plan from the test."""
        key = MAPPABLE if mappable else b""
        self.transport.import_key("peer", RegionKey(region=REGION, address=0, length=MEMORY_BYTES, key=key))
        plan = scattered_plan()
        return self.transport.read(
            Read(peer="peer", attempt=1, plan=plan, integrity=integrity, chunk_leaves=4, max_rereads=max_rereads)
        )

    def tell(self, word: int, *files: int, region: int = 0, offset: int = 0, size: int = 0) -> None:
        socket.send_fds(self.lane, [FRAME.pack(word, region, offset, size, 0)], files)

    def hear(self) -> tuple[int, int, int, int, list[int]]:
        """The next frame but bells: word, region, offset, bytes, files."""
        while True:
            data, files, _, _ = socket.recv_fds(self.lane, FRAME.size, 4)
            word, region, offset, size, _ = FRAME.unpack(data)
            if word != BELL:
                return word, region, offset, size, files


class FakeSource:
    """Serves the ring, as long as the test wants it to."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        word, _, _, _, (asks,) = rig.hear()
        assert word == WANT_RING
        self.asks = mmap.mmap(asks, 0, prot=mmap.PROT_READ)
        os.close(asks)
        self.page_file, self.page = file_of(PAGE)
        self.ring_file, self.ring = file_of(SLOTS * SLOT_BYTES)
        memory = np.random.default_rng(4).integers(0, 256, MEMORY_BYTES, dtype=np.uint8)
        self.wire = wire_bytes(scattered_plan(), memory)
        self.memory = memory
        self.answered = 0

    def offer(self, page: int | None = None, ring: int | None = None) -> None:
        self.rig.tell(RING, self.page_file if page is None else page, self.ring_file if ring is None else ring)

    def asked(self) -> int:
        return struct.unpack_from("<I", self.asks, 0)[0]

    def ask(self) -> tuple[int, int, int]:
        """The next ask that is not answered yet: attempt, begin, end; waits for it."""
        deadline = time.monotonic() + 5
        while self.asked() == self.answered:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        return struct.unpack_from("<Qqq", self.asks, WORDS_BYTES + self.answered % SLOTS * ASK_BYTES)

    def answer(self, *, spoil: bool = False, reason: int = 0) -> tuple[int, int]:
        """Answer the next ask; ``spoil``: a byte arrives wrong. What was asked for."""
        _, begin, end = self.ask()
        slot, payload = self.answered % SLOTS, self.wire[begin:end]
        digests = [xxhash.xxh3_64_intdigest(payload[at : at + LEAF_BYTES]) for at in range(0, len(payload), LEAF_BYTES)]
        packed = bytes([payload[0] ^ 1]) + payload[1:] if spoil else payload
        self.ring[slot * SLOT_BYTES : slot * SLOT_BYTES + len(packed)] = packed
        entry = WORDS_BYTES + slot * ANSWER_BYTES
        struct.pack_into("<I", self.page, entry, reason)
        struct.pack_into(f"<{len(digests)}Q", self.page, entry + 8, *digests)
        self.answered += 1
        self.publish(self.answered)
        return begin, end

    def serve(self, op: int, *, spoil: bool = False) -> None:
        """Answer whatever is asked until the read ends."""
        while not any(completion.op == op for completion in self.rig.seen):
            self.rig.seen += self.rig.transport.poll()
            if self.asked() != self.answered:
                self.answer(spoil=spoil)

    def publish(self, count: int) -> None:
        struct.pack_into("<I", self.page, 0, count & 0xFFFFFFFF)
        self.rig.tell(BELL)


class FakeTarget:
    """Asks the ring for what it should not."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.file, self.page = file_of(PAGE)
        self.asked = 0
        rig.tell(WANT_RING, self.file)
        word, _, _, _, (answers, ring) = rig.hear()
        assert word == RING
        self.files = answers, ring
        self.answers = mmap.mmap(answers, 0, prot=mmap.PROT_READ)

    def ask(self, attempt: int, begin: int, end: int, digests: int = 1, *, count: int = 1) -> None:
        """The next ask, told as ``count``."""
        entry = WORDS_BYTES + self.asked % SLOTS * ASK_BYTES
        struct.pack_into("<QqqI", self.page, entry, attempt, begin, end, digests)
        self.asked += count
        struct.pack_into("<I", self.page, 0, self.asked)
        self.rig.tell(BELL)

    def answer(self, length: int) -> tuple[int, bytes]:
        """Waits for the answer of the last ask: the reason why there are no bytes, or 0 and ``length`` bytes."""
        deadline = time.monotonic() + 5
        while struct.unpack_from("<I", self.answers, 0)[0] != self.asked:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        slot = (self.asked - 1) % SLOTS
        (reason,) = struct.unpack_from("<I", self.answers, WORDS_BYTES + slot * ANSWER_BYTES)
        return reason, b"" if reason else self.got()[slot * SLOT_BYTES :][:length]

    def got(self) -> bytes:
        """All that the ring holds."""
        return mmap.mmap(self.files[1], SLOTS * SLOT_BYTES, prot=mmap.PROT_READ)[:]


def bad_addresses(own: bytes) -> list[tuple[bytes, int, type[KVLinkError]]]:
    """An address, the number of lanes that come with it, and how it is refused."""
    address = msgspec.msgpack.decode(own, type=SharedAddress)
    return [
        (msgspec.msgpack.encode(msgspec.structs.replace(address, boot="other")), 1, PeerIncompatibleError),
        (msgspec.msgpack.encode(msgspec.structs.replace(address, version=9)), 1, PeerIncompatibleError),
        (b"\xc1", 1, SchemaError),
        (own, 0, TransportError),
        (own, 2, TransportError),
    ]
