"""Every bound, with its unit in its name. Relations between bounds are asserted at the end."""

from __future__ import annotations

from typing import Final

# --- digest and data path -------------------------------------------------------------------------------------
LEAF_BYTES: Final = 16 * 1024
"""Bytes of wire order under one XXH3-64. Frozen: part of the digest scheme."""
DIGEST_SCHEME: Final = "xxh3-64-leaf16k"
"""Its name on the wire."""
DEFAULT_CHUNK_LEAVES: Final = 64
"""Leaves in a chunk: 1 MiB, the unit of pipelining and re-read."""
MAX_CHUNK_LEAVES: Final = 4096
DEFAULT_MOVE_THREADS: Final = 8
"""CPUs that a local conversion takes if not told: from here on memory is the limit on the machines we know."""
MAX_REREADS_PER_CHUNK: Final = 3
"""Re-reads of one chunk inside an attempt, after which the attempt fails."""
MAX_OUTSTANDING_GETS: Final = 64
"""Gets in flight per read, and what a full transport refuses beyond."""
MAX_ACTIVE_READS: Final = 1024
"""Reads accepted by a transport at a time."""
MAX_LANES: Final = 8
"""Sockets for payload between two ranks, beside their channel."""
STREAM_LANES: Final = 2
"""Of the stream transport (default; see Config): a second one pays from 64 KiB up, where one core is not enough."""
MAX_COPY_THREADS: Final = 16
"""That copy beside a transport's own thread."""
COPY_THREADS: Final = 3
"""At most, if not told (see Config): four cores read about what a socket's memory gives."""
MIN_CAP_BYTES_PER_SECOND: Final = 1e6
"""Least cap on a link's reads: below, one leaf at a time is no longer even."""
MAX_CAP_BYTES_PER_SECOND: Final = 1e13
MAX_TRANSFER_BYTES: Final = 1 << 44
SLOT_BYTES: Final = 512 * 1024
"""Of staging: what the packed path gathers, gets and scatters at a time, while it is in a core's cache."""
RING_SLOTS: Final = 8
"""Slots that a source keeps for one peer to be packed into: 4 MiB."""
MAX_RINGS: Final = 256
"""Peers that a source packs for at a time: 1 GiB of rings, made as they are wanted."""
STAGING_SLOTS: Final = 16
"""Slots that packed bytes are got into, of all peers together."""
CALIBRATION_SECONDS: Final = 0.08
"""After which a link that opens begins no further step of measuring this machine (`kvlink.transports.calibration`)."""
REGISTERED_ASIDE_BYTES: Final = 64 * 1024 * 1024
"""Regions of this length, and longer, are registered in a thread by a link that opens: other links share its loop."""
PROGRESS_SECONDS: Final = 2.0
"""Between two words in the log about something that takes long."""
NOMINAL_TRANSFER_BYTES: Final = 64 * 1024 * 1024
"""What a pair's transport is chosen for, before anything is known of its requests."""
NOMINAL_TOKENS: Final = 4096
"""Length of the prompt whose plan tells how long the runs between two caches are."""

# --- geometry -------------------------------------------------------------------------------------------------
MAX_LAYERS: Final = 1024
MAX_HEADS: Final = 4096
MAX_GROUPS: Final = 64
MAX_PLANES_PER_GROUP: Final = 4096
MAX_REGIONS: Final = 4096
MAX_BLOCK_SLOTS: Final = 65_536
MAX_CHANNELS: Final = 1 << 20
"""Elements of a row: some hundred of an attention head, a state's matrix, the bytes of an engine's own row."""
MAX_SCALES: Final = 1 << 20
"""Planes times heads of a group that states scales."""
MAX_BLOCKS_PER_REQUEST: Final = 1 << 20
MAX_TOKENS_PER_REQUEST: Final = 1 << 24
MAX_WORLD_RANKS: Final = 1024
MAX_OFFSET_BYTES: Final = 1 << 46
"""Largest offset or stride a spec may state: far above any machine's memory, far below int64 overflow."""
HUGE_PAGE_BYTES: Final = 2 * 1024 * 1024
"""Alignment of pools and of the regions in them; the transparent huge page of x86-64, and of aarch64 on 4 KiB pages."""

