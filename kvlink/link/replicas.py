"""A part that is published with replicas: several keys, one target each, over the same blocks, which return once."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvlink import limits
from kvlink.errors import ConfigError
from kvlink.link.part import LivePart, Part, Result

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvlink.wire import Offer


def replicas_of(offer: Offer, count: int, secret: bytes | None) -> tuple[Offer, ...]:
    """Offers of the same KV to ``count`` further targets, signed if there is a secret.

    Raises:
        ConfigError: below none, or more than `limits.MAX_REPLICAS`.
        SchemaError: the offer's key leaves no room for a replica's.
    """
    if not 0 <= count <= limits.MAX_REPLICAS:
        raise ConfigError(f"replicas is {count}; give 0 to {limits.MAX_REPLICAS}")
    offers = (offer.replica(number) for number in range(1, count + 1))
    return tuple(one if secret is None else one.sign(secret) for one in offers)


class ReplicatedPart(LivePart):
    """The request's own part, which ends after those of its replicas: until then the blocks are the library's.

    Its end is the request's own, whatever became of the replicas. Each of those has a part and a `PartEnded` event.
    """

    __slots__ = ("_own", "copies")

    def __init__(self, key: str, replicas: tuple[Offer, ...]) -> None:
        super().__init__(key)
        self.replicas = replicas
        self.copies: tuple[LivePart, ...] = ()
        self._own: Result | None = None

    def serve(self, copies: Sequence[LivePart]) -> None:
        """The replicas' parts have begun."""
        self.copies = tuple(copies)
        for copy in self.copies:
            copy.when_ended(self._copy_ended)

    def end(self, result: Result) -> None:
        """Record the request's own end; it is told with the last replica's."""
        self._own = self._own or result
        self._settle()

    def _copy_ended(self, copy: Part) -> None:
        if self._own is not None and copy.result is not None:  # its verb was the same call as the request's
            self._own = replace(self._own, seconds=max(self._own.seconds, copy.result.seconds))
        self._settle()

    def _settle(self) -> None:
        if self._own is not None and all(copy.state.ended for copy in self.copies):
            super().end(self._own)


def parts_of(part: Part) -> tuple[Part, ...]:
    """The part, and those that stand behind it."""
    return (part, *part.copies) if isinstance(part, ReplicatedPart) else (part,)
