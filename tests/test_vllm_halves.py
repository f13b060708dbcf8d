"""vLLM's connector without vLLM: its two halves, over real bridges, stepped as vLLM steps them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from step_engine import MODEL, Request, StepEngine, run

from kvlink import Config
from kvlink.adapters.vllm.requests import facts_of
from kvlink.adapters.vllm.settings import Settings
from kvlink.adapters.vllm.tally import Tally
from kvlink.cli.bench.content import Prompt
from kvlink.errors import ConfigError

SECRET = Config(secret=b"the same on every rank", transports=("stream",))
Make = Callable[..., StepEngine]


@pytest.fixture
def engine() -> Iterator[Make]:
    with ExitStack() as stack:

        def make(name: str, **fields: Any) -> StepEngine:
            made = StepEngine(name, **fields)
            stack.callback(made.close)
            return made

        yield make


def tokens(count: int, seed: int = 0) -> list[int]:
    return [(seed + 31 * index) % 512 for index in range(count)]


def prefilled(source: StepEngine, count: int, request_id: str = "cmpl-p", seed: int = 0) -> dict[str, Any]:
    """The parameters of a prompt that ``source`` has computed in blocks 9, 2, 17, ..."""
    request = Request(request_id, tokens(count, seed), kv_transfer_params={"do_remote_decode": True})
    params = source.prefill(request, Prompt(seed=7, tokens=count), FROM[: -(-count // source.block_size)])
    assert params is not None
    return params


FROM = (9, 2, 17, 4, 11, 30, 22, 5)
INTO = (3, 8, 13, 18, 23, 1, 44, 6)


@pytest.mark.parametrize(("source_tp", "target_tp"), [(1, 1), (2, 1), (1, 2), (2, 4)])
@pytest.mark.parametrize(("source_block", "target_block"), [(16, 32), (32, 16)])
def test_a_prompt_is_fetched_whole(
    engine: Make, source_tp: int, target_tp: int, source_block: int, target_block: int
) -> None:
    """D1, D4: every rank reports, the last block is part-filled, and what lies behind it stays."""
    source = engine("prefill", tp=source_tp, block_size=source_block)
    target = engine("decode", tp=target_tp, block_size=target_block, layout="fused", canary=0x5A)
    request = Request("cmpl-d", tokens(75), kv_transfer_params=prefilled(source, 75))
    target.arrive(request)
    blocks = INTO[: -(-75 // target_block)]
    assert target.admit(request, blocks) == 75
    run(source, target, until=lambda: not source.waiting and not target.waiting)
    assert (source.sent, target.loaded, target.failed) == (["cmpl-p"], ["cmpl-d"], set())
    assert all(content.check(Prompt(seed=7, tokens=75), blocks) is None for content in target.contents)
    target.end(request)


def test_the_parameters_are_those_that_proxies_forward(engine: Make) -> None:
    params = prefilled(engine("prefill", tp=2), 40)
    assert (params["do_remote_prefill"], params["do_remote_decode"]) == (True, False)
    assert params["remote_block_ids"] == [[9, 2, 17]]
    assert params["tp_size"] == 2
    assert {"remote_engine_id", "remote_host", "remote_port", "remote_request_id"} <= params.keys()


def test_a_prefix_that_is_here_is_not_fetched(engine: Make) -> None:
    source, target = engine("prefill"), engine("decode", canary=0x5A)
    request = Request("cmpl-d", tokens(75), kv_transfer_params=prefilled(source, 75))
    target.arrive(request)
    assert target.admit(request, INTO[:5], computed=32) == 43
    run(source, target, until=lambda: not source.waiting and not target.waiting)
    content = target.contents[0]
    assert content.check_wiped(INTO[:2]) is None
    (bytes_moved,) = target.ranks[0].tally.fetch_bytes
    assert bytes_moved == 43 * MODEL.num_layers * 2 * MODEL.num_kv_heads * MODEL.head_dim * 2


def test_a_full_local_hit_declines_the_offer(engine: Make) -> None:
    """B2: the source's blocks come back at once, not when its claim runs out."""
    source, target = engine("prefill"), engine("decode")
    request = Request("cmpl-d", tokens(48), kv_transfer_params=prefilled(source, 48))
    target.arrive(request)
    assert target.admit(request, INTO[:3], computed=48) == 0
    run(source, target, until=lambda: not source.waiting, timeout_seconds=5)
    assert source.sent == ["cmpl-p"]
    assert target.loaded == []