# --- control --------------------------------------------------------------------------------------------------
MAX_FRAME_BYTES: Final = 8 * 1024 * 1024
MAX_UNAUTHENTICATED_FRAME_BYTES: Final = 4096
MAX_TEXT_BYTES: Final = 4096
MAX_NAME_BYTES: Final = 256
MAX_KEY_BYTES: Final = 256
"""Request key: printable text."""
MAX_CLAIM_BYTES: Final = 1024 * 1024
MAX_CARD_BYTES: Final = 64 * 1024
"""One rank's card: mostly the ids of its layers and heads."""
MAX_BLOB_BYTES: Final = 64 * 1024
"""An opaque address or memory key of a transport."""
MAX_TRANSPORTS: Final = 16
MAX_RENEWED_KEYS: Final = 4096
"""Keys in one `Renew`."""
MAX_ECHO_CHARS: Final = 200
"""How much of a peer's own words an error text may repeat."""
MAX_REASON_CHARS: Final = 1000
"""Of why a transport was chosen, as the other side is told."""
MAX_UNIX_PATH_BYTES: Final = 107
"""``sun_path`` less its NUL."""
MAX_NESTING_DEPTH: Final = 16
HANDSHAKE_TIMEOUT_SECONDS: Final = 5.0
MAX_PENDING_HANDSHAKES: Final = 64
MAX_PEERS: Final = 4096
MAX_LEGS: Final = 1024
"""Legs leased by a source at a time (default; see Config)."""
MAX_LEASED_BLOCKS: Final = 1 << 20
"""Blocks leased by a source at a time (default; see Config)."""
NONCE_BYTES: Final = 32
MAC_BYTES: Final = 32
SESSION_ID_BYTES: Final = 16
MIN_SECRET_BYTES: Final = 16
MAX_SECRET_BYTES: Final = 4096
CHANNEL_KEY_SECONDS: Final = 30.0
"""How long the one-time keys of a channel and its lanes are good for, from the control connection's handshake."""
MAX_QUEUED_MESSAGES: Final = 1024
"""Received and not yet taken messages of one connection, beyond which its socket is no longer read."""
MAX_QUEUED_BYTES: Final = 16 * 1024 * 1024
"""Their bytes on the wire, with the same effect."""
MAX_SEND_QUEUE_BYTES: Final = 32 * 1024 * 1024
"""Unsent bytes of one connection, beyond which the peer is held to be lost."""
LISTEN_BACKLOG: Final = 128
ACCEPT_PAUSE_SECONDS: Final = 0.1
"""Wait after the operating system refused to accept: out of file descriptors, most likely."""

