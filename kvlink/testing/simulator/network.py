"""What lies between the ranks: messages that are lost, doubled and late, cut links, leases, and the news of a peer.

A pair of ranks *hears* each other while both run and the link between them is up. A lease is renewed while its pair
hears and its target renews; the source's clock judges it. Whoever hears nothing for long enough is told `PeerLost`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from kvlink import wire
from kvlink.memory.ledger import BlockLedger
from kvlink.protocol import PeerDead, PeerLost
from kvlink.testing.simulator.clockwork import Agenda, Process
from kvlink.testing.simulator.plan import LEASE_SECONDS, PEER_LOST_SECONDS, Plan
from kvlink.testing.simulator.pool import Pool


class Rank(Process):
    """A process that sends and hears messages.

    Attributes:
        slot: its place, whatever its incarnation: ``"D/0"``.
        engine: its engine's incarnation, which all its ranks share: ``"D@2"``.
        pool: its blocks, as they really are.
        blocks: its blocks, as it accounts for them.
        asleep: its link is paused: it has left all peers, and hears nobody.
        works: its requests, by key.
    """

    pool: Pool
    blocks: BlockLedger
    works: dict[str, Any]

    def __init__(self, network: Network, slot: str, incarnation: int) -> None:
        dice = network.dice
        rate = 1.0 + dice.uniform(-1.0, 1.0) * network.drift
        super().__init__(network.agenda, f"{slot}@{incarnation}", rate, dice.random() * 100.0)
        self.network = network
        self.slot = slot
        self.asleep = False
        self.engine = f"{slot.split('/', maxsplit=1)[0]}@{incarnation}"

    def cancel(self, key: str) -> None:
        """The embedder takes the request back."""
        raise NotImplementedError

    @property
    def idle(self) -> bool:
        """Every part has ended: nothing is read or written."""
        raise NotImplementedError

    def fall_asleep(self) -> None:
        """Nothing that was installed stands any more."""

    def hear(self, peer: str, message: Any) -> None:  # noqa: ANN401
        """A message came."""
        raise NotImplementedError

    def learn(self, event: PeerLost | PeerDead) -> None:
        """News of a peer."""
        raise NotImplementedError

    def lapsed(self, peer: str, attempt: int) -> None:
        """A source's transport says that a lease has lapsed."""
        raise NotImplementedError


@dataclass(slots=True)
class Lease:
    """An exposure, and since when (true time) nobody renews it."""

    since: float | None
    lapsed: bool = False
    renewing: bool = False


@dataclass(slots=True)
class Pair:
    """A source rank and a target rank, incarnations both."""

    source: Rank
    target: Rank
    deaf_since: float | None = None
    lost_to: set[str] = field(default_factory=set)
    leases: dict[int, Lease] = field(default_factory=dict)
    waiting: list[Callable[[], None]] = field(default_factory=list)

    @property
    def ranks(self) -> tuple[Rank, Rank]:
        """Both."""
        return self.source, self.target


