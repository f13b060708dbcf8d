"""The asyncio driver: the only room that waits.

`link` is what an embedder awaits, over `driver`, which opens, closes and holds the two halves; `target_half` and
`source_half` carry out the protocol's actions, and what is named after them is theirs; `sessions` keeps one live
connection per peer over `control`, `handshake` and `listener`; `recovery` knows what became of what was installed;
`room` gives out blocks that were lent; `pump` brings completions in.
"""

from kvlink.link.driver import CloseReport, Stats
from kvlink.link.link import Link, open_link
from kvlink.link.part import Part, Result, State
from kvlink.link.recovery import RecoveryPoint, Replica, ReplicaStage
from kvlink.link.room import Reservation, RoomStats

__all__ = [
    "CloseReport",
    "Link",
    "Part",
    "RecoveryPoint",
    "Replica",
    "ReplicaStage",
    "Reservation",
    "Result",
    "RoomStats",
    "State",
    "Stats",
    "open_link",
]
