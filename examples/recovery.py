"""Losing a decode engine after it has installed: the source says from where the request can go on."""

import asyncio

from kvlink import Caches, Config, DType, Identity, Link, Offer, Place, Roster, open_link, request_key
from kvlink.layout import standard_spec
from kvlink.observe import Event, InstalledLost

MODEL = Identity(model="demo", num_layers=4, num_kv_heads=4, head_dim=64)


async def open_rank(engine: str) -> Link:
    spec = standard_spec("nhd", identity=MODEL, place=Place(engine=engine, incarnation="1"), layers=range(4),
                         heads=range(4), block_size=16, num_blocks=64, dtype=DType.BFLOAT16)  # fmt: skip
    return await open_link(Config(), Caches.standard(spec))


async def main() -> None:
    prefill, decode, spare = await open_rank("prefill"), await open_rank("decode"), await open_rank("spare")

    def on_event(event: Event) -> None:
        if isinstance(event, InstalledLost):
            print(f"{event.target} lost {event.key}; prefill again: {event.prefill_again}")

    prefill.events.subscribe(on_event)
    key = request_key("1", "request-7")
    offer = Offer(key=key, roster=Roster.of([prefill.card]), blocks=((3, 1, 4),), tokens=48)
    published = prefill.publish(offer, replicas=1)  # its blocks are the library's until both targets have them
    await decode.fetch(offer, ((7, 8, 9),), deadline_seconds=10)
    (replica,) = published.replicas
    await spare.fetch(replica, ((1, 2, 3),), deadline_seconds=10)
    await published.wait()

    await decode.close()  # or its process dies
    await asyncio.sleep(1.0)
    point = prefill.recovery_point(key, cached_tokens=16)
    for copy in point.replicas:
        print(f"{copy.key} is {copy.stage} at {copy.target}: decode there")
    print(f"or prefill {point.recompute_tokens} tokens, {point.recompute_bytes} bytes of KV")

    prefill.release(key)  # the request is over, or goes on elsewhere: nobody will ask again
    await prefill.close()
    await spare.close()


asyncio.run(main())
