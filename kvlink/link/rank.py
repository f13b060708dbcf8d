"""What a link knows of itself: its cache, its transports, and how it introduces itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from kvlink import limits
from kvlink.config import AUTO
from kvlink.errors import ConfigError
from kvlink.layout import fingerprint, share_of
from kvlink.link.choice import candidates, choose, none_in_common, shape_of_pair
from kvlink.wire import Chosen, Introduce, RankCard, TransportCard, WireKey

if TYPE_CHECKING:
    from kvlink.config import Config
    from kvlink.layout import CacheSpec, Group, RankShare
    from kvlink.link.linger import Linger
    from kvlink.link.moments import Moments
    from kvlink.link.pump import Pump
    from kvlink.memory import Caches
    from kvlink.relayout import Gpu


@dataclass(slots=True)
class LocalRank:
    """One rank: its caches, its settings, and a pump per transport, best first.

    ``caches`` are others after a pause; whoever needs them reads them here each time. ``gpu`` is where they lie, if not
    in host memory, and ``moments`` what is waited for there; ``linger`` waits awake for what comes soon.
    """

    config: Config
    caches: Caches
    pumps: tuple[Pump, ...]
    version: str
    gpu: Gpu | None
    moments: Moments
    linger: Linger
    _shared: tuple[CacheSpec, RankShare] | None = None

    @property
    def share(self) -> RankShare:
        """What of the model this rank holds; composed once a cache, since every request asks."""
        spec = self.caches.spec
        if self._shared is None or self._shared[0] is not spec:
            self._shared = spec, share_of(spec)
        return self._shared[1]

    def introduce(self) -> Introduce:
        """What an authenticated peer is told: geometry, transports and the keys to read us."""
        return Introduce(
            spec=self.caches.spec,
            transports=tuple(self._card(pump) for pump in self.pumps),
            digest_scheme=limits.DIGEST_SCHEME,
            lease_seconds=self.config.lease_seconds,
            heartbeat_seconds=self.config.heartbeat_seconds,
            kvlink=self.version,
        )

    def stands_by(self, told: Introduce) -> bool:
        """Whether what a peer was told is still so: the same cache, under the same keys."""
        keys = [self._card(pump).keys for pump in self.pumps]
        return told.spec is self.caches.spec and [card.keys for card in told.transports] == keys

    def card(self, address: str) -> bytes:
        """What the engine's scheduler puts into a roster."""
        spec = self.caches.spec
        return RankCard(
            place=spec.place,
            address=address,
            share=self.share,
            identity=spec.identity,
            identity_fingerprint=fingerprint(spec.identity),
            kvlink=self.version,
        ).to_bytes()

    def choose(self, theirs: Introduce, peer: str) -> tuple[Pump, TransportCard, str]:
        """The transport by which we read from a peer: of those that both have, and that can work between the two.

        Returns:
            Its pump, the peer's card, and the reason for the choice.

        Raises:
            PeerIncompatibleError: none in common; both lists are named.
        """
        shape = shape_of_pair(theirs.spec, self.caches.spec)
        ours = [pump.transport for pump in self.pumps]
        common = candidates(ours, theirs.transports, shape, integrity=self.config.integrity)
        name, reason = choose(common, shape, by_cost=self.config.transports == (AUTO,))
        if name is None:
            raise none_in_common(self._names(), [card.name for card in theirs.transports], reason, peer)
        return (*self._both(name, theirs, peer), reason)

    def chosen(self, chosen: Chosen, theirs: Introduce, peer: str) -> tuple[Pump, TransportCard, str]:
        """The transport by which a peer reads from us, as it has chosen.

        Raises:
            PeerIncompatibleError: it is none that both have, or cannot work between the two.
        """
        pump, card = self._both(chosen.transport, theirs, peer)
        if (refusal := pump.transport.refusal(card.address)) is not None:
            raise none_in_common(self._names(), [card.name], f"not {card.name}: {refusal}", peer)
        return pump, card, f"the target's choice: {chosen.reason}"

    def _both(self, name: str, theirs: Introduce, peer: str) -> tuple[Pump, TransportCard]:
        cards = {card.name: card for card in theirs.transports}
        for pump, ours in zip(self.pumps, self._names(), strict=True):
            if ours == name and name in cards:
                return pump, cards[name]
        raise none_in_common(self._names(), list(cards), f"the peer chose {name!r}", peer)

    def _names(self) -> list[str]:
        return [pump.transport.capabilities().name for pump in self.pumps]

    @staticmethod
    def _card(pump: Pump) -> TransportCard:
        transport = pump.transport
        capabilities = transport.capabilities()
        return TransportCard(
            name=capabilities.name,
            version=capabilities.version,
            origin=capabilities.origin,
            address=transport.address(),
            keys=tuple(
                WireKey(region=key.region, address=key.address, length=key.length, key=key.key)
                for key in pump.region_keys
            ),
        )


def check_device(config: Config, caches: Caches) -> None:
    """Whether the transports can reach the cache.

    Raises:
        ConfigError: it is on a GPU, and one of them cannot.
    """
    cannot = [name for name in config.transports if name not in ("ucx", AUTO)]
    if not caches.on_host and cannot:
        raise ConfigError(
            f"the cache lies on {caches.device}, which {' and '.join(cannot)} cannot reach; set transports to ucx"
        )


def check_successor(before: CacheSpec, after: CacheSpec) -> None:
    """Whether a rank may go on with another cache: the same seat, and another incarnation if it is another's KV.

    Raises:
        ConfigError: the seat differs, or identity or geometry do under the same incarnation.
    """
    seats = [msgspec.structs.replace(spec.place, incarnation="") for spec in (before, after)]
    if seats[0] != seats[1]:
        raise ConfigError(f"resume: the cache is {after.place}'s, this link was opened for {before.place}")
    if before.place != after.place:
        return
    for name, mine, theirs in (
        ("identity", before.identity, after.identity),
        ("layers and heads", share_of(before), share_of(after)),
        ("groups", _shapes(before), _shapes(after)),
    ):
        if mine != theirs:
            raise ConfigError(
                f"resume: {name} changed, and the incarnation is still {after.place.incarnation!r}; what peers know of "
                "this incarnation would be wrong: give the cache a new one"
            )


def _shapes(spec: CacheSpec) -> list[Group]:
    """Groups without where their planes lie."""
    return [msgspec.structs.replace(group, planes=()) for group in spec.groups]
