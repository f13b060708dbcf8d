"""Peers that mean harm: every attack ends in a typed, counted refusal; nothing is told; the good are still served."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import struct

import msgspec
import pytest
from geometries import rank_spec
from peers import SECRET, UCX_ADDRESS, introduce, serving

from kvlink import limits
from kvlink.errors import (
    AuthenticationError,
    FrameError,
    KVLinkError,
    LayoutError,
    PeerLostError,
    PeerUnreachableError,
    SchemaError,
    VersionError,
)
from kvlink.link import handshake
from kvlink.link.control import connect
from kvlink.link.handshake import DialerHandshake
from kvlink.wire import Ack, Ask, ErrorInfo, encode, pack_frame
from kvlink.wire.opening import Challenge, Hello, Proof, Purpose, Rejected, encode_opening

# A socket or transport that was not closed is an error here, not a warning.
pytestmark = pytest.mark.filterwarnings("error")

DEEP = b"\x91" * 3000
pack = msgspec.msgpack.encode


def nonce():
    return os.urandom(limits.NONCE_BYTES)


def hello(**changes):
    fields = {"type": "Hello", "versions": [1], "nonce": nonce(), "purpose": "control", "open_mode": False}
    return pack(fields | {"session": None} | changes)


class Attacker:
    """A bare connection that keeps whatever it was told."""

    def __init__(self, served, reader, writer):
        self.served, self.reader, self.writer = served, reader, writer
        self.told = b""

    @classmethod
    async def at(cls, served):
        address = served.listener.address
        return cls(served, *await asyncio.open_connection(address.host, address.port))

    async def send(self, payload):
        await self.send_raw(pack_frame(payload))

    async def send_raw(self, data):
        self.writer.write(data)
        await self.writer.drain()

    async def next(self):
        header = await self.reader.readexactly(4)
        payload = await self.reader.readexactly(struct.unpack("<I", header)[0])
        self.told += payload
        return payload

    async def authenticate(self, secret=SECRET):
        """As somebody who knows the secret: from here on an attack is a peer's."""
        dialer = DialerHandshake(secret=secret, nonce=nonce())
        await self.send(dialer.hello())
        await self.send(dialer.answer(await self.next()))
        return dialer.confirm(await self.next())

    async def hang_up(self):
        """Read to the end, so that all that was ever told is known."""
        with contextlib.suppress(OSError, EOFError):
            if self.writer.can_write_eof():
                self.writer.write_eof()
            while data := await self.reader.read(65_536):
                self.told += data
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()


# --- before authentication ------------------------------------------------------------------------------------------


def raw(data):
    async def attack(attacker):
        await attacker.send_raw(data)

    return attack


def first(payload):
    """The payload of the first frame; composed for each try."""

    async def attack(attacker):
        await attacker.send(payload() if callable(payload) else payload)

    return attack


def second(payload):
    """A good hello, and then this in place of a proof."""

    async def attack(attacker):
        await attacker.send(hello())
        challenge = await attacker.next()
        await attacker.send(payload(challenge) if callable(payload) else payload)

    return attack


async def wrong_secret(attacker):
    dialer = DialerHandshake(secret=b"a guess of some length", nonce=nonce())
    await attacker.send(dialer.hello())
    await attacker.send(dialer.answer(await attacker.next()))


async def replayed(attacker):
    """A hello and proof that were good once, recorded from the wire."""
    recorder = await Attacker.at(attacker.served)
    dialer = DialerHandshake(secret=SECRET, nonce=nonce())
    good_hello = dialer.hello()
    await recorder.send(good_hello)
    good_proof = dialer.answer(await recorder.next())
    recorder.writer.close()
    await attacker.send(good_hello)
    await attacker.next()
    await attacker.send(good_proof)


async def reflected(attacker):
    """A listener's proof over this very exchange, sent back as ours: only the role tells it apart."""
    own = hello()
    await attacker.send(own)
    challenge = await attacker.next()
    transcript = handshake._Transcript(SECRET)
    transcript.add(own)
    transcript.add(challenge)
    await attacker.send(encode_opening(Proof(mac=transcript.mac(handshake._LISTENER))))


async def channel_of_nobody(attacker):
    await attacker.send(hello(purpose="channel", session=os.urandom(limits.SESSION_ID_BYTES)))


async def channel_with_a_wrong_key(attacker):
    dialled, _ = await attacker.served.pair()
    dialer = DialerHandshake(
        secret=b"k" * 32, nonce=nonce(), purpose=Purpose.CHANNEL, session_id=dialled.session.session_id
    )
    await attacker.send(dialer.hello())
    await attacker.send(dialer.answer(await attacker.next()))


async def channel_with_a_used_key(attacker):
    dialled, accepted = await attacker.served.pair()
    (await dialled.channel()).close()
    (await accepted.channel()).close()
    await attacker.send(hello(purpose="channel", session=dialled.session.session_id))


