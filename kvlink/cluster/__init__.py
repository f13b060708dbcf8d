"""Decisions about many requests and many workers, as pure code: events in, verdicts out. No I/O, no clock."""

from kvlink.cluster.admission import Admission, Admitted, Busy, Demand, Room, TooLarge, Verdict, Waiting
from kvlink.cluster.batching import prefill_chunks
from kvlink.cluster.line import Line
from kvlink.cluster.order import precedence
from kvlink.cluster.pools import PoolLoad, PoolState, rollout_waves, worker_to_move
from kvlink.cluster.routing import Candidate, Choice, Score, Wish, route

__all__ = [
    "Admission",
    "Admitted",
    "Busy",
    "Candidate",
    "Choice",
    "Demand",
    "Line",
    "PoolLoad",
    "PoolState",
    "Room",
    "Score",
    "TooLarge",
    "Verdict",
    "Waiting",
    "Wish",
    "precedence",
    "prefill_chunks",
    "rollout_waves",
    "route",
    "worker_to_move",
]
