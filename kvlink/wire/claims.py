"""Claims: offers and tickets, pure data that travels through schedulers and gateways, signed and checked at its end.

Nothing here needs a link, a thread or UCX: an engine's scheduler process makes, reads, signs and checks claims. A
claim is only a claim: its signature says who made it; handshake, descriptor and digest say whether it holds.
"""

from __future__ import annotations

import base64
import binascii
import hmac
from collections.abc import Mapping
from typing import Annotated, ClassVar, Final, Self, TypeAlias

import msgspec

from kvlink import limits
from kvlink.descriptor import Facts, FirstTokens, KVDescriptor, compare_facts
from kvlink.errors import AuthenticationError, FrameError, MismatchError, SchemaError, VersionError
from kvlink.layout import Identity, compare_identity, fingerprint
from kvlink.wire.address import Address
from kvlink.wire.codec import clip, decode_with, encode_with
from kvlink.wire.messages import Key, Mac, Name, Seconds
from kvlink.wire.roster import Roster

CLAIM_VERSION: Final = 1
"""First byte of an encoded claim."""
PARAMS_FIELD: Final = "kvlink"
"""Our one field in an engine's transfer parameters; all others there are for gateways to look at."""

JSON: TypeAlias = "bool | int | float | str | list[JSON] | dict[str, JSON] | None"
BlockId = Annotated[int, msgspec.Meta(ge=0, le=limits.MAX_OFFSET_BYTES)]
Blocks = Annotated[
    tuple[Annotated[tuple[BlockId, ...], msgspec.Meta(max_length=limits.MAX_BLOCKS_PER_REQUEST)], ...],
    msgspec.Meta(max_length=limits.MAX_GROUPS),
]
Tokens = Annotated[int, msgspec.Meta(ge=0, le=limits.MAX_TOKENS_PER_REQUEST)]

_SIGNATURE_DOMAIN: Final = b"kvlink claim\0"


def request_key(incarnation: str, request_id: str) -> str:
    """The key of a request: unique over restarts of the source, and equal on all of its ranks.

    Args:
        incarnation: the source's (fetch), or the target's that made the ticket (push).
        request_id: the engine's own.

    Raises:
        SchemaError: the result is no printable ASCII text of at most `limits.MAX_KEY_BYTES`.
    """
    key = f"{incarnation}:{request_id}"
    if not (key.isascii() and key.isprintable() and len(key) <= limits.MAX_KEY_BYTES):
        msg = f"key {clip(key)!r} must be printable ASCII of at most {limits.MAX_KEY_BYTES} characters"
        raise SchemaError(msg)
    return key


