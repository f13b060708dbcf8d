"""Control connections between peers that mean well: handshake, messages, channels, ends."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import os
import socket
import stat
import weakref

import msgspec
import pytest
from geometries import rank_spec
from peers import SECRET, Served, introduce, serving

from kvlink import limits
from kvlink.errors import (
    AuthenticationError,
    ClosedError,
    FrameError,
    KVLinkError,
    LayoutError,
    PeerLostError,
    PeerUnreachableError,
    SchemaError,
    UnavailableError,
    VersionError,
)
from kvlink.link import handshake, sockets
from kvlink.link.control import connect
from kvlink.link.handshake import DialerHandshake, ListenerHandshake
from kvlink.link.listener import Listener
from kvlink.link.sockets import dial
from kvlink.wire import Ack, Address, Commit, Expect, Goodbye, Installed, TransportCard, WireKey
from kvlink.wire.opening import Purpose

# A socket or transport that was not closed is an error here, not a warning.
pytestmark = pytest.mark.filterwarnings("error")

NONCES = (b"a" * limits.NONCE_BYTES, b"b" * limits.NONCE_BYTES)


def addresses(tmp_path):
    return ["tcp://127.0.0.1:0", "tcp://[::1]:0", "tcp://localhost:0", f"unix://{tmp_path}/control.sock"]


async def soon(condition):
    """Wait until ``condition()``; the test's own bound ends it."""
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)


# --- the handshake by itself ----------------------------------------------------------------------------------------


def listener_of(secret=SECRET, nonce=NONCES[1], keys=None, **more):
    return ListenerHandshake(secret=secret, nonce=nonce, take_channel_key=lambda s: (keys or {}).pop(s, None), **more)


def dialer_of(secret=SECRET, nonce=NONCES[0], **more):
    return DialerHandshake(secret=secret, nonce=nonce, **more)


def run(dialer, listener):
    proof, theirs = listener.verify(dialer.answer(listener.challenge(dialer.hello())))
    return dialer.confirm(proof), theirs


@pytest.mark.parametrize("secret", [SECRET, None])
def test_both_sides_of_a_handshake_derive_the_same_session(secret):
    ours, theirs = run(dialer_of(secret), listener_of(secret))
    assert ours == theirs
    again, _ = run(dialer_of(secret, nonce=b"c" * limits.NONCE_BYTES), listener_of(secret))
    assert again.channel_key != ours.channel_key
    assert again.session_id != ours.session_id


def test_the_highest_common_version_is_taken_and_none_is_named_on_both_sides():
    """J3."""
    ours, _ = run(dialer_of(versions=(1, 2, 9)), listener_of(versions=(2, 1, 5)))
    assert ours.version == 2
    with pytest.raises(VersionError, match="listener speaks 2, 3, dialer 1"):
        listener_of(versions=(2, 3)).challenge(dialer_of(versions=(1,)).hello())


def test_a_downgrade_on_the_way_is_found():
    dialer, listener = dialer_of(versions=(1, 2)), listener_of(versions=(1, 2))
    weakened = dialer_of(versions=(1,)).hello()
    dialer.hello()
    with pytest.raises(AuthenticationError):
        listener.verify(dialer.answer(listener.challenge(weakened)))


def test_a_proof_of_one_role_is_none_of_the_other():
    """Reflection: a dialer without the secret lets another listener of the cluster make the proof for it."""
    first = listener_of()
    thief = dialer_of(secret=b"not the secret at all")
    thief.answer(first.challenge(thief.hello()))
    victim = dialer_of(nonce=NONCES[1])
    stolen = victim.answer(listener_of(nonce=NONCES[0]).challenge(victim.hello()))
    with pytest.raises(AuthenticationError):
        first.verify(stolen)


def test_a_recorded_handshake_does_not_replay():
    dialer, listener = dialer_of(), listener_of()
    hello = dialer.hello()
    proof = dialer.answer(listener.challenge(hello))
    listener.verify(proof)
    fresh = listener_of(nonce=b"d" * limits.NONCE_BYTES)
    fresh.challenge(hello)
    with pytest.raises(AuthenticationError):
        fresh.verify(proof)


def test_a_dialer_cannot_choose_the_name_of_its_session():
    with pytest.raises(SchemaError, match="session"):
        listener_of().challenge(dialer_of(session_id=b"s" * 16).hello())