# --- protocol timing (defaults; see Config) ----------------------------------------------------------------------
HEARTBEAT_SECONDS: Final = 0.5
PEER_LOST_SECONDS: Final = 2.5
"""Silence on the native channel after which a peer is lost."""
LEASE_SECONDS: Final = 2.5
"""A lease unrenewed for this long is lapsed, for good."""
COMMIT_TTL_SECONDS: Final = 4.0
"""Counted by the target from first sending PREPARED. All legs are prepared together, so it spans one round trip."""
DRIFT_MARGIN_SECONDS: Final = 0.5
"""The source waits this much longer than the target's time to live."""
REPEAT_SECONDS: Final = 0.5
"""First interval between repeats of an unanswered message; doubles up to MAX_REPEAT_SECONDS."""
MAX_REPEAT_SECONDS: Final = 2.0
UNHURRIED_SECONDS: Final = 0.002
"""How long a message that nobody waits for may wait for one to leave with."""
LINGER_SECONDS: Final = 0.00025
"""How long an answer that is on its way is waited for without sleep; what takes longer is slept for."""
LINGER_BURST_SECONDS: Final = 0.00005
"""At most so long between two looks at whatever else a loop has to do."""
LINGER_PAUSE_SECONDS: Final = 0.1
"""No such waiting for so long, once somebody else was seen to compute on the CPU."""
LINGER_BYTES: Final = 1 << 20
"""Reads up to this size are waited for so."""
FORESEEN_BLOCKS: Final = 64
"""Offers of up to so many source blocks are planned before they are asked for, where it is clear by whom."""
MAX_LINGERED: Final = 4
"""Answers that are waited for so at a time; where more are under way, something is always ready."""
TELL_SECONDS: Final = 30.0
"""How long INSTALLED or NOT_INSTALLED is repeated to a source that does not acknowledge."""
RETRY_HOLD_SECONDS: Final = 10.0
"""How long a hold outlives a retryable failure of a leg, so that a fresh attempt can ask."""
LOST_HOLD_SECONDS: Final = 2.0
"""How long a hold outlives the loss of the target that was to read it."""
RETIRE_SECONDS: Final = 40.0
"""How long a source keeps a part that did not end done, to answer and to learn from late messages."""
GATHER_SECONDS: Final = 5.0
"""How long the ranks of an engine wait for the last of them to begin its part of a request."""
MAX_ATTEMPTS_PER_LEG: Final = 8
PARK_SECONDS: Final = 10.0
"""How long an early ask waits for its source to know the key."""
MAX_PARKED_ASKS: Final = 1024
STREAM_WINDOW: Final = 2
"""Increments of a stream that a source exposes before it hears that they landed; what is ready beyond them waits."""
MAX_INCREMENTS: Final = 4096
"""Of one leg's stream; from there on what becomes ready waits for the seal."""
REST_SECONDS: Final = 60.0
"""How long a target waits for more of a stream without a word from its source, whose engine may compute as long as it
lets its source part live."""
INCREMENT_LEASE_SECONDS: Final = 30.0
"""At least, of an increment: only a read renews, and this one begins when its target's interpreter comes to it. A peer
that is silent is lost long before."""
MAX_STREAM_SECONDS: Final = 3600.0
"""How long a target lets a stream rest, from its lease: no source keeps its blocks longer by words alone."""
CUT_OFF_GRACE_SECONDS: Final = 0.5
"""Wait for outstanding gets before the endpoint is closed by force."""
RENEWAL_LINGER_SECONDS: Final = 600.0
"""How long at most a target goes on renewing the lease of a read that ended well. The link ends it at the commit or at
the failure; until then its commit may wait for a busy interpreter, or for a slower leg of the same part."""
CLAIM_TTL_SECONDS: Final = 60.0
CLOSE_TIMEOUT_SECONDS: Final = 3.0
VLLM_DRAIN_SECONDS: Final = 2.0
"""What a closing vLLM worker waits for its transfers before it cuts them: all of it must be done in 3 s, vLLM ends
workers after 5."""
MAX_QUEUED_EVENTS: Final = 4096
"""Events of a link that nobody has taken yet; older ones are dropped."""
PAUSE_TELL_SECONDS: Final = 1.0
"""How long a pause waits for sources to acknowledge how their legs ended."""
BRIDGE_ANSWER_SECONDS: Final = 30.0
"""How long a bridge waits for its loop: registering hundreds of gigabytes takes a while, and a loop may be busy."""
BRIDGE_CLOSE_MARGIN_SECONDS: Final = 10.0
"""What a bridge allows for a close, or a quiesce, beyond its own bound: the cut-offs that follow it."""
BRIDGE_TURNS: Final = 8
"""Turns of the loop in one poll of a bridge without a thread: a message on its way through tasks takes several."""
SOURCE_WORD_SECONDS: Final = 0.25
"""How long a target whose read the source refused waits to be told why."""
LAST_WORD_TURNS: Final = 3
"""Turns of the loop between a transport's news of a lost peer or lease and its effect: what the peer said last, and is
here already, comes first."""
REDIAL_SECONDS: Final = 2.0
"""How long a lost connection is redialled before the machines hear of a lost peer."""
REDIAL_PAUSE_SECONDS: Final = 0.1
BUSY_HINT_SECONDS: Final = 0.1
"""What a busy source suggests to wait, and the least that anyone does."""
ROOM_HINT_SECONDS: Final = 1.0
"""What a target without room suggests to wait before any block has come back."""
MAX_ROOM_HINT_SECONDS: Final = 30.0
MAX_WAITING_DEMANDS: Final = 1024
"""Demands for room that wait at a target."""
MAX_ATTEMPT_SECONDS: Final = 600.0
"""Longest deadline of a transfer: a source lends its blocks no longer, whatever its target says."""
FETCH_DEADLINE_SECONDS: Final = 60.0
"""What an engine's adapter allows one transfer (default; see its settings)."""
PUSH_DEADLINE_SECONDS: Final = 300.0
"""What an engine's adapter allows a push, from its blocks to its install (default; see its settings): the prefill
engine's queue and its prefill are part of it."""
PUSH_WORDS_PER_STEP: Final = 8
"""How often in a step an adapter tells that more layers are written: each word costs the engine's thread a little."""
PREEMPTION_SECONDS: Final = 1.0
"""How long an engine's step waits for the readers of a request that it preempts."""
RENEWALS_PER_CLAIM: Final = 4
"""How often in its time to live an adapter renews an offer that queues: three may be lost."""
RETRY_TRIES: Final = 3
"""Tries of a request, the first included (default; see RetryPolicy)."""
MAX_RETRY_TRIES: Final = 100
RETRY_TOTAL_SECONDS: Final = 60.0
RETRY_PAUSE_SECONDS: Final = 0.1
"""Before the second try (default); doubles up to MAX_RETRY_PAUSE_SECONDS."""
MAX_RETRY_PAUSE_SECONDS: Final = 5.0
RETRY_HORIZON_SECONDS: Final = 600.0
MAX_LEDGER_ENTRIES: Final = 65_536
LOSS_GRACE_SECONDS: Final = 0.5
"""How long a target must stay away before its source tells that what it had installed is lost."""
LOSSES_TOLD_PER_TURN: Final = 64
"""Installed requests of a lost target that a source tells of before its loop turns to others."""
MAX_REPLICAS: Final = 7
"""Further targets of one request: each holds its source's blocks until it has read them."""

