"""What a target part has of its siblings, if all become visible together: where it stands, and its coordinator's word.

The part only repeats where it stands until it hears the verdict that it waits for; the coordinator only answers.
`kvlink.protocol.target` owns it, `kvlink.protocol.group` is the other side.
"""

from __future__ import annotations

from msgspec.structs import replace

from kvlink import errors, wire
from kvlink.protocol.table import Moment
from kvlink.protocol.vocabulary import End, Failure, Repeat, Send, Value, error_info, fail, failure_of


class Membership(Value, frozen=True, kw_only=True):
    """One part's place among its siblings.

    Attributes:
        key: the request's.
        coordinator: the rank that decides, an incarnation; may be this one.
        number: of this part: higher than any before it in this incarnation.
        content: names source and descriptor; siblings must have the same.
        tokens: one past the last position, of a stream once it is sealed; likewise, once all have landed.
        stage: where this part stands, as it was last told.
        group: the gathering in which it was told to proceed, 0 before.
        error: why it failed or leaves.
        repeat: when that is told again; ``None``: nothing is waited for.
        until: when it stops waiting, or telling.
    """

    key: str
    coordinator: str
    number: int
    content: str
    tokens: int | None = None
    stage: wire.Stage = wire.Stage.JOINED
    group: int = 0
    error: wire.ErrorInfo | None = None
    repeat: Repeat | None = None
    until: float | None = None


Told = tuple[Membership, tuple[Send, ...]]


class Proceed(Value, frozen=True):
    """All siblings have landed, in this gathering."""

    group: int


class Reveal(Value, frozen=True):
    """All siblings are installed."""


class Abandon(Value, frozen=True):
    """The request has failed, as one."""

    failure: Failure


class Noted(Value, frozen=True):
    """What became of this part is recorded."""


Word = Proceed | Reveal | Abandon | Noted


def word_of(member: Membership, peer: str, message: wire.Decided) -> Word | None:
    """The event that a coordinator's message is to this part, or ``None`` if it is not about it."""
    if peer != member.coordinator or message.part != member.number:
        return None
    match message.verdict:
        case wire.Verdict.PROCEED:
            return Proceed(message.group)
        case wire.Verdict.REVEAL:
            return Reveal()
        case wire.Verdict.ABANDON:
            error = message.error or error_info(errors.TransferError, "abandoned by the coordinator")
            return Abandon(_abandoned(error))
        case wire.Verdict.NOTED:
            return Noted()


def answer_unknown(peer: str, message: wire.Decided) -> tuple[Send, ...]:
    """What to say to a coordinator about a part that is forgotten: it never waits for one that cannot come."""
    if message.verdict not in (wire.Verdict.PROCEED, wire.Verdict.ABANDON):
        return ()
    error = error_info(errors.UnknownRequestError, f"no part of request {message.key} waits here any more")
    stands = wire.Stands(
        key=message.key, part=message.part, group=message.group, content="", stage=wire.Stage.FAILED, error=error
    )
    return (Send(peer, stands),)


def tell(member: Membership, stage: wire.Stage, at: Moment, error: wire.ErrorInfo | None = None) -> Told:
    """Tell where the part stands now, and go on telling."""
    bounded = stage not in (wire.Stage.JOINED, wire.Stage.LANDED)  # until then the transfer's own deadline is the bound
    member = replace(
        member,
        stage=stage,
        error=error,
        repeat=Repeat.start(at.now, at.timing),
        until=at.now + at.timing.tell_seconds if bounded else None,
    )
    return member, (_stands(member),)


def tell_again(member: Membership, at: Moment) -> Told:
    """The same words."""
    return replace(member, repeat=member.repeat and member.repeat.again(at.now, at.timing)), (_stands(member),)


def heard(member: Membership) -> Membership:
    """Nothing is waited for any more."""
    return replace(member, repeat=None, until=None)


def leaderless(member: Membership) -> Failure:
    """Nobody is left to decide, and nothing can have been decided without this part."""
    text = f"{member.coordinator}, which coordinates the ranks of this engine, is gone or silent"
    return fail(End.FAILED, errors.PeerLostError, text)


def doubt(member: Membership, why: str) -> Failure:
    """This part is not visible, and of its siblings it is not known: never tried again (G3)."""
    text = f"request {member.key} is not visible on this rank, and may be on its siblings: {why}"
    return Failure(End.INDETERMINATE, error_info(errors.IndeterminateError, text))


def _abandoned(error: wire.ErrorInfo) -> Failure:
    if error.code == errors.IndeterminateError.code:
        return Failure(End.INDETERMINATE, error)
    return failure_of(error)


def _stands(member: Membership) -> Send:
    message = wire.Stands(
        key=member.key,
        part=member.number,
        group=member.group,
        content=member.content,
        tokens=member.tokens,
        stage=member.stage,
        error=member.error,
    )
    return Send(member.coordinator, message)
