"""What became of every request key, for as long as somebody may ask again. No I/O, no clock.

A target keeps one for its fetches: a repeated request joins the live one, or gets the recorded outcome while its
blocks are reserved (G1, G3); once they are released it is a new request (G5). A source keeps one for its holds: it
answers asks for parts that are gone, and remembers what must not be published again.

Content is compared while a request is live or its outcome stands. Nothing of a request that failed, or was released,
is left to be confused with: a retry may come with freshly computed blocks, so with another descriptor.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from kvlink import errors, limits, wire
from kvlink.protocol.vocabulary import End, error_info

Live = TypeVar("Live")


@dataclass(frozen=True, slots=True)
class Fresh:
    """Nobody knows this key: `Ledger.begin` it."""


@dataclass(frozen=True, slots=True)
class Join(Generic[Live]):
    """The same request is live."""

    live: Live


@dataclass(frozen=True, slots=True)
class Recorded:
    """The same request has ended, and its outcome still holds."""

    end: End
    error: wire.ErrorInfo | None


@dataclass(frozen=True, slots=True)
class Refuse:
    """A conflict, or no room in the ledger."""

    error: wire.ErrorInfo


_WITHOUT_ERROR: Final = {end: Recorded(end, None) for end in End}
"""Thousands of ended requests share these."""


@dataclass(slots=True)
class _Entry(Generic[Live]):
    """A request that is live, or, once ``live`` is gone, whose outcome stands."""

    digest: str | None
    live: Live | None
    outcome: Recorded | None = field(default=None)


class Ledger(Generic[Live]):
    """Live requests, and ended ones for the retry horizon. Of those whose outcome does not stand it keeps little.

    Args:
        limit: requests kept at a time; when full, new keys are refused as busy.
        horizon_seconds: how long an ended key is remembered, from its end or, if its outcome stood, from its release.
    """

    def __init__(
        self, limit: int = limits.MAX_LEDGER_ENTRIES, horizon_seconds: float = limits.RETRY_HORIZON_SECONDS
    ) -> None:
        self._limit = limit
        self._horizon = horizon_seconds
        self._entries: dict[str, _Entry[Live]] = {}
        self._ended: OrderedDict[str, tuple[float, Recorded]] = OrderedDict()  # by when it is forgotten, which rises

    def __len__(self) -> int:
        return len(self._entries) + len(self._ended)

    def look(self, key: str, digest: str | None, now: float) -> Fresh | Join[Live] | Recorded | Refuse:
        """What a request for ``key`` is, by `kvlink.descriptor.descriptor_digest` (``None``: not known yet).

        Changes nothing but to forget what is past the horizon.
        """
        self._forget(now)
        entry = self._entries.get(key)
        if entry is None:
            if key in self._ended or len(self) < self._limit:
                return Fresh()
            text = f"the ledger is full: {self._limit} requests are live or remembered"
            return Refuse(error_info(errors.BusyError, text))
        if digest is not None and entry.digest is not None and digest != entry.digest:
            text = f"request {key} was here with content {entry.digest}, and came again with {digest}"
            return Refuse(error_info(errors.ConflictError, text))
        return Join(entry.live) if entry.live is not None else entry.outcome or Fresh()

    def begin(self, key: str, digest: str | None, live: Live) -> None:
        """Record a live request. Only after `look` said `Fresh`."""
        self._ended.pop(key, None)
        self._entries[key] = _Entry(digest, live)

    def content(self, key: str, digest: str) -> None:
        """The content of a live request has become known."""
        self._entries[key].digest = digest

    def end(self, key: str, end: End, error: wire.ErrorInfo | None, now: float, *, standing: bool) -> None:
        """Record a live request's end.

        Args:
            key: the request's key.
            end: how it ended.
            error: why, if it is not done.
            now: the driver's clock.
            standing: the outcome answers repeats until `release`. Target: it is installed. Source: it is
                *indeterminate*, and must not be published again until `Learned`.
        """
        entry = self._entries[key]
        entry.live, entry.outcome = None, _WITHOUT_ERROR[end] if error is None else Recorded(end, error)
        if not standing:
            self.release(key, now)

    def release(self, key: str, now: float) -> None:
        """The outcome no longer stands: the engine released the blocks, or the source has learned. Idempotent."""
        entry = self._entries.get(key)
        if entry is None or entry.outcome is None:
            return
        del self._entries[key]
        self._ended[key] = now + self._horizon, entry.outcome

    def outcome(self, key: str) -> Recorded | None:
        """How an ended key ended, standing or not, while it is remembered."""
        entry = self._entries.get(key)
        if entry is not None:
            return entry.outcome
        _, outcome = self._ended.get(key, (0.0, None))
        return outcome

    def _forget(self, now: float) -> None:
        """A plain dict would look through all that it has lost at its front, at every request."""
        while self._ended and now >= self._ended[key := next(iter(self._ended))][0]:
            del self._ended[key]
