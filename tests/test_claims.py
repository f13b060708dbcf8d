"""Cards, rosters, offers and tickets: pure data that comes through gateways unharmed, or is refused."""

from __future__ import annotations

import base64
import json
import subprocess
import sys

import msgspec
import pytest
from geometries import identity_of
from peers import SECRET, card, roster

from kvlink import limits
from kvlink.descriptor import Facts
from kvlink.errors import AuthenticationError, FrameError, MismatchError, SchemaError, VersionError, WireError
from kvlink.layout import GroupShare, Rope, fingerprint
from kvlink.wire import Claim, Offer, RankCard, Roster, RosterRank, Ticket, request_key

FACTS = Facts(prompt_digest="abc", adapter="sql", tenant="acme", opaque=b"\x00\xff")


def offer(**changes):
    fields = {"key": request_key("1", "cmpl-7"), "roster": roster(), "blocks": ((3, 1, 2),), "tokens": 10}
    return Offer(**(fields | {"facts": FACTS} | changes))


def ticket(**changes):
    return Ticket(**({"key": request_key("2", "cmpl-7"), "roster": roster(), "blocks": (), "tokens": 10} | changes))


def through_a_gateway(params):
    """JSON, re-ordered and re-formatted as gateways do."""
    return json.loads(json.dumps(dict(reversed(params.items())), indent=1))


# --- cards and rosters ----------------------------------------------------------------------------------------------


def test_a_roster_is_put_together_from_cards_in_any_order():
    cards = [card((pp, 2), (tp, 2)).to_bytes() for pp, tp in ((1, 0), (0, 1), (1, 1), (0, 0))]
    made = Roster.of(cards)
    assert [(rank.share.pp_rank, rank.share.tp_rank) for rank in made.ranks] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [rank.address for rank in made.ranks][2] == "tcp://[fd00::1]:5010"
    assert str(made.place(2)) == "p/1/0@1"
    assert made.shares[3].groups[0].heads == (2, 3)


def test_a_roster_lacking_a_rank_is_refused_by_its_name():
    with pytest.raises(SchemaError, match=r"lacks rank \(pp, tp\) \(0, 1\)"):
        Roster.of([card(tp=(0, 2)).to_bytes()])
    with pytest.raises(SchemaError, match="twice"):
        Roster.of([card(tp=(tp, 2)).to_bytes() for tp in (0, 1, 1)])
    with pytest.raises(SchemaError, match="none was given"):
        Roster.of([])


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"incarnation": "2"}, "place.incarnation"),
        ({"engine": "other"}, "place.engine"),
        ({"identity": identity_of(weights_revision="r2")}, "identity"),
    ],
)
def test_cards_of_different_engines_lives_or_models_do_not_mix(changes, field):
    """C1: a rank of the life before must not slip into the roster of this one."""
    with pytest.raises(MismatchError) as caught:
        Roster.of([card(tp=(0, 2)).to_bytes(), card(tp=(1, 2), **changes).to_bytes()])
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"address": "tcp://nowhere"}, "not an address"),
        ({"identity_fingerprint": "00"}, "fingerprint"),
        ({"share": card(tp=(1, 2)).share}, "holds the share of"),
        ({"share": msgspec.structs.replace(card().share, groups=())}, "0 groups"),
    ],
)
def test_a_card_that_contradicts_itself_is_refused(changes, word):
    with pytest.raises(SchemaError, match=word):
        card(**changes)


@pytest.mark.parametrize("heads", [(), (1, 0), (0, 0), (-1,), (0, 4096)])
def test_a_share_with_impossible_heads_is_refused_in_a_roster(heads):
    good = roster(tp_size=1)
    share = msgspec.structs.replace(good.shares[0], groups=(GroupShare(name="full", layers=(0, 1), heads=heads),))
    with pytest.raises(SchemaError, match="ascending ids"):
        msgspec.structs.replace(good, ranks=(RosterRank("tcp://h:1", share),))


def test_a_roster_cannot_claim_more_ranks_than_there_may_be():
    """Refused by its sizes: a million expected ranks are never counted out."""
    with pytest.raises(SchemaError, match="more than 1024 ranks"):
        msgspec.structs.replace(roster(), pp_size=1024, tp_size=1024)


def test_a_card_of_another_version_or_none_is_refused():
    data = card().to_bytes()
    assert RankCard.from_bytes(data) == card()
    with pytest.raises(VersionError, match="version 2"):
        RankCard.from_bytes(b"\x02" + data[1:])
    with pytest.raises(VersionError, match="nothing"):
        RankCard.from_bytes(b"")
    with pytest.raises(FrameError):
        RankCard.from_bytes(data + b"\x00" * limits.MAX_CARD_BYTES)


# --- claims ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("claim", [offer(), offer().sign(SECRET), ticket(), ticket().sign(SECRET)])
def test_a_claim_comes_through_a_gateway_unharmed(claim):
    params = through_a_gateway(claim.to_params())
    assert type(claim).from_params(params) == claim
    assert Claim.from_params(params) == claim


def test_the_fields_that_gateways_know_are_beside_ours():
    params = offer().to_params()
    assert params["do_remote_prefill"] is True
    assert params["do_remote_decode"] is False
    assert params["remote_block_ids"] == [[3, 1, 2]]
    assert (params["remote_host"], params["remote_port"]) == ("fd00::1", 5000)
    assert (params["remote_engine_id"], params["tp_size"]) == ("p", 2)
    assert ticket().to_params()["do_remote_decode"] is True


def test_what_a_gateway_writes_beside_the_claim_changes_nothing():
    params = offer().sign(SECRET).to_params()
    read = Offer.from_params(params | {"remote_host": "10.6.6.6", "remote_block_ids": [[0]], "more": {"a": [1]}})
    read.verify(SECRET)
    assert read.blocks == ((3, 1, 2),)


