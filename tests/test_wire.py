"""Messages: what is encoded is decoded, what is malformed is refused in few words, errors cross both ways."""

from __future__ import annotations

import contextlib
import random
import re

import msgspec
import pytest
from peers import introduce

from kvlink import errors, limits, wire
from kvlink.descriptor import Facts, KVDescriptor
from kvlink.errors import BusyError, FrameError, KVLinkError, MismatchError, SchemaError
from kvlink.layout import Frontier
from kvlink.transports.base import TransportFull
from kvlink.wire import Ack, Address, ErrorInfo, Goodbye, decode, encode, error_to_info, info_to_error

DESCRIPTOR = KVDescriptor(
    request_id="1:r", tokens=40, first_token=0, blocks=((3, 1, 2),), identity_fingerprint="f", digest_scheme=None,
    facts=Facts(tenant="t", opaque=b"\x00"), deadline_seconds=3.0,
)  # fmt: skip
INFO = ErrorInfo(code="busy", message="full", retryable=True, retry_after_seconds=0.5)
CAPACITY = wire.Capacity(leased_blocks=7, active_legs=1, max_legs=8)
EVERY_MESSAGE = (
    introduce(),
    wire.Ask(key="1:r", attempt=1, descriptor=DESCRIPTOR, first_token=0, integrity=True, leg=(), readers=2),
    wire.Lease(attempt=1, lease_seconds=2.5, total_bytes=4096, capacity=CAPACITY),
    wire.Parked(attempt=1, park_seconds=10.0),
    wire.Refused(attempt=1, error=INFO, capacity=CAPACITY),
    wire.Advance(attempt=1, number=2, frontier=Frontier(4, 1, 8), blocks=((3,), ()), total_bytes=64, sealed="ab"),
    wire.Landed(attempt=1, increments=2),
    wire.Prepared(attempt=1, root=b"12345678", increments=2, content="ab"),
    wire.Commit(attempt=1, ttl_seconds=5.0, root=None),
    wire.Installed(attempt=1),
    wire.NotInstalled(attempt=1, error=INFO),
    wire.Ack(attempt=(1 << 63) - 1),
    wire.Revoked(attempt=1, error=INFO),
    wire.Expect(ticket=b"ticket"),
    wire.Announce(key="1:r", descriptor=DESCRIPTOR),
    wire.Renew(keys=("1:r", "1:s")),
    wire.Decline(key="1:r", why="full local hit", unread=True),
    wire.Withdrawn(key="1:r", error=INFO),
    wire.Stands(key="1:r", part=7, group=0, content="p@1 ab", stage=wire.Stage.FAILED, error=INFO),
    wire.Decided(key="1:r", part=7, group=3, verdict=wire.Verdict.PROCEED),
    wire.Chosen(transport="stream", reason="stream 6.2 ms predicted for 64 MiB in runs of 1 KiB"),
    wire.Goodbye(why="reload"),
)


def packed(**fields):
    return msgspec.msgpack.encode(fields)


def test_every_message_is_decoded_to_what_was_encoded():
    kinds = {type(message) for message in EVERY_MESSAGE}
    assert kinds == set(wire.AnyMessage.__args__), "a message has no example here"
    for message in EVERY_MESSAGE:
        assert decode(encode(message)) == message