class Claim(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What an `Offer` (the source's) and a `Ticket` (the target's) have in common.

    Attributes:
        key: names the request on both sides, see `request_key`.
        roster: all ranks of the engine that makes the claim.
        blocks: the claiming side's block ids, one list a group, entry i holding positions ``[i * block_size, ...)``.
            A ticket leaves them empty: a source is not told its target's blocks.
        tokens: one past the last position; for a ticket, how many there is room for.
        first_token: first position that is moved; what lies before is at the target already.
        group_first_tokens: one a group, in the order of ``blocks``: where the positions of the group begin, for groups
            that keep a window only; empty if all groups are whole.
        facts: what else is stated about the request.
        ttl_seconds: how long the claim is kept unasked, from when it was made.
        digest_scheme: how integrity is checked, or ``None`` for not at all.
        signature: HMAC-SHA-256 over everything else, or ``None``.
    """

    key: Key
    roster: Roster
    blocks: Blocks
    tokens: Tokens
    first_token: Tokens = 0
    group_first_tokens: FirstTokens = ()
    facts: Facts = Facts()
    ttl_seconds: Seconds = limits.CLAIM_TTL_SECONDS
    digest_scheme: Name | None = limits.DIGEST_SCHEME
    signature: Mac | None = None

    _remote_prefill: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.first_token > self.tokens:
            msg = f"first_token {self.first_token} lies past the {self.tokens} tokens of {self.key!r}"
            raise SchemaError(msg)
        if max(self.group_first_tokens, default=0) > self.tokens:
            msg = f"group_first_tokens {self.group_first_tokens} lie past the {self.tokens} tokens of {self.key!r}"
            raise SchemaError(msg)

    def to_bytes(self) -> bytes:
        """The encoded claim.

        Raises:
            FrameError: larger than `limits.MAX_CLAIM_BYTES`.
            SchemaError: a text in it is not Unicode.
        """
        return bytes([CLAIM_VERSION]) + encode_with(self, limits.MAX_CLAIM_BYTES - 1)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Read a claim; its signature is not looked at (`verify`).

        Args:
            data: from `to_bytes`. On `Claim` itself either kind is read, on `Offer` and `Ticket` only that.

        Raises:
            VersionError: made by a KVLink that encodes claims in another version.
            FrameError: too large, truncated, or not a claim at all.
            SchemaError: its content breaks the schema, or contradicts itself.
        """
        if data[:1] != bytes([CLAIM_VERSION]):
            msg = f"claim has version {data[0] if data else 'nothing'}; this side reads version {CLAIM_VERSION}"
            raise VersionError(msg)
        claim = decode_with(_decoder, memoryview(data)[1:], "claim", limits.MAX_CLAIM_BYTES - 1)
        if not isinstance(claim, cls):
            msg = f"expected {cls.__name__}, got {type(claim).__name__}"
            raise SchemaError(msg)
        return claim

    def to_params(self) -> dict[str, JSON]:
        """A JSON-safe dict for an engine's ``kv_transfer_params``.

        The claim itself is one text under ``"kvlink"``, so that no gateway's idea of numbers can change what was
        signed. The fields beside it carry the names that vLLM's connectors use; gateways may read them, we do not.
        """
        first = Address.parse(self.roster.ranks[0].address)
        return {
            PARAMS_FIELD: base64.urlsafe_b64encode(self.to_bytes()).decode("ascii"),
            "do_remote_prefill": self._remote_prefill,
            "do_remote_decode": not self._remote_prefill,
            "remote_engine_id": self.roster.engine,
            "remote_request_id": self.key,
            "remote_block_ids": [list(blocks) for blocks in self.blocks],
            "remote_host": first.host or first.path,
            "remote_port": first.port,
            "tp_size": self.roster.tp_size,
        }

    @classmethod
    def from_params(cls, params: Mapping[str, JSON]) -> Self:
        """Read the claim in an engine's transfer parameters; raises as `from_bytes` does."""
        text = params.get(PARAMS_FIELD)
        if not isinstance(text, str):
            msg = f"transfer parameters carry no claim: {PARAMS_FIELD!r} is {type(text).__name__}, not text"
            raise SchemaError(msg)
        if len(text) > _MAX_CLAIM_TEXT:
            msg = f"claim has {len(text)} characters; {_MAX_CLAIM_TEXT} are accepted"
            raise FrameError(msg)
        try:
            data = base64.b64decode(text.encode("ascii"), altchars=b"-_", validate=True)
        except (binascii.Error, UnicodeEncodeError) as error:
            msg = f"claim is no base64: {clip(str(error))}"
            raise FrameError(msg) from None
        return cls.from_bytes(data)

    def sign(self, secret: bytes) -> Self:
        """The same claim with its signature under the cluster's secret."""
        return msgspec.structs.replace(self, signature=self._mac(secret))

    def verify(self, secret: bytes) -> None:
        """Check the signature.

        Raises:
            AuthenticationError: unsigned, or not signed like this under ``secret``.
        """
        if self.signature is None or not hmac.compare_digest(self.signature, self._mac(secret)):
            what = "is not signed" if self.signature is None else "has a wrong signature"
            msg = f"{type(self).__name__} {what}; give its maker and us the same secret"
            raise AuthenticationError(msg, request_id=self.key, stage="claim")

    def check(self, facts: Facts, identity: Identity) -> MismatchError | None:
        """Compare with what this side knows of the request: the first difference, or ``None``.

        Identity, and what `kvlink.descriptor.compare_facts` compares, where both sides state it.
        """
        theirs = (self.roster.identity, self.facts)
        ours = (identity, facts)
        (source_identity, source_facts), (target_identity, target_facts) = (
            (theirs, ours) if self._remote_prefill else (ours, theirs)
        )
        try:
            compare_identity(source_identity, target_identity)
            compare_facts(source_facts, target_facts)
        except MismatchError as error:
            error.request_id = self.key
            error.stage = "claim"
            return error
        return None

    def _mac(self, secret: bytes) -> bytes:
        # Over the encoding of the decoded value: fields in order, the kind's tag first, so it is canonical.
        unsigned = msgspec.structs.replace(self, signature=None)
        return hmac.digest(secret, _SIGNATURE_DOMAIN + unsigned.to_bytes(), "sha256")


class Offer(Claim, frozen=True, tag="offer"):
    """Fetch: made by the source; what is available, and where to ask for it."""

    def descriptor(self, deadline_seconds: float) -> KVDescriptor:
        """What a target states in its ask for this offer, given what is left of its time."""
        return KVDescriptor(
            request_id=self.key,
            tokens=self.tokens,
            first_token=self.first_token,
            blocks=self.blocks,
            identity_fingerprint=fingerprint(self.roster.identity),
            digest_scheme=self.digest_scheme,
            facts=self.facts,
            deadline_seconds=deadline_seconds,
            group_first_tokens=self.group_first_tokens,
        )

    def replica(self, number: int) -> Self:
        """The offer of the same KV to one further target, unsigned: its key is this one's and the replica's number.

        Args:
            number: from 1 on.

        Raises:
            SchemaError: the key would be longer than `limits.MAX_KEY_BYTES`.
        """
        key = f"{self.key}#replica{number}"
        if len(key) > limits.MAX_KEY_BYTES:
            msg = f"key {clip(key)!r} of a replica has over {limits.MAX_KEY_BYTES} characters; shorten the request's"
            raise SchemaError(msg)
        return msgspec.structs.replace(self, key=key, signature=None)


class Ticket(Claim, frozen=True, tag="ticket"):
    """Push: made by the target; room is reserved, and where to announce that the KV is there."""

    _remote_prefill: ClassVar[bool] = False


_decoder: Final = msgspec.msgpack.Decoder(Offer | Ticket)
_MAX_CLAIM_TEXT: Final = 4 * -(-limits.MAX_CLAIM_BYTES // 3)
