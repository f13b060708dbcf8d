"""For each case of the field, its mechanism taken out of the code, and the test that must then fail.

A mutant is one edit of one file of kvlink: ``old``, which occurs there once, becomes ``new``. It is made in a copy of
the package (links, but for the file), so the code on disk is never touched, and child processes of a test see it too.
Where native code waits for a GPU's driver, the stand-in for the driver does not wait instead (`Unheeded`).
``scripts/field-case-mutants`` runs the table; `test_field_mutants` runs some of it in every test run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from stand_in import UNHEEDED

import kvlink

HOME = Path(kvlink.__file__).parent
TESTS = Path(__file__).resolve().parent
SECONDS = 110.0
"""Bound on one run of pytest."""
_BOUND = ("-o", "timeout=60")
"""On each of its tests: what never ends has been found."""


@dataclass(frozen=True)
class Mutant:
    """``what`` becomes of KVLink without the mechanism of ``case``; ``test`` is below tests/."""

    case: str
    what: str
    file: str
    old: str
    new: str
    test: str

    def fit(self) -> None:
        """Raises ValueError if the edit does not fit the code (any more)."""
        self.edited()

    def edited(self) -> str:
        """The file's text without the mechanism; raises as `fit`."""
        text = (HOME / self.file).read_text(encoding="utf-8")
        if text.count(self.old) != 1:
            raise ValueError(f"{self.case}: kvlink/{self.file} has {text.count(self.old)} times: {self.old!r}")
        return text.replace(self.old, self.new)

    def run(self, folder: Path) -> subprocess.CompletedProcess[str]:
        """Its test, with a copy of the package in ``folder`` that has the edit."""
        copy = folder / "kvlink"
        shutil.copytree(HOME, copy, copy_function=os.symlink, ignore=shutil.ignore_patterns("__pycache__"))
        (copy / self.file).unlink()
        (copy / self.file).write_text(self.edited(), encoding="utf-8")
        return run([f"tests/{self.test}"], folder)


@dataclass(frozen=True)
class Unheeded:
    """``what`` becomes of KVLink where ``call`` of the GPU's driver does nothing and claims that it did."""

    case: str
    what: str
    file: str
    """The native source that makes the call, below native/src."""
    call: str
    test: str

    def fit(self) -> None:
        """Raises ValueError if native code does not make the call (any more)."""
        if f'"{self.call}"' not in (TESTS.parent / "native/src" / self.file).read_text(encoding="utf-8"):
            raise ValueError(f"{self.case}: native/src/{self.file} does not call {self.call}")

    def run(self, folder: Path) -> subprocess.CompletedProcess[str]:
        """Its test, over a driver that does not heed the call; ``folder`` is not needed."""
        return run([f"tests/{self.test}"], environment={UNHEEDED: self.call})


