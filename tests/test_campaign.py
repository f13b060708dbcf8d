"""C7, A1 A3 A6, B1 B3, C1, G3: a slice of ``scripts/campaign``; the whole takes minutes, and its record is kept."""

from __future__ import annotations

from campaign.report import LANES, run


async def test_processes_killed_and_stopped_at_random_moments_leave_every_byte_and_block_in_order() -> None:
    record = await run(seed=4, kills=10, stops=4, lanes=list(LANES), max_seconds=60.0)
    assert record["findings"] == []
    assert record["kills"] >= 10
    assert record["stops"] == 4
    assert record["installs"] >= 14
    assert record["checked_bytes"] > 0