def test_a_channel_key_is_good_once():
    control, _ = run(dialer_of(), listener_of())
    keys = {control.session_id: control.channel_key}
    channel = {"purpose": Purpose.CHANNEL, "session_id": control.session_id, "secret": control.channel_key}
    ours, theirs = run(dialer_of(**channel), listener_of(keys=keys))
    assert ours.purpose is Purpose.CHANNEL
    assert ours.session_id == theirs.session_id == control.session_id
    with pytest.raises(AuthenticationError, match="used"):
        listener_of(keys=keys).challenge(dialer_of(**channel).hello())


# --- connections ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", range(4))
async def test_peers_meet_introduce_themselves_and_talk_in_order(which, tmp_path):
    """J1, J2: bound once, the real port reported, IPv6 and Unix sockets alike."""
    async with serving(addresses(tmp_path)[which]) as served:
        assert Address.parse(served.address) == served.listener.address
        assert served.listener.address.path or served.listener.address.port > 0
        dialled, accepted = await served.pair()
        assert dialled.peer == "p/0/0@1"
        assert accepted.peer == "d/0/0@1"
        assert dialled.peer_introduce == introduce()
        for attempt in range(1, 200):
            dialled.send(Ack(attempt=attempt))
            accepted.send(Installed(attempt=attempt))
        assert [(await accepted.receive()).attempt for _ in range(199)] == list(range(1, 200))
        assert [(await dialled.receive()).attempt for _ in range(199)] == list(range(1, 200))
        dialled.close()
        with pytest.raises(PeerLostError, match="closed by the peer"):
            await accepted.receive()
        await asyncio.wait_for(dialled.closed.wait(), 5)
        await asyncio.wait_for(accepted.closed.wait(), 5)


async def test_large_frames_and_a_queued_close_arrive_whole():
    async with serving() as served:
        dialled, accepted = await served.pair()
        ticket = os.urandom(limits.MAX_CLAIM_BYTES)
        for _ in range(5):
            dialled.send(Expect(ticket=ticket))
        dialled.close()
        got = [await asyncio.wait_for(accepted.receive(), 5) for _ in range(5)]
        assert all(message.ticket == ticket for message in got)
        with pytest.raises(ClosedError):
            dialled.send(Goodbye(why="late"))


async def test_a_full_inbox_stops_the_reading_and_loses_nothing():
    async with serving() as served:
        dialled, accepted = await served.pair()
        total = limits.MAX_QUEUED_MESSAGES * 20
        for attempt in range(1, total + 1):
            dialled.send(Ack(attempt=attempt))
        await soon(lambda: len(accepted._inbox) >= limits.MAX_QUEUED_MESSAGES)
        await asyncio.sleep(0.02)
        assert len(accepted._inbox) == limits.MAX_QUEUED_MESSAGES
        assert [(await accepted.receive()).attempt for _ in range(total)] == list(range(1, total + 1))


async def test_an_inbox_is_bounded_in_bytes_too():
    async with serving() as served:
        dialled, accepted = await served.pair()
        tickets = [bytes([i]) * limits.MAX_CLAIM_BYTES for i in range(28)]
        for ticket in tickets:
            dialled.send(Expect(ticket=ticket))
        await soon(lambda: accepted._inbox_bytes >= limits.MAX_QUEUED_BYTES)
        await asyncio.sleep(0.02)
        assert accepted._inbox_bytes < limits.MAX_QUEUED_BYTES + 2 * limits.MAX_CLAIM_BYTES
        assert [(await accepted.receive()).ticket for _ in tickets] == tickets
        assert accepted._inbox_bytes == 0


