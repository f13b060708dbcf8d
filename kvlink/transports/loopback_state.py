"""The two ends of one attempt in the loopback: what a source lets be read, and a read under way at its target."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from kvlink._native import _kvlink, native_plan
from kvlink.errors import TransportError
from kvlink.limits import LEAF_BYTES
from kvlink.transports.base import Completion, CompletionKind, LeaseReport, Outcome

if TYPE_CHECKING:
    from kvlink.plan import CopyPlan
    from kvlink.transports.base import Exposure, Read

T = TypeVar("T")

DIGEST_BYTES = 8

Regions = list[tuple[int, int]]
"""Address and length by region number; (0, 0) where none is registered."""


def leaf_count(total_bytes: int) -> int:
    """Leaves over ``total_bytes`` of wire order; the last one may be shorter."""
    return -(-total_bytes // LEAF_BYTES)


def by_region(table: Mapping[int, T], missing: T) -> list[T]:
    """A table by region number as a list; ``missing`` fills the holes."""
    return [table.get(region, missing) for region in range(max(table, default=-1) + 1)]


def checked_plan(plan: CopyPlan, lengths: Mapping[int, list[int]], peer: str, stage: str) -> _kvlink.Plan:
    """The native plan, if each side in ``lengths`` stays inside its regions' lengths."""
    try:
        native = native_plan(plan)
        for side, of_regions in lengths.items():
            native.check_bounds(side, of_regions)
    except ValueError as error:
        raise TransportError(f"plan refused: {error}", peer=peer, stage=stage, retryable=False) from error
    return native


class SourceLease:
    """Source side: one exposure, its leaves as far as they were asked for, and whether its lease held."""

    def __init__(self, exposure: Exposure, plan: _kvlink.Plan, now: float) -> None:
        self.exposure = exposure
        self.plan = plan
        self.lapsed = False
        self._renewed_at = now
        self._leaves = bytearray(DIGEST_BYTES * leaf_count(exposure.plan.total_bytes))
        self._known = bytearray(leaf_count(exposure.plan.total_bytes))

    def lapses_at(self, heard_until: float) -> float:
        """When the lease ends if renewals arrive until then."""
        return max(self._renewed_at, heard_until) + self.exposure.lease_seconds

    def settle(self, now: float, heard_until: float) -> bool:
        """Bring the lease up to ``now``; True if it lapsed by this call.

        Args:
            now: on the fabric's clock.
            heard_until: renewals have been arriving since the last call and until then (-inf: none, inf: they still
                do). Callers settle before that changes.
        """
        if self.lapsed:
            return False
        self._renewed_at = max(self._renewed_at, min(now, heard_until))
        self.lapsed = now >= self.lapses_at(-math.inf)
        return self.lapsed

    def lapse(self) -> bool:
        """End the lease now; True if it was held."""
        held = not self.lapsed
        self.lapsed = True
        return held

    def leaves(self, regions: Regions, first: int, count: int) -> bytes:
        """Digests of ``count`` leaves, computed once from the source's own memory."""
        if 0 in self._known[first : first + count]:
            digests = _kvlink.digest_leaves(self.plan, _kvlink.SOURCE, regions, first, count)
            self._leaves[DIGEST_BYTES * first : DIGEST_BYTES * (first + count)] = digests
            self._known[first : first + count] = b"\1" * count
        return bytes(self._leaves[DIGEST_BYTES * first : DIGEST_BYTES * (first + count)])

    def report(self) -> LeaseReport:
        """The answer to `Transport.lease`."""
        complete = self.exposure.integrity and 0 not in self._known
        root = _kvlink.digest_root(bytes(self._leaves)) if complete else None
        return LeaseReport(held=not self.lapsed, root=root)


class Flight(NamedTuple):
    """A chunk between its get and its landing: it lands in a poll whose step is at least ``due_step``."""

    chunk: int
    due_step: int


