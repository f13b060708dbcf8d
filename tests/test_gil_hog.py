"""B9: a thread of pure Python hogs the interpreter on both sides. What it costs is measured by benchmarks/gil-hog."""

from __future__ import annotations

import asyncio

import pytest
from rank_process import RankProcess

from kvlink import Identity
from kvlink.cli.bench.content import Prompt

SHAPE = {
    "identity": Identity(model="tiny", num_layers=2, num_kv_heads=8, head_dim=32),
    "block_size": 64,
    "num_blocks": 70,
}
QUICK = {"lease_seconds": 0.9, "peer_lost_seconds": 0.9, "heartbeat_seconds": 0.2}
PROMPT = Prompt(seed=1, tokens=64 * 64)
BLOCKS = tuple(range(64))


@pytest.mark.parametrize("transport", ["ucx", "stream"])
async def test_b9_a_hogged_interpreter_is_no_loss_and_no_lapse(transport: str) -> None:
    source, target = RankProcess(), RankProcess()
    try:
        for rank, engine in ((source, "prefill"), (target, "decode")):
            await rank.open(engine, "i", **SHAPE, **QUICK, transports=(transport,))
            await rank.call("hog", on=True)
        source.content.fill(PROMPT, BLOCKS)
        for number in range(4):
            key = f"i:{number}"
            offer = source.offer(key, BLOCKS, PROMPT.tokens)
            await source.publish(offer)
            await target.start_fetch(offer, BLOCKS)
            assert (await target.end_of(key)).state == "DONE"
            await target.call("release", key=key)
            await asyncio.sleep(0.5)
        assert target.content.check(PROMPT, BLOCKS) is None
        for rank in (source, target):
            assert await rank.lost_at() == []
            assert await rank.call("lapsed") == 0
    finally:
        source.close()
        target.close()
