"""What an embedder says to several verbs alike, checked: each refusal names the argument and what is accepted."""

from __future__ import annotations

from kvlink import limits
from kvlink.errors import ConfigError


def check_uncovered(uncovered: str) -> None:
    """Raises ConfigError if it is no word for what becomes of slots past the last token."""
    if uncovered not in ("leave", "zero"):
        raise ConfigError(
            f"uncovered is {uncovered!r}; slots past the last token can be 'leave' (left) or 'zero' (zeroed)"
        )


def check_ttl(seconds: float) -> None:
    """Raises ConfigError if blocks may not be kept unasked for so long."""
    if not 0 < seconds <= limits.RETRY_HORIZON_SECONDS:  # NaN is in no range
        raise ConfigError(
            f"ttl_seconds is {seconds}; give a time above 0 and at most {limits.RETRY_HORIZON_SECONDS:g}, for which "
            "blocks may be kept for nobody"
        )


def check_deadline(seconds: float) -> None:
    """Raises ConfigError if no transfer may last so long."""
    if not 0 < seconds <= limits.MAX_ATTEMPT_SECONDS:
        raise ConfigError(
            f"deadline_seconds is {seconds}; give the time that is left, above 0 and at most "
            f"{limits.MAX_ATTEMPT_SECONDS:g}"
        )
