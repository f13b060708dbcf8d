"""What happened, counted. The link feeds it; it never looks for itself."""

from kvlink.observe.counters import Counters

__all__ = ["Counters"]