def test_an_abort_in_the_queue_declines_the_offer(engine: Make) -> None:
    """B4: the client is gone before blocks were there; the source hears of it within the next step."""
    source, target = engine("prefill"), engine("decode")
    request = Request("cmpl-d", tokens(48), kv_transfer_params=prefilled(source, 48))
    target.arrive(request)
    target.end(request)
    run(source, target, until=lambda: not source.waiting, timeout_seconds=5)
    assert target.loaded == []


def test_an_abort_while_loading_is_reported_once_and_after_its_end(engine: Make) -> None:
    """A2, B4: vLLM keeps the blocks until every rank has reported, and asserts that none reports twice."""
    source, target = engine("prefill", tp=2), engine("decode", tp=2)
    request = Request("cmpl-d", tokens(75), kv_transfer_params=prefilled(source, 75))
    target.arrive(request)
    target.admit(request, INTO[:5])
    target.step()  # submitted; the source has not published yet, so the ask is parked
    target.end(request)
    run(source, target, until=lambda: not target.waiting and not source.waiting)
    for _ in range(20):
        target.step()
    assert target.loaded == ["cmpl-d"]


def test_an_offer_that_nobody_fetches_ends_by_itself(engine: Make) -> None:
    """B1: with nothing to schedule, the blocks still come back."""
    config = Config(transports=("stream",), claim_ttl_seconds=0.3)
    source = engine("prefill", config=config)
    prefilled(source, 48)
    run(source, until=lambda: not source.waiting, timeout_seconds=5)
    assert source.ranks[0].tally.sends == {"expired": 1}


def test_an_offer_is_renewed_while_its_request_queues(engine: Make) -> None:
    """B7: waiting for blocks does not burn the time in which the source keeps its own."""
    config = Config(transports=("stream",), claim_ttl_seconds=0.5)
    source, target = engine("prefill", config=config), engine("decode", config=config)
    request = Request("cmpl-d", tokens(75), kv_transfer_params=prefilled(source, 75))
    target.arrive(request)
    renewed = []
    run(source, target, until=lambda: bool(renewed.append(1)) or len(renewed) > 900, timeout_seconds=30)
    assert source.waiting == {"cmpl-p"}
    target.admit(request, INTO[:5])
    run(source, target, until=lambda: not target.waiting)
    assert target.failed == set()


def test_a_cache_that_is_reset_takes_back_what_it_offered(engine: Make) -> None:
    """K4: weights change: held blocks come back at once, and whoever would read them is refused."""
    source, target = engine("prefill"), engine("decode")
    request = Request("cmpl-d", tokens(48), kv_transfer_params=prefilled(source, 48))
    source.step()
    prefilled(source, 32, "cmpl-q")  # its offer leaves with the step that takes all back
    source.scheduler.reset()
    run(source, target, until=lambda: not source.waiting, timeout_seconds=5)
    assert source.ranks[0].tally.sends == {"cancelled": 2}
    target.arrive(request)
    target.admit(request, INTO[:3])
    run(source, target, until=lambda: not target.waiting)
    assert target.failed == {"cmpl-d"}


def test_a_reset_computes_here_what_queued_for_a_load(engine: Make) -> None:
    """K4: the KV of old weights, which another may hold, is not mixed with that of new ones."""
    source, target = engine("prefill"), engine("decode")
    request = Request("cmpl-d", tokens(48), kv_transfer_params=prefilled(source, 48))
    target.arrive(request)
    target.scheduler.reset()
    assert target.admit(request, INTO[:3]) == 0
    run(source, target, until=lambda: not source.waiting, timeout_seconds=5)
    assert source.sent == ["cmpl-p"]
    assert target.loaded == []