@pytest.mark.parametrize(
    ("payload", "error", "word"),
    [
        (b"", SchemaError, "nothing"),
        (b"\xc0", SchemaError, "must be a map"),
        (packed(attempt=1, type="Ack"), SchemaError, "first is 'type'"),
        (packed(type="Ack"), SchemaError, "missing required field `attempt`"),
        (packed(type="Ack", attempt=1, extra=1), SchemaError, "unknown field `extra`"),
        (packed(type="Nack", attempt=1), SchemaError, "Nack"),
        (packed(type="Ack", attempt="1"), SchemaError, "$.attempt"),
        (packed(type="Ack", attempt=0), SchemaError, ">= 1"),
        (packed(type="Ack", attempt=1 << 63), SchemaError, "$.attempt"),
        (packed(type="Ack", attempt=True), SchemaError, "$.attempt"),
        (packed(type="Prepared", attempt=1, root=b"short"), SchemaError, "$.root"),
        (packed(type="Landed", attempt=1, increments=-1), SchemaError, "$.increments"),
        (packed(type="Landed", attempt=1, increments=1 << 20), SchemaError, "$.increments"),
        (packed(type="Parked", attempt=1, park_seconds=float("nan")), SchemaError, "$.park_seconds"),
        (packed(type="Parked", attempt=1, park_seconds=-1.0), SchemaError, "$.park_seconds"),
        (packed(type="Renew", keys=["k"] * 5000), SchemaError, "$.keys"),
        (packed(type="Renew", keys=["line\nbreak"]), SchemaError, "matching regex"),
        (packed(type="Goodbye", why="x" * 5000), SchemaError, "$.why"),
        (encode(Ack(attempt=1))[:-1], FrameError, "truncated"),
        (encode(Ack(attempt=1)) + b"\x00", FrameError, "trailing"),
        (b"\x82\xa4type\xa7Goodbye\xa3why\xa2\xff\xfe", FrameError, "UTF-8"),
        (b"\x82\xa4type\xa5Renew\xa4keys\xdd\xff\xff\xff\xff", SchemaError, "$.keys"),
        (b"\x82\xa4type\xa6Expect\xa6ticket\xc6\xff\xff\xff\xff", SchemaError, "$.ticket"),
        (b"\x82\xa4type\xa6Expect\xa6ticket\xc6\x00\x0f\xff\xff", FrameError, "truncated"),
    ],
)  # fmt: skip
def test_malformed_payload_is_refused_with_what_and_where(payload, error, word):
    with pytest.raises(error, match=re.escape(word)):
        decode(payload)


def test_payload_over_the_bound_is_refused_unread():
    with pytest.raises(FrameError, match=str(limits.MAX_FRAME_BYTES)):
        decode(b"\x00" * (limits.MAX_FRAME_BYTES + 1))
    with pytest.raises(FrameError, match="takes"):
        encode(wire.Expect(ticket=b"\x00" * limits.MAX_FRAME_BYTES))


@pytest.mark.parametrize("opener", [b"\x91", b"\x81\xa1k", b"\xdc\x00\x01", b"\xdf\x00\x00\x00\x01\xa1k"])
def test_nesting_cannot_exhaust_the_stack_wherever_it_starts(opener):
    """Every position at which a value may stand is filled with 100,000 levels: refused, and not by recursion."""
    deep = opener * 100_000
    whole = encode(EVERY_MESSAGE[1])
    for cut in range(len(whole)):
        with pytest.raises(errors.WireError) as caught:
            decode(whole[:cut] + deep)
        assert "nested deeper" not in str(caught.value), f"cut at {cut} reached the interpreter's own bound"


def test_a_peers_words_are_echoed_in_part_and_printable():
    with pytest.raises(SchemaError) as caught:
        decode(packed(type="\x1b[31m\n" + "A" * 100_000))
    assert len(str(caught.value)) < 300
    assert str(caught.value).isprintable()


def test_random_damage_is_refused_or_decoded_never_anything_else():
    rng = random.Random(7)
    for message in EVERY_MESSAGE:
        whole = encode(message)
        for _ in range(100):
            damaged = bytearray(whole)
            for _ in range(rng.randint(1, 4)):
                damaged[rng.randrange(len(damaged))] = rng.randrange(256)
            with contextlib.suppress(errors.WireError):
                decode(bytes(damaged))


@pytest.mark.parametrize("length", [0, limits.MAX_UNAUTHENTICATED_FRAME_BYTES + 1, 0x20544547])
def test_a_frame_header_is_bounded_before_anything_is_allocated(length):
    with pytest.raises(FrameError, match=str(length)):
        wire.frame_length(length.to_bytes(4, "little"), limits.MAX_UNAUTHENTICATED_FRAME_BYTES)


