"""The scheduler's half: decides on pure data (offers, rosters, blocks); no link, no thread, nothing that waits.

A request that arrives with an offer is *queued* until vLLM gives it blocks, then *loading* until every rank has
reported, then *settled*. What the ranks are to do is collected in a `StepWork`, which vLLM takes to them with the step.
"""

from __future__ import annotations

import hashlib
import logging
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Protocol

from kvlink.adapters.vllm.messages import Decline, Fetch, Publish, Refused, StepWork
from kvlink.config import Config
from kvlink.descriptor import Facts
from kvlink.errors import KVLinkError, MismatchError
from kvlink.layout import Identity
from kvlink.limits import DIGEST_SCHEME, MAX_KEY_BYTES, RENEWALS_PER_CLAIM
from kvlink.wire import Offer, Roster, request_key

NULL_BLOCK: Final = 0
"""vLLM's block for positions that have left a window."""
NO_ADAPTER: Final = ""
"""Stated by a request without LoRA, so that its KV is not taken for an adapter's, nor the reverse."""

_log: Final = logging.getLogger("kvlink.adapters.vllm")


class EngineRequest(Protocol):
    """What is read of vLLM's ``Request``."""

    request_id: str
    prompt_token_ids: Sequence[int] | None
    num_prompt_tokens: int
    num_computed_tokens: int
    kv_transfer_params: dict[str, Any] | None
    lora_request: Any
    mm_features: Sequence[Any]


@dataclass(frozen=True, slots=True)
class GroupView:
    """What the scheduler must know of one KVLink group.

    Attributes:
        name: KVLink's name of the group.
        index: which of vLLM's block lists is the group's.
        block_size: positions in a block.
        windowed: whether blocks before a window are given back, and stand as null blocks.
    """

    name: str
    index: int
    block_size: int
    windowed: bool


class _Stage(Enum):
    QUEUED = "queued"
    LOADING = "loading"
    SETTLED = "settled"


@dataclass(slots=True)
class _Incoming:
    """A request whose prefill is elsewhere.

    ``offer`` is there once it is known who made it; with a ``refusal`` it is only declined.
    """

    offer: Offer | None
    refusal: KVLinkError | None
    tokens: int
    stage: _Stage = _Stage.QUEUED