def test_another_revision_is_refused_by_name(engine: Make) -> None:
    """K4: every rank reports the load as failed, and the count names the field."""
    source = engine("prefill", identity=msgspec.structs.replace(MODEL, weights_revision="r2"))
    target = engine("decode", tp=2)
    request = Request("cmpl-d", tokens(75), kv_transfer_params=prefilled(source, 75))
    target.arrive(request)
    assert target.admit(request, INTO[:5]) == 75
    run(target, until=lambda: not target.waiting)
    assert target.failed == {"cmpl-d"}
    assert target.ranks[1].tally.failures == {"mismatch|identity.weights_revision": 1}
    assert target.scheduler.matched_tokens(request, 0) == 0, "computed here when vLLM asks again"


@pytest.mark.parametrize(
    ("spoil", "kind"),
    [
        (lambda params: params.pop("kvlink"), "schema"),
        (lambda params: params.update(kvlink="!" + params["kvlink"]), "frame"),
        (lambda params: params.update(kvlink=params["kvlink"][:-40]), "frame"),
        (lambda params: params.update(kvlink=7), "schema"),
    ],
)
def test_an_offer_that_cannot_be_read_fails_its_request_only(
    engine: Make, spoil: Callable[..., Any], kind: str
) -> None:
    target = engine("decode")
    params = prefilled(engine("prefill"), 40)
    spoil(params)
    request = Request("cmpl-d", tokens(40), kv_transfer_params=params)
    target.arrive(request)
    target.admit(request, INTO[:3])
    run(target, until=lambda: not target.waiting)
    assert list(target.ranks[0].tally.failures) == [f"{kind}|"]


def test_an_unsigned_offer_is_refused_where_there_is_a_secret(engine: Make) -> None:
    """K2: also one that is signed with another secret."""
    target = engine("decode", config=SECRET)
    for config in (Config(transports=("stream",)), replace(SECRET, secret=b"another one, and as long")):
        request = Request("cmpl-d", tokens(40), kv_transfer_params=prefilled(engine("prefill", config=config), 40))
        target.arrive(request)
        target.admit(request, INTO[:3])
        run(target, until=lambda: not target.waiting)
        target.end(request)
    assert target.ranks[0].tally.failures == {"authentication|": 2}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"prompt_token_ids": tokens(40, seed=1)}, "facts.prompt_digest"),
        ({"prompt_token_ids": tokens(39)}, "prompt_tokens"),
        ({"lora_request": SimpleNamespace(lora_name="poet")}, "facts.adapter"),
    ],
)
def test_kv_of_another_prompt_or_adapter_is_refused(engine: Make, change: dict[str, Any], field: str) -> None:
    """G4, K3: the same parameters with another prompt, a shorter one, or under an adapter."""
    target = engine("decode")
    request = Request("cmpl-d", tokens(40), kv_transfer_params=prefilled(engine("prefill"), 40))
    for name, value in change.items():
        setattr(request, name, value)
    target.arrive(request)
    target.admit(request, INTO[:3])
    run(target, until=lambda: not target.waiting)
    assert list(target.ranks[0].tally.failures) == [f"mismatch|{field}"]


def test_a_longer_prompt_takes_what_was_prefilled(engine: Make) -> None:
    source, target = engine("prefill"), engine("decode")
    request = Request("cmpl-d", tokens(60), kv_transfer_params=prefilled(source, 40))
    target.arrive(request)
    assert target.admit(request, INTO[:4]) == 40
    run(source, target, until=lambda: not target.waiting)
    assert target.contents[0].check(Prompt(seed=7, tokens=40), INTO[:3]) is None


