"""A connected pair of transports to run `kvlink.testing.conformance` on: what the author of a transport writes.

The target is a `Transport` of this process. The source may be another one of this process, or of a process of its
own; either way its memory is seen from here (a shared mapping), so that it can be judged while its owner is stopped or
dead.
"""

from __future__ import annotations

import enum
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvlink.plan import CopyPlan, Dim, Segment
from kvlink.transports.base import Completion, CompletionKind, Exposure, LeaseReport, Read, Transport

T = TypeVar("T")

REGION = 3
"""Number of the one region each side registers; not 0, so that a transport that mixes up numbers is found out."""
MEMORY_BYTES = 2 * 1024 * 1024
"""Length of that region, on each side."""


class Ability(enum.Enum):
    """What a harness can provoke beyond stopping, resuming and killing its source."""

    FLIP = "corrupt one byte of a chunk between the source's memory and the target's"
    READ_ELSEWHERE = "read other source bytes than those exposed, because it is the target that addresses them"


class Source(ABC):
    """The peer a target reads from, wherever it runs. It has registered `memory` as `REGION`.

    Attributes:
        name: what the target calls it.
        memory: uint8, `MEMORY_BYTES`: its region, seen from this process.
    """

    name: str
    memory: NDArray[np.uint8]

    @abstractmethod
    def expose(self, exposure: Exposure) -> None:
        """Call `Transport.expose` there; raises what it raised."""

    @abstractmethod
    def lease(self, attempt: int) -> LeaseReport:
        """Call `Transport.lease` there, for the target's attempt."""

    @abstractmethod
    def withdraw(self, attempt: int) -> LeaseReport:
        """Call `Transport.withdraw` there, for the target's attempt."""

    @abstractmethod
    def completions(self) -> list[Completion]:
        """All that its transport has reported since the last call."""

    @abstractmethod
    def stop(self) -> None:
        """Stop it as SIGSTOP does; back when it is stopped."""

    @abstractmethod
    def resume(self) -> None:
        """Undo `stop`."""

    @abstractmethod
    def kill(self) -> None:
        """End it as SIGKILL does, stopped or not; back when it is gone."""


class Harness(ABC):
    """One target and one source, connected, with the source's key imported. A context manager.

    Attributes:
        target: the transport under test.
        target_name: what the source calls it.
        memory: uint8, `MEMORY_BYTES`: its region `REGION`.
        source: the peer it reads from.
        short_lease_seconds: a lease that ends soon when nobody reads.
        lease_seconds: a lease that nothing but a fault ends.
    """

    target: Transport
    target_name: str
    memory: NDArray[np.uint8]
    source: Source
    short_lease_seconds: float = 0.3
    lease_seconds: float = 30.0

    def __init__(self) -> None:
        self.seen: list[Completion] = []
        self._target_closed = False

    @abstractmethod
    def clock(self) -> float:
        """The time both sides live by, in seconds."""

    @abstractmethod
    def idle(self) -> None:
        """Let the source, and time, move on: about 10 ms, less if the target has something to report."""

    @abstractmethod
    def reconnect(self) -> None:
        """Connect the target and the living source again, after they lost each other, and import the key."""

    @abstractmethod
    def replace_source(self) -> None:
        """Make and connect a successor of a dead source, under the same name."""

    @abstractmethod
    def connect_to_nobody(self) -> int:
        """Call `Transport.connect` with the name ``"nobody"`` and the address of a peer that is gone; its op."""

    @abstractmethod
    def close(self) -> None:
        """End both sides, whatever state they are in."""

    def flip(self, chunk: int, on_try: int | None) -> None:
        """Corrupt a byte of ``chunk`` on its way in the next read: on its n-th try, or (``None``) on every try.

        Implement it, or name `Ability.FLIP` in `TransportConformance.cannot`.
        """
        raise NotImplementedError(f"flip chunk {chunk} on try {on_try}: this harness cannot")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- what the rules are written with ----------------------------------------------------------------------------

    def exposure(
        self, attempt: int, plan: CopyPlan, *, lease_seconds: float | None = None, integrity: bool = True
    ) -> Exposure:
        """An exposure to the target."""
        return Exposure(
            peer=self.target_name,
            attempt=attempt,
            plan=plan,
            lease_seconds=self.lease_seconds if lease_seconds is None else lease_seconds,
            integrity=integrity,
            chunk_leaves=CHUNK_LEAVES,
        )

    def start_read(self, attempt: int, plan: CopyPlan, *, integrity: bool = True, max_rereads: int = 2) -> int:
        """Start a read from the source; its op."""
        return self.target.read(
            Read(
                peer=self.source.name,
                attempt=attempt,
                plan=plan,
                integrity=integrity,
                chunk_leaves=CHUNK_LEAVES,
                max_rereads=max_rereads,
            )
        )

    def cut_off(self, attempt: int) -> Completion:
        """Cut an attempt off and wait for the end of it."""
        return self.end_of(self.target.cut_off(self.source.name, attempt))

    def end_of(self, op: int, *, within_seconds: float = 10.0) -> Completion:
        """Wait for the completion of an op."""
        return self.wait_for(lambda completion: completion.op == op, f"completion of op {op}", within_seconds)

    def event(self, kind: CompletionKind, *, within_seconds: float = 10.0) -> Completion:
        """Wait for a completion of a kind."""
        return self.wait_for(lambda completion: completion.kind is kind, kind.name, within_seconds)

    def wait_for(self, wanted: Callable[[Completion], bool], what: str, within_seconds: float) -> Completion:
        """The first completion seen that is wanted, polling the target until it is there."""
        found = self._until(lambda: next(filter(wanted, self.seen), None), within_seconds)
        if found is None:
            raise AssertionError(f"no {what} within {within_seconds} s; seen: {self.seen}")
        return found

    def source_event(self, kind: CompletionKind, *, within_seconds: float = 10.0) -> list[Completion]:
        """Wait until the source's transport has reported a completion of a kind; all it reported till then."""
        reported: list[Completion] = []

        def look() -> list[Completion] | None:
            reported.extend(self.source.completions())
            return reported if any(completion.kind is kind for completion in reported) else None

        if self._until(look, within_seconds) is None:
            raise AssertionError(f"no {kind.name} at the source within {within_seconds} s; reported: {reported}")
        return reported

    def close_target(self) -> None:
        """Close the transport under test; from then on waiting leaves it alone."""
        self._target_closed = True
        self.target.close()

    def let_pass(self, seconds: float) -> None:
        """Let time pass, with both sides at work."""
        self._until(lambda: None, seconds)

    def of(self, op: int) -> list[Completion]:
        """Every completion of an op seen so far."""
        return [completion for completion in self.seen if completion.op == op]

    def _until(self, look: Callable[[], T | None], within_seconds: float) -> T | None:
        deadline = self.clock() + within_seconds
        while True:
            if not self._target_closed:
                self.seen += self.target.poll()
            found = look()
            if found is not None or self.clock() >= deadline:
                return found
            if self._target_closed:  # nothing moves a virtual clock now, so that the wait is counted here
                time.sleep(0.01)
                deadline -= 0.01
            else:
                self.idle()