async def test_a_peer_that_does_not_read_is_lost_not_queued_for_without_bound():
    async with serving() as served:
        dialled, accepted = await served.pair()
        accepted._frames._pause()
        blob = Expect(ticket=bytes(limits.MAX_CLAIM_BYTES))
        with contextlib.suppress(PeerLostError):
            for _ in range(2 * limits.MAX_SEND_QUEUE_BYTES // limits.MAX_CLAIM_BYTES):
                dialled.send(blob)
        with pytest.raises(PeerLostError, match="does not read"):
            dialled.send(blob)
        await asyncio.wait_for(dialled.closed.wait(), 5)


async def test_a_cancelled_receive_loses_no_message():
    async with serving() as served:
        dialled, accepted = await served.pair()
        for attempt in range(1, 20):
            waiting = asyncio.create_task(accepted.receive())
            await asyncio.sleep(0)
            waiting.cancel()
            dialled.send(Ack(attempt=attempt))
            with contextlib.suppress(asyncio.CancelledError):
                assert (await waiting).attempt == attempt
                continue
            assert (await accepted.receive()).attempt == attempt


async def test_who_listens_hears_what_came_before_then_each_message_and_the_end_once():
    async with serving() as served:
        dialled, accepted = await served.pair()
        heard: list[int] = []
        ends: list[KVLinkError] = []
        dialled.send(Commit(attempt=1, ttl_seconds=1.0, root=None))
        await soon(lambda: len(accepted._inbox) == 1)
        accepted.listen(lambda message: heard.append(message.attempt), ends.append)
        assert heard == [1]
        for attempt in range(2, 200):
            dialled.send(Commit(attempt=attempt, ttl_seconds=1.0, root=None))
        dialled.close()
        await soon(lambda: bool(ends))
        assert heard == list(range(1, 200))
        await asyncio.sleep(0.01)
        assert [type(error) for error in ends] == [PeerLostError]


async def test_a_listener_that_fails_ends_its_connection_and_no_other(caplog):
    async with serving() as served:
        dialled, accepted = await served.pair()
        ends: list[KVLinkError] = []
        accepted.listen(lambda _message: {}["no such key"], ends.append)
        dialled.send(Commit(attempt=1, ttl_seconds=1.0, root=None))
        with pytest.raises(PeerLostError):
            await asyncio.wait_for(dialled.receive(), 5)
        assert [type(error) for error in ends] == [ClosedError]
        assert "failed inside" in caplog.text


async def test_what_nobody_waits_for_leaves_behind_what_somebody_does_or_alone_a_little_later():
    async with serving() as served:
        dialled, accepted = await served.pair()
        dialled.send(Ack(attempt=1))
        dialled.send(Commit(attempt=2, ttl_seconds=1.0, root=None))
        assert [(await asyncio.wait_for(accepted.receive(), 5)).attempt for _ in range(2)] == [2, 1]
        dialled.send(Installed(attempt=3))
        assert dialled._frames.unsent_bytes > 0
        assert (await asyncio.wait_for(accepted.receive(), 5)).attempt == 3
        dialled.send(Ack(attempt=4))
        dialled.close()
        assert (await asyncio.wait_for(accepted.receive(), 5)).attempt == 4, "a close sends what is left"


async def test_a_message_that_cannot_be_encoded_leaves_the_connection_as_it_was():
    async with serving() as served:
        dialled, accepted = await served.pair()
        with pytest.raises(SchemaError):
            dialled.send(Goodbye(why="\ud800"))
        with pytest.raises(FrameError):
            dialled.send(Expect(ticket=bytes(limits.MAX_FRAME_BYTES)))
        dialled.send(Ack(attempt=1))
        assert await accepted.receive() == Ack(attempt=1)


@pytest.mark.parametrize(("dialer", "listener"), [(SECRET, None), (None, SECRET), (b"x" * 16, SECRET)])
async def test_secrets_and_modes_must_be_the_same_on_both_sides(dialer, listener):
    """K2: an open side and one with a secret refuse each other, as do two secrets."""
    told = []
    async with serving(secret=listener) as served:
        with pytest.raises(AuthenticationError, match="secret"):
            await connect(served.address, secret=dialer, introduce=lambda: told.append(1))
        await soon(lambda: served.listener.refused["authentication"] == 1)
    assert not told, "something was told before the other side had proven itself"


async def test_open_mode_works_between_two_open_sides_and_says_so(caplog):
    caplog.set_level(logging.INFO, "kvlink.link")
    async with serving(secret=None) as served:
        dialled, accepted = await served.pair(secret=None)
        dialled.send(Ack(attempt=1))
        assert await accepted.receive() == Ack(attempt=1)
    assert "open mode" in caplog.text


async def test_a_version_that_the_listener_does_not_speak_is_a_version_error_at_the_dialer(monkeypatch):
    """J3."""
    monkeypatch.setattr(handshake.DialerHandshake.__init__, "__kwdefaults__",
                        handshake.DialerHandshake.__init__.__kwdefaults__ | {"versions": (7,)})  # fmt: skip
    async with serving() as served:
        with pytest.raises(VersionError, match="listener speaks 1, dialer 7"):
            await connect(served.address, secret=SECRET, introduce=introduce)


# --- introductions --------------------------------------------------------------------------------------------------


def overlapping():
    spec = rank_spec("nhd")
    group = spec.groups[0]
    planes = (group.planes[0], *(type(p)(p.layer, p.kind, *list_of(group.planes[0])) for p in group.planes[1:]))
    return replace_planes(spec, planes)


def outside():
    spec = rank_spec("nhd")
    first, *rest = spec.groups[0].planes
    return replace_planes(spec, (msgspec.structs.replace(first, offset_bytes=spec.region_bytes[0]), *rest))


def list_of(plane):
    return plane.region, plane.offset_bytes, plane.block_stride, plane.slot_stride, plane.head_stride


def replace_planes(spec, planes):
    return msgspec.structs.replace(spec, groups=(msgspec.structs.replace(spec.groups[0], planes=planes),))


def with_keys(*keys):
    return introduce(transports=(TransportCard(name="ucx", version="1", origin="", address=b"", keys=keys),))


BAD_INTRODUCTIONS = {
    "planes that overlap": (lambda: introduce(spec=overlapping()), LayoutError, "layout"),
    "a plane outside its region": (lambda: introduce(spec=outside()), LayoutError, "layout"),
    "a key of no region": (lambda: with_keys(WireKey(region=99, address=0, length=1, key=b"")), SchemaError, "schema"),
    "a key shorter than its region": (
        lambda: with_keys(WireKey(region=0, address=0, length=1, key=b"")), SchemaError, "schema"),
    "two keys of one region": (
        lambda: with_keys(*(WireKey(region=0, address=0, length=1 << 20, key=b""),) * 2), SchemaError, "schema"),
    "not an introduction": (lambda: Ack(attempt=1), SchemaError, "schema"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_INTRODUCTIONS)
async def test_an_impossible_introduction_ends_the_connection_on_whichever_side_gets_it(name):
    compose, error, reason = BAD_INTRODUCTIONS[name]
    async with serving() as served:
        with contextlib.suppress(PeerLostError):
            connection = await connect(served.address, secret=SECRET, introduce=compose)
            await connection.closed.wait()
        await soon(lambda: served.listener.refused[reason] == 1)
        assert served.incoming.empty()
    async with serving(introduce=compose) as served:
        with pytest.raises(error):
            await connect(served.address, secret=SECRET, introduce=introduce)


# --- channels -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", range(4))
async def test_both_ends_get_a_raw_channel_at_its_first_byte(which, tmp_path):
    """What the accepting side's engine sends at once is still in the dialler's socket."""
    loop = asyncio.get_running_loop()
    async with serving(addresses(tmp_path)[which]) as served:
        dialled, accepted = await served.pair()
        far = asyncio.create_task(accepted.channel())
        near = await dialled.channel()
        far = await far
        for one, other in ((near, far), (far, near)):
            assert not one.getblocking()
            await loop.sock_sendall(one, b"\x00first bytes")
            assert await loop.sock_recv(other, 100) == b"\x00first bytes"
        near.close()
        far.close()
        dialled.send(Ack(attempt=1))
        assert await accepted.receive() == Ack(attempt=1), "the control connection lives on beside its channel"


async def test_a_channel_that_came_before_it_was_waited_for_is_kept_and_given_once():
    async with serving() as served:
        dialled, accepted = await served.pair()
        near = await dialled.channel()
        await soon(lambda: accepted._channels)
        far = await accepted.channel()
        far.close()
        near.close()
        with pytest.raises(ClosedError, match="taken"):
            await accepted.channel()
        with pytest.raises(AuthenticationError, match="used"):
            await dialled.channel()


async def test_lanes_are_sockets_of_their_own_in_any_order():
    """Each end finds the other's nth socket under its own n, whatever came first; each can be had once."""
    loop = asyncio.get_running_loop()
    async with serving() as served:
        dialled, accepted = await served.pair()
        near = {index: await dialled.channel(index) for index in (2, 0, limits.MAX_LANES)}
        far = {index: await accepted.channel(index) for index in (0, limits.MAX_LANES, 2)}
        for index, sock in near.items():
            await loop.sock_sendall(sock, bytes([index]))
        assert {index: await loop.sock_recv(sock, 9) for index, sock in far.items()} == {i: bytes([i]) for i in near}
        with pytest.raises(AuthenticationError, match="used"):
            await dialled.channel(2)
        with pytest.raises(AuthenticationError, match="never given"):
            await dialled.channel(limits.MAX_LANES + 1)
        for sock in (*near.values(), *far.values()):
            sock.close()


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:0", "tcp://[::1]:0"])
async def test_sockets_within_a_host_are_not_paced(address):
    """Where the host's congestion control paces (BBR), both ends of a connection within it have another one."""
    with await sockets.listen(Address.parse(address)) as listener:
        near = await sockets.dial(sockets.local_address(listener))
        far, _ = await asyncio.get_running_loop().sock_accept(listener)
        sockets.tune_accepted(far)
        with near, far:
            for sock in (near, far):
                assert not sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).startswith(b"bbr")


async def test_a_connection_that_ended_is_not_kept_for_the_channels_that_never_came():
    async with serving() as served:
        _, accepted = await served.pair()
        held = weakref.ref(accepted)
        await served.close_all()
        del accepted
        gc.collect()
        assert held() is None


async def test_a_channel_key_grows_old(monkeypatch):
    monkeypatch.setattr(limits, "CHANNEL_KEY_SECONDS", -1.0)
    async with serving() as served:
        dialled, _ = await served.pair()
        with pytest.raises(AuthenticationError, match="too old"):
            await dialled.channel()


async def test_the_wait_for_a_channel_is_bounded_and_ends_with_the_connection():
    async with serving() as served:
        dialled, accepted = await served.pair()
        with pytest.raises(PeerUnreachableError, match="no channel within"):
            await accepted.channel(timeout_seconds=0.02)
        waiting = asyncio.create_task(accepted.channel())
        await asyncio.sleep(0)
        dialled.close()
        with pytest.raises(PeerLostError):
            await waiting
        with pytest.raises(ClosedError):
            await dialled.channel()


async def test_a_channel_that_nobody_took_is_closed_with_its_connection():
    async with serving() as served:
        dialled, accepted = await served.pair()
        near = await dialled.channel()
        await soon(lambda: accepted._channels)
        accepted.close()
        assert await asyncio.wait_for(asyncio.get_running_loop().sock_recv(near, 1), 5) == b""
        near.close()


# --- binding, dialling, ends ----------------------------------------------------------------------------------------


async def bind(address):
    return await Listener.bind(address, secret=SECRET, introduce=introduce)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:{port}", "unix://{path}"])
async def test_an_address_in_use_is_a_typed_error_with_its_remedy(address, tmp_path):
    """J1."""
    first = await bind("tcp://127.0.0.1:0" if address.startswith("tcp") else f"unix://{tmp_path}/s")
    taken = address.format(port=first.address.port, path=first.address.path)
    with pytest.raises(UnavailableError, match=r"(?i)in use; use another port"):
        await bind(taken)
    first.close()
    (await bind(taken)).close()


@pytest.mark.parametrize("address", ["tcp://192.0.2.1:0", "tcp://no-such-host.invalid:0", "unix:///no/such/dir/s"])
async def test_an_address_that_is_not_ours_is_a_typed_error(address):
    with pytest.raises(UnavailableError, match="cannot listen on"):
        await bind(address)


async def test_a_unix_socket_is_private_replaces_a_stale_one_and_goes_with_its_listener(tmp_path):
    path = tmp_path / "s"
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(path))
    stale.close()
    listener = await bind(f"unix://{path}")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    listener.close()
    listener.close()
    assert not path.exists()
    path.write_text("a file that is not ours")
    with pytest.raises(UnavailableError):
        await bind(f"unix://{path}")
    assert path.read_text() == "a file that is not ours"


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:{port}", "unix://{path}/none", "tcp://no-such-host.invalid:1"])
async def test_nobody_there_is_unreachable_and_retryable(address, tmp_path):
    listener = await bind("tcp://127.0.0.1:0")
    listener.close()
    with pytest.raises(PeerUnreachableError, match="cannot connect") as caught:
        await connect(address.format(port=listener.address.port, path=tmp_path), secret=SECRET, introduce=introduce)
    assert caught.value.retryable


