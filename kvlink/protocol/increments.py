"""What either side of a streamed leg remembers of its increments. `source_leg` and `target_leg` move it.

Increments are numbered from 1, exposed and landed in order, and each is a read of its own. What they amount to has one
root: ``root(n) = BLAKE2b-64(root(n - 1) || root of increment n)``, from nothing; an increment without bytes adds none.
"""

from __future__ import annotations

from hashlib import blake2b

from msgspec.structs import replace

from kvlink import limits, wire
from kvlink.layout import NOTHING, Frontier
from kvlink.protocol.vocabulary import Value


def fold(root: bytes | None, increment: bytes | None) -> bytes | None:
    """The root of a stream with one more increment; ``None``: none has a root, as with integrity off."""
    if increment is None:
        return root
    return blake2b((root or b"") + increment, digest_size=8).digest()


class Landing(Value, frozen=True, kw_only=True):
    """A stream at its target.

    Attributes:
        taken: increments that have been told, and whose reads were started.
        landed: how many of the first are here, without a gap.
        early: those that landed before an earlier one, with their roots.
        root: over the first ``landed``.
        content: digest of the descriptor that the seal covers, once the last has been told.
        tokens: positions that it covers.
    """

    taken: int = 0
    landed: int = 0
    early: tuple[tuple[int, bytes | None], ...] = ()
    root: bytes | None = None
    content: str | None = None
    tokens: int | None = None

    @property
    def resting(self) -> bool:
        """Nothing is being read."""
        return self.landed == self.taken

    @property
    def whole(self) -> bool:
        """All that the seal covers is here."""
        return self.resting and self.content is not None

    def expects(self, advance: wire.Advance) -> bool:
        """Whether this is the next increment. Others are late copies, or come again."""
        return (
            advance.number == self.taken + 1
            and self.content is None
            and self.taken - self.landed < limits.STREAM_WINDOW
        )

    def take(self, advance: wire.Advance) -> Landing:
        """Its read is started."""
        tokens = None if advance.sealed is None else advance.frontier.tokens
        return replace(self, taken=advance.number, content=advance.sealed, tokens=tokens)

    def land(self, number: int, root: bytes | None) -> Landing:
        """It is here."""
        early, landed, whole = dict(self.early) | {number: root}, self.landed, self.root
        while landed + 1 in early:
            landed += 1
            whole = fold(whole, early.pop(landed))
        return replace(self, landed=landed, root=whole, early=tuple(sorted(early.items())))


class Offering(Value, frozen=True, kw_only=True):
    """A stream at its source.

    Attributes:
        ready: how far the KV has been computed.
        content: digest of the descriptor, once sealed.
        exposed: increments that the target was told of.
        told: how far they go.
        sealed: the last of them carries the seal.
        landed: how many have landed, under a lease that held.
        root: over those.
    """

    ready: Frontier
    content: str | None = None
    exposed: int = 0
    told: Frontier = NOTHING
    sealed: bool = False
    landed: int = 0
    root: bytes | None = None

    @property
    def may_expose(self) -> bool:
        """There is something to tell, and room for it."""
        news = self.ready != self.told or (self.content is not None and not self.sealed)
        room = self.exposed - self.landed < limits.STREAM_WINDOW
        return news and room and (self.content is not None or self.exposed + 1 < limits.MAX_INCREMENTS)

    def expose(self) -> Offering:
        """One more: all that is ready."""
        return replace(self, exposed=self.exposed + 1, told=self.ready, sealed=self.content is not None)

    def land(self, root: bytes | None) -> Offering:
        """The next has landed."""
        return replace(self, landed=self.landed + 1, root=fold(self.root, root))

    def closes(self, increments: int, content: str | None) -> bool:
        """Whether a target that has so many, and means this content, has all that the seal covers and nothing else."""
        return self.sealed and increments == self.exposed == self.landed and content == self.content
