"""What UCX is told and made to do: addresses, keys, protocols, forks, and the bare loop beside it."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import msgspec
import numpy as np
import pytest
from peer_process import PeerProcess
from ucx_pair import QUICK, Target, join

from kvlink._native import _kvlink
from kvlink.errors import ClosedError, PeerIncompatibleError, SchemaError, TransportError
from kvlink.testing.harness import REGION, expected, moved, scattered_plan
from kvlink.transports.base import CompletionKind, Exposure, Outcome, Read, RegionKey
from kvlink.transports.ucx import UcxAddress, UcxProbe, UcxTransport


@pytest.fixture
def target() -> Iterator[Target]:
    target = Target(2 << 20)
    yield target
    target.transport.close()


def test_native_words_are_the_contract_s() -> None:
    assert {kind.name: kind.value for kind in CompletionKind} == _kvlink.completion_kinds()
    assert {outcome.name: outcome.value for outcome in Outcome} == _kvlink.outcomes()


# --- addresses and keys ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (lambda whole: whole[:-1], SchemaError),
        (lambda whole: whole[:-1] + bytes([whole[-1] ^ 1]), SchemaError),
        (lambda _: b"", SchemaError),
        (lambda _: b"\xc1" * 40, SchemaError),
        (
            lambda _: msgspec.msgpack.encode(UcxAddress(version="1.13.1", rdma=False, host="", worker=b"1234worker")),
            PeerIncompatibleError,
        ),
    ],
    ids=["truncated", "flipped", "empty", "garbage", "another UCX"],
)
def test_an_address_that_cannot_work_is_refused(
    target: Target, damage: Callable[[bytes], bytes], error: type[Exception]
) -> None:
    """J3: UCX parses addresses blindly, so it never sees a damaged one; the channel is taken over all the same."""
    ours, theirs = socket.socketpair()
    with theirs:
        with pytest.raises(error):
            target.transport.connect("source", damage(target.transport.address()), ours.detach())
        theirs.settimeout(5)
        assert theirs.recv(1) == b""


def test_a_connection_needs_a_channel(target: Target) -> None:
    with pytest.raises(TransportError, match="channel"):
        target.transport.connect("source", target.transport.address(), None)


def test_a_descriptor_that_is_none_is_refused(target: Target) -> None:
    with pytest.raises(TransportError, match="channel cannot be used"):
        target.transport.connect("source", target.transport.address(), 1 << 30)


@pytest.mark.parametrize("damage", [lambda key: key[:-1], lambda key: key[::-1], lambda _: b""])
def test_a_damaged_key_is_refused(target: Target, damage: Callable[[bytes], bytes]) -> None:
    key = target.transport.export_key(REGION)
    damaged = RegionKey(region=REGION, address=key.address, length=key.length, key=damage(key.key))
    with pytest.raises(SchemaError, match=f"key of region {REGION} of peer source is damaged"):
        target.transport.import_key("source", damaged)


@pytest.mark.parametrize(("region", "length"), [(REGION, 4096), (4096, 4096), (-1, 4096), (1, 0), (1, 2**63)])
def test_a_region_that_cannot_be_is_refused(target: Target, region: int, length: int) -> None:
    """Registered already, out of number, empty, beyond any memory."""
    with pytest.raises(TransportError):
        target.transport.register(region, target.memory.ctypes.data, length)


def test_a_region_can_be_registered_again(target: Target) -> None:
    target.transport.unregister(REGION)
    with pytest.raises(TransportError, match="not registered"):
        target.transport.export_key(REGION)
    target.transport.register(REGION, target.memory.ctypes.data, 4096)
    assert target.transport.export_key(REGION).length == 4096


# --- protocols ------------------------------------------------------------------------------------------------------


def report(tls: str | None, environment: dict[str, str]) -> str:
    """What UCX reports of the gets of a process that read from this one."""
    reader = PeerProcess(ucx_tls=tls, environment={"UCX_PROTO_INFO": "y", **environment})
    with ExitStack() as closing:
        closing.callback(reader.close)
        here = Target(2 << 20, ucx_tls=tls)
        closing.callback(here.transport.close)
        join(here, reader)
        plan = scattered_plan()
        here.transport.expose(
            Exposure(peer="source", attempt=1, plan=plan, lease_seconds=9, integrity=True, chunk_leaves=4)
        )
        reader.read(Read(peer="target", attempt=1, plan=plan, integrity=True, chunk_leaves=4, max_rereads=0))
        while not (ended := reader.poll()):
            time.sleep(0.001)
        assert ended[0].outcome is Outcome.OK
        tables = reader.output().split("remote memory read by ucp_get*")
        assert len(tables) == 2
        return tables[1]


def test_gets_on_one_host_are_zero_copy() -> None:
    """Peer error mode alone would turn them into software emulation; see RNDV_THRESH in native/src/ucx_context.hpp."""
    said = report(None, {})
    assert "zero-copy" in said
    assert "cma/" in said
    assert "software emulation" not in said


def test_gets_over_tcp_are_emulated() -> None:
    said = report("tcp", {})
    assert "software emulation" in said
    assert "tcp/" in said


def test_the_environment_s_threshold_is_respected() -> None:
    """Who sets UCX_RNDV_THRESH gets it, and with it what we would have avoided."""
    assert "software emulation" in report(None, {"UCX_RNDV_THRESH": "auto"})


# --- processes ------------------------------------------------------------------------------------------------------


def test_a_forked_child_cannot_use_it_and_can_let_it_go() -> None:
    """Every call raises in the child, closing does not hang, and the parent's transport still works."""
    target = Target(2 << 20)
    child = os.fork()
    if child == 0:
        refused = 0
        for call in (target.transport.address, target.transport.poll, lambda: target.transport.cut_off("a", 1)):
            try:
                call()
            except ClosedError:
                refused += 1
        target.transport.close()
        os._exit(refused)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 3
    assert target.end_of(target.transport.cut_off("a", 1)).outcome is Outcome.OK
    target.transport.close()
    with pytest.raises(ClosedError):
        target.transport.address()


def test_a_second_ucx_beside_the_first_is_refused(target: Target) -> None:
    """One UCX serves a process."""
    del target
    with pytest.raises(Exception, match="same ucx_origin"):
        UcxTransport(ucx_origin=__file__)


@pytest.mark.parametrize("tls", ["tcp", None])
def test_the_bare_loop_gets_the_same_bytes(tls: str | None) -> None:
    """The limit moves what a transfer moves, or it would be no limit."""
    source = PeerProcess(ucx_tls=tls, **QUICK)
    probe = UcxProbe(ucx_tls=tls)
    try:
        random = np.random.default_rng(4)
        memory = random.integers(0, 256, len(source.memory), np.uint8)
        source.memory[:] = random.integers(0, 256, len(source.memory), np.uint8)
        plan = scattered_plan()
        after = expected(plan, source.memory, memory)
        address, key = source.call("serve_probe")
        probe.register(REGION, memory.ctypes.data, len(memory))
        probe.connect(address)
        probe.import_key(msgspec.msgpack.decode(key, type=RegionKey))
        assert probe.get(plan, max_run_bytes=4096, window=7) > 0
        assert np.array_equal(memory, after)
        with pytest.raises(TransportError, match="region"):
            probe.get(moved(plan, (len(memory), 0)), max_run_bytes=4096)
    finally:
        probe.close()
        source.close()
