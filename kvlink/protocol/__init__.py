"""The protocol as data: ``step(state, event, now) -> (state, actions)`` over frozen values and total tables.

No I/O, no clock, no randomness: ids, time and verdicts come in with events, deeds go out as actions. ``target`` and
``source`` are the two machines, ``group`` makes the parts of several target ranks one, `Ledger`, `Installations` and
`ParkingLot` are what surrounds them. See docs/protocol.md.
"""

from __future__ import annotations

from kvlink.protocol import group, membership, source, target
from kvlink.protocol.group import Group, GroupEvent, GroupPhase, Stood
from kvlink.protocol.installations import Installation, Installations, Standing
from kvlink.protocol.ledger import Fresh, Join, Ledger, Recorded, Refuse
from kvlink.protocol.membership import Abandon, Membership, Noted, Proceed, Reveal
from kvlink.protocol.parking import ParkingLot
from kvlink.protocol.retry import AGAIN, Again, RetryPolicy, again
from kvlink.protocol.source import answer_unknown
from kvlink.protocol.source_leg import LeaseLapsed, PreparedArrived
from kvlink.protocol.source_part import (
    AskArrived,
    DeclineArrived,
    RenewHold,
    Seal,
    SourceEvent,
    SourcePart,
    SourcePhase,
    TicketArrived,
    ended_error,
)
from kvlink.protocol.target import InstallDone, InstallFailed, TargetEvent, TargetPart, TargetPhase
from kvlink.protocol.target_leg import CutOffDone, ReadEnded
from kvlink.protocol.vocabulary import (
    Action,
    Cancel,
    CutOff,
    End,
    EndHold,
    Expose,
    Failure,
    Install,
    Learned,
    ParkAsk,
    PeerDead,
    PeerLost,
    Received,
    ReleaseBlocks,
    Report,
    Send,
    SendAnnounce,
    SendAsk,
    SendLease,
    Show,
    StartRead,
    StopRenewing,
    Tick,
    Timing,
    Unpark,
    Withdraw,
    error_info,
    fail,
    failure_of,
)

__all__ = [
    "AGAIN",
    "Abandon",
    "Action",
    "Again",
    "AskArrived",
    "Cancel",
    "CutOff",
    "CutOffDone",
    "DeclineArrived",
    "End",
    "EndHold",
    "Expose",
    "Failure",
    "Fresh",
    "Group",
    "GroupEvent",
    "GroupPhase",
    "Install",
    "InstallDone",
    "InstallFailed",
    "Installation",
    "Installations",
    "Join",
    "Learned",
    "LeaseLapsed",
    "Ledger",
    "Membership",
    "Noted",
    "ParkAsk",
    "ParkingLot",
    "PeerDead",
    "PeerLost",
    "PreparedArrived",
    "Proceed",
    "ReadEnded",
    "Received",
    "Recorded",
    "Refuse",
    "ReleaseBlocks",
    "RenewHold",
    "Report",
    "RetryPolicy",
    "Reveal",
    "Seal",
    "Send",
    "SendAnnounce",
    "SendAsk",
    "SendLease",
    "Show",
    "SourceEvent",
    "SourcePart",
    "SourcePhase",
    "Standing",
    "StartRead",
    "Stood",
    "StopRenewing",
    "TargetEvent",
    "TargetPart",
    "TargetPhase",
    "Tick",
    "TicketArrived",
    "Timing",
    "Unpark",
    "Withdraw",
    "again",
    "answer_unknown",
    "ended_error",
    "error_info",
    "fail",
    "failure_of",
    "group",
    "membership",
    "source",
    "target",
]
