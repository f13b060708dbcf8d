"""The bridge: an engine with a step loop of its own, which submits, polls and never awaits."""

import time

from kvlink import Bridge, Caches, Config, DType, Identity, Offer, Place, Roster
from kvlink.layout import standard_spec

MODEL = Identity(model="demo", num_layers=4, num_kv_heads=4, head_dim=64)


def caches(engine: str) -> Caches:
    spec = standard_spec("fused", identity=MODEL, place=Place(engine=engine, incarnation="1"), layers=range(4),
                         heads=range(4), block_size=16, num_blocks=64, dtype=DType.FLOAT16)  # fmt: skip
    return Caches.standard(spec)


prefill = Bridge.open(Config(), caches("prefill"))
decode = Bridge.open(Config(), caches("decode"), pump="caller")  # no thread of Python's: poll() runs the loop
offer = Offer(key="1:r", roster=Roster.of([prefill.card]), blocks=((8, 1, 5),), tokens=48)
params = offer.to_params()  # JSON: into kv_transfer_params, through the gateway, and back

prefill.publish(offer)
decode.fetch(Offer.from_params(params), [[2, 7, 9]], deadline_seconds=10)
ended = []
while not ended:  # the engine's own step loop
    ended = decode.poll()
    time.sleep(0.001)
(part,) = ended
print(part.key, part.state.name, part.result.bytes if part.result else 0)
decode.release(part.key)
print("cut at close:", decode.close(1.0).cut, prefill.close(1.0).cut)
