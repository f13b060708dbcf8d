"""What a target part is: its phases, its state, the events it takes. `kvlink.protocol.target` moves it."""

from __future__ import annotations

from kvlink import wire
from kvlink.protocol.membership import Membership
from kvlink.protocol.target_leg import CutOffDone, ReadEnded, TargetLeg
from kvlink.protocol.vocabulary import Cancel, Failure, PeerDead, PeerLost, Received, Tick, Timing, Value, Word


class TargetPhase(Word):
    """Where a target part stands."""

    LIVE = "live"
    GATHERED = "gathered"
    """All has landed; siblings have not."""
    INSTALLING = "installing"
    HIDDEN = "hidden"
    """Installed, and shown to nobody before all siblings are: time cannot take it away, the coordinator can."""
    ENDING = "ending"
    """Failed; cut-offs are awaited (*draining*)."""
    ENDED = "ended"
    """Reported; sources are still being told."""
    CLOSED = "closed"
    """Nothing is left to do: the driver forgets the part."""


class InstallDone(Value, frozen=True):
    """The engine has the blocks."""


class InstallFailed(Value, frozen=True):
    """The engine does not have the blocks and never will."""

    error: wire.ErrorInfo


class AllLanded(Value, frozen=True):
    """Every leg's bytes are here and verified."""


class AllCommitted(Value, frozen=True):
    """Every source has promised."""


class AllQuiet(Value, frozen=True):
    """No byte of any leg can land."""


class AllTold(Value, frozen=True):
    """Every source has acknowledged, or is past telling."""


TargetEvent = Received | ReadEnded | CutOffDone | PeerLost | PeerDead | InstallDone | InstallFailed | Cancel | Tick


class TargetPart(Value, frozen=True, kw_only=True):
    """One request on one target rank.

    Attributes:
        key: the request's key.
        legs: one attempt per source rank.
        timing: its clocks.
        deadline_seconds: as given to `begin`.
        deadline_at: when the transfer's own clock runs out; pushed back by the time spent parked.
        parked_since: since when a leg is parked or rests, or ``None``. While it does, the transfer's clock stands
            still.
        phase: where it stands.
        failure: the first cause, once it failed.
        siblings: where it stands among them, if all become visible together.
    """

    key: str
    legs: tuple[TargetLeg, ...]
    timing: Timing
    deadline_seconds: float
    deadline_at: float
    parked_since: float | None = None
    phase: TargetPhase = TargetPhase.LIVE
    failure: Failure | None = None
    siblings: Membership | None = None

    def leg(self, attempt: int) -> TargetLeg | None:
        """The leg of this attempt, if it is ours."""
        return next((leg for leg in self.legs if leg.attempt == attempt), None)


Change = tuple[TargetPart, tuple[object, ...]]
