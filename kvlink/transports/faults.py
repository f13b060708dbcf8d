"""Faults that `kvlink.transports.loopback` injects, as a short list a test can be read from.

>>> script = FaultScript([FlipByte(chunk=3, on_try=1), KillPeer(end="source", after_chunks=8)])
>>> script.flips(read=1, chunk=3, nth_try=1), script.flips(read=1, chunk=3, nth_try=2)
(True, False)

Everything is counted from one (the first read is 1) except chunks, which are numbered from zero as in a plan.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FlipByte:
    """A byte of a chunk arrives wrong at the target.

    Attributes:
        chunk: index of the chunk in its plan.
        on_try: which try at this chunk (1 is the first, 2 the first re-read), or ``None`` for every try.
        read: which read of the fabric, in the order accepted, or ``None`` for every read.
    """

    chunk: int
    on_try: int | None = None
    read: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayChunk:
    """A chunk stays in flight for ``steps`` more polls of its target. ``None`` for a field means every one."""

    steps: int
    chunk: int | None = None
    read: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FailRead:
    """The ``nth`` read of the fabric ends with FAILED once ``after_chunks`` of its chunks have landed."""

    nth: int
    after_chunks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FailRegister:
    """The ``nth`` registration of the fabric raises `kvlink.errors.TransportError`."""

    nth: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FailConnect:
    """The ``nth`` connect of the fabric ends with UNREACHABLE."""

    nth: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RefuseReads:
    """`Transport.read` raises `TransportFull` while ``active`` or more reads of its end run."""

    active: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DropRenewals:
    """Renewals of leases by the end named ``end`` get lost, from the moment the fault is injected."""

    end: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StopPeer:
    """The end named ``end`` stops, as under SIGSTOP, when ``after_chunks`` chunks of the fabric have landed."""

    end: str
    after_chunks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KillPeer:
    """The end named ``end`` dies, as under ``kill -9``, when ``after_chunks`` chunks of the fabric have landed."""

    end: str
    after_chunks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomFaults:
    """Every read, and every chunk of it, takes its chance.

    What happens to a chunk depends on ``seed``, its read, its index and its try only: not on the order of events.

    Attributes:
        drop: how likely a read loses one of its first chunks, and ends with FAILED; not of every chunk, for then no
            long read would ever end well. One of very few chunks may get away.
        corrupt: how likely a byte of a try at a chunk arrives wrong.
        delay: how likely a chunk stays in flight for up to ``delay_steps`` more polls of its target.
        delay_steps: at most, 1 at least.
        seed: of all these draws.
    """

    drop: float = 0.0
    corrupt: float = 0.0
    delay: float = 0.0
    delay_steps: int = 16
    seed: int = 0

    def drops(self, read: int, landed: int) -> bool:
        """Whether a read fails now, with ``landed`` of its chunks at the target."""
        draw = self._draw("drop", read)
        return draw.random() < self.drop and landed >= draw.randint(0, 3)

    def corrupts(self, read: int, chunk: int, nth_try: int) -> bool:
        """Whether a byte of this try at a chunk arrives wrong."""
        return self.corrupt > 0 and self._draw("corrupt", read, chunk, nth_try).random() < self.corrupt

    def steps(self, read: int, chunk: int) -> int:
        """Polls by which a chunk is late."""
        draw = self._draw("delay", read, chunk)
        return draw.randint(1, self.delay_steps) if self.delay > 0 and draw.random() < self.delay else 0

    def _draw(self, what: str, *numbers: int) -> random.Random:
        return random.Random(f"{self.seed} {what} {numbers}")  # noqa: S311 - chance to repeat, not a secret


Fault = (
    FlipByte | DelayChunk | FailRead | FailRegister | FailConnect | RefuseReads | DropRenewals | StopPeer | KillPeer
    | RandomFaults
)  # fmt: skip


class FaultScript:
    """Answers, in the order things happen, which of a list of faults strikes now.

    Counts registrations, connects, reads and landed chunks of the whole fabric; the same calls in the same order get
    the same answers.
    """

    def __init__(self, faults: Iterable[Fault] = ()) -> None:
        self._faults: list[Fault] = list(faults)
        self._registrations = 0
        self._connects = 0
        self._reads = 0
        self._landed = 0

    def inject(self, fault: Fault) -> None:
        """Add a fault; what has happened already stays as it was."""
        self._faults.append(fault)

    def registration_fails(self) -> bool:
        """Count a registration; whether it fails."""
        self._registrations += 1
        return any(isinstance(fault, FailRegister) and fault.nth == self._registrations for fault in self._faults)

    def connect_fails(self) -> bool:
        """Count a connect; whether it fails."""
        self._connects += 1
        return any(isinstance(fault, FailConnect) and fault.nth == self._connects for fault in self._faults)

    def refuses_read(self, active: int) -> bool:
        """Whether a read is refused while ``active`` others of its end run. Counts nothing."""
        return any(isinstance(fault, RefuseReads) and active >= fault.active for fault in self._faults)

    def read_accepted(self) -> int:
        """Count a read; its number."""
        self._reads += 1
        return self._reads

    def read_fails(self, read: int, landed: int) -> bool:
        """Whether a read ends now, with ``landed`` of its chunks at the target."""
        return any(
            (isinstance(fault, FailRead) and fault.nth == read and landed >= fault.after_chunks)
            or (isinstance(fault, RandomFaults) and fault.drops(read, landed))
            for fault in self._faults
        )

    def delay(self, read: int, chunk: int) -> int:
        """Polls by which a chunk is late."""
        return sum(
            fault.steps
            for fault in self._faults
            if isinstance(fault, DelayChunk) and fault.chunk in (None, chunk) and fault.read in (None, read)
        ) + sum(fault.steps(read, chunk) for fault in self._faults if isinstance(fault, RandomFaults))

    def flips(self, read: int, chunk: int, nth_try: int) -> bool:
        """Whether a byte of this try at a chunk arrives wrong."""
        return any(
            (
                isinstance(fault, FlipByte)
                and fault.chunk == chunk
                and fault.read in (None, read)
                and fault.on_try in (None, nth_try)
            )
            or (isinstance(fault, RandomFaults) and fault.corrupts(read, chunk, nth_try))
            for fault in self._faults
        )

    def drops_renewals(self, end: str) -> bool:
        """Whether renewals by this end get lost."""
        return any(isinstance(fault, DropRenewals) and fault.end == end for fault in self._faults)

    def chunk_landed(self) -> list[StopPeer | KillPeer]:
        """Count a landed chunk; the peers that stop or die by it, in the order listed."""
        self._landed += 1
        return [
            fault
            for fault in self._faults
            if isinstance(fault, StopPeer | KillPeer) and fault.after_chunks == self._landed
        ]
