"""The tables are total, and no sequence of events makes a machine raise or tell an end twice."""

from __future__ import annotations

import subprocess
import sys
from enum import Enum
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlink import errors, protocol, wire
from kvlink.protocol import End, group, source, target
from kvlink.protocol.group import GROUP, GROUP_EVENTS
from kvlink.protocol.source import SOURCE_PART, SOURCE_PART_EVENTS
from kvlink.protocol.source_leg import SOURCE_LEG, SOURCE_LEG_EVENTS
from kvlink.protocol.table import Edge, fire, inert, on, row, total
from kvlink.protocol.target import TARGET_PART, TARGET_PART_EVENTS
from kvlink.protocol.target_leg import TARGET_LEG, TARGET_LEG_EVENTS

TABLES = [
    (TARGET_LEG, TARGET_LEG_EVENTS),
    (TARGET_PART, TARGET_PART_EVENTS),
    (SOURCE_LEG, SOURCE_LEG_EVENTS),
    (SOURCE_PART, SOURCE_PART_EVENTS),
    (GROUP, GROUP_EVENTS),
]


class Lamp(Enum):
    OFF = "off"
    ON = "on"


@pytest.mark.parametrize(("table", "events"), TABLES)
def test_every_pair_of_phase_and_event_has_a_cell_that_always_leads_somewhere(table, events) -> None:
    for cells in table.values():
        assert set(cells) == set(events)
        assert all(edges[-1].when is None for edges in cells.values())


@pytest.mark.parametrize(("table", "events"), TABLES)
def test_every_phase_but_the_first_is_reached(table, events) -> None:
    phases = list(table)
    reached = {edge.to for cells in table.values() for edges in cells.values() for edge in edges}
    assert set(phases[1:]) - reached <= ({source.SourcePhase.HELD} if table is SOURCE_PART else set())


def test_a_missing_or_doubled_cell_is_found_at_import() -> None:
    with pytest.raises(ValueError, match="no cell for"):
        total(Lamp, (int, str), {Lamp.OFF: row(inert(int, str)), Lamp.ON: row(inert(int))})
    with pytest.raises(ValueError, match="no such event"):
        total(Lamp, (int,), {Lamp.OFF: row(inert(int, str)), Lamp.ON: row(inert(int))})
    with pytest.raises(ValueError, match="given twice"):
        row(inert(int), on(int, Edge(Lamp.ON)))


def test_the_diagrams_in_the_documentation_are_those_of_the_tables() -> None:
    script = Path(__file__).parent.parent / "scripts" / "protocol-diagrams"
    checked = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr


ERROR = protocol.error_info(errors.TransportError, "boom")
FAILURE = protocol.fail(End.CANCELLED, errors.CancelledError, "enough")
CAPACITY = wire.Capacity(leased_blocks=0, active_legs=0, max_legs=1)
peers = st.sampled_from(["A", "B", "Z"])
attempts = st.sampled_from([1, 2, 3])
roots = st.sampled_from([None, b"rootroot", b"otherone"])


def received(*messages) -> st.SearchStrategy:
    return st.builds(protocol.Received, peers, st.one_of(messages))


told = received(
    st.builds(lambda a: wire.Lease(attempt=a, lease_seconds=1.0, total_bytes=0, capacity=CAPACITY), attempts),
    st.builds(lambda a: wire.Parked(attempt=a, park_seconds=1.0), attempts),
    st.builds(lambda a: wire.Refused(attempt=a, error=ERROR), attempts),
    st.builds(lambda a: wire.Revoked(attempt=a, error=ERROR), attempts),
    st.builds(
        lambda a, ttl, root: wire.Commit(attempt=a, ttl_seconds=ttl, root=root), attempts, st.floats(0, 9), roots
    ),
    st.builds(lambda a: wire.Ack(attempt=a), attempts),
    st.builds(lambda a: wire.Installed(attempt=a), attempts),
    st.builds(lambda a: wire.NotInstalled(attempt=a, error=ERROR), attempts),
    st.just(wire.Goodbye(why="bye")),
)
verdicts = received(
    st.builds(
        lambda number, verdict, error: wire.Decided(key="k", part=number, group=1, verdict=verdict, error=error),
        st.sampled_from([1, 1, 1, 2]),
        st.sampled_from(wire.Verdict),
        st.sampled_from([None, ERROR]),
    )
)
common = [
    told,
    st.builds(protocol.PeerLost, peers),
    st.builds(protocol.PeerDead, peers),
    st.just(protocol.Cancel(FAILURE)),
    st.just(protocol.Tick()),
]
target_events = st.one_of(
    *common,
    verdicts,
    st.builds(protocol.ReadEnded, attempts, roots, st.sampled_from([None, None, ERROR])),
    st.builds(protocol.CutOffDone, attempts),
    st.just(protocol.InstallDone()),
    st.just(protocol.InstallFailed(ERROR)),
)
source_events = st.one_of(
    *common,
    st.builds(
        protocol.AskArrived,
        peer=peers,
        engine=st.sampled_from(["D", "E"]),
        attempt=attempts,
        digest=st.sampled_from(["digest", "other"]),
        readers=st.sampled_from([1, 2]),
        refusal=st.sampled_from([None, None, ERROR]),
    ),
    st.builds(protocol.PreparedArrived, peers, attempts, roots, st.booleans(), roots),
    st.builds(protocol.LeaseLapsed, peers, attempts),
    st.builds(protocol.TicketArrived, peers),
    st.builds(protocol.DeclineArrived, peers, st.just("full hit"), st.booleans()),
    st.just(protocol.RenewHold()),
    st.just(protocol.Seal("digest")),
)
steps = st.floats(0.0, 6.0)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(target_events, steps), max_size=40), st.booleans())
def test_a_target_part_takes_any_events_and_ends_once(script, together) -> None:
    """C3, C5, G2."""
    siblings = protocol.Membership(key="k", coordinator="Z", number=1, content="c") if together else None
    part, actions = target.begin(
        "k", [("A", 1), ("B", 2)], deadline_seconds=9.0, now=0.0, timing=protocol.Timing(), siblings=siblings
    )
    deeds, now = list(actions), 0.0
    for event, wait in script:
        now += wait
        part, actions = target.step(part, event, now)
        deeds += actions
    ends = [deed for deed in deeds if isinstance(deed, protocol.Report)]
    released = deeds.count(protocol.ReleaseBlocks())
    assert len(ends) <= 1
    assert released == sum(end.end is not End.DONE for end in ends)
    if ends and ends[0].end is End.DONE:
        assert deeds.count(protocol.Install()) == 1
        assert deeds.count(protocol.Show()) == int(together)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(source_events, steps), max_size=40), st.sampled_from([None, "digest"]))