async def silence(attacker):
    await attacker.reader.read()


async def slowloris(attacker):
    with contextlib.suppress(OSError):
        for byte in pack_frame(hello()):
            await attacker.send_raw(bytes([byte]))
            await asyncio.sleep(0.02)


UNPROVEN = {
    "http": (raw(b"GET / HTTP/1.1\r\n\r\n"), "frame"),
    "tls": (raw(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200)), "frame"),
    "empty frame": (raw(bytes(4)), "frame"),
    "4 GiB announced": (raw(b"\xff\xff\xff\xff"), "frame"),
    "a byte over the bound": (raw(struct.pack("<I", limits.MAX_UNAUTHENTICATED_FRAME_BYTES + 1)), "frame"),
    "truncated header": (raw(b"\x10\x00"), "peer_lost"),
    "truncated frame": (raw(pack_frame(hello())[:-5]), "peer_lost"),
    "nothing at all": (raw(b""), "peer_lost"),
    "nested": (first(DEEP), "schema"),
    "nested in a field": (first(b"\x82\xa4type\xa5Hello\xa8versions" + DEEP), "schema"),
    "nested before the tag": (first(b"\x82\xa1x" + DEEP), "schema"),
    "unknown message": (first(pack({"type": "Helo"})), "schema"),
    "unknown field": (first(hello(admin=True)), "schema"),
    "missing field": (first(pack({"type": "Hello", "versions": [1]})), "schema"),
    "wrong type": (first(hello(nonce=7)), "schema"),
    "short nonce": (first(hello(nonce=b"short")), "schema"),
    "unknown purpose": (first(hello(purpose="admin")), "schema"),
    "too many versions": (first(hello(versions=list(range(1, 999)))), "schema"),
    "version zero": (first(hello(versions=[0])), "schema"),
    "wrong version": (first(lambda: hello(versions=[77])), "version"),
    "trailing garbage": (first(lambda: hello() + b"\x00"), "frame"),
    "lying count": (first(b"\x82\xa4type\xa5Hello\xa8versions\xdd\xff\xff\xff\xff"), "schema"),
    "lying length": (first(b"\x82\xa4type\xa5Hello\xa5nonce\xc6\xff\xff\xff\xff"), "schema"),
    "random bytes": (first(lambda: os.urandom(400)), "schema"),
    "introduced too early": (first(encode(introduce())[:4000]), "schema"),
    "asked too early": (first(encode(Ack(attempt=1))), "schema"),
    "a session of its own choice": (first(lambda: hello(session=bytes(16))), "schema"),
    "open mode against a secret": (first(lambda: hello(open_mode=True)), "authentication"),
    "introduced in place of a proof": (second(encode(introduce())[:4000]), "schema"),
    "hello in place of a proof": (second(hello()), "schema"),
    "the challenge sent back": (second(lambda challenge: challenge), "schema"),
    "no proof": (second(lambda _: encode_opening(Proof(mac=bytes(32)))), "authentication"),
    "short proof": (second(pack({"type": "Proof", "mac": b""})), "schema"),
    "wrong secret": (wrong_secret, "authentication"),
    "replayed proof": (replayed, "authentication"),
    "reflected proof": (reflected, "authentication"),
    "channel of nobody": (channel_of_nobody, "authentication"),
    "channel without a session": (first(lambda: hello(purpose="channel")), "schema"),
    "channel with a wrong key": (channel_with_a_wrong_key, "authentication"),
    "channel with a used key": (channel_with_a_used_key, "authentication"),
    "silence": (silence, "timeout"),
    "slowloris": (slowloris, "timeout"),
}


async def refused(served, reason, count):
    async with asyncio.timeout(5):
        while served.listener.refused[reason] < count:
            await asyncio.sleep(0.002)


async def serves_a_good_peer(served):
    dialled, accepted = await served.pair()
    dialled.send(Ack(attempt=1))
    assert await asyncio.wait_for(accepted.receive(), 5) == Ack(attempt=1)
    await served.close_all()


@pytest.mark.parametrize("name", UNPROVEN)
async def test_whoever_has_not_proven_itself_is_refused_and_told_nothing(name):
    """K2; C3: what comes is counted and dropped."""
    attack, reason = UNPROVEN[name]
    seconds = 0.1 if reason == "timeout" else 5.0
    composed = []
    async with serving(introduce=lambda: composed.append(1) or introduce(), handshake_seconds=seconds) as served:
        attacker = await Attacker.at(served)
        await attack(attacker)
        good = len(composed)  # some attacks come beside a good peer
        await attacker.hang_up()
        await refused(served, reason, 1)
        assert served.listener.refused["internal"] == 0
        assert len(composed) == good, "an Introduce was composed for nobody"
        assert UCX_ADDRESS not in attacker.told
        assert b"Introduce" not in attacker.told
        served.listener._handshake_seconds = 5.0
        await serves_a_good_peer(served)


