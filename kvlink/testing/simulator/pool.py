"""The model of a rank's blocks: whose they are, what lies in them, and that nothing else may write there."""

from __future__ import annotations

from kvlink.testing.simulator.clockwork import InvariantError

Blocks = tuple[int, ...]
Content = tuple[str, int]
"""What lies in a cell: the tag of a request's KV, and the attempt that wrote it (0: computed here)."""

REFILLED: Content = ("other people's KV", 0)


class Pool:
    """A rank's blocks. A block has a cell per source rank that may write into it; a source's own cell is ``""``."""

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.size = size
        self._free = list(range(size))
        self._owners: dict[int, str] = {}
        self._cells: dict[tuple[int, str], Content] = {}

    @property
    def free(self) -> int:
        """Blocks that nobody has."""
        return len(self._free)

    def take(self, count: int, owner: str) -> Blocks | None:
        """Give ``count`` blocks to ``owner``, or ``None`` if there are not that many. The last returned goes first."""
        if len(self._free) < count:
            return None
        blocks = tuple(self._free.pop() for _ in range(count))
        self._owners.update(dict.fromkeys(blocks, owner))
        return blocks

    def give_back(self, blocks: Blocks, owner: str) -> None:
        """They are the engine's again, and get other content at once."""
        for block in blocks:
            if self._owners.pop(block, None) != owner:
                raise InvariantError(f"4: {owner} gives block {block} of {self.name} back, and does not have it")
            self._free.append(block)
            for cell in [cell for cell in self._cells if cell[0] == block]:
                self._cells[cell] = REFILLED

    def compute(self, blocks: Blocks, tag: str) -> None:
        """A prefill writes."""
        for block in blocks:
            self._cells[block, ""] = (tag, 0)

    def look(self, block: int, cell: str = "") -> Content:
        """What lies there."""
        return self._cells.get((block, cell), REFILLED)

    def land(self, block: int, cell: str, content: Content, owner: str) -> None:
        """Bytes of an attempt land."""
        if self._owners.get(block) != owner:
            has = self._owners.get(block, "the engine")
            raise InvariantError(f"1: bytes of {owner} land in block {block} of {self.name}, which {has} has")
        self._cells[block, cell] = content