def test_a_source_part_takes_any_events_and_ends_once(script, digest) -> None:
    """C3, C5, G1, G2."""
    part = source.begin("k", digest=digest, ttl_seconds=9.0, deadline_seconds=9.0, now=0.0, timing=protocol.Timing())
    deeds, now = [], 0.0
    exposed: set[tuple[str, int]] = set()
    for event, wait in script:
        now += wait
        part, actions = source.step(part, event, now)
        for deed in actions:
            if isinstance(deed, protocol.Expose):
                exposed.add((deed.peer, deed.attempt))
            if isinstance(deed, protocol.Withdraw):
                exposed.discard((deed.peer, deed.attempt))
            if isinstance(deed, protocol.EndHold):
                assert not exposed, "blocks go back only when nobody may read them"
        deeds += actions
    assert sum(isinstance(deed, protocol.Report) for deed in deeds) == deeds.count(protocol.EndHold()) <= 1


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(source_events, steps), max_size=25))
def test_a_source_part_left_alone_ends_within_its_bounds(script) -> None:
    """B1, B3, B6: whatever has happened, time alone brings every block back."""
    part = source.begin("k", digest="digest", ttl_seconds=9.0, deadline_seconds=9.0, now=0.0, timing=protocol.Timing())
    deeds, now = [], 0.0
    for event, wait in script:
        now += wait
        part, actions = source.step(part, event, now)
        deeds += actions
    for _ in range(100):
        timer = source.next_timer(part)
        if timer is None:
            break
        now = max(now, timer)
        part, actions = source.step(part, protocol.Tick(), now)
        deeds += actions
    assert part.phase is protocol.SourcePhase.CLOSED
    assert deeds.count(protocol.EndHold()) == 1


def test_fire_takes_the_first_edge_whose_guard_holds() -> None:
    part = source.begin("k", digest="d", ttl_seconds=1.0, deadline_seconds=1.0, now=0.0, timing=protocol.Timing())
    moment = source.Moment(5.0, part.timing)
    part, _ = fire(SOURCE_PART, part, protocol.Tick(), moment)
    assert part.phase is protocol.SourcePhase.ENDING


stands = st.builds(
    lambda peer, number, gathering, stage, content: protocol.Stood(
        peer, wire.Stands(key="k", part=number, group=gathering, content=content, stage=stage, error=ERROR)
    ),
    st.sampled_from(["D0", "D1"]),
    st.sampled_from([1, 1, 1, 2]),
    st.sampled_from([0, 7, 7, 7, 3]),
    st.sampled_from(wire.Stage),
    st.sampled_from(["c", "c", "c", "other"]),
)
group_events = st.one_of(
    stands,
    stands,
    st.builds(protocol.PeerLost, st.sampled_from(["D0", "D1", "Z"])),
    st.builds(protocol.PeerDead, st.sampled_from(["D1", "Z"])),
    st.just(protocol.Tick()),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(group_events, st.floats(0.0, 1.0)), max_size=30))
def test_a_group_takes_any_events_and_never_decides_both_ways(script) -> None:
    """C3, G2: whatever its ranks say in whatever order, what was revealed to another rank is not abandoned there."""
    known = group.begin("k", 7, "D0", ["D0", "D1"], now=0.0, timing=protocol.Timing())
    words, now = [], 0.0
    for event, wait in script:
        now += wait
        known, actions = group.step(known, event, now)
        words += [send.message for send in actions if send.peer == "D1" and send.message.group == 7]
    parts = {word.part for word in words if word.verdict is wire.Verdict.REVEAL}
    first = next((place for place, word in enumerate(words) if word.verdict is wire.Verdict.REVEAL), len(words))
    assert not any(word.verdict is wire.Verdict.ABANDON and word.part in parts for word in words[first:])