def test_two_requests_with_one_offer_end_apart(engine: Make) -> None:
    """G1: the second finds the key taken by other blocks: its own failure, not the engine's."""
    source, target = engine("prefill"), engine("decode")
    params = prefilled(source, 40)
    for request_id, blocks in (("cmpl-1", INTO[:3]), ("cmpl-2", INTO[3:6])):
        request = Request(request_id, tokens(40), kv_transfer_params=dict(params))
        target.arrive(request)
        target.admit(request, blocks)
    run(source, target, until=lambda: not target.waiting)
    assert sorted(target.loaded) == ["cmpl-1", "cmpl-2"]
    assert target.failed == {"cmpl-2"}
    assert list(target.ranks[0].tally.failures) == ["conflict|"]


def test_a_source_that_is_gone_fails_the_load(engine: Make) -> None:
    """C7: in bounded time, with the blocks reported after the cut-off."""
    source, target = engine("prefill"), engine("decode")
    params = prefilled(source, 40)
    source.close()
    request = Request("cmpl-d", tokens(40), kv_transfer_params=params)
    target.arrive(request)
    target.admit(request, INTO[:3])
    run(target, until=lambda: not target.waiting)
    assert target.failed == {"cmpl-d"}
    assert [(load.request_id, load.blocks) for load in target.scrubbed] == [("cmpl-d", (INTO[:3],))]


def test_a_source_restarted_on_its_address_is_another_one(engine: Make) -> None:
    """C1: an offer of the life before is refused, and new requests work."""
    source, target = engine("prefill"), engine("decode")
    old = prefilled(source, 40)
    address = source.scheduler._roster.ranks[0].address
    source.close()
    config = Config(transports=("stream",), listen=address)
    again = engine("prefill", incarnation="2", config=config)
    for request_id, params in (("cmpl-old", old), ("cmpl-new", prefilled(again, 40))):
        request = Request(request_id, tokens(40), kv_transfer_params=params)
        target.arrive(request)
        target.admit(request, INTO[:3])
        run(again, target, until=lambda: not target.waiting)
        target.end(request)
    assert target.failed == {"cmpl-old"}
    assert list(target.ranks[0].tally.failures) == ["peer_restarted|"]


def source_that_comes_back(engine: Make, clock: list[float]) -> tuple[StepEngine, Request, Callable[[], StepEngine]]:
    """A target whose first try has found nobody, and a way to bring its source back on the address."""
    source, target = engine("prefill"), engine("decode", now=lambda: clock[0])
    request = Request("cmpl-d", tokens(40), kv_transfer_params=prefilled(source, 40))
    address = source.scheduler._roster.ranks[0].address
    source.close()
    target.arrive(request)
    target.admit(request, INTO[:3])
    run(target, until=lambda: [load.part for load in target.ranks[0]._loads.values()] == [None])
    assert target.loaded == []

    def back() -> StepEngine:
        again = engine("prefill", config=Config(transports=("stream",), listen=address))
        prefilled(again, 40)
        return again

    return target, request, back


def test_a_failure_that_passes_is_tried_again(engine: Make) -> None:
    """G2: into the same blocks, whose cut-off is behind them; vLLM hears of the end only."""
    clock = [0.0]
    target, _, back = source_that_comes_back(engine, clock)
    source = back()
    for _ in range(5):
        target.step()
    assert target.loaded == [], "not before its pause is over"
    clock[0] = 1.0
    run(source, target, until=lambda: not target.waiting)
    assert (target.loaded, target.failed, target.ranks[0].tally.retries) == (["cmpl-d"], set(), 1)
    assert target.contents[0].check(Prompt(seed=7, tokens=40), INTO[:3]) is None


def test_an_abort_between_two_tries_ends_the_load(engine: Make) -> None:
    """A2: nothing is outstanding, so its end is reported at once, and no try follows."""
    clock = [0.0]
    target, request, _ = source_that_comes_back(engine, clock)
    target.end(request)
    target.step()
    assert target.loaded == ["cmpl-d"]
    clock[0] = 1.0
    target.step()
    assert (target.loaded, target.ranks[0]._loads) == (["cmpl-d"], {})


