"""What the target half keeps of one request: its legs, its times, and how its end is told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from kvlink import limits
from kvlink.errors import (
    IntegrityError,
    KVLinkError,
    LeaseLapsedError,
    MismatchError,
    PeerLostError,
    TransportError,
)
from kvlink.link.part import Part, Result, State
from kvlink.plan import CopyPlan, assign_legs, plan_leg, readers_of, unread_sources
from kvlink.protocol import End, TargetEvent, TargetPart
from kvlink.transports.base import Outcome
from kvlink.wire import Ask, ErrorInfo, error_to_info, info_to_error

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvlink.descriptor import BlockList, KVDescriptor
    from kvlink.layout import CacheSpec, GroupShare, RankShare
    from kvlink.link.machine import Machine
    from kvlink.link.sessions import Session
    from kvlink.transports.base import Completion
    from kvlink.wire import Roster, Ticket

Uncovered = Literal["leave", "zero"]

STATE_OF_END = {
    End.DONE: State.DONE,
    End.FAILED: State.FAILED,
    End.CANCELLED: State.CANCELLED,
    End.EXPIRED: State.EXPIRED,
    End.INDETERMINATE: State.INDETERMINATE,
}
PHASES = ("handshake", "reserve", "plan", "wire", "verify", "commit", "install")


@dataclass(slots=True)
class LegWork:
    """One leg of a target part: who is read, what, and by which attempt."""

    peer: str
    address: str
    groups: tuple[GroupShare, ...]
    readers: int
    source_index: int
    attempt: int = 0
    plan: CopyPlan | None = None
    wire_name: str = ""
    reading: bool = False
    cutting: bool = False
    rereads: int = 0


@dataclass(slots=True, eq=False)
class TargetWork:
    """One request on this target rank.

    Attributes:
        key: the request's key.
        part: what the embedder holds.
        roster: the source engine.
        into: this rank's blocks, one list a group.
        first_token: where this target begins.
        uncovered: what becomes of slots past the last token.
        deadline_seconds: of the transfer, from its first ask.
        ticket: push: what the sources are told, until they announce.
        descriptor: the source's claim, once known.
        legs: by attempt, once begun.
        machine: once begun.
        followers: parts of repeated requests that joined this one.
        marks: loop times of phases passed.
        phases: seconds by phase.
    """

    key: str
    part: Part
    roster: Roster
    into: tuple[BlockList, ...]
    first_token: int
    uncovered: Uncovered
    deadline_seconds: float
    started: float
    ticket: Ticket | None = None
    descriptor: KVDescriptor | None = None
    legs: dict[int, LegWork] = field(default_factory=dict)
    machine: Machine[TargetPart, TargetEvent] | None = None
    followers: list[Part] = field(default_factory=list)
    marks: dict[str, float] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    transport: str = ""
    transport_reason: str = ""
    path: str = ""
    path_reason: str = ""

    @property
    def total_bytes(self) -> int:
        """Payload of all legs."""
        return sum(leg.plan.total_bytes for leg in self.legs.values() if leg.plan is not None)

    def ask(self, leg: LegWork, descriptor: KVDescriptor, *, integrity: bool) -> Ask:
        """What a leg's source is asked; the same words on every repeat."""
        return Ask(
            key=self.key,
            attempt=leg.attempt,
            descriptor=descriptor,
            first_token=self.first_token,
            integrity=integrity,
            leg=leg.groups,
            readers=leg.readers,
        )

    def read_ended(self, leg: LegWork, completion: Completion) -> None:
        """Account for a read."""
        leg.reading = False
        leg.rereads = completion.rereads
        self.phases["wire"] = max(self.phases["wire"], completion.wire_seconds)
        self.phases["verify"] = max(self.phases["verify"], completion.verify_seconds)

    def result(self, end: End, error: ErrorInfo | None, *, integrity: bool, now: float) -> Result:
        """How it ended, for the embedder."""
        return Result(
            key=self.key,
            state=STATE_OF_END[end],
            error=None if error is None else info_to_error(error, request_id=self.key),
            bytes=self.total_bytes if end is End.DONE else 0,
            seconds=now - self.started,
            attempts=len(self.legs),
            legs=len(self.legs),
            rereads=sum(leg.rereads for leg in self.legs.values()),
            transport=self.transport,
            transport_reason=self.transport_reason,
            path=self.path,
            path_reason=self.path_reason,
            integrity=integrity,
            phases=dict(self.phases),
        )


def legs_of(
    roster: Roster, own: RankShare, siblings: Sequence[RankShare]
) -> tuple[tuple[LegWork, ...], tuple[int, ...]]:
    """This rank's legs, and the sources that no rank of our engine reads (by index into the roster).

    Which sources are unread is only told by the engine's first rank, and only if all its ranks are known.

    Raises:
        UnsupportedError: the sources together lack something that we hold.
    """
    targets = list(siblings) or [own]
    mine = next(i for i, share in enumerate(targets) if (share.pp_rank, share.tp_rank) == (own.pp_rank, own.tp_rank))
    legs = assign_legs(roster.shares, targets)
    work = tuple(
        LegWork(
            peer=str(roster.place(leg.source)),
            address=roster.ranks[leg.source].address,
            groups=leg.groups,
            readers=readers_of(legs, leg.source),
            source_index=leg.source,
        )
        for leg in legs
        if leg.target == mine
    )
    unread = unread_sources(legs, len(roster.ranks)) if siblings and mine == 0 else ()
    return work, unread


def plan_of(leg: LegWork, session: Session, own: CacheSpec, work: TargetWork, descriptor: KVDescriptor) -> CopyPlan:
    """Both sides of a leg's plan; raises as `kvlink.plan.plan_leg` does."""
    return plan_leg(
        session.spec,
        own,
        leg.groups,
        source_blocks=descriptor.blocks,
        target_blocks=work.into,
        first_token=work.first_token,
        tokens=descriptor.tokens,
    )


def read_error(completion: Completion, leg: LegWork, *, session_ended: bool) -> ErrorInfo | None:
    """What a READ completion says about its leg, or ``None`` if all is well."""
    if completion.outcome is Outcome.OK:
        return None
    detail = completion.detail or completion.outcome.name.lower()
    error: KVLinkError
    if completion.outcome is Outcome.DIGEST_MISMATCH:
        leaf = completion.bad_leaf or 0
        low = leaf * limits.LEAF_BYTES
        error = IntegrityError(
            f"leaf {leaf} (wire bytes {low} to {low + limits.LEAF_BYTES}) of {leg.peer} differed from its source's "
            f"digest on every of {completion.rereads + 1} tries"
        )
    elif completion.outcome is Outcome.SOURCE_FAILED:
        error = LeaseLapsedError(f"{leg.peer} no longer lets attempt {leg.attempt} read: {detail}")
    elif completion.outcome is Outcome.PEER_LOST or session_ended:
        error = PeerLostError(f"{leg.peer} was lost while attempt {leg.attempt} read: {detail}")
    else:
        error = TransportError(f"reading from {leg.peer} failed: {detail}")
    return error_to_info(error)


def size_mismatch(leg: LegWork, theirs: int, ours: int, own: str) -> ErrorInfo:
    """The two sides count a leg's bytes differently: their geometry is not what they told each other."""
    return error_to_info(MismatchError("lease.total_bytes", theirs, ours, source=leg.peer, target=own, stage="lease"))
