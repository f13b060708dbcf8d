"""Requests that are prefilled here and pushed, in the scheduler's process: what the ranks are told, step by step.

A request is *announced* when it arrives, *advances* with every step that computes more of its prompt, begins anew when
it is preempted, and is *handed* over when it ends, with its blocks held until every rank has reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvlink.adapters.vllm.messages import Advance, Announce, Hand, StepWork
from kvlink.adapters.vllm.requests import EngineRequest, GroupView, facts_of, window_start
from kvlink.descriptor import Facts
from kvlink.errors import SchemaError
from kvlink.limits import MAX_KEY_BYTES

PUSH_FIELD: Final = "kvlink_push"
"""In transfer parameters: the key of a request that is pushed. Whoever routes it makes one up and gives it to both
engines; it must be another one for every request."""


@dataclass(slots=True)
class _Push:
    request: EngineRequest
    announce: Announce
    told: int = 0


class Outgoing:
    """One engine's pushes. Every method is called on the scheduler's thread.

    Args:
        groups: in the order of KVLink's groups.
        ttl_seconds: how long an announcement, and what it has come to, waits for a reader.
        zeroed: whether vLLM zeroes blocks that it gives to a request.
    """

    def __init__(self, groups: Sequence[GroupView], ttl_seconds: float, *, zeroed: bool = False) -> None:
        self._groups = tuple(groups)
        self._ttl_seconds = ttl_seconds
        # Blocks leave a window, and are another request's, while the prompt is computed; and of a preempted request,
        # they may be zeroed before the ranks hear of it. Then nobody may read them until the request has ended.
        self._streams = not zeroed and not any(group.windowed for group in groups)
        self._pushes: dict[str, _Push] = {}

    def begin(self, request: EngineRequest, work: StepWork) -> None:
        """A request has arrived whose KV is to be pushed.

        Raises:
            SchemaError: its key is no key, or its prompt has no token ids by which the other side could know it.
        """
        key = push_key(request.kv_transfer_params or {})
        if key is None or request.request_id in self._pushes:
            return
        tokens = request.num_prompt_tokens
        announce = Announce(request.request_id, key, tokens, pushed_facts(request), self._ttl_seconds)
        self._pushes[request.request_id] = _Push(request, announce)
        work.announce.append(announce)

    def step(
        self,
        scheduled: Mapping[str, int],
        preempted: Iterable[str],
        blocks_of: Callable[[str], Sequence[Sequence[int]] | None],
        work: StepWork,
    ) -> None:
        """VLLM has scheduled a step.

        Args:
            scheduled: how many tokens it computes of each request.
            preempted: requests whose blocks it gives to others.
            blocks_of: a scheduled request's blocks, one list a group of vLLM's.
            work: what the ranks are told.
        """
        for request_id in preempted:
            push = self._pushes.get(request_id)
            if push is not None and push.told:
                push.told = 0
                work.preempted.append(request_id)
        if not self._streams or not self._pushes:
            return
        for request_id, count in scheduled.items():
            push = self._pushes.get(request_id)
            if push is None:
                continue
            tokens = min(push.request.num_computed_tokens + count, push.announce.tokens)
            blocks = blocks_of(request_id)
            if tokens > push.told and blocks is not None:
                push.told = tokens
                work.advance.append(Advance(request_id, self._lists(blocks), tokens))

    def finish(
        self, request: EngineRequest, blocks: Sequence[Sequence[int]], work: StepWork, *, complete: bool
    ) -> bool | None:
        """A request ended; whether its blocks are held until every rank has reported, or ``None`` if it is no push."""
        push = self._pushes.pop(request.request_id, None)
        if push is None:
            return None
        if push.announce in work.announce:  # no rank has heard of it
            work.announce.remove(push.announce)
            return False
        if complete and request.num_computed_tokens >= push.announce.tokens:
            lists = self._lists(blocks)
            starts = tuple(window_start(group, ids) for group, ids in zip(self._groups, lists, strict=True))
            work.hand.append(Hand(request.request_id, lists, push.announce.tokens, starts))
        else:
            work.withdraw.append(request.request_id)
        return True

    def _lists(self, blocks: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(blocks[group.index]) for group in self._groups)


def push_key(params: Mapping[str, Any]) -> str | None:
    """The key under which a request is pushed, if it is.

    Raises:
        SchemaError: what stands there is no key.
    """
    key = params.get(PUSH_FIELD)
    if key is None:
        return None
    if not (isinstance(key, str) and key and key.isascii() and key.isprintable() and len(key) <= MAX_KEY_BYTES):
        raise SchemaError(f"{PUSH_FIELD!r} must be printable ASCII of 1 to {MAX_KEY_BYTES} characters, and is not")
    return key


def pushed_facts(request: EngineRequest) -> Facts:
    """What both sides state of a pushed request, and compare.

    Raises:
        SchemaError: a prompt without token ids: two of one length could be taken for each other.
    """
    facts = facts_of(request, request.num_prompt_tokens)
    if facts.prompt_digest is None:
        raise SchemaError("a prompt given as embeddings cannot be pushed: it has no token ids to know it by")
    return facts
