"""What a seed decides before anything happens: the world's shape, its clocks, and when which fault strikes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random

from kvlink.protocol import Timing

LEASE_SECONDS = 2.5
PEER_LOST_SECONDS = 2.5
CUT_OFF_SECONDS = 0.5
HEADS = 6
SPAN_SECONDS = 14.0
"""Faults strike, and requests start, within this time."""

TIMINGS = (
    Timing(tell_seconds=12.0, retire_seconds=16.0, group_seconds=60.0),
    Timing(
        commit_ttl_seconds=2.0,
        drift_margin_seconds=0.25,
        repeat_seconds=0.5,
        max_repeat_seconds=1.0,
        park_seconds=3.0,
        tell_seconds=8.0,
        retry_hold_seconds=4.0,
        lost_hold_seconds=1.0,
        retire_seconds=10.0,
        gather_seconds=2.0,
        group_seconds=60.0,
    ),
)
"""The defaults with less patience (fewer repeats of what changes nothing), and short ones."""
MAX_DRIFT = 0.055
"""Each clock is at most this much fast or slow: two of them differ by less than margin over time to live (1/8)."""
FAR_DRIFT = 0.12
"""Twice what the margin covers: then a source may give up before its target installs, and nothing else is lost."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that strikes once: at a time, or with the first message of a kind after that (``on``), where it is."""

    at: float
    kind: str
    dice: float
    seconds: float
    on: str = ""


FAULTS = (
    "crash target", "crash target", "crash source", "crash source", "stop target", "stop target", "stop source",
    "sever", "sever", "reset", "silence", "lapse", "fail read", "corrupt", "elsewhere", "cancel target",
    "cancel source", "elsewhere", "again", "decline", "renew", "deaf", "split", "split",
    "stick", "stick", "pause target", "pause source",
)  # fmt: skip