async def test_a_listener_that_does_not_answer_is_unreachable_in_time():
    """C2: bounded and retryable."""
    listener = await bind("tcp://127.0.0.1:0")
    with pytest.raises(PeerUnreachableError, match="did not answer"):
        await connect(str(listener.address), secret=SECRET, introduce=introduce, timeout_seconds=0.05)
    listener.close()


@pytest.mark.parametrize("frames", [0, 1])
async def test_a_peer_that_dies_in_mid_handshake_is_lost_and_retryable(frames):
    """C2: no half-open peer is left."""

    async def die(reader, writer):
        await reader.readexactly(4)
        if frames:
            writer.write(b"\x10\x00\x00\x00\x82")
        writer.close()

    server = await asyncio.start_server(die, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(PeerLostError) as caught:
        await connect(f"tcp://127.0.0.1:{port}", secret=SECRET, introduce=introduce)
    assert caught.value.retryable
    server.close()


async def test_a_reset_is_a_lost_peer():
    async with serving() as served:
        dialled, accepted = await served.pair()
        dialled._frames.abort()
        with pytest.raises(PeerLostError):
            await accepted.receive()
        with pytest.raises(PeerLostError):
            accepted.send(Ack(attempt=1))


async def test_cancelling_anywhere_in_connecting_leaves_no_socket_and_no_task():
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    async with serving() as served:
        for steps in range(40):
            task = asyncio.create_task(connect(served.address, secret=SECRET, introduce=introduce))
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                (await task).close()
        await soon(lambda: not served.listener._unproven)
        await served.close_all()
        inside = len(os.listdir("/proc/self/fd"))
        assert inside <= before + 1, "more than the listener is open"
    assert len(asyncio.all_tasks()) == 1


async def test_cancelling_a_connect_that_hangs_closes_its_socket():
    with socket.socket() as full, contextlib.ExitStack() as fillers:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(3):  # the kernel drops what does not fit, so that a connect hangs
            filler = fillers.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
        task = asyncio.create_task(dial(Address(host="127.0.0.1", port=full.getsockname()[1])))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gc.collect()


async def test_a_handshake_cancelled_before_it_began_closes_its_socket():
    async with serving() as served:
        loop = asyncio.get_running_loop()
        near = socket.socket()
        near.setblocking(False)
        await loop.sock_connect(near, (served.listener.address.host, served.listener.address.port))
        async with asyncio.TaskGroup() as group:
            served.listener._accept(served.listener._socket, group, served.take)
            next(iter(served.listener._unproven)).cancel()
        assert await asyncio.wait_for(loop.sock_recv(near, 1), 5) == b""
        near.close()
        gc.collect()


async def test_ending_the_service_ends_its_handshakes_and_keeps_its_connections():
    listener = await bind("tcp://127.0.0.1:0")
    served = Served(listener)
    task = asyncio.create_task(listener.serve(served.take))
    dialled, accepted = await served.pair()
    slow = socket.create_connection((listener.address.host, listener.address.port))
    slow.setblocking(False)
    await soon(lambda: listener._unproven)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.wait_for(asyncio.get_running_loop().sock_recv(slow, 1), 5) == b""
    slow.close()
    dialled.send(Ack(attempt=3))
    assert await accepted.receive() == Ack(attempt=3)
    await served.close_all()
    listener.close()


class Exhausted:
    """A listening socket in a process that is out of descriptors, for the first few times."""

    def __init__(self, sock, times):
        self.sock, self.times = sock, times

    def accept(self):
        if self.times:
            self.times -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return self.sock.accept()

    def __getattr__(self, name):
        return getattr(self.sock, name)


async def test_a_listener_out_of_descriptors_does_not_spin_and_recovers(monkeypatch):
    monkeypatch.setattr(limits, "ACCEPT_PAUSE_SECONDS", 0.02)
    async with serving() as served:
        exhausted = served.listener._socket = Exhausted(served.listener._socket, 3)
        await served.pair()
        assert exhausted.times == 0


async def test_a_control_connection_is_not_let_in_where_lanes_are(tmp_path):
    """K2: a transport's own socket may be reached by more users than the address listened on, in open mode too."""
    path = str(tmp_path / "lanes")
    with socket.socket(socket.AF_UNIX) as lanes:
        lanes.setblocking(False)
        lanes.bind(path)
        lanes.listen()
        listener = await Listener.bind("tcp://127.0.0.1:0", secret=None, introduce=introduce)
        listener.accept_lanes(lanes)
        taken = []
        serving_task = asyncio.create_task(listener.serve(taken.append))
        try:
            with pytest.raises((AuthenticationError, PeerLostError)):
                await connect(f"unix://{path}", secret=None, introduce=lambda: introduce("d"), timeout_seconds=2)
            assert (listener.refused["authentication"], taken) == (1, [])
        finally:
            serving_task.cancel()
            await asyncio.gather(serving_task, return_exceptions=True)
            listener.close()
