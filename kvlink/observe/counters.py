"""Counters of one link's life. They only grow; names end in what they count."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass


@dataclass(slots=True)
class Counters:
    """One link's counters.

    Attributes:
        parts_done, parts_failed, parts_cancelled, parts_expired, parts_indeterminate: parts by their end.
        bytes_moved: payload bytes read into this rank's cache, re-reads included.
        chunks_reread: chunks read again because a digest differed.
        attempts_started: legs asked for by this rank.
        leases_granted, leases_lapsed: leases this rank gave, and those that went unrenewed.
        asks_parked, asks_refused: asks that came early, and those answered with a refusal.
        peers_connected, peers_lost: sessions made, and those that ended by reset or silence.
        fetches_retried, sources_changed: tries after a failed one, and those of them that turned to another source.
        demands_admitted, demands_queued, demands_busy, demands_too_large: requests for room (`kvlink.Link.reserve`)
            that got it, had to wait for it, were turned away, or can never fit.
        reservations_expired: reservations that nobody used in their time.
        installs_lost: requests whose target fell silent or died after it had installed them, as events told.
        messages_late: messages for attempts or keys that nobody knows (any more); dropped.
    """

    parts_done: int = 0
    parts_failed: int = 0
    parts_cancelled: int = 0
    parts_expired: int = 0
    parts_indeterminate: int = 0
    bytes_moved: int = 0
    chunks_reread: int = 0
    attempts_started: int = 0
    leases_granted: int = 0
    leases_lapsed: int = 0
    asks_parked: int = 0
    asks_refused: int = 0
    peers_connected: int = 0
    peers_lost: int = 0
    fetches_retried: int = 0
    sources_changed: int = 0
    demands_admitted: int = 0
    demands_queued: int = 0
    demands_busy: int = 0
    demands_too_large: int = 0
    reservations_expired: int = 0
    installs_lost: int = 0
    messages_late: int = 0

    def ended(self, end: str) -> None:
        """Count a part by the name of its end."""
        name = f"parts_{end}"
        setattr(self, name, getattr(self, name) + 1)

    def snapshot(self) -> Mapping[str, int]:
        """The counters by name, as of now."""
        return asdict(self)