async def test_silent_connections_do_not_keep_a_good_peer_out():
    """Far more than there is room for: the oldest make way, and a good peer passes at once."""
    async with serving(handshake_seconds=60.0) as served:
        attackers = [await Attacker.at(served) for _ in range(3 * limits.MAX_PENDING_HANDSHAKES)]
        await serves_a_good_peer(served)
        assert len(served.listener._unproven) <= limits.MAX_PENDING_HANDSHAKES
        assert served.listener.refused["crowded"] >= 2 * limits.MAX_PENDING_HANDSHAKES
        for attacker in attackers:
            attacker.writer.close()


async def test_memory_stays_flat_over_thousands_of_attacks():
    cheap = [name for name, (_, reason) in UNPROVEN.items() if reason != "timeout" and "channel with" not in name]
    async with serving() as served:

        async def volley(count):
            for i in range(count):
                attacker = await Attacker.at(served)
                await UNPROVEN[cheap[i % len(cheap)]][0](attacker)
                await attacker.hang_up()

        await volley(300)
        before = resident_bytes()
        await volley(2000)
        assert resident_bytes() - before < 4 << 20
        assert served.listener.refused["internal"] == 0
        assert sum(served.listener.refused.values()) >= 2300
        assert not served.listener._unproven
        await serves_a_good_peer(served)


def resident_bytes():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


# --- authenticated, and hostile all the same ------------------------------------------------------------------------


def changed(path, value):
    """A good `Introduce` with one value replaced, past our own types."""

    def compose():
        fields = msgspec.msgpack.decode(encode(introduce()))
        *inner, last = path
        place = fields
        for step in inner:
            place = place[step]
        place[last] = value
        return pack(fields)

    return compose


def added():
    return pack(msgspec.msgpack.decode(encode(introduce())) | {"extra": 1})


GROUP = ("spec", "groups", 0)
PROVEN = {
    "4 GiB announced": (lambda: None, "frame"),
    "not an introduction": (lambda: encode(Ack(attempt=1)), "schema"),
    "unknown field": (added, "schema"),
    "nested spec": (lambda: b"\x82\xa4type\xa9Introduce\xa4spec\x81\xa8identity" + DEEP, "schema"),
    "plane outside its region": (changed((*GROUP, "planes", 0, 3), 1 << 40), "layout"),
    "planes that overlap": (changed((*GROUP, "planes", 1, 3), 0), "layout"),
    "rows that overlap": (changed((*GROUP, "planes", 0, 5), 1), "layout"),
    "negative offset": (changed((*GROUP, "planes", 0, 3), -4096), "layout"),
    "region that is not there": (changed((*GROUP, "planes", 0, 2), 99), "layout"),
    "more blocks than bytes": (changed((*GROUP, "num_blocks"), 1 << 30), "layout"),
    "heads beyond the model's": (changed((*GROUP, "heads", 0), 4000), "layout"),
    "a layer twice": (changed((*GROUP, "planes", 0, 0), 1), "layout"),
    "rank outside its world": (changed(("spec", "place", "tp_rank"), 8), "layout"),
    "stride past the bound": (changed((*GROUP, "planes", 0, 4), 1 << 62), "layout"),
    "key of no region": (changed(("transports", 0, "keys", 0, "region"), 77), "schema"),
    "key shorter than its region": (changed(("transports", 0, "keys", 0, "length"), 1), "schema"),
    "endless lease": (changed(("lease_seconds",), float("inf")), "schema"),
}


@pytest.mark.parametrize("name", PROVEN)
async def test_an_authenticated_peer_cannot_introduce_nonsense(name):
    compose, reason = PROVEN[name]
    async with serving() as served:
        attacker = await Attacker.at(served)
        await attacker.authenticate()
        payload = compose()
        await (attacker.send_raw(b"\xff\xff\xff\xff") if payload is None else attacker.send(payload))
        await refused(served, reason, 1)
        await attacker.hang_up()
        assert served.listener.refused["internal"] == 0
        assert served.incoming.empty(), "the connection was handed over"
        await serves_a_good_peer(served)


