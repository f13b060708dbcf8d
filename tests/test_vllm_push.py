"""vLLM's push without vLLM: the halves of two engines, stepped as vLLM steps them, one computing for the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from step_engine import MODEL, Request, StepEngine, run

from kvlink import Config
from kvlink.adapters.vllm.messages import StepWork
from kvlink.adapters.vllm.outgoing import PUSH_FIELD, Outgoing
from kvlink.adapters.vllm.requests import GroupView
from kvlink.adapters.vllm.settings import Settings
from kvlink.cli.bench.content import Prompt
from kvlink.errors import ConfigError

Make = Callable[..., StepEngine]
CONFIG = Config(transports=("stream",))
TOKENS = 75
CHUNK = 32
TOKEN_BYTES = MODEL.num_layers * 2 * MODEL.num_kv_heads * MODEL.head_dim * 2
FROM = (9, 2, 17, 4, 11)
LATER = (40, 41, 42, 43, 44)
"""Where a request lies after it was preempted."""
INTO = (3, 8, 13, 18, 23)
PROMPT = Prompt(seed=7, tokens=TOKENS)
_keys = count()


@pytest.fixture
def engine() -> Iterator[Make]:
    with ExitStack() as stack:

        def make(name: str, **fields: Any) -> StepEngine:
            made = StepEngine(name, **{"layers": True} | fields)
            stack.callback(made.close)
            return made

        yield make


def tokens(number: int = TOKENS, seed: int = 0) -> list[int]:
    return [(seed + 31 * index) % 512 for index in range(number)]


def both_sides(source: StepEngine, ids: list[int] | None = None) -> tuple[Request, Request]:
    """One prompt as its two engines get it from a router that knows the prefill engine."""
    key = f"router-{next(_keys)}"
    asked = {"do_remote_decode": True, PUSH_FIELD: key}
    there = Request("cmpl-p", ids or tokens(), kv_transfer_params=asked)
    here = Request("cmpl-d", ids or tokens(), kv_transfer_params=source.scheduler._standing(asked))
    return there, here


def blocks_for(engine: StepEngine, blocks: tuple[int, ...], number: int = TOKENS) -> tuple[int, ...]:
    return blocks[: -(-number // engine.block_size)]


def compute(source: StepEngine, request: Request, blocks: tuple[int, ...], *others: StepEngine) -> None:
    """Chunked prefill, a chunk a step, while the other engines step too."""
    for upto in (*range(CHUNK, TOKENS, CHUNK), TOKENS):
        source.compute(request, PROMPT, blocks_for(source, blocks, upto), upto)
        run_once(source, *others)


def run_once(*engines: StepEngine) -> None:
    for engine in engines:
        engine.step()


def moved(target: StepEngine) -> int:
    """Bytes that have landed in the first rank's cache."""
    return int(target.ranks[0]._bridge.stats().counters["bytes_moved"])


def settled(*engines: StepEngine) -> Callable[[], bool]:
    return lambda: not any(engine.waiting for engine in engines)


def check(target: StepEngine) -> None:
    blocks = blocks_for(target, INTO)
    assert all(content.check(PROMPT, blocks) is None for content in target.contents)


@pytest.mark.parametrize(("source_tp", "target_tp"), [(1, 1), (2, 1), (1, 2), (2, 4)])
@pytest.mark.parametrize(("source_block", "target_block"), [(16, 32), (32, 16)])
@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_a_prompt_is_pushed_whole(
    engine: Make, source_tp: int, target_tp: int, source_block: int, target_block: int, first: str
) -> None:
    """D1, D4: whichever of the two engines hears of it first; every rank reports once, at its end."""
    layers = source_block == 16
    source = engine("prefill", tp=source_tp, block_size=source_block, layers=layers)
    target = engine("decode", tp=target_tp, block_size=target_block, layout="fused", canary=0x5A)
    there, here = both_sides(source)
    if first == "decode":
        target.arrive(here)
        assert target.admit(here, blocks_for(target, INTO)) == TOKENS
        run_once(target)
    source.arrive(there)
    compute(source, there, FROM, target)
    params = source.finish(there, blocks_for(source, FROM))
    if first == "prefill":
        target.arrive(here)
        assert target.admit(here, blocks_for(target, INTO)) == TOKENS
    run(source, target, until=settled(source, target))
    assert (source.sent, target.loaded, target.failed) == (["cmpl-p"], ["cmpl-d"], set())
    assert params == here.kv_transfer_params, "a router may as well learn them from the answer"
    check(target)
    target.end(here)


