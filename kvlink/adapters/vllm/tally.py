"""What one rank counts between two reports: plain numbers, added up over ranks and steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from kvlink.link import Part, State

OTHER_FIELD: Final = "other"
"""For a field whose name a peer made up: labels must not grow at a peer's will."""


@dataclass(slots=True)
class Tally:
    """Counts since the last `take`.

    Attributes:
        fetch_seconds: of each load that was installed, from submitting it to its install.
        fetch_bytes: of the same.
        retries: tries beyond the first, of loads that were installed.
        failures: loads that failed, by ``kind|field``: an error's code, and the field where two sides differ.
        sends: finished requests whose blocks came back, by how they ended (``done`` is fetched).
    """

    fetch_seconds: list[float] = field(default_factory=list)
    fetch_bytes: list[int] = field(default_factory=list)
    retries: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    sends: dict[str, int] = field(default_factory=dict)

    def fetched(self, part: Part, tries: int) -> None:
        """A load was installed."""
        self.retries += tries - 1
        if part.result is not None:
            self.fetch_seconds.append(part.result.seconds)
            self.fetch_bytes.append(part.result.bytes)

    def failed(self, kind: str, difference: str) -> None:
        """A load failed."""
        known = difference if difference.replace(".", "").isidentifier() and len(difference) <= 64 else OTHER_FIELD
        name = f"{kind}|{known if difference else ''}"
        self.failures[name] = self.failures.get(name, 0) + 1

    def sent(self, state: State) -> None:
        """A finished request's blocks came back."""
        name = state.name.lower()
        self.sends[name] = self.sends.get(name, 0) + 1

    def take(self) -> dict[str, Any] | None:
        """Everything counted, as plain data, or ``None`` if there was nothing; counting starts anew."""
        counted = {
            "fetch_seconds": self.fetch_seconds,
            "fetch_bytes": self.fetch_bytes,
            "retries": self.retries,
            "failures": self.failures,
            "sends": self.sends,
        }
        self.fetch_seconds, self.fetch_bytes, self.retries, self.failures, self.sends = [], [], 0, {}, {}
        return counted if any(counted.values()) else None
