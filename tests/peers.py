"""Ranks, cards and introductions to test the wire and its connections with."""

from __future__ import annotations

import asyncio
import contextlib

from geometries import identity_of, rank_spec

from kvlink.errors import ClosedError
from kvlink.layout import Place, fingerprint, share_of
from kvlink.link.control import connect
from kvlink.link.listener import Listener
from kvlink.wire import Introduce, RankCard, Roster, TransportCard, WireKey

SECRET = b"sixteen bytes or more"
UCX_ADDRESS = b"the UCX worker address that must not be told"


def introduce(engine="p", **changes):
    spec = rank_spec("nhd", engine=engine)
    keys = tuple(WireKey(region=i, address=4096 * i, length=n, key=b"rkey") for i, n in enumerate(spec.region_bytes))
    fields = {
        "spec": spec,
        "transports": (TransportCard(name="ucx", version="1.22", origin="wheel", address=UCX_ADDRESS, keys=keys),),
        "digest_scheme": "xxh3-64-leaf16k",
        "lease_seconds": 2.5,
        "heartbeat_seconds": 0.5,
        "kvlink": "0.1.0",
    }
    return Introduce(**(fields | changes))


def card(pp=(0, 1), tp=(0, 1), **changes):
    identity = changes.pop("identity", identity_of())
    spec = rank_spec("nhd", identity=identity, pp=pp, tp=tp)
    place = {"engine": "p", "incarnation": "1"} | {
        name: changes.pop(name) for name in ("engine", "incarnation") if name in changes
    }
    fields = {
        "place": Place(**place, pp_rank=pp[0], pp_size=pp[1], tp_rank=tp[0], tp_size=tp[1]),
        "address": f"tcp://[fd00::1]:{5000 + 10 * pp[0] + tp[0]}",
        "share": share_of(spec),
        "identity": identity,
        "identity_fingerprint": fingerprint(identity),
        "kvlink": "0.1.0",
    }
    return RankCard(**(fields | changes))


def roster(pp_size=1, tp_size=2):
    cards = [card((pp, pp_size), (tp, tp_size)) for pp in range(pp_size) for tp in range(tp_size)]
    return Roster.of(c.to_bytes() for c in cards)


class Served:
    """A listener that serves, and the connections that came in."""

    def __init__(self, listener):
        self.listener = listener
        self.address = str(listener.address)
        self.incoming = asyncio.Queue()
        self.connections = []

    def take(self, connection):
        self.connections.append(connection)
        self.incoming.put_nowait(connection)

    async def pair(self, secret=SECRET):
        """A dialled connection and its other end."""
        dialled = await connect(self.address, secret=secret, introduce=lambda: introduce("d"), timeout_seconds=5)
        self.connections.append(dialled)
        return dialled, await asyncio.wait_for(self.incoming.get(), 5)

    async def close_all(self):
        """Until no connection is left, whichever way it ended."""
        while self.connections:
            connection = self.connections.pop()
            connection.fail(ClosedError("the test is over"))
            await asyncio.wait_for(connection.closed.wait(), 5)


@contextlib.asynccontextmanager
async def serving(address="tcp://127.0.0.1:0", secret=SECRET, introduce=introduce, handshake_seconds=5.0):
    listener = await Listener.bind(address, secret=secret, introduce=introduce, handshake_seconds=handshake_seconds)
    served = Served(listener)
    task = asyncio.create_task(listener.serve(served.take))
    try:
        yield served
    finally:
        await served.close_all()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        listener.close()
