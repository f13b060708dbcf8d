"""Which bytes go where: legs between ranks, then one compact `CopyPlan` a leg. Pure, numpy only.

`copyplan` is the data and its bounds check, `legs` decides who reads whom, `planner` makes the plans of one leg:
`match` is what its two sides must agree on, `families` and `template` what is prepared once, `pieces` the token range
cut, `increments` the plans of a leg that is streamed. `path` says how a plan's bytes best cross, and what each way
costs.
"""

from kvlink.plan.copyplan import Conversion, CopyPlan, Dim, Segment, check_plan
from kvlink.plan.increments import IncrementPlanner, Increments
from kvlink.plan.legs import Leg, assign_legs, readers_of, unread_sources
from kvlink.plan.path import (
    DIRECT,
    MAPPED,
    PACKED,
    PULLED,
    RING,
    STREAM,
    TYPICAL,
    Rate,
    Setting,
    Shape,
    Speeds,
    bytes_text,
    choose_path,
    faster,
    predict,
    seconds_text,
)
from kvlink.plan.planner import LegPlanner, plan_leg

__all__ = [
    "DIRECT",
    "MAPPED",
    "PACKED",
    "PULLED",
    "RING",
    "STREAM",
    "TYPICAL",
    "Conversion",
    "CopyPlan",
    "Dim",
    "IncrementPlanner",
    "Increments",
    "Leg",
    "LegPlanner",
    "Rate",
    "Segment",
    "Setting",
    "Shape",
    "Speeds",
    "assign_legs",
    "bytes_text",
    "check_plan",
    "choose_path",
    "faster",
    "plan_leg",
    "predict",
    "readers_of",
    "seconds_text",
    "unread_sources",
]