def all_classes():
    found, todo = [], [KVLinkError]
    while todo:
        cls = todo.pop()
        found.append(cls)
        todo += [sub for sub in cls.__subclasses__() if sub.__module__ == errors.__name__]
    return found


def example(cls):
    return cls("identity.model", "llama", "qwen") if cls is MismatchError else cls("it failed")


@pytest.mark.parametrize("cls", all_classes())
def test_every_error_class_crosses_the_wire_as_itself(cls):
    error = example(cls)
    again = info_to_error(error_to_info(error), request_id="1:r", peer="e/0/0@1", stage="ask")
    assert type(again) is cls
    assert (again.message, again.retryable) == (error.message, error.retryable)
    assert (again.request_id, again.peer, again.stage) == ("1:r", "e/0/0@1", "ask")


def test_codes_are_unique_over_the_tree():
    codes = [cls.code for cls in all_classes()]
    assert len(set(codes)) == len(codes)


def test_errors_with_fields_keep_them_over_the_wire():
    busy = info_to_error(error_to_info(BusyError("no room", retry_after_seconds=1.5)))
    assert isinstance(busy, BusyError)
    assert busy.retry_after_seconds == 1.5
    told = MismatchError("identity.model", "llama", "qwen", source="p/0/0@1", target="d/0/0@1")
    mismatch = info_to_error(error_to_info(told))
    assert isinstance(mismatch, MismatchError)
    assert (mismatch.field, mismatch.source_value, mismatch.target_value) == ("identity.model", "llama", "qwen")
    assert str(mismatch) == str(told)


def test_a_class_outside_the_tree_travels_as_its_ancestor_and_an_unknown_code_as_the_root():
    assert error_to_info(TransportFull("full")).code == "transport"
    unknown = info_to_error(ErrorInfo(code="from_the_future", message="hm", retryable=True))
    assert type(unknown) is KVLinkError
    assert unknown.retryable
    assert "from_the_future" in str(unknown)


def test_an_error_text_always_fits_its_message():
    info = error_to_info(KVLinkError("\ud800" + "x" * 10_000))
    message = wire.Withdrawn(key="k", error=info)
    assert decode(encode(message)) == message


def test_text_that_is_not_unicode_is_a_typed_error_and_not_sent():
    with pytest.raises(SchemaError, match="Goodbye"):
        encode(Goodbye(why="\ud800"))


@pytest.mark.parametrize(
    "text",
    ["tcp://10.0.0.1:80", "tcp://node-3.rack_1:0", "tcp://[::1]:65535", "tcp://[fe80::1%eth0]:7", "unix:///run/k.sock"],
)
def test_addresses_are_printed_as_they_are_read(text):
    """J2: IPv6 in RFC 3986 brackets."""
    assert str(Address.parse(text)) == text


@pytest.mark.parametrize(
    "text",
    ["", "tcp://", "tcp://h", "tcp://h:99999", "tcp://::1:80", "tcp://[::1:80", "tcp://[:::]:80", "http://h:1",
     "tcp://h:1/x", "tcp://h:1\n", "tcp://a b:1", "unix://rel", "unix:///" + "x" * 200, "tcp://h:-1", "tcp://u@h:1"],
)  # fmt: skip
def test_other_addresses_are_refused(text):
    with pytest.raises(SchemaError):
        Address.parse(text)


def test_an_address_knows_who_can_reach_it():
    loopback = ("tcp://127.0.0.5:1", "tcp://[::1]:1", "tcp://localhost:1", "unix:///a")
    assert all(Address.parse(text).is_loopback for text in loopback)
    assert not any(Address.parse(text).is_loopback for text in ("tcp://0.0.0.0:1", "tcp://[::]:1", "tcp://h:1"))
    assert all(Address.parse(text).is_wildcard for text in ("tcp://0.0.0.0:1", "tcp://[::]:1"))
