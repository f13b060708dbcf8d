"""Ranks in processes of their own over memory shared within the host, on both paths: killed, stopped and resumed.

What a victim is and how it is judged is `test_processes`'s.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from test_processes import (
    ENDS_WITHIN_SECONDS,
    LONG_RUNS,
    LOST_WITHIN_SECONDS,
    Big,
    OpenRank,
    big_fetched,
    end_of,
    fetch_big,
    open_rank,
    reuse_and_resume,
    serves_here,
    serves_there,
    source_here,
    spare,
    target_here,
)

from kvlink.errors import ExpiredError, PeerError, PeerLostError

__all__ = ["open_rank"]

MANY_SHORT_RUNS = Big(2500, "hnd")
"""320 MB in runs of 64 bytes, which a memory moves faster than any network."""
BOTH_PATHS = pytest.mark.parametrize("shareable", [True, False], ids=["mapped", "ring"])
INTEGRITY = pytest.mark.parametrize("integrity", [True, False], ids=["checked", "unchecked"])


@pytest.fixture(scope="module", autouse=True)
def _close_spare() -> Iterator[None]:
    yield
    while spare:
        spare.pop().close()


def settings(*, integrity: bool = True, **others: object) -> dict[str, Any]:
    return {"transports": ("shared",), "integrity": integrity, **others}


@BOTH_PATHS
@INTEGRITY
async def test_b1_c7_a_source_killed_in_mid_transfer_is_lost_and_a_new_one_is_served(
    open_rank: OpenRank, *, shareable: bool, integrity: bool
) -> None:
    over = settings(integrity=integrity)
    source = await open_rank("prefill", big=MANY_SHORT_RUNS, shareable=shareable, **over)
    async with target_here(MANY_SHORT_RUNS, **over) as target:
        part = await fetch_big(source, target, "i:killed", MANY_SHORT_RUNS)
        killed = source.kill()
        error, ended = await end_of(part)
        assert isinstance(error, PeerLostError)
        assert error.retryable
        assert ended - killed < ENDS_WITHIN_SECONDS
        target.assert_no_block_out()
        assert target.ranks[0].content.check_wiped(MANY_SHORT_RUNS.others) is None
        successor = await open_rank("prefill", big=MANY_SHORT_RUNS, shareable=shareable, **over)
        await serves_here(successor, target, "i:next")


async def test_b3_c7_a_target_killed_in_mid_transfer_frees_its_source_which_serves_a_new_one(
    open_rank: OpenRank,
) -> None:
    target = await open_rank("decode", big=MANY_SHORT_RUNS, **settings())
    async with source_here(MANY_SHORT_RUNS, **settings()) as source:
        part = await big_fetched(source, target, "i:killed", MANY_SHORT_RUNS)
        killed = target.kill()
        error, ended = await end_of(part)
        assert isinstance(error, PeerError)
        assert error.retryable
        assert ended - killed < ENDS_WITHIN_SECONDS
        source.assert_no_block_out()
        assert target.content.check_wiped(MANY_SHORT_RUNS.others) is None
        await serves_there(source, await open_rank("decode", big=MANY_SHORT_RUNS, **settings()), "i:next")


@pytest.mark.parametrize(
    ("shareable", "big"), [(True, LONG_RUNS), (False, MANY_SHORT_RUNS)], ids=["mapped, long runs", "ring, short runs"]
)
async def test_a1_c7_a_source_stopped_in_mid_transfer_and_resumed_after_the_cut_off_changes_no_byte(
    big: Big, open_rank: OpenRank, *, shareable: bool
) -> None:
    """A stopped source answers nothing on the ring; mapped memory may be read to its end, but is never committed."""
    over = settings(commit_ttl_seconds=1.0)
    source = await open_rank("prefill", big=big, shareable=shareable, **over)
    async with target_here(big, **over) as target:
        part = await fetch_big(source, target, "i:stopped", big)
        stopped = source.stop()
        error, ended = await end_of(part)
        assert isinstance(error, PeerLostError | ExpiredError)
        assert error.retryable
        assert ended - stopped < (ENDS_WITHIN_SECONDS if shareable else LOST_WITHIN_SECONDS)
        await reuse_and_resume(source, target)
        await serves_here(source, target, "i:next")