def run(
    tests: list[str], folder: Path | None = None, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """pytest on some tests, with the kvlink of ``folder`` or the one that is installed."""
    path = [str(HOME.parent if folder is None else folder), str(TESTS)]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider", *_BOUND, *tests]
    ours = {"PYTHONPATH": os.pathsep.join(path), "PYTHONSAFEPATH": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        command,
        cwd=TESTS.parent,
        env={**os.environ, **ours, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=SECONDS * max(1, len(tests) / 4),
        check=False,
    )


MUTANTS = (
    # --- A: memory reused under a live transfer -----------------------------------------------------------------------
    Mutant(
        "A1",
        "a block of a live request is given to another",
        "memory/ledger.py",
        "            if owner is not None:",
        "            if owner is None:",
        "test_memory.py::test_two_live_requests_never_own_one_block_a1_g5",
    ),
    Mutant(
        "A1",
        "blocks go back before the transport's cut-off is complete",
        "link/target_reads.py",
        "        if not leg.reading:\n",
        "        if leg.attempt:\n",
        "test_field_cases.py::test_a1_a5_bytes_in_flight_at_a_cancel_land_before_the_end_is_told_or_never",
    ),
    Mutant(
        "A2",
        "a cancel is answered at once",
        "protocol/target.py",
        "all(leg.phase in QUIET for leg in part.legs)",
        "all(leg.phase is not LegPhase.ASKING for leg in part.legs)",
        "test_protocol_target.py::test_a_cancel_is_told_to_every_source_and_ends_after_the_cut_off",
    ),
    Mutant(
        "A3",
        "a hold's end gives leased blocks back",
        "memory/ledger.py",
        "        if hold.leases or not hold.ended:",
        "        if not hold.ended:",
        "test_memory.py::test_source_blocks_come_back_when_hold_and_leases_have_ended_a3",
    ),
    Mutant(
        "A4",
        "siblings of a failed leg read on",
        "protocol/target.py",
        "    part, actions = _each(part, Cut(failure), at)",
        "    actions: tuple[object, ...] = ()",
        "test_protocol_target.py::test_siblings_are_cut_off_before_the_blocks_go_back_and_the_end_is_told_once",
    ),
    Mutant(
        "A5",
        "ending a read frees it while it runs",
        "link/target_reads.py",
        "        if not leg.reading:\n",
        "        if leg.reading:\n",
        "test_field_cases.py::test_a1_a5_bytes_in_flight_at_a_cancel_land_before_the_end_is_told_or_never",
    ),
    Mutant(
        "A6",
        "a lapsed lease is committed",
        "protocol/source_leg.py",
        "    return not event.lease_held",
        "    return False",
        "test_protocol_source.py::test_a_lease_that_lapsed_is_never_committed",
    ),
    Mutant(
        "A7",
        "closing drains nothing",
        "link/driver.py",
        "        if not live or await self._ended_within(live, timeout_seconds):",
        "        if not live or await self._ended_within(live, 0.0):",
        "test_field_cases.py::test_a7_closing_a_source_lets_its_reader_finish",
    ),
    # --- B: leaks on abort and timeout --------------------------------------------------------------------------------
    Mutant(
        "B1",
        "the loss of a silent source is not told to its requests",
        "link/target_half.py",
        "        event = await self._calls.redial(peer)\n        if event is None:",
        "        event = None\n        if event is None:",
        "test_processes.py::test_b1_a_source_that_goes_before_a_byte_has_moved_gives_the_reservations_back[killed]",
    ),
    Mutant(
        "B2",
        "a refusal before admission reaches nobody",
        "protocol/source.py",
        '    text = f"{event.peer} declined: {event.why}"\n    return _end_all(part, fail(End.FAILED, errors.DeclinedError, text), at)',
        "    return part, ()",
        "test_link.py::test_b2_a_declined_offer_frees_its_source_at_once",
    ),
    Mutant(
        "B3",
        "a leased leg whose target fell silent is kept",
        "protocol/source_leg.py",
        "            on(PeerLost, Edge(P.REVOKED, revoke_lost)),\n",
        "            inert(PeerLost),\n",
        "test_protocol_source.py::test_a_silent_reader_loses_its_lease_and_the_hold_ends_soon_after",
    ),
    Mutant(
        "B4",
        "a cancelled target tells no source",
        "protocol/target_leg.py",
        "    return _telling(leg, at), (_not_installed(leg),)",
        "    return _telling(leg, at), ()",
        "test_protocol_target.py::test_a_cancel_is_told_to_every_source_and_ends_after_the_cut_off",
    ),
    Mutant(
        "B5",
        "a prefill that fails tells no ticket holder",
        "protocol/source.py",
        "    return part, (*revoked, *told, *unparked)",
        "    return part, (*revoked, *unparked)",
        "test_protocol_source.py::test_a_ticket_holder_is_told_when_the_prefill_fails",
    ),
    Mutant(
        "B6",
        "waiting ends only when somebody asks",
        "cluster/admission.py",
        "        return min((_ends_at(queued.demand) for queued in self._queue.values()), default=None)",
        "        return None",
        "test_admission.py::test_b6_waiting_ends_on_its_own_tick_and_lets_others_in",
    ),
    Mutant(
        "B7",
        "time spent parked is the transfer's",
        "protocol/target.py",
        "        return replace(part, parked_since=None, deadline_at=part.deadline_at + now - before.parked_since)",
        "        return replace(part, parked_since=None)",
        "test_protocol_target.py::test_time_spent_parked_is_not_the_transfers_and_has_its_own_bound",
    ),
    Mutant(
        "B8",
        "target blocks are nobody's while bytes move",
        "link/target_half.py",
        "                self._blocks.reserve(work.key, work.written(self._rank.caches.spec, tokens))\n",
        "",
        "test_field_cases.py::test_b8_ownership_is_recorded_before_the_first_byte_moves",
    ),
    Mutant(
        "B9",
        "renewals wait for more than a lease's length",
        "transports/engine.py",
        "    return heartbeat_seconds, peer_lost_seconds,",
        "    return 100 * heartbeat_seconds, peer_lost_seconds,",
        "test_ucx.py::test_a_held_interpreter_is_neither_silence_nor_a_lapse",
    ),
    # --- C: peer death and stale metadata -----------------------------------------------------------------------------
    Mutant(
        "C1",
        "a restarted rank is taken for the one before it",
        "link/sessions.py",
        "    if actual == expected:\n",
        "    if actual.engine == expected.engine:\n",
        "test_field_cases.py::test_c1_a_restarted_source_is_another_peer",
    ),
    Mutant(
        "C2",
        "a handshake has no bound",
        "link/control.py",
        "        async with asyncio.timeout(timeout_seconds):\n            sock, session = await _dial_and_prove(target, secret, Purpose.CONTROL, None)",
        "        async with asyncio.timeout(None):\n            sock, session = await _dial_and_prove(target, secret, Purpose.CONTROL, None)",
        "test_control.py::test_a_listener_that_does_not_answer_is_unreachable_in_time",
    ),
    Mutant(
        "C3",
        "messages are taken for a leg whoever sends them",
        "protocol/target.py",
        "return _each(part, message, at, lambda leg: leg.attempt == attempt and leg.peer == peer)",
        "return _each(part, message, at)",
        "test_protocol_target.py::test_messages_of_another_peer_or_attempt_are_inert",
    ),
    Mutant(
        "C4",
        "a lost peer stays connected at the transport",
        "link/sessions.py",
        "        session.connection.fail(error)\n        session.pump.transport.disconnect(session.wire_name)\n",
        "        session.connection.fail(error)\n",
        "test_field_cases.py::test_c4_a_peer_lost_on_its_control_connection_is_let_go_at_the_transport",
    ),
    Mutant(
        "C5",
        "an error in the background ends no part",
        "link/target_half.py",
        "    def _fail_early(self, work: TargetWork, error: Exception) -> None:\n",
        "    def _fail_early(self, work: TargetWork, error: Exception) -> None:\n        return\n",
        "test_link_misuse.py::test_c5_a_dial_that_fails_in_any_way_ends_its_part",
    ),
    Mutant(
        "C6",
        "an attempt that cannot be exposed is told to nobody",
        "link/source_leases.py",
        "            self._feed(work, protocol.LeaseLapsed(peer, attempt))\n",
        "",
        "test_field_cases.py::test_c6_a_source_that_cannot_expose_says_so",
    ),
    Mutant(
        "C7",
        "silence is never taken for a loss",
        "transports/engine.py",
        "    return heartbeat_seconds, peer_lost_seconds,",
        "    return heartbeat_seconds, 100 * peer_lost_seconds,",
        "test_processes.py::test_a1_c7_a_source_stopped_in_mid_transfer_and_resumed_after_the_cut_off_changes_no_byte[stream, short runs]",
    ),
    # --- D: parallelism, blocks, layouts ------------------------------------------------------------------------------
    Mutant(
        "D1",
        "each target reads the source of its own rank number",
        "plan/legs.py",
        "            candidates = sorted(layer_sources & head_sources)",
        "            candidates = sorted(layer_sources)",
        "test_plan.py::test_every_tp_pair_fills_every_target_with_the_right_bytes_d1",
    ),
    Mutant(
        "D2",
        "a head id outside the model is let in",
        "layout/check.py",
        '        within(f"{path}.heads[{index}]", head, 0, num_heads - 1)\n',
        "        pass\n",
        "test_layout.py::test_a_local_head_or_layer_id_outside_the_model_is_refused_d2_d3",
    ),
    Mutant(
        "D3",
        "layers are looked for by who comes first",
        "layout/check.py",
        '    within(f"{path}.layer", plane.layer, 0, spec.identity.num_layers - 1)\n',
        "",
        "test_layout.py::test_a_local_head_or_layer_id_outside_the_model_is_refused_d2_d3",
    ),
    Mutant(
        "D4",
        "both sides count blocks of the source's size",
        "plan/planner.py",
        "        entries = pieces.first // self.slots\n        return self.ids[entries - self.first_entry], pieces.first - entries * self.slots",
        "        entries = pieces.first // self.slots\n        return self.ids[entries - self.first_entry], 0 * pieces.first",
        "test_plan.py::test_block_sizes_up_and_down_with_partial_blocks_d4",
    ),
    Mutant(
        "D5",
        "rows that overlap are let in",
        "layout/check.py",
        "        if stride < extent:",
        "        if stride < 0:",
        "test_layout.py",
    ),
    Mutant(
        "D6",
        "a plan may leave its regions",
        "plan/copyplan.py",
        "        if low < 0 or high > int(lengths[region]):",
        "        if low < 0:",
        "test_plan.py::test_a_plan_that_leaves_its_regions_is_refused_before_use_d6",
    ),
    Mutant(
        "D7",
        "all read the first replica",
        "plan/legs.py",
        "candidates[turn % len(candidates)]",
        "candidates[0]",
        "test_plan.py::test_replicas_are_read_evenly_d7",
    ),
    # --- E: hybrid, quantised, chunked, preempted ---------------------------------------------------------------------
    Mutant(
        "E1",
        "a group without tensors is left behind",
        "memory/caches.py",
        "        if (group.name in present) == (group.name in absent):",
        "        if group.name in present and group.name in absent:",
        "test_memory.py::test_every_group_has_tensors_or_is_refused_e1",
    ),
    Mutant(
        "E2",
        "quantised values move without their scales",
        "plan/match.py",
        "        if dtype.quantised and not group.scales:",
        "        if dtype.quantised and group.scales is None:",
        "test_plan_kinds.py::test_quantised_kv_whose_scales_are_left_behind_is_refused_e2",
    ),
    Mutant(
        "E3",
        "a chunk that never verified is installed",
        "protocol/target_leg.py",
        "    return event.error is not None\n",
        "    return False\n",
        "test_link_faults.py::test_e3_a_byte_flipped_on_every_try_is_named_never_installed_and_every_block_is_back",
    ),
    Mutant(
        "E4",
        "whoever waits for a prefill waits for ever",
        "protocol/target_leg.py",
        "    return replace(leg, until=at.now + at.timing.park_seconds), ()",
        "    return leg, ()",
        "test_protocol_target.py::test_time_spent_parked_is_not_the_transfers_and_has_its_own_bound",
    ),
    # --- F: order and visibility --------------------------------------------------------------------------------------
    Mutant(
        "F1",
        "an engine's events and streams are not waited for",
        "link/moments.py",
        "        return self._gpu.moment(event, stream, self._fd)",
        "        return None",
        "test_gpu_link.py::test_f1_nothing_is_read_before_the_producers_event",
    ),
    Unheeded(
        "F2",
        "a slot is used again before its event has come",
        "cuda_gpu.cpp",
        "cuEventQuery",
        "test_gpu_link.py::test_f2_a_slot_comes_back_when_its_event_has_passed",
    ),
    Mutant(
        "F3",
        "a read is over when its last chunk has come",
        "transports/loopback_state.py",
        "        return not self.in_flight and not self.may_post",
        "        return not self.may_post",
        "test_field_cases.py::test_f3_a_chunk_that_is_overtaken_is_waited_for",
    ),
    Mutant(
        "F4",
        "slots are zeroed after the blocks were handed over",
        "link/target_half.py",
        "            zero_uncovered(self._rank.caches, ",
        "            self._loop.call_later(0.05, zero_uncovered, self._rank.caches, ",
        "test_field_cases.py::test_f4_nothing_is_written_after_the_install_is_told",
    ),
    # --- G: duplicates and retries ------------------------------------------------------------------------------------
    Mutant(
        "G1",
        "a repeat of a live request is a fault",
        "protocol/ledger.py",
        "        return Join(entry.live) if entry.live is not None else entry.outcome or Fresh()",
        "        assert entry.live is None\n        return entry.outcome or Fresh()",
        "test_link.py::test_g1_a_repeated_fetch_joins_the_live_one_and_then_gets_its_outcome",
    ),
    Mutant(
        "G2",
        "a retry goes by the id of what it repeats",
        "link/target_half.py",
        "            self._last_attempt += 1\n            leg.attempt = self._last_attempt\n",
        "            leg.attempt = 1\n",
        "test_field_cases.py::test_g2_no_attempt_id_is_used_twice",
    ),
    Mutant(
        "G3",
        "silence is taken for not installed",
        "protocol/source_leg.py",
        "Edge(P.INDETERMINATE, give_up, over)",
        "Edge(P.NOT_INSTALLED, give_up, over)",
        "test_protocol_source.py",
    ),
    Mutant(
        "G4",
        "another prompt under the same key is the same request",
        "protocol/ledger.py",
        "        if digest is not None and entry.digest is not None and digest != entry.digest:",
        "        if digest is None and entry.digest is None:",
        "test_protocol_ledger.py::test_other_content_under_a_live_or_standing_key_is_a_conflict_that_names_both",
    ),
    Mutant(
        "G5",
        "an outcome outlives the blocks that it speaks of",
        "link/target_half.py",
        "            self._blocks.release(key)\n        self._ledger.release(key, self._loop.time())",
        "            self._blocks.release(key)",
        "test_link.py::test_g5_released_blocks_make_the_key_a_new_request",
    ),
    # --- H: backpressure ----------------------------------------------------------------------------------------------
    Mutant(
        "H1",
        "room is promised in one pool without the others",
        "cluster/admission.py",
        "            if any(wanted > free for wanted, free in zip(head.blocks, self._free, strict=True)):",
        "            if all(wanted > free for wanted, free in zip(head.blocks, self._free, strict=True)):",
        "test_admission.py::test_h1_a_demand_gets_all_its_pools_or_nothing_of_any",
    ),
    Mutant(
        "H2",
        "what can never fit waits",
        "cluster/admission.py",
        "            if wanted > total:\n",
        "            if wanted > 2 * total:\n",
        "test_admission.py::test_h2_what_can_never_fit_is_refused_at_once_and_names_the_pool",
    ),
    Mutant(
        "H3",
        "shares do not count",
        "cluster/admission.py",
        "            share=share, tenants",
        "            share=0.0, tenants",
        "test_admission.py::test_h3_a_tenant_below_its_fair_share_goes_before_one_at_it_whatever_its_priority",
    ),
    Mutant(
        "H4",
        "blocks of the engine's own are queued for",
        "link/room.py",
        "            foreign = self._lent[pool].intersection(ids) - own[pool]",
        "            foreign = set(ids) - own[pool]",
        "test_reserve.py::test_h4_an_engine_that_passes_its_own_blocks_is_never_queued",
    ),
    # --- I: speed and registration ------------------------------------------------------------------------------------
    Mutant(
        "I1",
        "a plan has a piece for every token",
        "plan/planner.py",
        "cut(leg.source.tensor_slots, leg.target.tensor_slots, *self._range)",
        "cut(1, 1, *self._range)",
        "test_plan.py::test_the_size_of_a_plan_does_not_grow_with_its_runs_i1",
    ),
    Mutant(
        "I2",
        "every tensor is a region of its own",
        "memory/caches.py",
        "        regions = _merge(plane.storage for plane in placed)",
        "        regions = sorted(plane.storage for plane in placed)",
        "test_memory.py::test_groups_that_alias_memory_share_a_region_i2",
    ),
    Mutant(
        "I3",
        "a run costs nothing, however short",
        "plan/path.py",
        "shape.total_bytes * self.byte_seconds + shape.runs * self.run_seconds",
        "shape.total_bytes * self.byte_seconds",
        "test_packed.py::test_a_reads_path_is_by_its_plan_unless_it_is_set",
    ),
    Mutant(
        "I4",
        "regions are registered in the loop's own turn",
        "link/registration.py",
        "    if length < limits.REGISTERED_ASIDE_BYTES:",
        "    if length > 0:",
        "test_registration.py::test_regions_are_registered_one_at_a_time_while_the_loop_goes_on_i4",
    ),
    # --- J: ports, versions, metrics ----------------------------------------------------------------------------------
    Mutant(
        "J1",
        "a port can be bound by two",
        "link/sockets.py",
        "            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)",
        "            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)",
        "test_control.py::test_an_address_in_use_is_a_typed_error_with_its_remedy",
    ),
    Mutant(
        "J2",
        "IPv6 addresses are printed without brackets",
        "wire/address.py",
        'return f"tcp://[{self.host}]:{self.port}" if ":" in self.host else',
        "return",
        "test_wire.py::test_addresses_are_printed_as_they_are_read",
    ),
    Mutant(
        "J3",
        "a listener takes whatever version the dialer speaks",
        "link/handshake.py",
        "        common = set(hello.versions) & set(self._versions)",
        "        common = set(hello.versions)",
        "test_control.py::test_the_highest_common_version_is_taken_and_none_is_named_on_both_sides",
    ),
    Mutant(
        "J4",
        "bandwidth is by the time of the last transfer alone",
        "cli/bench/tally.py",
        "Span.over([transfer.span for transfer in self.transfers]).seconds",
        "self.transfers[-1].span.seconds",
        "test_bench_report.py::test_transfers_side_by_side_are_rated_by_the_wall_clock_over_all_of_them",
    ),
    # --- K: security and identity -------------------------------------------------------------------------------------
    Mutant(
        "K1",
        "something unpickles",
        "wire/codec.py",
        "from __future__ import annotations\n",
        "from __future__ import annotations\n\nimport pickle\n",
        "test_imports.py::test_nothing_unpickles_or_evaluates",
    ),
    Mutant(
        "K2",
        "a wrong answer to the challenge is as good as a right one",
        "link/handshake.py",
        "        if not hmac.compare_digest(self.mac(label), proof.mac):",
        "        if not proof.mac:",
        "test_hostile.py::test_whoever_has_not_proven_itself_is_refused_and_told_nothing",
    ),
    Mutant(
        "K3",
        "another adapter is the same prompt",
        "descriptor.py",
        "fields=_COMPARED_FACTS,",
        'fields=("prompt_digest", "tenant"),',
        "test_descriptor.py::test_facts_that_both_state_must_be_equal_k3",
    ),
    Mutant(
        "K4",
        "weights may differ",
        "layout/identity.py",
        "        if source_value != target_value:",
        '        if source_value != target_value and "revision" not in field:',
        "test_layout.py::test_another_model_is_refused_naming_field_values_and_peers_k4",
    ),
)
