"""The three functions of planning that stand alone, and KV volume: contracts, boundaries, and what is refused."""

from __future__ import annotations

import msgspec
import pytest

from kvlink.errors import ConfigError
from kvlink.layout import DType
from kvlink.planning import (
    DEVICES,
    MODELS,
    LedgerEntry,
    capacity,
    evaluate_pd_decision,
    kv_bytes,
    kv_bytes_per_token,
    plan_pd_split,
    shard_bytes,
    summarize_request_mix,
    transfer_bound_seconds,
)


def entry(prompt, decode, name="r"):
    return LedgerEntry(name=name, prompt_tokens=prompt, decode_tokens=decode)


@pytest.mark.parametrize(
    ("prompt", "decode", "kind"),
    [
        (801, 100, "prefill_heavy"),
        (801, 101, "mixed"),
        (800, 101, "decode_heavy"),
        (800, 100, "mixed"),
        (10_000, 0, "prefill_heavy"),
        (0, 10_000, "decode_heavy"),
        (0, 0, "mixed"),
    ],
)
def test_a_request_is_of_the_kind_that_its_side_of_the_thresholds_says(prompt, decode, kind):
    mix = summarize_request_mix([entry(prompt, decode)], 800)
    assert mix == {"prefill_heavy": 0, "decode_heavy": 0, "mixed": 0} | {kind: 1}


def test_the_eighth_is_exact():
    """A threshold that eight does not divide: 100 / 8 is 12.5, so 12 is at most an eighth and 13 is above."""
    assert summarize_request_mix([entry(101, 12)], 100)["prefill_heavy"] == 1
    assert summarize_request_mix([entry(101, 13)], 100)["mixed"] == 1


def test_counts_add_up_and_nothing_is_nothing():
    requests = [entry(p, d) for p in range(0, 200, 7) for d in range(0, 40, 3)]
    assert sum(summarize_request_mix(requests, 100).values()) == len(requests)
    assert sum(summarize_request_mix([], 100).values()) == 0


def test_each_name_is_in_one_pool_and_order_is_kept():
    requests = [
        entry(2000, 10, "a"), entry(10, 2000, "b"), entry(2000, 2000, "c"),
        entry(10, 10, "d"), entry(1001, 100, "e"), entry(1000, 101, "f"), entry(1000, 100, "g"),
    ]  # fmt: skip
    split = plan_pd_split(requests, 1000, 100)
    assert split == {"prefill_pool": ["a", "e"], "decode_pool": ["b", "f"], "shared_pool": ["c", "d", "g"]}


def test_a_name_that_comes_twice_is_refused():
    with pytest.raises(ValueError, match="name is 'a'"):
        plan_pd_split([entry(1, 1, "a"), entry(2, 2, "a")], 10, 10)


@pytest.mark.parametrize(
    ("baseline", "split", "expected"),
    [
        ((10, 500), (12, 500), (2, 0, True)),
        ((10, 500), (12, 499.5), (2, -0.5, True)),
        ((10, 500), (12, 500.5), (2, 0.5, False)),
        ((10, 500), (10, 100), (0, -400, False)),
        ((10, 500), (9, 100), (-1, -400, False)),
    ],
)
def test_a_split_is_kept_if_it_gains_and_no_tail_grows(baseline, split, expected):
    runs = [{"throughput": t, "p95_latency_ms": p} for t, p in (baseline, split)]
    assert tuple(evaluate_pd_decision(*runs).values()) == expected


MISSING = object()


@pytest.mark.parametrize("bad", [MISSING, None, -1, float("nan"), float("inf"), "7", True])
@pytest.mark.parametrize("field", ["prompt_tokens", "decode_tokens"])
def test_a_bad_count_is_named(field, bad):
    request = {"name": "x", "prompt_tokens": 1, "decode_tokens": 1, field: bad}
    if bad is MISSING:
        del request[field]
    with pytest.raises(ValueError, match=f"^{field} is .*request 'x'"):
        summarize_request_mix([request], 10)
    with pytest.raises(ValueError, match=f"^{field} is"):
        plan_pd_split([request], 10, 10)


@pytest.mark.parametrize("bad", [MISSING, None, -0.1, float("nan"), "fast"])
@pytest.mark.parametrize("field", ["throughput", "p95_latency_ms"])
@pytest.mark.parametrize("which", [0, 1])
def test_a_bad_measure_is_named(which, field, bad):
    runs = [{"throughput": 1.0, "p95_latency_ms": 1.0} for _ in range(2)]
    runs[which][field] = bad
    if bad is MISSING:
        del runs[which][field]
    with pytest.raises(ConfigError, match=f"^{field} is"):
        evaluate_pd_decision(*runs)


@pytest.mark.parametrize(("call", "field"), [
    (lambda: summarize_request_mix([], -1), "long_prompt_threshold"),
    (lambda: plan_pd_split([], 1, None), "long_decode_threshold"),
    (lambda: plan_pd_split([], 1.5, 1), "long_prompt_threshold"),
    (lambda: kv_bytes(MODELS["llama-3-8b"], -1), "tokens"),
    (lambda: transfer_bound_seconds(1, 0), "bandwidth_bytes_per_second"),
    (lambda: transfer_bound_seconds(-1, 1), "size"),
])  # fmt: skip
def test_a_bad_argument_is_named(call, field):
    with pytest.raises(ValueError, match=f"^{field} is"):
        call()


def test_a_token_of_grouped_heads_is_two_rows_a_layer_and_head():
    assert kv_bytes_per_token(MODELS["llama-3-70b"]) == 2 * 80 * 8 * 128 * 2
    assert kv_bytes(MODELS["llama-3-70b"], 1000) == 327_680_000


def test_more_ranks_than_heads_count_their_replicas():
    model = MODELS["llama-3-8b"]
    assert kv_bytes(model, 10, tensor_parallel=8) == kv_bytes(model, 10)
    assert kv_bytes(model, 10, tensor_parallel=16) == 2 * kv_bytes(model, 10)


def test_a_latent_is_stored_once_and_on_every_rank():
    model = MODELS["deepseek-v3"]
    assert kv_bytes_per_token(model) == 61 * 576 * 2
    assert kv_bytes_per_token(model, tensor_parallel=4) == 4 * 61 * 576 * 2


def test_quantised_kv_carries_its_scales():
    model = msgspec.structs.replace(MODELS["llama-3-8b"], kv_dtype=DType.FLOAT8_E4M3, scale_bytes_per_head=8)
    assert kv_bytes_per_token(model) == 32 * 8 * (2 * 128 + 8)


def test_the_fullest_rank_has_the_heads_and_layers_left_over():
    model = MODELS["llama-3-8b"]
    assert shard_bytes(model, 1, tensor_parallel=3, pipeline_parallel=5) == 7 * 3 * 2 * 128 * 2
    assert shard_bytes(model, 1, tensor_parallel=16) == 32 * 1 * 2 * 128 * 2


def test_the_bound_is_bytes_over_bandwidth():
    assert transfer_bound_seconds(5_000_000_000, 50e9) == 0.1


def test_room_is_what_the_weights_leave():
    room = capacity(MODELS["llama-3-70b"], DEVICES["h100-sxm"], devices=4, request_tokens=10_000)
    assert room.tokens == int((4 * 80e9 * 0.9 - 70.6e9 * 2) // 327_680)
    assert room.requests == room.tokens // 10_000
    with pytest.raises(ValueError, match="do not fit into 1 x h100-sxm"):
        capacity(MODELS["llama-3-70b"], DEVICES["h100-sxm"], devices=1, request_tokens=1)