# --- plans, and what they should do -----------------------------------------------------------------------------------

CHUNK_LEAVES = 4
"""Chunks of 64 KiB: a plan of the kit has a dozen."""


def scattered_plan(lane: int = 0, *, pieces: int = 40) -> CopyPlan:
    """Two heads of each block, from blocks in one order to blocks in another: runs that divide no leaf and no chunk.

    Args:
        lane: 0, 1, ... Plans of different lanes share no byte at the target, so that they can run together.
        pieces: blocks, at most 40; 20,000 bytes each.
    """
    run_bytes, source_block, target_block = 10_000, 26_000, 24_000
    order = np.random.default_rng(lane).permutation(40)[:pieces]
    table = np.stack([order * source_block, order[::-1] * target_block], axis=1).astype(np.int64)
    bases = np.array([[REGION, 500, REGION, 700 + lane * 1_000_000]], dtype=np.int64)
    segment = Segment(bases=bases, pieces=table, nest=(Dim(2, 11_000, 12_000),), run_bytes=run_bytes)
    return CopyPlan(segments=(segment,), total_bytes=2 * run_bytes * pieces)


def moved(plan: CopyPlan, offsets: tuple[int, int] = (0, 0)) -> CopyPlan:
    """A plan with ``offsets`` (source, target) bytes added to every base: to leave a region, or to read elsewhere."""
    shift = np.array([0, offsets[0], 0, offsets[1]], dtype=np.int64)
    segments = tuple(Segment(s.bases + shift, s.pieces, s.nest, s.run_bytes) for s in plan.segments)
    return CopyPlan(segments=segments, total_bytes=plan.total_bytes)


def runs(plan: CopyPlan) -> Iterator[tuple[int, int, int]]:
    """(source offset, target offset, bytes) of every run in wire order, by the plain walk of docs/architecture.md."""
    for segment in plan.segments:
        for base in segment.bases.tolist():
            for piece in segment.pieces.tolist():
                for index in np.ndindex(*(dim.count for dim in segment.nest)):
                    steps = list(zip(index, segment.nest, strict=True))
                    source = base[1] + piece[0] + sum(i * dim.source_stride for i, dim in steps)
                    target = base[3] + piece[1] + sum(i * dim.target_stride for i, dim in steps)
                    yield source, target, segment.run_bytes


def wire_bytes(plan: CopyPlan, source: NDArray[np.uint8]) -> bytes:
    """The plan's bytes in wire order, gathered from the source's region."""
    return b"".join(source[start : start + length].tobytes() for start, _, length in runs(plan))


def expected(plan: CopyPlan, source: NDArray[np.uint8], target: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """What the whole target region must be once the plan has run; touched bytes and all others."""
    after = target.copy()
    for start, place, length in runs(plan):
        after[place : place + length] = source[start : start + length]
    return after
