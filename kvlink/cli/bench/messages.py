"""What the conductor of a bench tells its workers, and what they answer: typed JSON lines, one a message.

A worker hosts ranks of one side. The conductor plays the two engines' schedulers: it chooses blocks, carries offers
and tickets, and decides when; it touches no KV.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeVar

import msgspec

from kvlink import limits
from kvlink.cli.bench.case import Case, SideName
from kvlink.wire import ErrorInfo

MAX_LINE_BYTES: Final = 32 * 1024 * 1024
"""A message holds at most two block lists; a million block ids take 8 MiB of digits each."""

Blocks = Annotated[tuple[int, ...], msgspec.Meta(max_length=limits.MAX_BLOCKS_PER_REQUEST)]
Card = Annotated[bytes, msgspec.Meta(max_length=limits.MAX_CLAIM_BYTES)]


class Command(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag=True):
    """Base of what the conductor says."""


class Open(Command, frozen=True):
    """Allocate the pools and open the links of ``ranks`` of one engine of a side. Answer: `Opened`.

    ``ranks`` are positions in the side's rank order.

    ``num_blocks`` are both sides', since a raw move is planned without the links.
    """

    case: Case
    side: SideName
    ranks: tuple[int, ...]
    num_blocks: dict[SideName, int]
    incarnation: str
    engine: int = 0


class Meet(Command, frozen=True):
    """The cards of all ranks of both sides, in rank order. Answer: `Done`.

    ``more_sources``: those of the other source engines that a target reads.
    """

    source: tuple[Card, ...]
    target: tuple[Card, ...]
    more_sources: tuple[tuple[Card, ...], ...] = ()


class Prepare(Command, frozen=True):
    """Source: write the prompt's KV. Target: check that the blocks hold the canary. Answer: `Checked`."""

    request: int
    blocks: Blocks


class Begin(Command, frozen=True):
    """A timed window starts. Answer: `Done`."""


class End(Command, frozen=True):
    """The timed window ends. Answer: `Spent`."""


class Provide(Command, frozen=True):
    """Source: publish (fetch), or announce, make ready and seal (push). Answer: `Done`.

    ``life``: how often the target died under the request. What a dead target did with it nobody can know, so it comes
    again as another request, under another key.
    """

    request: int
    blocks: Blocks
    life: int = 0


class Settle(Command, frozen=True):
    """Source: wait for the end of the request's parts; its blocks are free then. Answer: `Settled`."""

    request: int


class Move(Command, frozen=True):
    """Target: fetch, or expect; until installed on every rank of this worker. Answer: `Moved`.

    ``engine``: of the source engines that this target knows, the one to read.
    """

    request: int
    source_blocks: Blocks
    target_blocks: Blocks
    life: int = 0
    engine: int = 0


class Abandon(Command, frozen=True):
    """Either side: cancel the request's parts. Answer: `Done`."""

    request: int
    why: str


class Verify(Command, frozen=True):
    """Target: compare every byte of the blocks with the reference. Answer: `Checked`."""

    request: int
    blocks: Blocks


class Wipe(Command, frozen=True):
    """Give the request's blocks back: release its parts and set the blocks to the canary. Answer: `Done`."""

    request: int
    blocks: Blocks


class Sweep(Command, frozen=True):
    """Check that every byte of every region holds the canary, once all requests are wiped. Answer: `Checked`."""


class ProbeAddresses(Command, frozen=True):
    """Source: what a raw probe needs to read this worker's ranks. Answer: `Addresses`."""


class ProbeConnect(Command, frozen=True):
    """Target: connect the raw probes of this worker's ranks to the source's, in rank order. Answer: `Done`."""

    source: tuple[Card, ...]


class Probe(Command, frozen=True):
    """Target: move the request's bytes bare. Answer: `Probed`."""

    request: int
    source_blocks: Blocks
    target_blocks: Blocks


class Close(Command, frozen=True):
    """Close the links. ``verified``: how the bench ended. Answer: `Done`, after which the worker ends."""

    verified: bool


class Reply(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag=True):
    """Base of what a worker answers."""


class Done(Reply, frozen=True):
    """It was done."""


class Opened(Reply, frozen=True):
    """The links are open: one card a rank, what UCX was loaded, and how long pools and registration took.

    ``gpu`` is where the caches lie; ``stand_in`` says that it is none, but a library for tests. ``clock``: whose
    monotonic clock the worker's times are on, or nothing.
    """

    cards: tuple[Card, ...]
    seconds: float
    clock: str = ""
    ucx_version: str | None = None
    ucx_origin: str | None = None
    ucx_transports: str | None = None
    gpu: str | None = None
    stand_in: bool = False


class Checked(Reply, frozen=True):
    """``fault`` names the first byte found wrong; ``None``: every byte is right."""

    fault: str | None


class Spent(Reply, frozen=True):
    """CPU time of the worker's process since `Begin`, user and system."""

    cpu_seconds: float


class Settled(Reply, frozen=True):
    """How the source's parts of a request ended; ``error`` is the first that failed.

    ``computed_at_seconds``: when the last layer of a push was in place, on the host's monotonic clock, if it was
    computed layer by layer; ``heard_at_seconds``: when the last rank knew it installed.
    """

    error: ErrorInfo | None
    computed_at_seconds: float | None = None
    heard_at_seconds: float = 0.0


class RankMove(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One target rank's share of a request."""

    bytes: int
    rereads: int
    transport: str
    transport_reason: str
    path: str
    path_reason: str
    phases: dict[str, float]


class Moved(Reply, frozen=True):
    """From the first verb called to the last rank installed, on the host's monotonic clock."""

    start_seconds: float
    end_seconds: float
    ranks: tuple[RankMove, ...]
    error: ErrorInfo | None


class Addresses(Reply, frozen=True):
    """One address a rank."""

    addresses: tuple[Card, ...]


class Probed(Reply, frozen=True):
    """Of the slowest rank of this worker: from its first byte asked for to its last one landed."""

    seconds: float


AnyCommand = (
    Open | Meet | Prepare | Begin | End | Provide | Settle | Move | Abandon | Verify | Wipe | Sweep
    | ProbeAddresses | ProbeConnect | Probe | Close
)  # fmt: skip
AnyReply = Done | Opened | Checked | Spent | Settled | Moved | Addresses | Probed
ReplyT = TypeVar("ReplyT", bound=Reply)


class Envelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One command under way."""

    id: int
    command: AnyCommand


class Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Its end: a reply or an error."""

    id: int
    reply: AnyReply | None = None
    error: ErrorInfo | None = None
