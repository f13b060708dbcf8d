"""Legs are assigned once a source engine, and handed out fresh to each request."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from peers import roster

from kvlink.link import target_legs
from kvlink.link.target_legs import Legs


def test_a_source_engine_is_assigned_once_and_each_request_gets_legs_of_its_own(monkeypatch: pytest.MonkeyPatch):
    assigned = []
    whole = target_legs.assign_legs
    monkeypatch.setattr(target_legs, "assign_legs", lambda *args: assigned.append(args) or whole(*args))
    legs, source = Legs(), roster()
    own = source.shares[0]
    (first, *_), _ = legs.of(source, own)
    (second, *_), _ = legs.of(roster(), own)
    assert len(assigned) == 1
    first.attempt = 7
    assert second.attempt == 0
    assert first.peer == second.peer

    moved = replace(source, ranks=(replace(source.ranks[0], address="tcp://10.9.9.9:5000"), *source.ranks[1:]))
    (elsewhere, *_), _ = legs.of(moved, own)
    assert elsewhere.address == "tcp://10.9.9.9:5000", "a roster under a known name is compared, not believed"
    legs.siblings = source.shares
    legs.of(moved, own)
    assert len(assigned) == 3