MOMENTS = (
    "Asked", "Lease", "Prepared", "Prepared", "Commit", "Commit", "Installed", "NotInstalled", "Announced", "Stands",
    "PROCEED", "REVEAL", "REVEAL",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A seed's world.

    Attributes:
        seed: what it was drawn from.
        source_ranks: ranks of the source engine.
        target_ranks: ranks of each target engine, by name.
        replicas: the source's ranks all hold every head, so that some may stay unread.
        requests: how many there are.
        loss, duplication: chance of each message.
        delay: mean of a message's and of a piece's way, seconds.
        straggle: chance that a way takes up to 20 times as long.
        integrity: digests are compared.
        blocks: blocks of a request on each rank.
        pool: blocks of a rank.
        busy: chance that a source's admission refuses an ask.
        parked: asks that a source parks at a time.
        mistakes: chance that a fetch names other content, or counts its readers wrong.
        tries: how often the gateway tries a request.
        refuse_install: chance that the engine does not take the blocks.
        timing, deadline, ttl: the protocol's clocks.
        streamed: chance that a push is streamed, block by block.
        together: the ranks of a target engine become visible together; else the gateway reduces their ends.
        faults: what strikes.
    """

    seed: int
    source_ranks: int
    target_ranks: dict[str, int]
    replicas: bool
    requests: int
    loss: float
    duplication: float
    delay: float
    straggle: float
    integrity: bool
    blocks: int
    pool: int
    busy: float
    parked: int
    mistakes: float
    tries: int
    refuse_install: float
    timing: Timing
    deadline: float
    ttl: float
    streamed: float = 0.0
    together: bool = False
    faults: tuple[Fault, ...] = field(default=())


# --- scenes: worlds in which faults that chance seldom brings together meet -------------------------------------------


def _late_promise(plan: Plan, dice: Random) -> Plan:
    """What answers *prepared* is stuck until about the time that its source gives up."""
    faults = _strikes(dice, "stick", "Prepared", 0.0, 2.0)
    return replace(plan, timing=TIMINGS[1], deadline=10.0, refuse_install=0.0, mistakes=0.0, faults=faults)


def _unheard_decision(plan: Plan, dice: Random) -> Plan:
    """Ranks become visible together, and one of three does not hear that they do."""
    ranks = dict.fromkeys(plan.target_ranks, 3)
    faults = _strikes(dice, "split", "REVEAL", 2.6, 6.0)
    return replace(plan, together=True, target_ranks=ranks, deadline=10.0, refuse_install=0.0, faults=faults)


def _late_copies(plan: Plan, dice: Random) -> Plan:
    """Copies come seconds late, while the gateway turns elsewhere and reads fail there."""
    faults = (
        *_strikes(dice, "elsewhere", "Lease", 0.0, 1.0),
        *_strikes(dice, "fail read", "Lease", 0.0, 1.0),
    )
    ranks = dict.fromkeys(("D", "E"), 1)
    return replace(
        plan, target_ranks=ranks, together=False, duplication=0.4, straggle=0.4, delay=0.2, tries=12, faults=faults
    )


def _spoiled_reads(plan: Plan, dice: Random) -> Plan:
    """What lands is not what was sent."""
    return replace(plan, integrity=True, faults=_strikes(dice, "corrupt", "Lease", 0.0, 1.0))


def _late_obituaries(plan: Plan, dice: Random) -> Plan:
    """Targets die as they begin to read, and their successors ask before everybody has heard of it."""
    faults = _strikes(dice, "crash target", "Lease", 0.0, 0.3)
    return replace(plan, together=False, delay=0.2, deadline=10.0, ttl=8.0, tries=12, faults=faults)


def _strikes(dice: Random, kind: str, on: str, least: float, most: float) -> tuple[Fault, ...]:
    """The same fault, a few times."""
    times = sorted(dice.random() * SPAN_SECONDS / 2 for _ in range(3))
    return tuple(Fault(at, kind, dice.random(), dice.uniform(least, most), on) for at in times)


SCENES = (_late_promise, _unheard_decision, _late_copies, _spoiled_reads, _late_obituaries)
DIRECTED_EVERY = 4
"""So many seeds to one that is a scene."""


def draw(seed: int) -> tuple[Plan, Random]:
    """A seed's world, and the dice for all that is decided on the way."""
    dice = Random(seed)  # noqa: S311 - it must be repeatable, not secret
    ranks = (1, 1, 1, 2, 2, 3)
    engines = ("D",) if dice.random() < 0.3 else ("D", "E")
    strikes = dice.choice((0, 1, 2, 3, 4, 6, 8, 10))
    faults = (
        Fault(
            dice.random() ** 2 * SPAN_SECONDS,
            dice.choice(FAULTS),
            dice.random(),
            dice.random() ** 2 * 7.0,
            dice.choice(MOMENTS) if dice.random() < 0.5 else "",
        )
        for _ in range(strikes)
    )
    plan = Plan(
        seed=seed,
        source_ranks=dice.choice(ranks),
        target_ranks={engine: dice.choice(ranks) for engine in engines},
        replicas=dice.random() < 0.15,
        requests=dice.choice((1, 1, 1, 2, 3)),
        loss=dice.choice((0.0, 0.0, 0.03, 0.1, 0.25, 0.4)),
        duplication=dice.choice((0.0, 0.0, 0.05, 0.2)),
        delay=dice.choice((0.002, 0.02, 0.2)),
        straggle=dice.choice((0.0, 0.05, 0.15, 0.4)),
        integrity=dice.random() < 0.5,
        blocks=dice.choice((1, 1, 2)),
        pool=dice.choice((3, 4, 6)),
        busy=dice.choice((0.0, 0.0, 0.0, 0.2)),
        parked=dice.choice((1, 2, 4, 64)),
        mistakes=0.0 if dice.random() < 0.9 else 0.1,
        tries=dice.choice((2, 3, 3, 4, 12)),
        refuse_install=dice.choice((0.0, 0.0, 0.1)),
        timing=dice.choice(TIMINGS),
        deadline=dice.choice((1.0, 4.0, 10.0)),
        ttl=dice.choice((1.0, 3.0, 8.0)),
        together=dice.random() < 0.35,
        faults=tuple(sorted(faults, key=lambda fault: fault.at)),
    )
    aim = Random(f"streamed {seed}")  # noqa: S311 - as above; apart, so that older seeds draw what they drew
    plan = replace(plan, streamed=aim.choice((0.0, 0.5, 1.0)))
    if seed % DIRECTED_EVERY == 0:
        aim = Random(f"aimed {seed}")  # noqa: S311 - as above
        plan = aim.choice(SCENES)(plan, aim)
    return plan, dice


def legs(plan: Plan, engine: str) -> dict[int, tuple[int, ...]]:
    """Which source ranks each target rank of ``engine`` reads."""
    count = plan.target_ranks[engine]
    if plan.replicas:
        return {rank: (rank % plan.source_ranks,) for rank in range(count)}
    theirs = [_heads(rank, plan.source_ranks) for rank in range(plan.source_ranks)]
    return {
        rank: tuple(source for source, heads in enumerate(theirs) if heads & _heads(rank, count))
        for rank in range(count)
    }


def _heads(rank: int, ranks: int) -> set[int]:
    return set(range(HEADS * rank // ranks, HEADS * (rank + 1) // ranks))
