"""Several ranks, one switch: the request is visible on all ranks of the decode engine, or on none of them."""

import asyncio

from kvlink import Caches, Config, DType, Identity, Link, Offer, Place, Roster, open_link, request_key
from kvlink.errors import CancelledError
from kvlink.layout import heads_of_rank, standard_spec

MODEL = Identity(model="demo", num_layers=4, num_kv_heads=4, head_dim=64)


async def open_engine(name: str, tp_size: int) -> list[Link]:
    links = []
    for tp_rank in range(tp_size):
        place = Place(engine=name, incarnation="1", tp_rank=tp_rank, tp_size=tp_size)
        heads = heads_of_rank(MODEL.num_kv_heads, tp_size, tp_rank)
        spec = standard_spec("nhd", identity=MODEL, place=place, layers=range(4), heads=heads, block_size=16,
                             num_blocks=64, dtype=DType.BFLOAT16)  # fmt: skip
        links.append(await open_link(Config(), Caches.standard(spec)))
    return links


async def main() -> None:
    prefill, decode = await open_engine("prefill", 1), await open_engine("decode", 2)
    source, target = (Roster.of(link.card for link in links) for links in (prefill, decode))
    for link in decode:  # the first of them coordinates
        link.set_siblings(target)

    offer = Offer(key=request_key("a1b2", "request-1"), roster=source, blocks=((3, 1, 4, 9),), tokens=60)
    prefill[0].publish(offer)
    room = ((10, 11, 12, 13),)
    parts = [link.start_fetch(offer, room, deadline_seconds=10, together=True) for link in decode]
    results = await asyncio.gather(*(part.wait() for part in parts))
    print("visible on", len(results), "ranks;", sum(result.bytes for result in results), "bytes")

    other = Offer(key=request_key("a1b2", "request-2"), roster=source, blocks=((20, 21, 22, 23),), tokens=60)
    held = prefill[0].announce(other.key, ttl_seconds=30)  # not sealed: the parts wait
    parts = [link.start_fetch(other, ((20, 21, 22, 23),), deadline_seconds=10, together=True) for link in decode]
    await asyncio.sleep(0.2)
    decode[1].cancel(parts[1], "the user has left")  # on one rank; it ends on all
    for part in parts:
        try:
            await part.wait()
        except CancelledError as error:
            print(part.state.name, "because", str(error).rsplit(": ", 1)[-1])
    prefill[0].cancel(held, "nobody reads it")
    for link in (*decode, *prefill):
        await link.close()


asyncio.run(main())
