"""Which installed requests still stand, and on which target engine, for as long as somebody may ask. No I/O, no clock.

A source keeps one beside its `Ledger`, which knows that a request was installed; this knows what became of its target
since. The ranks of an engine are one incarnation: a request that has lost one of them is lost.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

from kvlink import limits

Target: TypeAlias = tuple[str, str]
"""An engine and its incarnation."""


class Standing(StrEnum):
    """What a source knows of a request that it saw installed."""

    INSTALLED = "installed"
    """All ranks that read it are connected."""
    LOST = "lost"
    """One of them fell silent, was cut off or left; its process may live, and the same incarnation may come back."""
    DEAD = "dead"
    """Another incarnation has authenticated in its place: what was installed is gone."""


@dataclass(frozen=True, slots=True)
class Installation:
    """A request as it was installed.

    Attributes:
        key: the request's.
        target: who has it.
        tokens: positions that it holds.
        group_first_tokens: where each group's positions begin, or none: all are whole.
        family: keys of the request and of its replicas, this one included; empty if it has none.
    """

    key: str
    target: Target
    tokens: int
    group_first_tokens: tuple[int, ...] = ()
    family: tuple[str, ...] = ()


@dataclass(slots=True)
class _Engine:
    """A target that has installed something: its requests, with what was told of each, and its missing ranks."""

    told: dict[str, Standing] = field(default_factory=dict)
    away: set[str] = field(default_factory=set)
    dead: bool = False

    @property
    def standing(self) -> Standing:
        if self.dead:
            return Standing.DEAD
        return Standing.LOST if self.away else Standing.INSTALLED


class Installations:
    """Installed requests until they are released, or for the retry horizon.

    Args:
        limit: how many are kept; at more, the oldest goes.
        horizon_seconds: how long one is kept, from its installation.
    """

    def __init__(
        self, limit: int = limits.MAX_LEDGER_ENTRIES, horizon_seconds: float = limits.RETRY_HORIZON_SECONDS
    ) -> None:
        self._limit = limit
        self._horizon = horizon_seconds
        # Ordered dicts: a plain one looks through all that it has lost at its front to find its first.
        self._known: OrderedDict[str, Installation] = OrderedDict()
        self._forget_at: OrderedDict[str, float] = OrderedDict()
        self._engines: dict[Target, _Engine] = {}

    def __len__(self) -> int:
        return len(self._known)

    def add(self, installation: Installation, away: Iterable[str], now: float) -> None:
        """A request was installed; ``away``: ranks that read it and are gone again already."""
        self.release(installation.key)
        self._forget(now)
        self._known[installation.key] = installation
        self._forget_at[installation.key] = now + self._horizon
        engine = self._engines.setdefault(installation.target, _Engine())
        engine.told[installation.key] = Standing.INSTALLED
        engine.away.update(away)
        if len(self._known) > self._limit:
            self.release(next(iter(self._known)))

    def release(self, key: str) -> None:
        """Nobody will want to recover it. Idempotent."""
        installation = self._known.pop(key, None)
        if installation is None:
            return
        del self._forget_at[key]
        engine = self._engines[installation.target]
        del engine.told[key]
        if not engine.told:
            del self._engines[installation.target]

    def look(self, key: str, now: float) -> tuple[Installation, Standing] | None:
        """A request and how it stands; ``None`` if it was not installed from here, was released, or is forgotten."""
        self._forget(now)
        installation = self._known.get(key)
        return None if installation is None else (installation, self._engines[installation.target].standing)

    # --- what becomes of targets --------------------------------------------------------------------------------------

    def lost(self, target: Target, peer: str) -> None:
        """A rank of the target is not connected any more."""
        if (engine := self._engines.get(target)) is not None:
            engine.away.add(peer)

    def back(self, target: Target, peer: str) -> None:
        """The same incarnation of a rank is connected."""
        engine = self._engines.get(target)
        if engine is not None and peer in engine.away:
            engine.away.discard(peer)
            if engine.standing is Standing.INSTALLED:
                engine.told = dict.fromkeys(engine.told, Standing.INSTALLED)

    def dead(self, target: Target) -> None:
        """A successor of one of its ranks has authenticated."""
        if (engine := self._engines.get(target)) is not None:
            engine.dead = True

    def untold(self, target: Target, now: float) -> list[tuple[Installation, Standing]]:
        """Those of the target's requests that have come to stand worse than was told of them; asking is telling."""
        self._forget(now)
        engine = self._engines.get(target)
        if engine is None or (standing := engine.standing) is Standing.INSTALLED:
            return []
        worse = [key for key, told in engine.told.items() if told is not standing]
        engine.told.update(dict.fromkeys(worse, standing))
        return [(self._known[key], standing) for key in worse]

    def _forget(self, now: float) -> None:
        """Requests come to their horizon in the order in which they were put there."""
        while self._forget_at and now >= self._forget_at[key := next(iter(self._forget_at))]:
            self.release(key)
