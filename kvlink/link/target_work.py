"""What the target half keeps of one request: its legs, its times, and how its end is told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from kvlink import limits
from kvlink.errors import (
    IntegrityError,
    KVLinkError,
    LayoutError,
    LeaseLapsedError,
    MismatchError,
    PeerLostError,
    TransportError,
)
from kvlink.layout import starts_of_groups, touched_ids
from kvlink.link.part import LivePart, Result, State, whole_blocks
from kvlink.plan import CopyPlan
from kvlink.protocol import End, TargetEvent, TargetPart
from kvlink.transports.base import Outcome
from kvlink.wire import Advance, AnyMessage, Ask, Commit, ErrorInfo, Lease, error_to_info, info_to_error

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvlink.config import Config
    from kvlink.descriptor import BlockList, FirstTokens, KVDescriptor
    from kvlink.layout import CacheSpec, GroupShare
    from kvlink.link.machine import Machine
    from kvlink.link.sessions import Session
    from kvlink.link.target_incoming import Incoming
    from kvlink.relayout.gpu import Moment
    from kvlink.transports.base import Completion
    from kvlink.wire import Claim, Offer, Roster, Ticket

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
    """One leg of a target part: who is read, what, and by which attempt.

    Attributes:
        plan: of a leg that is read at once.
        stream: what is known of one that is read increment by increment.
        places: among the reads of this rank that it may take.
        reading: numbers under which the transport reads for it: the attempt, and its increments from there on.
        renewed: numbers whose reads have ended well, and whose leases go on.
        total_bytes: of its plans.
        wire_seconds, verify_seconds: of its reads.
    """

    peer: str
    address: str
    groups: tuple[GroupShare, ...]
    readers: int
    source_index: int
    attempt: int = 0
    plan: CopyPlan | None = None
    stream: Incoming | None = None
    wire_name: str = ""
    places: int = 0
    reading: set[int] = field(default_factory=set)
    renewed: set[int] = field(default_factory=set)
    cutting: bool = False
    rereads: int = 0
    total_bytes: int = 0
    wire_seconds: float = 0.0
    verify_seconds: float = 0.0

    @property
    def wanted_places(self) -> int:
        """Reads that it may have under way at a time."""
        return 1 if self.stream is None else limits.STREAM_WINDOW


@dataclass(slots=True, eq=False)
class TargetWork:
    """One request on this target rank.

    Attributes:
        key: the request's key.
        part: what the embedder holds.
        roster: the source engine.
        into: this rank's blocks, one list a group.
        first_token: where this target begins.
        group_first_tokens: where it begins in each of its own groups, if not in all alike.
        uncovered: what becomes of slots past the last token.
        deadline_seconds: of the transfer, from its first ask.
        together: it becomes visible with its siblings.
        ticket: push: what the sources are told, until they announce.
        descriptor: the source's claim, once known; what its stream begins with, if it streams.
        streams: its sources are still computing.
        legs: by attempt, once begun.
        machine: once begun.
        followers: parts of repeated requests that joined this one.
        streamed_bytes: what had landed when the seal came.
        marks: loop times of phases passed.
        phases: seconds by phase.
    """

    key: str
    part: LivePart
    roster: Roster
    into: tuple[BlockList, ...]
    first_token: int
    uncovered: Uncovered
    deadline_seconds: float
    started: float
    together: bool = False
    group_first_tokens: FirstTokens = ()
    ticket: Ticket | None = None
    descriptor: KVDescriptor | None = None
    streams: bool = False
    legs: dict[int, LegWork] = field(default_factory=dict)
    machine: Machine[TargetPart, TargetEvent] | None = None
    followers: list[LivePart] = field(default_factory=list)
    streamed_bytes: int = 0
    marks: dict[str, float] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    transport: str = ""
    transport_reason: str = ""
    after: Moment | None = None
    path: str = ""
    path_reason: str = ""

    @classmethod
    def of(  # noqa: PLR0913, PLR0917 - all of it the request's own
        cls,
        claim: Claim,
        into: Sequence[Sequence[int]],
        part: LivePart,
        starts: tuple[int, FirstTokens],
        uncovered: Uncovered,
        deadline_seconds: float,
        now: float,
    ) -> TargetWork:
        """A request as its verb states it. Raises LayoutError if ``into`` does not hold whole block ids."""
        return cls(
            key=claim.key,
            part=part,
            roster=claim.roster,
            into=whole_blocks(into, claim.key),
            first_token=starts[0],
            group_first_tokens=starts[1],
            uncovered=uncovered,
            deadline_seconds=deadline_seconds,
            started=now,
        )

    @property
    def total_bytes(self) -> int:
        """Payload of all legs."""
        return sum(leg.total_bytes for leg in self.legs.values())

    @property
    def tokens(self) -> int:
        """One past the last position: of a stream as far as it was told, of anything else as it is claimed."""
        streams = [leg.stream for leg in self.legs.values() if leg.stream is not None]
        if streams:
            return streams[0].increments.frontier.tokens
        return 0 if self.descriptor is None else self.descriptor.tokens

    def integrity(self, config: Config) -> bool:
        """Whether digests are wanted on this side and given on the other."""
        stated = self.descriptor is not None and self.descriptor.digest_scheme is not None
        return config.integrity and stated

    def source_first_tokens(self, own: CacheSpec) -> FirstTokens:
        """``group_first_tokens`` in the order of the source's groups; what is not ours begins at 0."""
        mine = {group.name: first for group, first in zip(own.groups, self.group_first_tokens, strict=False)}
        return tuple(mine.get(group.name, 0) for group in self.roster.ranks[0].share.groups) if mine else ()

    def written(self, own: CacheSpec, tokens: int) -> list[list[int]]:
        """The blocks that bytes may land in; null blocks and a prefix that is here already are not among them.

        Raises:
            LayoutError: the blocks given are not one list a group, or do not hold ``tokens``.
        """
        if len(self.into) != len(own.groups):
            raise LayoutError(
                f"{len(self.into)} block lists are given; this rank has {len(own.groups)} groups: one list a group",
                request_id=self.key,
            )
        starts = starts_of_groups(len(own.groups), self.first_token, self.group_first_tokens)
        return [
            touched_ids(group, blocks, first, tokens, f"target blocks of groups.{group.name}")
            for group, blocks, first in zip(own.groups, self.into, starts, strict=True)
        ]

    def ask(self, leg: LegWork, descriptor: KVDescriptor, own: CacheSpec, *, integrity: bool) -> Ask:
        """What a leg's source is asked; the same words on every repeat."""
        return Ask(
            key=self.key,
            attempt=leg.attempt,
            descriptor=descriptor,
            first_token=self.first_token,
            integrity=integrity,
            leg=leg.groups,
            readers=leg.readers,
            group_first_tokens=self.source_first_tokens(own),
        )

    def read_ended(self, leg: LegWork, completion: Completion) -> None:
        """Account for a read."""
        leg.rereads += completion.rereads
        leg.wire_seconds += completion.wire_seconds
        leg.verify_seconds += completion.verify_seconds
        if completion.path:
            self.path = completion.path
            self.path_reason = completion.path_reason or self.path_reason
        self.phases["wire"] = max(self.phases["wire"], leg.wire_seconds)
        self.phases["verify"] = max(self.phases["verify"], leg.verify_seconds)

    def note(self, message: AnyMessage, now: float) -> None:
        """Stamp phases as they pass, for the report only."""
        match message:
            case Lease():
                self.phases["reserve"] = now - self.marks["asked"]
            case Advance(sealed=str()):
                self.marks.setdefault("sealed", now)
            case Commit():
                self.phases["commit"] = now - self.marks.get("landed", now)

    def result(self, end: End, error: ErrorInfo | None, *, integrity: bool, now: float) -> Result:
        """How it ended, for the embedder."""
        return Result(
            key=self.key,
            state=STATE_OF_END[end],
            error=None if error is None else info_to_error(error, request_id=self.key),
            bytes=self.total_bytes if end is End.DONE else 0,
            tokens=self.tokens if end is End.DONE else 0,
            streamed_bytes=self.streamed_bytes if end is End.DONE else 0,
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


def starts_of(offer: Offer, own: CacheSpec, first_token: int | Sequence[int] | None) -> tuple[int, FirstTokens]:
    """Where a target that has a prefix begins to read an offer: for all groups, and by its own groups if not alike.

    Raises:
        LayoutError: a first position is outside of what is offered, or they are not one a group.
    """
    first_token = offer.first_token if first_token is None else first_token
    names = [group.name for group in own.groups]
    stated = [first_token] * len(names) if isinstance(first_token, int) else list(first_token)
    if len(stated) != len(names) or not all(offer.first_token <= first <= offer.tokens for first in stated):
        raise LayoutError(
            f"first_token is {first_token}; give one, or one for each of {len(names)} groups, among the offer's "
            f"positions [{offer.first_token}, {offer.tokens})",
            request_id=offer.key,
        )
    if isinstance(first_token, int) and not offer.group_first_tokens:
        return first_token, ()
    source_names = [group.name for group in offer.roster.ranks[0].share.groups]
    windows = dict(zip(source_names, offer.group_first_tokens, strict=False))
    return min(stated), tuple(max(first, windows.get(name, 0)) for name, first in zip(names, stated, strict=True))


def plan_of(leg: LegWork, session: Session, own: CacheSpec, work: TargetWork, descriptor: KVDescriptor) -> CopyPlan:
    """Both sides of a leg's plan; raises as `kvlink.plan.LegPlanner` does."""
    starts = descriptor.starts(work.first_token, work.source_first_tokens(own))
    planner = session.planners.of(leg.groups)
    return planner.plan(descriptor.blocks, work.into, first_token=starts, tokens=descriptor.tokens)


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


def size_mismatch(leg: LegWork, theirs: int, ours: int, own: str) -> MismatchError:
    """The two sides count a leg's bytes differently: their geometry is not what they told each other."""
    return MismatchError("lease.total_bytes", theirs, ours, source=leg.peer, target=own, stage="lease")