@pytest.mark.parametrize(
    "changes",
    [{"tokens": 11}, {"blocks": ((3, 1, 0),)}, {"key": "1:cmpl-8"}, {"facts": Facts(tenant="evil")},
     {"ttl_seconds": 9.0}, {"roster": roster(tp_size=1)}, {"digest_scheme": None}, {"signature": b"\x00" * 32}],
)  # fmt: skip
def test_any_change_of_a_signed_claim_is_found(changes):
    signed = offer().sign(SECRET)
    signed.verify(SECRET)
    with pytest.raises(AuthenticationError, match="wrong signature"):
        msgspec.structs.replace(signed, **changes).verify(SECRET)


def test_a_signature_is_of_one_secret_and_one_kind():
    signed = offer().sign(SECRET)
    with pytest.raises(AuthenticationError, match="wrong signature"):
        signed.verify(b"another secret, long")
    with pytest.raises(AuthenticationError, match="not signed"):
        offer().verify(SECRET)
    same = {name: getattr(signed, name) for name in signed.__struct_fields__}
    with pytest.raises(AuthenticationError):
        Ticket(**same).verify(SECRET)


def test_an_offer_is_not_read_as_a_ticket():
    with pytest.raises(SchemaError, match="expected Ticket, got Offer"):
        Ticket.from_params(offer().to_params())


def hostile_params():
    body = offer().to_bytes()
    text = base64.urlsafe_b64encode
    fields = msgspec.msgpack.decode(body[1:])
    return {
        "no claim": {"remote_host": "h"},
        "not text": {"kvlink": {"a": 1}},
        "not base64": {"kvlink": "!!!!"},
        "not ascii": {"kvlink": "\u00e9" * 8},
        "empty": {"kvlink": ""},
        "truncated": {"kvlink": text(body[:-3]).decode()},
        "trailing": {"kvlink": text(body + b"\x00").decode()},
        "oversized": {"kvlink": "A" * (2 * limits.MAX_CLAIM_BYTES)},
        "other version": {"kvlink": text(b"\x09" + body[1:]).decode()},
        "nested": {"kvlink": text(b"\x01\x82\xa4type\xa5offer\xa6blocks" + b"\x91" * 100_000).decode()},
        "unknown field": {"kvlink": text(b"\x01" + msgspec.msgpack.encode(fields | {"x": 1})).decode()},
        "negative block": {"kvlink": text(b"\x01" + msgspec.msgpack.encode(fields | {"blocks": [[-1]]})).decode()},
        "windows past its end": {
            "kvlink": text(b"\x01" + msgspec.msgpack.encode(fields | {"group_first_tokens": [11]})).decode()
        },
        "a window for too many groups": {
            "kvlink": text(b"\x01" + msgspec.msgpack.encode(fields | {"group_first_tokens": [0] * 65})).decode()
        },
        "range past its end": {"kvlink": text(b"\x01" + msgspec.msgpack.encode(fields | {"first_token": 11})).decode()},
        "too many tokens": {"kvlink": text(b"\x01" + msgspec.msgpack.encode(fields | {"tokens": 1 << 40})).decode()},
    }


@pytest.mark.parametrize("name", hostile_params())
def test_hostile_parameters_are_a_typed_error(name):
    with pytest.raises(WireError) as caught:
        Offer.from_params(hostile_params()[name])
    assert len(str(caught.value)) < 400


def test_a_claim_is_compared_with_what_this_side_states():
    """K3, K4: adapter and weights revision are compared where both sides state them."""
    identity = identity_of()
    assert offer().check(Facts(), identity) is None
    assert offer().check(FACTS, identity) is None
    wrong_adapter = offer().check(Facts(adapter="chat"), identity)
    assert wrong_adapter is not None
    assert wrong_adapter.field == "facts.adapter"
    assert (wrong_adapter.source_value, wrong_adapter.target_value) == ("sql", "chat")
    wrong_rope = offer(roster=Roster.of([card(identity=identity_of(rope=Rope(theta=1e4))).to_bytes()])).check(
        Facts(), identity_of(rope=Rope(theta=1e6))
    )
    assert wrong_rope is not None
    assert wrong_rope.field == "identity.rope.theta"
    assert wrong_rope.request_id == "1:cmpl-7"
    as_source = ticket(facts=Facts(adapter="sql")).check(Facts(adapter="chat"), identity)
    assert as_source is not None
    assert (as_source.source_value, as_source.target_value) == ("chat", "sql"), "a ticket is the target's"


def test_an_offer_becomes_the_descriptor_of_its_ask():
    made = offer(first_token=4).descriptor(2.5)
    assert (made.request_id, made.tokens, made.first_token, made.blocks) == ("1:cmpl-7", 10, 4, ((3, 1, 2),))
    assert made.identity_fingerprint == fingerprint(identity_of())
    assert (made.facts, made.deadline_seconds, made.digest_scheme) == (FACTS, 2.5, limits.DIGEST_SCHEME)
    assert offer(group_first_tokens=(8,)).descriptor(1.0).group_first_tokens == (8,)


@pytest.mark.parametrize("request_id", ["x" * 300, "line\nbreak", "\u00e9"])
def test_keys_are_short_printable_ascii(request_id):
    with pytest.raises(SchemaError, match="printable ASCII"):
        request_key("1", request_id)


def test_claims_need_no_native_code_no_ucx_and_no_torch():
    """An engine's scheduler process makes and checks claims, and has none of these."""
    code = (
        "import sys, kvlink.wire\n"
        "loaded = {'kvlink._native', 'libucx', 'torch'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
