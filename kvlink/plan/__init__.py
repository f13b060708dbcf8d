"""Which bytes go where: legs between ranks, then one compact `CopyPlan` a leg. Pure, numpy only.

`copyplan` is the data and its bounds check, `legs` decides who reads whom, `build` makes the plan of one leg.
"""

from kvlink.plan.build import plan_leg
from kvlink.plan.copyplan import CopyPlan, Dim, Segment, check_plan
from kvlink.plan.legs import Leg, assign_legs, readers_of, unread_sources

__all__ = [
    "CopyPlan",
    "Dim",
    "Leg",
    "Segment",
    "assign_legs",
    "check_plan",
    "plan_leg",
    "readers_of",
    "unread_sources",
]
