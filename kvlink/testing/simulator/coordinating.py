"""A target rank that coordinates its engine's, driven as `kvlink.link.coordinator` does."""

from __future__ import annotations

from collections.abc import Callable

from kvlink import protocol, wire
from kvlink.protocol import Group, GroupEvent, GroupPhase, group
from kvlink.testing.simulator.clockwork import Runner
from kvlink.testing.simulator.network import Rank
from kvlink.testing.simulator.plan import Plan


class Coordinating:
    """The groups of one engine's first rank.

    Args:
        rank: that rank.
        plan: of the world.
        own_part: takes a word to this rank's own part.
    """

    def __init__(self, rank: Rank, plan: Plan, own_part: Callable[[str, wire.Decided], None]) -> None:
        self._rank = rank
        self._plan = plan
        self._own_part = own_part
        self._gatherings = 0
        self.groups: dict[str, Runner[Group]] = {}

    def hears(self, peer: str, message: wire.Stands) -> None:
        """A rank, or this one itself, tells where its part stands."""
        runner = self.groups.get(message.key)
        if group.begins(None if runner is None else runner.state, peer, message):
            runner = self._begin(message.key)
        if runner is None:
            self._act(group.answer_unknown(peer, message))
        else:
            runner.feed(protocol.Stood(peer, message))

    def learn(self, event: GroupEvent) -> None:
        """News of a rank."""
        for runner in list(self.groups.values()):
            runner.feed(event)

    def _begin(self, key: str) -> Runner[Group]:
        if (older := self.groups.get(key)) is not None:
            older.stop()
        self._gatherings += 1
        rank, kind = self._rank, self._rank.slot.split("/", maxsplit=1)[0]
        incarnation = rank.name.split("@")[1]
        peers = [f"{kind}/{index}@{incarnation}" for index in range(self._plan.target_ranks[kind])]
        now, after = rank.clock(), None if older is None else older.state
        state = group.begin(key, self._gatherings, rank.name, peers, now=now, timing=self._plan.timing, after=after)
        runner: Runner[Group] = Runner(
            rank, group, state, self._act, lambda _event, _after, _actions: None, lambda: self._settle(key)
        )
        self.groups[key] = runner
        runner.start(())
        return runner

    def _act(self, send: protocol.Send) -> None:
        if send.peer == self._rank.name and isinstance(send.message, wire.Decided):
            self._own_part(send.peer, send.message)
        else:
            self._rank.network.send(self._rank, send.peer, send.message)

    def _settle(self, key: str) -> None:
        runner = self.groups.get(key)
        if runner is not None and runner.state.phase is GroupPhase.CLOSED:
            runner.stop()
            del self.groups[key]
