"""The KV room of one simulated worker: what requests hold, and which prefix blocks are there to be found.

Room is counted in tokens. A request holds its own whole length; blocks that two live requests share are counted for
both, so room is never promised twice. Blocks that nobody holds any more stay as cache, the longest unused evicted
first, in whatever room is not held.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class KVSpace:
    """Room of ``total`` tokens; prefix blocks of ``block_tokens`` each."""

    def __init__(self, total: int, block_tokens: int) -> None:
        self.total = total
        self.held = 0
        self.block_tokens = block_tokens
        self._holders: dict[int, int] = {}
        self._unused: OrderedDict[int, None] = OrderedDict()

    @property
    def free(self) -> int:
        """Tokens that nobody holds; cache gives way to whoever needs them."""
        return self.total - self.held

    def hold(self, tokens: int) -> bool:
        """Take ``tokens`` (or, negative, give them back); whether they were there."""
        if tokens > self.free:
            return False
        self.held += tokens
        while self._unused and self.held + len(self._unused) * self.block_tokens > self.total:
            self._unused.popitem(last=False)
        return True

    def match(self, blocks: Sequence[int]) -> int:
        """How many of the first blocks are here."""
        for index, block in enumerate(blocks):
            if block not in self._holders and block not in self._unused:
                return index
        return len(blocks)

    def pin(self, blocks: Sequence[int]) -> None:
        """They are here, and stay until `unpin`."""
        for block in blocks:
            self._holders[block] = self._holders.get(block, 0) + 1
            self._unused.pop(block, None)

    def unpin(self, blocks: Sequence[int]) -> None:
        """One holder less of each; what nobody holds becomes cache. The last block of a prefix is evicted first."""
        for block in reversed(blocks):
            if self._holders[block] == 1:
                del self._holders[block]
                self._unused[block] = None
            else:
                self._holders[block] -= 1

    def clear(self) -> None:
        """The memory is gone."""
        self.held = 0
        self._holders.clear()
        self._unused.clear()
