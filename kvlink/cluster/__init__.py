"""Decisions about many requests and many workers, as pure code: events in, verdicts out. No I/O, no clock."""

from kvlink.cluster.admission import Admission, Admitted, Busy, Demand, Room, TooLarge, Verdict, Waiting

__all__ = ["Admission", "Admitted", "Busy", "Demand", "Room", "TooLarge", "Verdict", "Waiting"]