class Network:
    """All ranks and what is between them.

    Attributes:
        quiet: no more faults: nothing is lost, doubled or slow.
        log: where a trace goes, or ``None``.
    """

    def __init__(self, plan: Plan, dice: Random, agenda: Agenda, drift: float, log: list[str] | None) -> None:
        self.plan = plan
        self.dice = dice
        self.agenda = agenda
        self.drift = drift
        self.quiet = False
        self.log = log
        self.ranks: dict[str, Rank] = {}
        self._pairs: dict[tuple[str, str], Pair] = {}
        self._severed: dict[tuple[str, str], int] = {}
        self._stuck: dict[tuple[str, str], float] = {}
        self._traps: dict[str, list[Callable[[Rank, Rank], None]]] = {}

    def note(self, text: str) -> None:
        """A line of the trace."""
        if self.log is not None:
            self.log.append(f"{self.agenda.now:9.4f}  {text}")

    def join(self, rank: Rank) -> None:
        """A process has started."""
        self.ranks[rank.name] = rank

    def way(self) -> float:
        """How long a message, or a piece of a read, is on its way."""
        plan, dice = self.plan, self.dice
        if self.quiet:
            return 0.002
        delay = plan.delay * (0.5 + dice.random())
        return delay * dice.uniform(2.0, 20.0) if dice.random() < plan.straggle else delay

    def trap(self, kind: str, do: Callable[[Rank, Rank], None]) -> None:
        """Call ``do(sender, receiver)`` with the next message of a kind."""
        self._traps.setdefault(kind, []).append(do)

    # --- messages -----------------------------------------------------------------------------------------------------

    def send(self, sender: Rank, peer: str, message: Any) -> None:  # noqa: ANN401
        """Send, or lose, or send twice."""
        receiver = self.ranks.get(peer)
        if receiver is None or not receiver.alive or sender.asleep:
            return
        if self._traps and not self.quiet and (trap := self._traps.pop(_kind(message), None)):
            for do in trap:
                self.agenda.after(self.dice.random() * self.plan.delay * 2.0, None, do, sender, receiver)
        plan, dice = self.plan, self.dice
        lost = not self.quiet and dice.random() < plan.loss
        if lost or self._cut(sender, receiver):
            self.note(f"{sender.name} -> {peer}: {_text(message)}, LOST")
            return
        self.note(f"{sender.name} -> {peer}: {_text(message)}")
        stuck = self._stuck.get((sender.slot, receiver.slot), 0.0) - self.agenda.now if not self.quiet else 0.0
        receiver.post(self.way() + max(0.0, stuck), self._arrive, sender, receiver, message)
        if not self.quiet and dice.random() < plan.duplication:
            receiver.post(self.way() * 3.0, self._arrive, sender, receiver, message)

    def _arrive(self, sender: Rank, receiver: Rank, message: Any) -> None:  # noqa: ANN401
        if self._cut(sender, receiver) or receiver.asleep:
            return
        self.note(f"{receiver.name} hears {sender.name}: {_text(message)}")
        receiver.hear(sender.name, message)

    # --- leases -------------------------------------------------------------------------------------------------------

    def pair(self, source: str, target: str) -> Pair:
        """The pair of these two incarnations."""
        pair = self._pairs.get((source, target))
        if pair is None:
            pair = Pair(self.ranks[source], self.ranks[target])
            self._pairs[source, target] = pair
            self._reconsider(pair)
        return pair

    def expose(self, source: str, peer: str, attempt: int) -> None:
        """A lease starts; its target renews it from when it reads."""
        pair = self.pair(source, peer)
        pair.leases[attempt] = lease = Lease(None)
        self._judge(pair, attempt, lease)

    def withdraw(self, source: str, peer: str, attempt: int) -> None:
        """The exposure is over."""
        self.pair(source, peer).leases.pop(attempt, None)

    def held(self, source: str, peer: str, attempt: int) -> bool:
        """Whether the lease has been held without a gap up to now, by the source's clock."""
        pair = self.pair(source, peer)
        lease = pair.leases.get(attempt)
        return lease is not None and not self._judge(pair, attempt, lease).lapsed

    def renew(self, source: str, peer: str, attempt: int, *, renewing: bool) -> None:
        """The target renews the lease from now on, or no longer."""
        pair = self.pair(source, peer)
        lease = pair.leases.get(attempt)
        if lease is not None:
            lease.renewing = renewing
            self._judge(pair, attempt, lease)

    def lapse(self, pair: Pair, attempt: int) -> None:
        """A lease lapses, for whatever reason; its source's process hears of it soon."""
        lease = pair.leases[attempt]
        if not lease.lapsed:
            lease.lapsed = True
            self.note(f"the lease of {pair.target.name}'s attempt {attempt} at {pair.source.name} lapses")
            pair.source.post(self.way(), pair.source.lapsed, pair.target.name, attempt)

    def _judge(self, pair: Pair, attempt: int, lease: Lease) -> Lease:
        renewed = lease.renewing and pair.deaf_since is None
        now, seconds = self.agenda.now, LEASE_SECONDS / pair.source.rate
        if lease.since is not None and now - lease.since >= seconds:
            self.lapse(pair, attempt)
        if renewed:
            lease.since = None
        elif lease.since is None:
            lease.since = now
            self.agenda.after(seconds, None, self._look_again, pair, attempt, lease)
        return lease

    def _look_again(self, pair: Pair, attempt: int, lease: Lease) -> None:
        if pair.leases.get(attempt) is lease and not lease.lapsed:
            self._judge(pair, attempt, lease)

    # --- links and the news of peers ----------------------------------------------------------------------------------

    def sever(self, one: Rank, other: Rank, seconds: float) -> None:
        """The link between two places is down for a while."""
        key = _key(one, other)
        self._severed[key] = self._severed.get(key, 0) + 1
        self.agenda.after(seconds, None, self._mend, key)
        self.reconsider()

    def stick(self, one: Rank, other: Rank, seconds: float) -> None:
        """What ``one`` tells ``other`` waits for a while, though they hear that both live: a stuck connection."""
        self._stuck[one.slot, other.slot] = self.agenda.now + seconds

    def _mend(self, key: tuple[str, str]) -> None:
        self._severed[key] -= 1
        self.note(f"the link {key} is up" if not self._severed[key] else f"the link {key} is still down")
        self.reconsider()

    def reconsider(self) -> None:
        """A process was stopped, resumed or killed, or a link has changed."""
        for pair in list(self._pairs.values()):
            self._reconsider(pair)

    def hears(self, pair: Pair) -> bool:
        """Both run and the link is up."""
        awake = not (pair.source.asleep or pair.target.asleep)
        return awake and pair.source.running and pair.target.running and not self._cut(*pair.ranks)

    def say_goodbye(self, rank: Rank) -> None:
        """All its peers are told that it goes; it forgets them."""
        for pair in list(self._pairs.values()):
            if rank in pair.ranks:
                one, other = pair.ranks
                self.lose(one, other)
                self.lose(other, one)

    def lose(self, observer: Rank, peer: Rank) -> None:
        """``observer`` is told that it has lost ``peer``, rightly or not."""
        observer.post(self.way(), observer.learn, PeerLost(peer.name))

    def announce_death(self, dead: Rank) -> None:
        """A successor has authenticated, or its host says so: some hear of it, sooner or later, some never."""
        for pair in list(self._pairs.values()):
            if dead in pair.ranks and self.dice.random() < 0.8:
                observer = pair.target if dead is pair.source else pair.source
                observer.post(self.dice.random() ** 3 * 4.0, observer.learn, PeerDead(dead.name))

    def _cut(self, one: Rank, other: Rank) -> bool:
        return bool(self._severed) and self._severed.get(_key(one, other), 0) > 0

    def _reconsider(self, pair: Pair) -> None:
        now, hears = self.agenda.now, self.hears(pair)
        if hears and pair.deaf_since is not None:
            pair.deaf_since = None
            waiting, pair.waiting = pair.waiting, []
            for do in waiting:
                self.agenda.after(self.way(), None, do)
            if pair.lost_to and self.dice.random() < 0.6:  # whoever was given up by the other finds a reset
                for rank, other in (pair.ranks, pair.ranks[::-1]):
                    if rank.name not in pair.lost_to:
                        self.lose(rank, other)
            pair.lost_to.clear()
        elif not hears and pair.deaf_since is None:
            pair.deaf_since = now
            reset = self.dice.random() < 0.5 and not (pair.source.alive and pair.target.alive)
            for rank, other in (pair.ranks, pair.ranks[::-1]):
                wait = 0.01 if reset else PEER_LOST_SECONDS / rank.rate
                rank.post(wait, self._silent, pair, rank, other, now)
        for attempt, lease in list(pair.leases.items()):
            self._judge(pair, attempt, lease)

    def _silent(self, pair: Pair, rank: Rank, other: Rank, since: float) -> None:
        if pair.deaf_since == since:
            pair.lost_to.add(rank.name)
            rank.learn(PeerLost(other.name))


def _key(one: Rank, other: Rank) -> tuple[str, str]:
    return (one.slot, other.slot) if one.slot < other.slot else (other.slot, one.slot)


def _kind(message: Any) -> str:  # noqa: ANN401
    """What a fault can wait for."""
    return message.verdict.name if isinstance(message, wire.Decided) else type(message).__name__


def _text(message: Any) -> str:  # noqa: ANN401
    about = getattr(message, "attempt", None)
    error = getattr(message, "error", None)
    what = "" if about is None else f" {about}"
    return type(message).__name__ + what + (f" ({error.code}: {error.message})" if error is not None else "")