async def test_an_authenticated_peer_that_does_not_introduce_itself_is_timed_out():
    async with serving(handshake_seconds=0.1) as served:
        attacker = await Attacker.at(served)
        await attacker.authenticate()
        await refused(served, "timeout", 1)
        await attacker.hang_up()


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"\xff\xff\xff\xff", FrameError),
        (struct.pack("<I", limits.MAX_FRAME_BYTES + 1), FrameError),
        (bytes(4), FrameError),
        (pack_frame(pack({"type": "Ack", "attempt": -1})), SchemaError),
        (pack_frame(pack({"type": "Ask", "key": "k"})), SchemaError),
        (pack_frame(encode(Ack(attempt=1)) + b"x"), FrameError),
        (pack_frame(hello()), SchemaError),
        (pack_frame(b"\x82\xa4type\xa3Ack\xa7attempt" + b"\x91" * 100_000), SchemaError),
    ],
)
async def test_a_connection_ends_at_its_first_malformed_message_and_alone(data, error):
    """What came before it is delivered; the other peer notices nothing."""
    async with serving() as served:
        other, other_end = await served.pair()
        attacker = await Attacker.at(served)
        await attacker.authenticate()
        await attacker.send(encode(introduce("x")))
        victim = await asyncio.wait_for(served.incoming.get(), 5)
        await attacker.send_raw(pack_frame(encode(Ack(attempt=5))) + data + pack_frame(encode(Ack(attempt=6))))
        assert await victim.receive() == Ack(attempt=5)
        with pytest.raises(error) as caught:
            await victim.receive()
        assert len(str(caught.value)) < 400
        await asyncio.wait_for(victim.closed.wait(), 5)
        await attacker.hang_up()
        other.send(Ack(attempt=1))
        assert await other_end.receive() == Ack(attempt=1)


# --- a hostile listener ---------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def pretending(serve):
    """The address of a listener that is none of ours."""
    done = asyncio.Event()

    async def handle(reader, writer):
        with contextlib.suppress(OSError, EOFError):
            await serve(reader, writer)
        writer.close()
        done.set()

    async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
        yield f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        await asyncio.wait_for(done.wait(), 5)


def challenge_of(**changes):
    fields = {"version": 1, "nonce": nonce(), "open_mode": False}
    return encode_opening(Challenge(**(fields | changes)))


HOSTILE_LISTENERS = {
    "garbage": (lambda _: b"SSH-2.0-OpenSSH_9.9\r\n", FrameError),
    "introduced at once": (lambda _: pack_frame(encode(introduce())[:4000]), SchemaError),
    "asks at once": (lambda _: pack_frame(pack({"type": Ask.__name__})), SchemaError),
    "a version that was not offered": (lambda _: pack_frame(challenge_of(version=9)), VersionError),
    "open": (lambda _: pack_frame(challenge_of(open_mode=True)), AuthenticationError),
    "our own nonce": (
        lambda payload: pack_frame(challenge_of(nonce=msgspec.msgpack.decode(payload, type=Hello).nonce)),
        AuthenticationError,
    ),
    "no proof": (
        lambda _: pack_frame(challenge_of()) + pack_frame(encode_opening(Proof(mac=bytes(32)))), AuthenticationError),
    "introduced in place of its proof": (
        lambda _: pack_frame(challenge_of()) + pack_frame(encode(introduce())[:4000]), SchemaError),
    "a long rejection": (
        lambda _: pack_frame(encode_opening(Rejected(error=ErrorInfo(code="version", message="\x1b[2J" * 900)))),
        VersionError,
    ),
    "a rejection that claims more": (
        lambda _: pack_frame(encode_opening(Rejected(error=ErrorInfo(code="integrity", message="your cache is bad")))),
        AuthenticationError,
    ),
    "goes away": (lambda _: b"", PeerLostError),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE_LISTENERS)
async def test_a_listener_that_has_not_proven_itself_is_told_nothing(name):
    reply, error = HOSTILE_LISTENERS[name]
    heard, composed = bytearray(), []

    async def serve(reader, writer):
        header = await reader.readexactly(4)
        payload = await reader.readexactly(struct.unpack("<I", header)[0])
        writer.write(reply(payload))
        writer.write_eof()
        heard.extend(await reader.read())

    async with pretending(serve) as address:
        with pytest.raises(error) as caught:
            await connect(address, secret=SECRET, introduce=lambda: composed.append(1))
    assert isinstance(caught.value, KVLinkError)
    assert len(str(caught.value)) < 500
    assert str(caught.value).isprintable()
    assert not composed
    assert UCX_ADDRESS not in heard


async def test_a_listener_that_drips_is_given_up_in_time():
    async def drip(_, writer):
        for byte in pack_frame(challenge_of()):
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0.02)

    async with pretending(drip) as address:
        with pytest.raises(PeerUnreachableError, match="did not answer"):
            await connect(address, secret=SECRET, introduce=introduce, timeout_seconds=0.1)


async def test_layout_errors_of_a_listener_reach_its_dialler():
    spec = rank_spec("nhd")
    bad = msgspec.structs.replace(spec, region_bytes=tuple(1 for _ in spec.region_bytes))
    async with serving(introduce=lambda: introduce(spec=bad, transports=())) as served:
        with pytest.raises(LayoutError, match="region"):
            await connect(served.address, secret=SECRET, introduce=introduce)
