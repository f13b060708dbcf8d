# Written by scripts/stubs from the built extension; do not edit.
"""Native core of KVLink."""

from collections.abc import Sequence
from typing import Annotated

import numpy
from numpy.typing import NDArray

SOURCE: int = 0

TARGET: int = 1

MAX_NEST_DIMS: int = 8

MAX_OFFSET_BYTES: int = 70368744177664

MAX_TRANSFER_BYTES: int = 17592186044416

MAX_REGIONS: int = 4096

class Plan:
    """
    A validated copy plan, walked in wire order. Immutable; any thread may use it.
    """

    def __init__(
        self,
        segments: Sequence[
            tuple[
                Annotated[NDArray[numpy.int64], dict(shape=(None, 4), order="C", device="cpu", writable=False)],
                Annotated[NDArray[numpy.int64], dict(shape=(None, 2), order="C", device="cpu", writable=False)],
                Annotated[NDArray[numpy.int64], dict(shape=(None, 3), order="C", device="cpu", writable=False)],
                int,
            ]
        ],
    ) -> None:
        """
        Each segment is (bases [P, 4], pieces [N, 2], nest [K, 3], run_bytes), tables of int64.

        Raises:
            ValueError: a term is out of its bounds; the message names the segment.
        """

    @property
    def total_bytes(self) -> int: ...
    def check_bounds(self, side: int, region_lengths: Sequence[int]) -> None:
        """
        Raises:
            ValueError: a byte of this side (0 source, 1 target) is outside its region.
        """

    def count_runs(self) -> int:
        """Maximal runs of the whole plan, with neighbours that touch merged."""

    def runs(
        self, begin: int = 0, end: int | None = None, max_run_bytes: int | None = None
    ) -> Annotated[NDArray[numpy.int64], dict(shape=(None, 5))]:
        """
        Maximal runs of wire bytes [begin, end), int64 [n, 5]: source region, source offset, target region,
        target offset, bytes.
        """

LEAF_BYTES: int = 16384

def hash_variants() -> list[str]:
    """Instruction sets this CPU can hash with, fastest (the default) first."""

def xxh3_64(data: bytes | bytearray | memoryview, variant: str | None = None) -> int:
    """XXH3-64, seed 0."""

def digest_leaves(
    plan: Plan,
    side: int,
    regions: Sequence[tuple[int, int]],
    first_leaf: int = 0,
    count: int | None = None,
    variant: str | None = None,
) -> bytes:
    """
    Leaf digests of one side (0 source, 1 target), 8 little-endian bytes each. Regions are (address, length);
    they must stay mapped, and at rest, until the call returns.

    Raises:
        ValueError: the plan leaves a region, or the leaves are outside the plan.
    """

def digest_root(leaves: bytes) -> int:
    """Root digest over all leaf digests, in order."""

def move(
    plan: Plan,
    source_regions: Sequence[tuple[int, int]],
    target_regions: Sequence[tuple[int, int]],
    begin: int = 0,
    end: int | None = None,
) -> None:
    """
    Copy wire bytes [begin, end) between this process's regions, (address, length) each. No run may overlap its
    own target.

    Raises:
        ValueError: the plan leaves a region, or the range the plan; nothing was copied.
    """