class ReadRun:
    """Target side: one read, from acceptance to its single completion.

    A run that has an ``outcome`` posts no more; it completes when what is in flight has landed or was dropped.
    """

    def __init__(self, read: Read, op: int, number: int, plan: _kvlink.Plan) -> None:
        self.read = read
        self.op = op
        self.number = number
        self.plan = plan
        self.chunk_bytes = read.chunk_leaves * LEAF_BYTES
        self.chunks = -(-read.plan.total_bytes // self.chunk_bytes)
        self.in_flight: list[Flight] = []
        self.outcome: Outcome | None = None
        self.detail = ""
        self.cut_off_ops: list[int] = []
        self.force_at: float | None = None
        self.chunks_landed = 0
        self.verify_seconds = 0.0
        self._next_chunk = 0
        self._again: list[int] = []
        self._tries: dict[int, int] = {}
        self._leaves = bytearray(DIGEST_BYTES * leaf_count(read.plan.total_bytes))
        self._bytes_moved = 0
        self._rereads = 0
        self._bad_leaf: int | None = None
        self._first_post: float | None = None
        self._last_landing = 0.0

    @property
    def may_post(self) -> bool:
        """Whether a get is still to be posted."""
        return self.outcome is None and (bool(self._again) or self._next_chunk < self.chunks)

    @property
    def finished(self) -> bool:
        """Whether nothing is in flight or to be posted."""
        return not self.in_flight and not self.may_post

    def span(self, chunk: int) -> tuple[int, int]:
        """Wire bytes ``[begin, end)`` of a chunk."""
        begin = chunk * self.chunk_bytes
        return begin, min(begin + self.chunk_bytes, self.read.plan.total_bytes)

    def tries(self, chunk: int) -> int:
        """Gets posted for a chunk so far."""
        return self._tries.get(chunk, 0)

    def next_to_post(self, now: float) -> int:
        """Take the next chunk: re-reads first, so that a bad one is known bad soon."""
        if self._first_post is None:
            self._first_post = now
        if self._again:
            chunk = self._again.pop(0)
        else:
            chunk = self._next_chunk
            self._next_chunk += 1
        self._tries[chunk] = self.tries(chunk) + 1
        return chunk

    def landed(self, chunk: int, now: float) -> None:
        """Count a chunk whose bytes are in the target's memory."""
        begin, end = self.span(chunk)
        self.chunks_landed += 1
        self._bytes_moved += end - begin
        self._last_landing = now

    def compare(self, chunk: int, here: bytes, there: bytes) -> None:
        """Keep a chunk's leaves if they are the source's; else read it again, or end with DIGEST_MISMATCH."""
        first = chunk * self.read.chunk_leaves
        if here == there:
            self._leaves[DIGEST_BYTES * first : DIGEST_BYTES * first + len(here)] = here
            return
        leaf = first + next(i for i in range(len(here)) if here[i] != there[i]) // DIGEST_BYTES
        if self._bad_leaf is None:
            self._bad_leaf = leaf
        if self.outcome is not None:
            return
        if self.tries(chunk) > self.read.max_rereads:
            self._bad_leaf = leaf
            self.end(Outcome.DIGEST_MISMATCH, f"leaf {leaf} differed on all {self.tries(chunk)} tries")
            return
        self._rereads += 1
        self._again.append(chunk)

    def end(self, outcome: Outcome, detail: str) -> None:
        """Post no more. The first outcome stays, except that a cut-off overrides what was not yet reported."""
        if self.outcome is None or outcome is Outcome.CUT_OFF:
            self.outcome, self.detail = outcome, detail

    def completion(self) -> Completion:
        """The READ completion of a finished run."""
        outcome = Outcome.OK if self.outcome is None else self.outcome
        verified = outcome is Outcome.OK and self.read.integrity
        return Completion(
            kind=CompletionKind.READ,
            op=self.op,
            peer=self.read.peer,
            attempt=self.read.attempt,
            outcome=outcome,
            bytes_moved=self._bytes_moved,
            root=_kvlink.digest_root(bytes(self._leaves)) if verified else None,
            rereads=self._rereads,
            bad_leaf=self._bad_leaf,
            wire_seconds=0.0 if self._first_post is None else max(0.0, self._last_landing - self._first_post),
            verify_seconds=self.verify_seconds,
            detail=self.detail,
        )
