"""The scheduler's half: decides on pure data (offers, rosters, blocks); no link, no thread, nothing that waits.

A request that arrives with an offer is *queued* until vLLM gives it blocks, then *loading* until every rank has
reported, then *settled*. One that will be pushed is the same, with a ticket of ours in place of the other's offer.
What the ranks are to do is collected in a `StepWork`, which vLLM takes to them with the step.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from msgspec.structs import replace

from kvlink.adapters.vllm.messages import Decline, Fetch, Publish, Refused, StepWork
from kvlink.adapters.vllm.outgoing import PUSH_FIELD, Outgoing, push_key, pushed_facts
from kvlink.adapters.vllm.requests import EngineRequest, GroupView, facts_of, window_start
from kvlink.config import Config
from kvlink.errors import ConfigError, KVLinkError, MismatchError
from kvlink.layout import Identity
from kvlink.limits import DIGEST_SCHEME, MAX_KEY_BYTES, PUSH_DEADLINE_SECONDS, RENEWALS_PER_CLAIM
from kvlink.wire import Offer, Roster, Ticket, request_key

STANDING_ID: Final = "standing"
"""Request id of an offer of nothing, which tells routers and their decode engines who prefills here."""

_log: Final = logging.getLogger("kvlink.adapters.vllm")


class _Stage(Enum):
    QUEUED = "queued"
    LOADING = "loading"
    SETTLED = "settled"


@dataclass(slots=True)
class _Incoming:
    """A request whose prefill is elsewhere.

    ``offer`` is there once it is known who made it; with a ``refusal`` it is only declined. Of a ``push`` it says who
    prefills, and under which key.
    """

    offer: Offer | None
    refusal: KVLinkError | None
    tokens: int
    push: bool
    stage: _Stage = _Stage.QUEUED


class SchedulerHalf:
    """One engine's decisions. Every method is called on the scheduler's thread.

    Args:
        groups: in the order of KVLink's groups.
        identity: the model, as this engine's ranks state it.
        config: for the secret, the time to live of offers, and whether KV is digested.
        clock: monotonic seconds; only the pace of renewals hangs on it.
        push_seconds: how long a ticket stands.
        zeroed: whether vLLM zeroes blocks that it gives to a request.
    """

    def __init__(
        self,
        groups: Sequence[GroupView],
        identity: Identity,
        config: Config,
        clock: Callable[[], float],
        *,
        push_seconds: float = PUSH_DEADLINE_SECONDS,
        zeroed: bool = False,
    ) -> None:
        self._groups = tuple(groups)
        self._identity = identity
        self._config = config
        self._clock = clock
        self._push_seconds = push_seconds
        self._roster: Roster | None = None
        self._outgoing = Outgoing(groups, config.claim_ttl_seconds, zeroed=zeroed)
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
        """Read the offer of a request that is new here; from now on it is renewed until blocks are there.

        One that is to be pushed from here is announced, so that whoever waits for it may know.
        """
        params = request.kv_transfer_params
        if params is None:
            return
        if params.get("do_remote_decode"):
            self._begin_push(request)
        if not params.get("do_remote_prefill") or request.request_id in self._incoming:
            return
        offer: Offer | None = None
        refusal: KVLinkError | None = None
        key: str | None = None
        try:
            offer = self._verified(params)
            key = push_key(params)
            if key is not None:
                offer = self._awaited(offer, key, request)
            self._check(offer, request)
        except KVLinkError as error:
            refusal = error
            _log.warning("request %s: its offer is refused: %s", request.request_id, error)
        count = request.num_prompt_tokens if offer is None or refusal is not None else offer.tokens
        self._incoming[request.request_id] = _Incoming(offer, refusal, count, key is not None)

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
            max(first, window_start(group, ids)) for group, ids in zip(self._groups, lists, strict=True)
        )  # fmt: skip
        ticket = self._ticket(incoming.offer, starts).to_bytes() if incoming.push else None
        self._work.fetch.append(Fetch(request_id, incoming.offer.to_bytes(), lists, starts, ticket))

    def loads_ended(self, request_ids: Iterable[str]) -> None:
        """Every rank has reported these loads, good or bad."""
        for request_id in request_ids:
            incoming = self._incoming.get(request_id)
            if incoming is not None:
                incoming.stage = _Stage.SETTLED

    def reset(self) -> None:
        """The cache is void, as where weights change: what was offered is withdrawn, what queues is computed here.

        Loads that run go on. vLLM does not reset a cache while a request waits for one.
        """
        self._work.void = True
        for incoming in self._incoming.values():
            if incoming.stage is _Stage.QUEUED:
                incoming.stage = _Stage.SETTLED
                self._decline(incoming, "its reader's cache was reset")

    # --- a request that ends here -----------------------------------------------------------------------------------

    def request_finished(
        self, request: EngineRequest, blocks: Sequence[Sequence[int]], *, complete: bool
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request ended here, by abort or well.

        Args:
            request: the request.
            blocks: one list a group of vLLM's, what it holds.
            complete: whether its prompt was computed to the end, rather than aborted.

        Returns:
            Whether its blocks are held until every rank has reported, or vLLM's at once; and transfer parameters, if
            another engine may go on with it.
        """
        self._forget(request.request_id)
        complete = complete and request.num_computed_tokens > 0
        held = self._outgoing.finish(request, blocks, self._work, complete=complete)
        if held is not None:
            return held, self._standing(request.kv_transfer_params or {}) if held and complete else None
        params = request.kv_transfer_params
        if params is None or not params.get("do_remote_decode") or not complete:
            return False, None
        try:
            offer = self._offer(request, blocks)
            published = None if offer is None else (offer.to_bytes(), offer.to_params())
        except KVLinkError as error:
            _log.error("request %s: its KV cannot be offered: %s", request.request_id, error)
            return False, None
        if published is None:
            return False, None
        self._work.publish.append(Publish(request.request_id, published[0]))
        return True, published[1]

    # --- a step -----------------------------------------------------------------------------------------------------

    def step_scheduled(
        self,
        scheduled: Mapping[str, int],
        preempted: Iterable[str],
        blocks_of: Callable[[str], Sequence[Sequence[int]] | None],
    ) -> None:
        """VLLM has scheduled a step: how far it brings those that are pushed; see `Outgoing.step`."""
        self._outgoing.step(scheduled, preempted, blocks_of, self._work)

    @property
    def has_push_work(self) -> bool:
        """Whether the ranks have yet to hear of something about a push."""
        work = self._work
        return bool(work.announce or work.preempted or work.hand or work.withdraw or work.decline or work.cancel)

    def take_work(self) -> StepWork:
        """What the ranks are to do in this step; the next step starts empty."""
        now = self._clock()
        if now >= self._renew_at:
            self._renew_at = now + self._config.claim_ttl_seconds / RENEWALS_PER_CLAIM
            self._work.renew = [
                incoming.offer.to_bytes()
                for incoming in self._incoming.values()
                if incoming.offer is not None
                and (incoming.stage is _Stage.QUEUED or (incoming.push and incoming.stage is _Stage.LOADING))
            ]
        work, self._work = self._work, StepWork()
        return work

    # --- inside -----------------------------------------------------------------------------------------------------

    def _verified(self, params: Mapping[str, Any]) -> Offer:
        offer = Offer.from_params(params)
        if self._config.secret is not None:
            offer.verify(self._config.secret)
        return offer

    def _awaited(self, offer: Offer, key: str, request: EngineRequest) -> Offer:
        """What whoever made ``offer`` will have computed under ``key``; what it offers besides is not ours."""
        if self._roster is None:
            raise ConfigError("this engine's ranks have not said where they are, and nobody can push to them")
        return replace(
            offer,
            key=key,
            blocks=(),
            tokens=request.num_prompt_tokens,
            first_token=0,
            group_first_tokens=(),
            facts=pushed_facts(request),
            signature=None,
        )

    def _ticket(self, offer: Offer, starts: tuple[int, ...]) -> Ticket:
        assert self._roster is not None, "nothing is awaited without it"
        ticket = Ticket(
            key=offer.key,
            roster=self._roster,
            blocks=(),
            tokens=offer.tokens,
            first_token=min(starts),
            group_first_tokens=starts if len(set(starts)) > 1 else (),
            facts=offer.facts,
            ttl_seconds=self._push_seconds,
            digest_scheme=offer.digest_scheme,
        )
        return ticket if self._config.secret is None else ticket.sign(self._config.secret)

    def _begin_push(self, request: EngineRequest) -> None:
        try:
            self._outgoing.begin(request, self._work)
        except KVLinkError as error:
            _log.warning("request %s is not pushed: %s", request.request_id, error)

    def _standing(self, params: Mapping[str, Any]) -> dict[str, Any] | None:
        """Transfer parameters for whoever decodes: who we are, and under which key the request is pushed."""
        if self._roster is None:
            return None
        offer = Offer(
            key=request_key(self._roster.incarnation, STANDING_ID),
            roster=self._roster,
            blocks=(),
            tokens=0,
            ttl_seconds=self._config.claim_ttl_seconds,
            digest_scheme=DIGEST_SCHEME if self._config.integrity else None,
        )
        if self._config.secret is not None:
            offer = offer.sign(self._config.secret)
        return {**offer.to_params(), PUSH_FIELD: params[PUSH_FIELD]}

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
        starts = tuple(window_start(group, ids) for group, ids in zip(self._groups, lists, strict=True))
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


def _key(incarnation: str, request_id: str) -> str:
    """Request ids may be a client's own text: what cannot be part of a key is named by its digest."""
    if not (request_id.isascii() and request_id.isprintable()) or len(request_id) > MAX_KEY_BYTES // 2:
        request_id = hashlib.sha256(request_id.encode("utf-8", "surrogatepass")).hexdigest()
    return request_key(incarnation, request_id)


def _refused(request_id: str, error: KVLinkError | None) -> Refused:
    field = error.field if isinstance(error, MismatchError) else ""
    return Refused(request_id, "error" if error is None else error.code, field, str(error))