def test_blocks_may_be_given_to_another_request_at_once(engine: Make) -> None:
    """A5: vLLM alone knows what its blocks hold once a load is reported, also where a request is preempted."""
    source, target = engine("prefill"), engine("decode")
    for request_id in ("cmpl-1", "cmpl-2"):
        request = Request(request_id, tokens(40), kv_transfer_params=prefilled(source, 40, "p" + request_id))
        target.arrive(request)
        target.admit(request, INTO[:3])
        run(source, target, until=lambda: not target.waiting)
    assert target.failed == set()


def test_an_aborted_prefill_offers_nothing(engine: Make) -> None:
    """E3: a prefill that was cut short is not there for anybody."""
    source = engine("prefill")
    request = Request("cmpl-p", tokens(75), num_computed_tokens=32, kv_transfer_params={"do_remote_decode": True})
    assert source.scheduler.request_finished(request, ([1, 2],), complete=False) == (False, None)
    assert source.scheduler.take_work().publish == []


def test_an_ordinary_request_is_left_alone(engine: Make) -> None:
    target = engine("decode")
    request = Request("cmpl", tokens(40))
    target.arrive(request)
    assert target.admit(request, INTO[:3]) == 0
    assert target.scheduler.request_finished(request, ([3],), complete=True) == (False, None)
    work = target.step()
    assert (work.fetch, work.publish, work.decline, work.cancel) == ([], [], [], [])


def test_ids_that_no_key_may_hold_are_named_by_digest(engine: Make) -> None:
    source, target = engine("prefill"), engine("decode")
    for request_id in ("ü" * 3, "x" * 400):
        params = prefilled(source, 40, request_id)
        request = Request("cmpl-d" + request_id[:1], tokens(40), kv_transfer_params=params)
        target.arrive(request)
        target.admit(request, INTO[:3])
        run(source, target, until=lambda: not target.waiting and not source.waiting)
        target.end(request)
    assert target.failed == set()


def test_a_prompt_is_named_by_its_images_too() -> None:
    """Images of one size have the same placeholders."""

    def with_image(identifier: str, offset: int) -> Request:
        feature = SimpleNamespace(identifier=identifier, mm_position=SimpleNamespace(offset=offset))
        return Request("r", tokens(40), mm_features=[feature])

    plain = facts_of(Request("r", tokens(40)), 40)
    assert facts_of(with_image("a", 3), 40) != facts_of(with_image("b", 3), 40) != plain
    assert facts_of(with_image("a", 30), 20) == facts_of(Request("r", tokens(40)), 20), "an image further on"
    assert facts_of(Request("r", None), 0).prompt_digest is None


def test_settings_are_the_links_and_the_adapters() -> None:
    read = Settings.read({"integrity": False, "weights_revision": "r2", "fetch_seconds": 5, "claim_ttl_seconds": 9})
    assert (read.link.integrity, read.link.claim_ttl_seconds, read.weights_revision, read.fetch_seconds) == (
        False,
        9,
        "r2",
        5,
    )
    for wrong in ({"revision": "r2"}, {"weights_revision": 2}, {"fetch_seconds": 0}, {"model": ""}, {"listen": "x"}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            Settings.read(wrong)


def test_labels_do_not_grow_at_a_peers_will() -> None:
    tally = Tally()
    for difference in ("identity.rope.theta", 'x"} 1\n', "a" * 65, ""):
        tally.failed("mismatch", difference)
    assert tally.take() == {
        "fetch_seconds": [], "fetch_bytes": [], "streamed_bytes": 0, "exposed_seconds": [], "retries": 0, "sends": {},
        "failures": {"mismatch|identity.rope.theta": 1, "mismatch|other": 2, "mismatch|": 1},
    }  # fmt: skip
    assert tally.take() is None
