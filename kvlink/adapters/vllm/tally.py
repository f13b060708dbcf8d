"""What one rank counts between two reports: plain numbers, added up over ranks and steps."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
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
        streamed_bytes: of the same, what had landed before its prefill was done (push).
        exposed_seconds: of each push that was streamed, from the end of its prefill to its install.
        retries: tries beyond the first, of loads that were installed.
        failures: loads that failed, by ``kind|field``: an error's code, and the field where two sides differ.
        sends: finished requests whose blocks came back, by how they ended (``done`` is fetched).
    """

    fetch_seconds: list[float] = field(default_factory=list)
    fetch_bytes: list[int] = field(default_factory=list)
    streamed_bytes: int = 0
    exposed_seconds: list[float] = field(default_factory=list)
    retries: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    sends: dict[str, int] = field(default_factory=dict)

    def fetched(self, part: Part, tries: int) -> None:
        """A load was installed."""
        self.retries += tries - 1
        if part.result is not None:
            self.fetch_seconds.append(part.result.seconds)
            self.fetch_bytes.append(part.result.bytes)
            self.streamed_bytes += part.result.streamed_bytes
            if (exposed := part.result.phases.get("exposed")) is not None:
                self.exposed_seconds.append(exposed)

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
        counted, fresh = {}, Tally()
        for counter in fields(self):
            counted[counter.name] = getattr(self, counter.name)
            setattr(self, counter.name, getattr(fresh, counter.name))
        return counted if any(counted.values()) else None