def test_what_is_pushed_before_the_request_ends_is_reported_after(engine: Make) -> None:
    """VLLM's scheduler must have ended a request before any rank reports it: else the engine ends."""
    source, target = engine("prefill"), engine("decode", canary=0x5A)
    there, here = both_sides(source)
    source.arrive(there)
    target.arrive(here)
    target.admit(here, INTO)
    compute(source, there, FROM, target)
    run(source, target, until=settled(target))
    for _ in range(20):
        source.step()
    assert source.sent == []
    source.finish(there, FROM)
    run(source, until=settled(source))
    check(target)


def test_a_prefix_that_is_here_is_not_pushed(engine: Make) -> None:
    source, target = engine("prefill"), engine("decode", canary=0x5A)
    there, here = both_sides(source)
    source.arrive(there)
    target.arrive(here)
    assert target.admit(here, INTO, computed=32) == 43
    compute(source, there, FROM, target)
    source.finish(there, FROM)
    run(source, target, until=settled(source, target))
    assert target.contents[0].check_wiped(INTO[:2]) is None
    (bytes_moved,) = target.ranks[0].tally.fetch_bytes
    assert bytes_moved == 43 * TOKEN_BYTES


def test_a_chunk_is_there_while_the_next_is_not_even_scheduled(engine: Make) -> None:
    source, target = engine("prefill"), engine("decode", canary=0x5A)
    there, here = both_sides(source)
    target.arrive(here)
    target.admit(here, INTO)
    source.arrive(there)
    source.compute(there, PROMPT, FROM, CHUNK)
    run(source, target, until=lambda: moved(target) == CHUNK * TOKEN_BYTES)
    assert target.loaded == []
    compute(source, there, FROM, target)
    source.finish(there, FROM)
    run(source, target, until=settled(source, target))
    tally = target.ranks[0].tally
    assert CHUNK * TOKEN_BYTES <= tally.streamed_bytes <= sum(tally.fetch_bytes) == TOKENS * TOKEN_BYTES
    assert len(tally.exposed_seconds) == 1
    check(target)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("steps", [1, 2])
def test_a_preempted_prefill_begins_anew(engine: Make, steps: int, tp: int) -> None:
    """A6: its blocks are another request's within the step; none of what was read of them is ever installed."""
    source, target = engine("prefill", tp=tp), engine("decode", canary=0x5A)
    there, here = both_sides(source)
    target.arrive(here)
    target.admit(here, INTO)
    source.arrive(there)
    for step in range(steps):
        source.compute(there, PROMPT, FROM, CHUNK * (step + 1))
        run_once(source, target)
    run(source, target, until=lambda: moved(target) >= CHUNK * TOKEN_BYTES)
    source.preempt(there, FROM)
    for _ in range(5):
        run_once(source, target)
    compute(source, there, LATER, target)
    source.finish(there, LATER)
    run(source, target, until=settled(source, target))
    assert (source.sent, target.loaded, target.failed) == (["cmpl-p"], ["cmpl-d"], set())
    check(target)


def test_a_prefill_preempted_after_it_was_installed_is_sent_once(engine: Make) -> None:
    """VLLM schedules ahead: a request may be preempted after its last step, and is then computed again for nobody."""
    source, target = engine("prefill"), engine("decode", canary=0x5A)
    there, here = both_sides(source)
    target.arrive(here)
    target.admit(here, INTO)
    source.arrive(there)
    compute(source, there, FROM, target)
    run(source, target, until=settled(target))
    source.preempt(there, FROM)
    compute(source, there, LATER, target)
    source.finish(there, LATER)
    run(source, target, until=settled(source), timeout_seconds=5)
    assert source.ranks[0].tally.sends == {"done": 1}
    check(target)


def test_a_prefill_preempted_before_it_was_asked_for_is_pushed(engine: Make) -> None:
    """Sealed, and preempted with nobody there yet."""
    source, target = engine("prefill"), engine("decode", canary=0x5A)
    there, here = both_sides(source)
    source.arrive(there)
    compute(source, there, FROM)
    source.preempt(there, FROM)
    run_once(source)
    target.arrive(here)
    target.admit(here, INTO)
    compute(source, there, LATER, target)
    source.finish(there, LATER)
    run(source, target, until=settled(source, target))
    assert target.failed == set()
    check(target)


@pytest.mark.parametrize("chunks", [0, 1])
def test_an_aborted_prefill_is_pushed_to_nobody(engine: Make, chunks: int) -> None:
    """B5, E3: its blocks are held until its readers are cut off; whoever waited fails within a few tries."""
    source, target = engine("prefill", tp=2), engine("decode")
    there, here = both_sides(source)
    target.arrive(here)
    target.admit(here, INTO)
    source.arrive(there)
    run_once(source, target)
    if chunks:
        source.compute(there, PROMPT, FROM, CHUNK)
        run_once(source, target)
    source.end(there)
    assert source.waiting == {"cmpl-p"}
    run(source, target, until=settled(source, target), timeout_seconds=10)
    assert (source.sent, target.loaded, target.failed) == (["cmpl-p"], ["cmpl-d"], {"cmpl-d"})
    assert list(target.ranks[0].tally.failures) == ["cancelled|"]


