"""What happened, counted and told. The link feeds it; it never looks for itself."""

from kvlink.observe.counters import Counters
from kvlink.observe.events import (
    Cause,
    Event,
    Events,
    InstalledLost,
    PartEnded,
    PeerConnected,
    PeerDisconnected,
    cause_of,
)

__all__ = [
    "Cause",
    "Counters",
    "Event",
    "Events",
    "InstalledLost",
    "PartEnded",
    "PeerConnected",
    "PeerDisconnected",
    "cause_of",
]