# --- cluster and planning -----------------------------------------------------------------------------------------
ADAPTER_LOAD_SECONDS: Final = 1.0
"""What routing expects the loading of an adapter to take."""
POOL_PRESSED: Final = 1.0
"""Pressure of a pool from which on it may take a worker from one that is idle."""
POOL_IDLE: Final = 0.5
"""Pressure of a pool up to which it may give a worker away."""
MAX_TRACE_REQUESTS: Final = 1_000_000
MAX_TRACE_LINE_BYTES: Final = 1024 * 1024
MAX_PLAN_FILE_BYTES: Final = 64 * 1024 * 1024
"""Of one result that `kvlink report` reads."""
MAX_SIMULATED_WORKERS: Final = 1024

assert POOL_IDLE < POOL_PRESSED, "a worker that has moved must not move back at once"
assert LEAF_BYTES * MAX_CHUNK_LEAVES <= 64 * 1024 * 1024
assert DEFAULT_CHUNK_LEAVES <= MAX_CHUNK_LEAVES
assert SLOT_BYTES % LEAF_BYTES == 0
assert 1 <= STREAM_LANES <= MAX_LANES
assert 1 <= COPY_THREADS <= MAX_COPY_THREADS
assert min(PEER_LOST_SECONDS, LEASE_SECONDS) >= HEARTBEAT_SECONDS * 3, "two lost heartbeats must not end a lease"
assert PEER_LOST_SECONDS < 3.0, "a stopped peer is noticed within 3 s"
assert MAX_CARD_BYTES < MAX_CLAIM_BYTES < MAX_FRAME_BYTES <= MAX_QUEUED_BYTES <= MAX_SEND_QUEUE_BYTES
assert MAX_UNAUTHENTICATED_FRAME_BYTES < MAX_CARD_BYTES, "a stranger costs less than a peer"
assert MAX_ECHO_CHARS * 4 < MAX_TEXT_BYTES
assert 100 * UNHURRIED_SECONDS < REPEAT_SECONDS, "what may wait is not repeated for it"
assert REPEAT_SECONDS <= MAX_REPEAT_SECONDS < COMMIT_TTL_SECONDS
assert COMMIT_TTL_SECONDS + DRIFT_MARGIN_SECONDS < 5.0, "a source whose target dies after the commit ends within 5 s"
assert PEER_LOST_SECONDS + LOST_HOLD_SECONDS < 5.0, "a source whose target dies while it reads ends within 5 s"
assert PEER_LOST_SECONDS + REDIAL_SECONDS < 5.0, "a target whose source falls silent ends within 5 s"
assert BRIDGE_CLOSE_MARGIN_SECONDS > 2 * (CLOSE_TIMEOUT_SECONDS + CUT_OFF_GRACE_SECONDS), "a close that cuts gets done"
assert COMMIT_TTL_SECONDS + DRIFT_MARGIN_SECONDS < TELL_SECONDS < RETIRE_SECONDS
assert max(FETCH_DEADLINE_SECONDS, PUSH_DEADLINE_SECONDS) <= min(MAX_ATTEMPT_SECONDS, RETRY_HORIZON_SECONDS)
assert TELL_SECONDS < RETIRE_SECONDS, "a coordinator outlasts the ranks that ask for its word"
assert RENEWAL_LINGER_SECONDS >= MAX_ATTEMPT_SECONDS, "a fast leg waits for its siblings with its lease held"
assert RENEWAL_LINGER_SECONDS > COMMIT_TTL_SECONDS, "a commit in time never finds its lease lapsed"
assert 1 <= STREAM_WINDOW < MAX_INCREMENTS
assert PEER_LOST_SECONDS < INCREMENT_LEASE_SECONDS < REST_SECONDS < MAX_STREAM_SECONDS
assert REST_SECONDS > 3 * MAX_REPEAT_SECONDS, "a source that lives and computes is heard in time"
assert CLAIM_TTL_SECONDS < RETRY_HORIZON_SECONDS, "a claim that the ledger has forgotten has run out by itself"
assert MAX_OFFSET_BYTES * 4 < 1 << 63