def test_a_prefill_aborted_before_its_first_step_was_never_announced(engine: Make) -> None:
    source = engine("prefill")
    there, _ = both_sides(source)
    source.arrive(there)
    source.end(there)
    work = source.step()
    assert (source.waiting, work.announce, work.withdraw) == (set(), [], [])


@pytest.mark.parametrize("stage", ["queued", "full local hit", "waiting", "computing"])
def test_a_decode_that_is_aborted_lets_its_source_go(engine: Make, stage: str) -> None:
    """A2, B2, B4: the source goes on computing for nobody, and its blocks come back as soon as it ends."""
    source, target = engine("prefill"), engine("decode")
    there, here = both_sides(source)
    target.arrive(here)
    if stage == "full local hit":
        assert target.admit(here, INTO, computed=TOKENS) == 0
    elif stage != "queued":
        target.admit(here, INTO)
    run_once(target)
    if stage == "computing":
        source.arrive(there)
        source.compute(there, PROMPT, FROM, CHUNK)
        run(source, target, until=lambda: not source._scheduled)
    if stage != "full local hit":
        target.end(here)
    run(target, until=settled(target))
    if stage != "computing":
        source.arrive(there)
    compute(source, there, FROM, target)
    source.finish(there, FROM)
    run(source, target, until=settled(source), timeout_seconds=5)
    assert (source.sent, target.failed <= {"cmpl-d"}) == (["cmpl-p"], True)


def test_a_push_that_nobody_takes_ends_by_itself(engine: Make) -> None:
    """B1: nobody brought a ticket, or declined."""
    source = engine("prefill", config=replace(CONFIG, claim_ttl_seconds=0.3))
    there, _ = both_sides(source)
    source.arrive(there)
    compute(source, there, FROM)
    source.finish(there, FROM)
    run(source, until=settled(source), timeout_seconds=5)
    assert source.ranks[0].tally.sends == {"expired": 1}


def test_a_reset_takes_back_what_was_not_taken(engine: Make) -> None:
    """K4: weights change: KV of the old ones is pushed to nobody who comes later."""
    source, target = engine("prefill"), engine("decode")
    there, here = both_sides(source)
    source.arrive(there)
    compute(source, there, FROM)
    source.finish(there, FROM)
    source.scheduler.reset()
    run(source, until=settled(source), timeout_seconds=5)
    assert source.ranks[0].tally.sends == {"cancelled": 1}
    target.arrive(here)
    target.admit(here, INTO)
    run(source, target, until=settled(target), timeout_seconds=5)
    assert target.failed == {"cmpl-d"}


@pytest.mark.parametrize("admitted", [False, True])
def test_a_push_is_renewed_while_its_decode_or_its_prefill_queues(engine: Make, admitted: bool) -> None:
    """B7: neither an engine's queue nor a slow prefill burns the time in which the other keeps its promise."""
    config = replace(CONFIG, claim_ttl_seconds=0.5)
    source, target = engine("prefill", config=config), engine("decode", config=config, canary=0x5A)
    there, here = both_sides(source)
    target.arrive(here)
    source.arrive(there)
    if admitted:
        target.admit(here, INTO)
    rounds: list[int] = []
    run(source, target, until=lambda: bool(rounds.append(1)) or len(rounds) > 900, timeout_seconds=30)
    if not admitted:
        target.admit(here, INTO)
    compute(source, there, FROM, target)
    source.finish(there, FROM)
    run(source, target, until=settled(source, target))
    assert target.failed == set()
    check(target)


def test_a_prefill_that_never_begins_fails_the_decode_within_its_bound(engine: Make) -> None:
    source, target = engine("prefill"), engine("decode", push_seconds=0.5)
    _, here = both_sides(source)
    target.arrive(here)
    target.admit(here, INTO)
    run(source, target, until=settled(target), timeout_seconds=5)
    assert list(target.ranks[0].tally.failures) == ["expired|"]
    assert [(load.request_id, load.blocks) for load in target.scrubbed] == [("cmpl-d", (INTO,))]


def test_a_source_that_dies_while_it_computes_fails_the_decode(engine: Make) -> None:
    """C1, C7: in bounded time."""
    source, target = engine("prefill"), engine("decode")
    there, here = both_sides(source)
    target.arrive(here)
    target.admit(here, INTO)
    source.arrive(there)
    source.compute(there, PROMPT, FROM, CHUNK)
    run_once(source, target)
    run_once(source, target)
    source.close()
    run(target, until=settled(target))
    assert target.failed == {"cmpl-d"}


