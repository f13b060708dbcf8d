"""A descriptor is believed only after every field of it has been checked."""

from __future__ import annotations

import msgspec
import pytest
from geometries import identity_of, rank_spec

from kvlink import limits
from kvlink.descriptor import Facts, KVDescriptor, check_descriptor, compare_facts, descriptor_digest
from kvlink.errors import LayoutError, MismatchError, UnsupportedError
from kvlink.layout import fingerprint

replace = msgspec.structs.replace
SPEC = rank_spec(block_size=4, num_blocks=16)


def descriptor_of(**changes):
    base = KVDescriptor(
        request_id="r-1",
        tokens=10,
        first_token=5,
        blocks=((0, 3, 9),),
        identity_fingerprint=fingerprint(SPEC.identity),
        digest_scheme=limits.DIGEST_SCHEME,
        facts=Facts(prompt_digest="p", tenant="t"),
        deadline_seconds=3.0,
    )
    return replace(base, **changes)


def test_a_true_descriptor_passes():
    check_descriptor(descriptor_of(), SPEC)
    check_descriptor(descriptor_of(digest_scheme=None, first_token=10), SPEC)
    check_descriptor(descriptor_of(blocks=((-1, 3, 9, 77),)), SPEC)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"request_id": ""}, "request_id"),
        ({"request_id": "x" * 257}, "request_id"),
        ({"request_id": "a\nb"}, "printable"),
        ({"first_token": 11}, r"\[11, 10\)"),
        ({"first_token": -1}, r"\[-1, 10\)"),
        ({"tokens": -2, "first_token": -3}, "impossible"),
        ({"tokens": 1 << 50}, "impossible"),
        ({"deadline_seconds": 0.0}, "deadline_seconds is 0"),
        ({"deadline_seconds": float("nan")}, "deadline_seconds"),
        ({"deadline_seconds": float("inf")}, "deadline_seconds"),
        ({"blocks": ()}, "0 lists"),
        ({"blocks": ((0, 3, 9), (1,))}, "2 lists"),
        ({"blocks": ((0, 3),)}, r"groups\.full: 2 blocks of 4 slots hold fewer than 10"),
        ({"blocks": ((0, 3, 16),)}, r"groups\.full\[2\] is block 16"),
        ({"blocks": ((0, -3, 1),)}, r"groups\.full\[1\] is block -3"),
        ({"group_first_tokens": (0, 0)}, r"group_first_tokens has 2 entries for 1 groups"),
        ({"group_first_tokens": (11,)}, r"group_first_tokens is \(11,\); each lies between 0 and the 10 tokens"),
        ({"group_first_tokens": (-1,)}, r"group_first_tokens is \(-1,\)"),
        ({"facts": Facts(tenant="t" * 5000)}, r"facts\.tenant has 5000 bytes"),
        ({"facts": Facts(opaque=bytes(limits.MAX_CLAIM_BYTES + 1))}, r"facts\.opaque"),
    ],
)
def test_an_impossible_descriptor_is_refused_with_its_field(changes, message):
    with pytest.raises(LayoutError, match=message):
        check_descriptor(descriptor_of(**changes), SPEC)


def test_a_group_is_moved_from_the_latest_first_position_that_anyone_states():
    windowed = descriptor_of(blocks=((0, 3, 9), (0, 0, 4)), group_first_tokens=(0, 8))
    assert windowed.starts() == (5, 8)
    assert windowed.starts(6) == (6, 8)
    assert windowed.starts(5, (9, 7)) == (9, 8)
    check_descriptor(descriptor_of(blocks=((-1, -1, 9),), group_first_tokens=(8,)), SPEC)


def test_an_unknown_digest_scheme_is_refused_by_name():
    with pytest.raises(UnsupportedError, match=r"'crc32'.*xxh3-64-leaf16k"):
        check_descriptor(descriptor_of(digest_scheme="crc32"), SPEC)


def test_a_descriptor_of_another_identity_is_refused_k4():
    """K4: weights were updated after the descriptor was made."""
    updated = fingerprint(identity_of(weights_revision="b"))
    with pytest.raises(MismatchError, match=r"identity_fingerprint differs.*p/0/0@1"):
        check_descriptor(descriptor_of(identity_fingerprint=updated), SPEC)


@pytest.mark.parametrize("field", ["prompt_digest", "adapter", "adapter_revision", "tenant"])
def test_facts_that_both_state_must_be_equal_k3(field):
    """K3: adapter name and revision are compared, and so are prompt and tenant."""
    one, other = Facts(**{field: "a"}), Facts(**{field: "b"})
    with pytest.raises(MismatchError, match=f"facts.{field} differs: p has 'a', d has 'b'") as caught:
        compare_facts(one, other, source_peer="p", target_peer="d")
    assert caught.value.field == f"facts.{field}"
    compare_facts(one, Facts())
    compare_facts(Facts(), other)
    compare_facts(one, one)


def test_how_to_treat_a_request_is_not_compared():
    compare_facts(Facts(trace_id="a", priority=1, opaque=b"x"), Facts(trace_id="b", priority=2, opaque=b"y"))


def test_repeats_have_the_same_digest_and_other_content_has_not_g4():
    """G4: the same request id with another prompt, range or blocks is another request."""
    digest = descriptor_digest(descriptor_of())
    repeat = descriptor_of(
        deadline_seconds=1.0, facts=Facts(prompt_digest="p", tenant="t", trace_id="again", priority=9)
    )
    assert descriptor_digest(repeat) == digest
    others = [
        descriptor_of(facts=Facts(prompt_digest="q", tenant="t")),
        descriptor_of(facts=Facts(prompt_digest="p", tenant="u")),
        descriptor_of(tokens=11),
        descriptor_of(first_token=4),
        descriptor_of(group_first_tokens=(6,)),
        descriptor_of(blocks=((0, 3, 8),)),
        descriptor_of(digest_scheme=None),
        descriptor_of(facts=Facts(prompt_digest="p", tenant="t", opaque=b"state")),
    ]
    assert len({digest, *map(descriptor_digest, others)}) == 9


def test_a_descriptor_survives_the_wire_unchanged():
    descriptor = descriptor_of()
    data = msgspec.msgpack.encode(descriptor)
    assert msgspec.msgpack.decode(data, type=KVDescriptor) == descriptor
