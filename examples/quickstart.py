import asyncio

import numpy as np

import kvlink

MODEL = kvlink.Identity(model="demo", num_layers=2, num_kv_heads=4, head_dim=64)
ENGINES = {"prefill": (16, "kv block slot head channel"), "decode": (32, "kv block head slot channel")}


def cache(engine: str, tensors: list[np.ndarray]) -> kvlink.Caches:
    block_size, axes = ENGINES[engine]
    full = kvlink.Group(name="full", heads=(0, 1, 2, 3), channels=64, dtype=kvlink.DType.FLOAT16,
                        block_size=block_size, num_blocks=64, planes=())  # fmt: skip
    by_plane = {kvlink.PlaneKey("full", layer): tensor for layer, tensor in enumerate(tensors)}
    return kvlink.Caches.from_tensors(by_plane, [full], MODEL, kvlink.Place(engine=engine, incarnation="1"), axes=axes)


async def main() -> None:
    nhd = [np.random.rand(2, 64, 16, 4, 64).astype(np.float16) for _ in range(2)]  # what prefill computed
    hnd = [np.zeros((2, 64, 4, 32, 64), np.float16) for _ in range(2)]
    async with (
        kvlink.open_link(kvlink.Config(), cache("prefill", nhd)) as prefill,
        kvlink.open_link(kvlink.Config(), cache("decode", hnd)) as decode,
    ):
        offer = kvlink.Offer(key="1:r", roster=kvlink.Roster.of([prefill.card]), blocks=((7, 3, 12),), tokens=40)
        prefill.publish(offer)  # source: 40 tokens in blocks 7, 3 and 12 may be fetched; the offer travels as JSON
        result = await decode.fetch(offer, into=((5, 9),), deadline_seconds=5)
        print(f"{result.bytes} bytes over {result.transport}, every chunk verified: {result.integrity}")
    assert (hnd[1][0, 9, :, 7] == nhd[1][0, 12, 7]).all()  # layer 1, K, token 39: block 12 slot 7 -> block 9 slot 7


asyncio.run(main())