def test_two_prompts_under_one_key_are_not_taken_for_each_other(engine: Make) -> None:
    """G4: a router that repeats a key."""
    source, target = engine("prefill"), engine("decode")
    there, here = both_sides(source)
    here.prompt_token_ids = tokens(seed=1)
    target.arrive(here)
    target.admit(here, INTO)
    source.arrive(there)
    compute(source, there, FROM, target)
    source.finish(there, FROM)
    run(source, target, until=settled(source, target))
    assert list(target.ranks[0].tally.failures) == ["mismatch|facts.prompt_digest"]


def test_a_secret_signs_both_ways(engine: Make) -> None:
    """K2: who prefills, and the ticket; a claim of another secret is refused before anything is dialled."""
    config = Config(transports=("stream",), secret=b"the same on every rank")
    source, target = engine("prefill", config=config), engine("decode", config=config, canary=0x5A)
    there, here = both_sides(source)
    source.arrive(there)
    target.arrive(here)
    target.admit(here, INTO)
    compute(source, there, FROM, target)
    source.finish(there, FROM)
    run(source, target, until=settled(source, target))
    check(target)
    target.end(here)
    stranger = engine("stranger", config=Config(transports=("stream",), secret=b"another one, and as long"))
    _, here = both_sides(stranger)
    target.arrive(here)
    target.admit(here, INTO)
    run(target, until=settled(target))
    assert target.ranks[0].tally.failures == {"authentication|": 1}


@pytest.mark.parametrize("key", ["", "ü", "x" * 300, 7])
def test_what_is_no_key_fails_its_request_only(engine: Make, key: object) -> None:
    source, target = engine("prefill"), engine("decode")
    there, here = both_sides(source)
    for request in (there, here):
        assert request.kv_transfer_params is not None
        request.kv_transfer_params[PUSH_FIELD] = key
    source.arrive(there)
    assert source.step().announce == []
    target.arrive(here)
    target.admit(here, INTO)
    run(target, until=settled(target))
    assert list(target.ranks[0].tally.failures) == ["schema|"]


def test_a_prompt_without_ids_is_not_pushed(engine: Make) -> None:
    """Nothing would tell two of one length apart."""
    source, target = engine("prefill"), engine("decode")
    there, here = both_sides(source)
    there.prompt_token_ids = here.prompt_token_ids = None
    source.arrive(there)
    assert source.step().announce == []
    target.arrive(here)
    assert next(iter(target.scheduler._incoming.values())).refusal is not None


def test_nothing_is_streamed_that_is_zeroed_for_others() -> None:
    """VLLM zeroes a preempted request's blocks before the ranks hear of it: it moves when it has ended."""
    outgoing, work = Outgoing([GroupView("full", 0, 16, windowed=False)], 60.0, zeroed=True), StepWork()
    request = Request("r", tokens(64), kv_transfer_params={PUSH_FIELD: "k"})
    outgoing.begin(request, work)
    outgoing.step({"r": 64}, (), {"r": ([1, 2, 3, 4],)}.get, work)
    assert (len(work.announce), work.advance) == (1, [])


def test_nothing_is_streamed_out_of_a_window() -> None:
    """While a prompt is computed, blocks leave its window and are another request's: it moves when it has ended."""
    groups = [GroupView("full", 0, 16, windowed=False), GroupView("full-window32", 1, 16, windowed=True)]
    outgoing, work = Outgoing(groups, 60.0), StepWork()
    request = Request("r", tokens(64), kv_transfer_params={PUSH_FIELD: "k"})
    outgoing.begin(request, work)
    outgoing.step({"r": 64}, (), {"r": ([1, 2, 3, 4], [5, 6, 7, 8])}.get, work)
    assert (len(work.announce), work.advance) == (1, [])
    request.num_computed_tokens = 64
    later = StepWork()
    assert outgoing.finish(request, ([1, 2, 3, 4], [0, 0, 7, 8]), later, complete=True)
    assert [hand.first_tokens for hand in later.hand] == [(0, 32)]


def test_a_step_is_asked_for_while_the_ranks_have_not_heard(engine: Make) -> None:
    source = engine("prefill")
    there, _ = both_sides(source)
    assert not source.scheduler.has_push_work
    source.arrive(there)
    assert source.scheduler.has_push_work
    source.step()
    assert not source.scheduler.has_push_work
    source.end(there)
    assert source.scheduler.has_push_work
    run(source, until=settled(source))


def test_settings_of_the_push() -> None:
    read = Settings.read({"flow": "push", "push_seconds": 5})
    assert (read.flow, read.push_seconds) == ("push", 5)
    assert Settings.read({}).flow == "fetch"
    for wrong in ({"flow": "pull"}, {"flow": ["push"]}, {"push_seconds": 601}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            Settings.read(wrong)