class SchedulerHalf:
    """One engine's decisions. Every method is called on the scheduler's thread.

    Args:
        groups: in the order of KVLink's groups.
        identity: the model, as this engine's ranks state it.
        config: for the secret, the time to live of offers, and whether KV is digested.
        clock: monotonic seconds; only the pace of renewals hangs on it.
    """

    def __init__(
        self, groups: Sequence[GroupView], identity: Identity, config: Config, clock: Callable[[], float]
    ) -> None:
        self._groups = tuple(groups)
        self._identity = identity
        self._config = config
        self._clock = clock
        self._roster: Roster | None = None
        self._incoming: dict[str, _Incoming] = {}
        self._work = StepWork()
        self._renew_at = clock()

    def set_cards(self, cards: Iterable[bytes]) -> None:
        """Take the cards of all ranks of this engine; offers can be made from now on.

        Raises:
            KVLinkError: they are not one engine's, or a rank is missing.
        """
        cards = tuple(cards)
        self._roster = Roster.of(cards)
        if len(cards) > 1:
            self._work.siblings = cards

    # --- a request whose prefill is elsewhere -----------------------------------------------------------------------

    def on_new_request(self, request: EngineRequest) -> None:
        """Read the offer of a request that is new here; from now on it is renewed until blocks are there."""
        params = request.kv_transfer_params
        if params is None or not params.get("do_remote_prefill") or request.request_id in self._incoming:
            return
        offer: Offer | None = None
        refusal: KVLinkError | None = None
        try:
            offer = self._verified(params)
            self._check(offer, request)
        except KVLinkError as error:
            refusal = error
            _log.warning("request %s: its offer is refused: %s", request.request_id, error)
        count = request.num_prompt_tokens if offer is None or refusal is not None else offer.tokens
        self._incoming[request.request_id] = _Incoming(offer, refusal, count)

    def matched_tokens(self, request: EngineRequest, computed_tokens: int) -> int:
        """How many positions past ``computed_tokens`` can be loaded. Changes nothing; may be asked again.

        A refused offer is answered like a good one: its load then fails on every rank, and vLLM's own policy
        (``kv_load_failure_policy``) says whether the request fails or is computed here.
        """
        incoming = self._incoming.get(request.request_id)
        if incoming is None or incoming.stage is not _Stage.QUEUED:
            return 0
        return max(0, incoming.tokens - computed_tokens)

    def blocks_given(self, request: EngineRequest, blocks: Sequence[Sequence[int]], external_tokens: int) -> None:
        """VLLM gave the request blocks, one list a group of its own, for ``external_tokens`` that are to be loaded."""
        request_id = request.request_id
        incoming = self._incoming.get(request_id)
        if incoming is None or incoming.stage is not _Stage.QUEUED:
            return
        if external_tokens == 0:
            incoming.stage = _Stage.SETTLED
            self._decline(incoming, "all of it is here already")
            return
        incoming.stage = _Stage.LOADING
        if incoming.offer is None or incoming.refusal is not None:
            self._work.refused.append(_refused(request_id, incoming.refusal))
            self._decline(incoming, "the offer is refused")
            return
        first = incoming.tokens - external_tokens
        lists = tuple(tuple(blocks[group.index]) for group in self._groups)
        starts = tuple(
            max(first, _window_start(group, ids)) for group, ids in zip(self._groups, lists, strict=True)
        )  # fmt: skip
        self._work.fetch.append(Fetch(request_id, incoming.offer.to_bytes(), lists, starts))

    def loads_ended(self, request_ids: Iterable[str]) -> None:
        """Every rank has reported these loads, good or bad."""
        for request_id in request_ids:
            incoming = self._incoming.get(request_id)
            if incoming is not None:
                incoming.stage = _Stage.SETTLED

    # --- a request that ends here -----------------------------------------------------------------------------------

    def request_finished(
        self, request: EngineRequest, blocks: Sequence[Sequence[int]], *, complete: bool
    ) -> dict[str, Any] | None:
        """A request ended here, by abort or well.

        Args:
            request: the request.
            blocks: one list a group of vLLM's, what it holds.
            complete: whether its prompt was computed to the end, rather than aborted.

        Returns:
            Transfer parameters if its blocks are held for whoever fetches them, until every rank has reported their
            end; else ``None``: the blocks are vLLM's at once.
        """
        self._forget(request.request_id)
        params = request.kv_transfer_params
        if params is None or not params.get("do_remote_decode") or not complete:
            return None
        try:
            offer = self._offer(request, blocks)
            published = None if offer is None else (offer.to_bytes(), offer.to_params())
        except KVLinkError as error:
            _log.error("request %s: its KV cannot be offered: %s", request.request_id, error)
            return None
        if published is None:
            return None
        self._work.publish.append(Publish(request.request_id, published[0]))
        return published[1]

    # --- a step -----------------------------------------------------------------------------------------------------

    def take_work(self) -> StepWork:
        """What the ranks are to do in this step; the next step starts empty."""
        now = self._clock()
        if now >= self._renew_at:
            self._renew_at = now + self._config.claim_ttl_seconds / RENEWALS_PER_CLAIM
            self._work.renew = [
                incoming.offer.to_bytes()
                for incoming in self._incoming.values()
                if incoming.stage is _Stage.QUEUED and incoming.offer is not None
            ]
        work, self._work = self._work, StepWork()
        return work

    # --- inside -----------------------------------------------------------------------------------------------------

    def _verified(self, params: Mapping[str, Any]) -> Offer:
        offer = Offer.from_params(params)
        if self._config.secret is not None:
            offer.verify(self._config.secret)
        return offer

    def _check(self, offer: Offer, request: EngineRequest) -> None:
        """Refuse KV of another model, prompt or adapter."""
        if offer.tokens > request.num_prompt_tokens:
            raise MismatchError(
                "prompt_tokens", offer.tokens, request.num_prompt_tokens,
                source=offer.roster.engine, request_id=offer.key, stage="claim",
            )  # fmt: skip
        difference = offer.check(facts_of(request, offer.tokens), self._identity)
        if difference is not None:
            raise difference

    def _offer(self, request: EngineRequest, blocks: Sequence[Sequence[int]]) -> Offer | None:
        tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        if tokens == 0 or self._roster is None:
            return None
        lists = tuple(tuple(blocks[group.index]) for group in self._groups)
        starts = tuple(_window_start(group, ids) for group, ids in zip(self._groups, lists, strict=True))
        offer = Offer(
            key=_key(self._roster.incarnation, request.request_id),
            roster=self._roster,
            blocks=lists,
            tokens=tokens,
            group_first_tokens=starts if any(starts) else (),
            facts=facts_of(request, tokens),
            ttl_seconds=self._config.claim_ttl_seconds,
            digest_scheme=DIGEST_SCHEME if self._config.integrity else None,
        )
        return offer if self._config.secret is None else offer.sign(self._config.secret)

    def _forget(self, request_id: str) -> None:
        """Whatever the request still wants of a source: nobody here will take it any more."""
        incoming = self._incoming.pop(request_id, None)
        if incoming is None:
            return
        if incoming.stage is _Stage.QUEUED:
            self._decline(incoming, "the request ended while it was queued")
        elif incoming.stage is _Stage.LOADING:
            self._work.cancel.append(request_id)

    def _decline(self, incoming: _Incoming, why: str) -> None:
        if incoming.offer is not None:
            self._work.decline.append(Decline(incoming.offer.to_bytes(), why))


def facts_of(request: EngineRequest, tokens: int) -> Facts:
    """What an engine states of the first ``tokens`` positions of a request: which prompt, and which adapter.

    A prompt given as embeddings has no ids to name it by, and is not stated.
    """
    digest = None
    if request.prompt_token_ids is not None:
        named = hashlib.sha256(array("q", request.prompt_token_ids[:tokens]).tobytes())
        for feature in request.mm_features or ():  # images of one size have the same ids
            if feature.mm_position.offset < tokens:
                named.update(feature.identifier.encode())
        digest = named.hexdigest()
    adapter = NO_ADAPTER if request.lora_request is None else str(request.lora_request.lora_name)
    return Facts(prompt_digest=digest, adapter=adapter)


def _key(incarnation: str, request_id: str) -> str:
    """Request ids may be a client's own text: what cannot be part of a key is named by its digest."""
    if not (request_id.isascii() and request_id.isprintable()) or len(request_id) > MAX_KEY_BYTES // 2:
        request_id = hashlib.sha256(request_id.encode("utf-8", "surrogatepass")).hexdigest()
    return request_key(incarnation, request_id)


def _window_start(group: GroupView, blocks: Sequence[int]) -> int:
    """First position that a block is there for."""
    gone = 0
    if group.windowed:
        while gone < len(blocks) and blocks[gone] == NULL_BLOCK:
            gone += 1
    return gone * group.block_size


def _refused(request_id: str, error: KVLinkError | None) -> Refused:
    field = error.field if isinstance(error, MismatchError) else ""
    return Refused(request_id, "error" if error is None else error.code, field, str(error))
