"""Push: the decode engine reserves room and hands out a ticket; the prefill engine streams what it computes."""

import asyncio

from kvlink import Caches, Config, DType, Facts, Identity, Link, Place, Roster, Ticket, open_link, request_key
from kvlink.layout import heads_of_rank, standard_spec

MODEL = Identity(model="demo", num_layers=4, num_kv_heads=4, head_dim=64, weights_revision="2026-11")
CONFIG = Config(secret=b"the same on every rank of the cluster")
TOKENS = 100


async def open_engine(engine: str, layout: str, tp_size: int) -> list[Link]:
    """One link a TP rank. In a real engine each lives in its rank's own process."""
    links = []
    for tp_rank in range(tp_size):
        spec = standard_spec(
            layout,
            identity=MODEL,
            place=Place(engine=engine, incarnation="a1b2", tp_rank=tp_rank, tp_size=tp_size),
            layers=range(4),
            heads=heads_of_rank(4, tp_size, tp_rank),
            block_size=16,
            num_blocks=64,
            dtype=DType.BFLOAT16,
        )
        links.append(await open_link(CONFIG, Caches.standard(spec)))
    return links


async def main() -> None:
    prefill, decode = await open_engine("prefill", "nhd", 2), await open_engine("decode", "hnd", 4)
    prefill_roster = Roster.of(link.card for link in prefill)
    decode_roster = Roster.of(link.card for link in decode)
    for link in decode:  # so that the sources hear how many ranks will read them
        link.set_siblings(decode_roster)

    key = request_key("a1b2", "request-17")
    ticket = Ticket(key=key, roster=decode_roster, blocks=(), tokens=TOKENS, facts=Facts(tenant="acme"))
    ticket = ticket.sign(CONFIG.secret or b"")

    room = (tuple(range(10, 17)),)
    received = [link.expect(ticket, prefill_roster, room, deadline_seconds=10) for link in decode]
    sent = [link.announce(key, ttl_seconds=30, max_tokens=TOKENS, facts=Facts(tenant="acme")) for link in prefill]
    blocks = (3, 1, 4, 15, 9, 2, 6)
    for chunk in (64, TOKENS):  # prefill computes chunk by chunk; its scheduler gives blocks as it goes
        for layer in range(1, 5):
            await asyncio.sleep(0.005)  # computing layer after layer: what is ready crosses meanwhile
            for part in sent:
                part.ready(tokens=chunk, layers=layer, blocks=(blocks[: -(-chunk // 16)],))
    for part in sent:
        part.seal()
    results = await asyncio.gather(*(part.wait() for part in (*received, *sent)))
    print(f"{len(results)} parts done; {sum(result.bytes for result in results[:4])} bytes installed")

    for link in decode:  # decode has finished with the request: its blocks may be reused
        link.release(key)
    for link in (*prefill, *decode):
        await link.close()


asyncio.run(main())
