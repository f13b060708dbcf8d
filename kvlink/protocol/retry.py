"""When a request is tried again: one table over errors, and a policy over count, time and jitter. Pure.

A retry is a fresh attempt into fresh blocks; it has nothing of the one before but the request's key. Who turns to
another source is the caller; nobody turns to another target by itself, and what is *indeterminate* is never tried
again: the first target may have installed it.
"""

from __future__ import annotations

from enum import Enum

from kvlink import errors, limits
from kvlink.errors import ConfigError, KVLinkError
from kvlink.protocol.vocabulary import Value


class Again(Enum):
    """What may help after an error."""

    NEVER = "never"
    """Nothing: it would fail alike, it was meant, or it may have been installed."""
    HERE = "here"
    """The same source, a moment later."""
    ELSEWHERE = "elsewhere"
    """Another source only: this one does not have it, or cannot work with us."""


AGAIN: dict[type[KVLinkError], Again] = {
    errors.KVLinkError: Again.HERE,  # a newer peer's: its own word decides
    errors.ConfigError: Again.NEVER,
    errors.LayoutError: Again.NEVER,
    errors.MismatchError: Again.ELSEWHERE,
    errors.UnsupportedError: Again.ELSEWHERE,
    errors.UnavailableError: Again.NEVER,
    errors.GpuError: Again.NEVER,
    errors.ClosedError: Again.NEVER,
    errors.WireError: Again.ELSEWHERE,
    errors.FrameError: Again.ELSEWHERE,
    errors.SchemaError: Again.ELSEWHERE,
    errors.VersionError: Again.ELSEWHERE,
    errors.AuthenticationError: Again.NEVER,
    errors.PeerError: Again.HERE,
    errors.PeerLostError: Again.HERE,
    errors.PeerUnreachableError: Again.HERE,
    errors.PeerRestartedError: Again.ELSEWHERE,
    errors.PeerIncompatibleError: Again.ELSEWHERE,
    errors.TransferError: Again.HERE,  # an attempt that a younger one replaced; its own word decides
    errors.BusyError: Again.HERE,
    errors.TooLargeError: Again.NEVER,
    errors.ConflictError: Again.NEVER,
    errors.UnknownRequestError: Again.ELSEWHERE,
    errors.DeclinedError: Again.NEVER,
    errors.CancelledError: Again.NEVER,
    errors.DeadlineError: Again.HERE,
    errors.LeaseLapsedError: Again.HERE,
    errors.ExpiredError: Again.HERE,
    errors.IntegrityError: Again.HERE,
    errors.IndeterminateError: Again.NEVER,
    errors.TransportError: Again.HERE,
}
"""One row an error class; a class from elsewhere is looked up as its nearest ancestor here."""


def again(error: KVLinkError) -> Again:
    """What may help after ``error``: the row of its class, unless it says itself that the same would fail again."""
    row = next(AGAIN[cls] for cls in type(error).__mro__ if cls in AGAIN)
    return Again.NEVER if row is Again.HERE and not error.retryable else row


class RetryPolicy(Value, frozen=True, kw_only=True):
    """How often, how long, and with what pauses a request is tried.

    Attributes:
        max_tries: tries in all, the first included.
        total_seconds: from the first try's start; no try begins after it, and none runs past it.
        first_pause_seconds: before the second try; doubles with each.
        max_pause_seconds: what it doubles up to.
        jitter: what part of a pause is left to chance, 0 to 1, so that those who failed together do not come back so.

    Raises:
        ConfigError: a value is out of its range; the text names it.
    """

    max_tries: int = limits.RETRY_TRIES
    total_seconds: float = limits.RETRY_TOTAL_SECONDS
    first_pause_seconds: float = limits.RETRY_PAUSE_SECONDS
    max_pause_seconds: float = limits.MAX_RETRY_PAUSE_SECONDS
    jitter: float = 0.5

    def __post_init__(self) -> None:
        if not 1 <= self.max_tries <= limits.MAX_RETRY_TRIES:
            raise ConfigError(f"max_tries is {self.max_tries}; give 1 to {limits.MAX_RETRY_TRIES}")
        if not 0 < self.total_seconds <= limits.RETRY_HORIZON_SECONDS:
            raise ConfigError(f"total_seconds is {self.total_seconds}; give up to {limits.RETRY_HORIZON_SECONDS:g}")
        if not 0 < self.first_pause_seconds <= self.max_pause_seconds <= limits.RETRY_HORIZON_SECONDS:
            raise ConfigError(
                f"pauses of {self.first_pause_seconds} to {self.max_pause_seconds} s; they rise, and are above 0"
            )
        if not 0 <= self.jitter <= 1:
            raise ConfigError(f"jitter is {self.jitter}; give a part of the pause, 0 to 1")

    def pause(self, error: KVLinkError, *, tries: int, elapsed_seconds: float, draw: float) -> float | None:
        """How long to wait before the next try, or ``None`` if there is none.

        Whether there is another source, where `again` says that only one helps, is the caller's to know.

        Args:
            error: what the last try ended with.
            tries: how many there were.
            elapsed_seconds: since the first began.
            draw: chance's word, in [0, 1).
        """
        if tries >= self.max_tries or again(error) is Again.NEVER:
            return None
        pause = min(self.first_pause_seconds * 2.0 ** (tries - 1), self.max_pause_seconds)
        pause *= 1 - self.jitter * draw
        if isinstance(error, errors.BusyError):  # never before the hint; jitter spreads those who got the same one
            pause += error.retry_after_seconds
        return pause if elapsed_seconds + pause < self.total_seconds else None
