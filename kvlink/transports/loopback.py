"""A transport inside one process: deterministic under a seed, on a clock that is given, with faults by script.

Every end of a `LoopbackFabric` is one `LoopbackTransport`, which stands for one rank's process. A read moves only in
`poll` of its target, a few chunks a poll, in an order drawn from the seed. A chunk is in flight from one poll to a
later one, so bytes still land between `cut_off` and its CUT_OFF completion, as they do on a wire.

    fabric = LoopbackFabric(seed=7, faults=[FlipByte(chunk=2, on_try=1)])
    source, target = LoopbackTransport(fabric, "source"), LoopbackTransport(fabric, "target")
    target.connect("source", source.address(), None)
    source.connect("target", target.address(), None)

Renewals are a state here, not messages: a lease is renewed without a gap while its read runs at a live target,
and for a while after it ended well.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvlink._native import _kvlink
from kvlink.errors import ClosedError, TransportError
from kvlink.limits import MAX_ACTIVE_READS, MAX_REGIONS, RENEWAL_LINGER_SECONDS
from kvlink.transports.alarm import Alarm
from kvlink.transports.base import (
    Backing,
    Capabilities,
    Completion,
    CompletionKind,
    Exposure,
    LeaseReport,
    Outcome,
    Read,
    RegionKey,
    Transport,
    TransportFull,
)
from kvlink.transports.faults import StopPeer
from kvlink.transports.loopback_fabric import End, LoopbackFabric
from kvlink.transports.loopback_state import (
    Flight,
    ReadRun,
    Regions,
    SourceLease,
    by_region,
    checked_plan,
    leaf_count,
)

__all__ = ["LoopbackFabric", "LoopbackTransport"]


@dataclass(slots=True, eq=False)
class _Peer:
    """One end's view of another, from CONNECTED to DISCONNECTED or PEER_LOST."""

    name: str
    end: End
    heard_at: float
    keys: dict[int, RegionKey] = field(default_factory=dict)
    runs: dict[int, ReadRun] = field(default_factory=dict)
    leases: dict[int, SourceLease] = field(default_factory=dict)
    lingering: dict[int, float] = field(default_factory=dict)  # attempts read well, and until when they are renewed


class LoopbackTransport(Transport):
    """One rank's end of a `LoopbackFabric`; ``name`` is what faults call it by."""

    def __init__(self, fabric: LoopbackFabric, name: str) -> None:
        self.name = name
        self._fabric = fabric
        self._alarm = Alarm()
        self._memory: dict[int, tuple[int, int]] = {}
        self._peers: dict[str, _Peer] = {}
        self._completions: deque[Completion] = deque()
        self._last_op = 0
        self._stopped_at: float | None = None
        self._closed = False
        self._address = fabric.join(self)

    # --- what it is, and its memory ---------------------------------------------------------------------------------

    def capabilities(self) -> Capabilities:
        """See `Transport.capabilities`."""
        return Capabilities(name="loopback", paths=("local",), version="1", origin="this process")

    def address(self) -> bytes:
        """Names this end in its fabric; no other end ever has the same."""
        return self._address

    def register(self, region: int, address: int, length: int, backing: Backing | None = None) -> None:
        """See `Transport.register`. The memory must stay mapped until `unregister` or `close`."""
        self._check_open()
        if self._fabric.script.registration_fails():
            raise TransportError(f"registering region {region} ({length} bytes) failed: fault injected")
        if region in self._memory:
            raise TransportError(f"region {region} is registered already; unregister it first")
        if not 0 <= region < MAX_REGIONS:
            raise TransportError(f"region {region} is out of range; there are {MAX_REGIONS}")
        if address <= 0 or length <= 0:
            raise TransportError(f"region {region} needs an address and a length above 0, not {address} and {length}")
        self._memory[region] = (address, length)

    def unregister(self, region: int) -> None:
        """See `Transport.unregister`."""
        self._memory.pop(region, None)

    def export_key(self, region: int) -> RegionKey:
        """See `Transport.export_key`."""
        memory = self._memory.get(region)
        if memory is None:
            raise TransportError(f"region {region} is not registered; register it before exporting its key")
        return RegionKey(region=region, address=memory[0], length=memory[1], key=self._address)

    # --- peers ------------------------------------------------------------------------------------------------------

    def connect(self, peer: str, address: bytes, channel: int | None, lanes: Sequence[int] = ()) -> int:
        """See `Transport.connect`. Sockets are not needed, and closed."""
        for descriptor in lanes if channel is None else (channel, *lanes):
            os.close(descriptor)  # the fabric is channel enough
        self._check_open()
        if peer in self._peers:
            raise TransportError("already connected; disconnect first", peer=peer, stage="connect")
        op = self._next_op()
        end = self._fabric.find(address)
        if self._fabric.script.connect_fails():
            self._report_connected(op, peer, Outcome.UNREACHABLE, "fault injected")
        elif end is None or end is self:
            self._report_connected(op, peer, Outcome.UNREACHABLE, "no live end of this fabric has that address")
        else:
            self._peers[peer] = _Peer(name=peer, end=end, heard_at=self._fabric.clock())
            self._report_connected(op, peer, Outcome.OK, "")
        return op

    def import_key(self, peer: str, key: RegionKey) -> None:
        """See `Transport.import_key`."""
        known = self._peer(peer, "import_key")
        # The key came from outside: nothing but the fabric's own record of a region is ever dereferenced.
        theirs = dict(enumerate(known.end.regions()))
        if key.key != known.end.address() or theirs.get(key.region) != (key.address, key.length):
            raise TransportError(f"key of region {key.region} is not one this peer gave", peer=peer, stage="import_key")
        known.keys[key.region] = key

    def disconnect(self, peer: str) -> int:
        """See `Transport.disconnect`. What is in flight never lands."""
        self._check_open()
        op = self._next_op()
        known = self._peers.get(peer)
        if known is not None:
            for end in (self, known.end):
                end.settle_leases()
            del self._peers[peer]
            self._end_all(known, Outcome.CUT_OFF, "disconnected")
            known.end.lose_end(self, "the peer disconnected")
        self._report(Completion(kind=CompletionKind.DISCONNECTED, op=op, peer=peer))
        return op

    # --- source side ------------------------------------------------------------------------------------------------

    def expose(self, exposure: Exposure) -> None:
        """See `Transport.expose`."""
        known = self._peer(exposure.peer, "expose")
        if exposure.attempt in known.leases:
            raise TransportError(f"attempt {exposure.attempt} is exposed already", peer=exposure.peer, stage="expose")
        plan = checked_plan(exposure.plan, {_kvlink.SOURCE: self._lengths()}, exposure.peer, "expose")
        known.leases[exposure.attempt] = SourceLease(exposure, plan, self._fabric.clock())
        self._alarm.ring()

    def lease(self, peer: str, attempt: int) -> LeaseReport:
        """See `Transport.lease`."""
        self.settle_leases()
        known = self._peers.get(peer)
        lease = None if known is None else known.leases.get(attempt)
        return LeaseReport(held=False, root=None) if lease is None else lease.report()

    def withdraw(self, peer: str, attempt: int) -> LeaseReport:
        """See `Transport.withdraw`. A read of the attempt ends with SOURCE_FAILED."""
        report = self.lease(peer, attempt)
        known = self._peers.get(peer)
        if known is not None:
            known.leases.pop(attempt, None)
            known.end.wake()
        return report

    def settle_leases(self) -> None:
        """See `End.settle_leases`."""
        now = self._fabric.clock()
        for peer in self._peers.values():
            for attempt, lease in peer.leases.items():
                if lease.settle(now, self._hears_until(peer, attempt)):
                    self._report(Completion(kind=CompletionKind.LEASE_LAPSED, peer=peer.name, attempt=attempt))
                    peer.end.wake()

    def renews_until(self, source: End, attempt: int) -> float:
        """See `End.renews_until`."""
        if self._fabric.script.drops_renewals(self.name):
            return -math.inf
        for peer in self._peers.values():
            if peer.end is source:
                return math.inf if attempt in peer.runs else peer.lingering.get(attempt, -math.inf)
        return -math.inf

    # --- target side ------------------------------------------------------------------------------------------------

    def read(self, read: Read) -> int:
        """See `Transport.read`."""
        known = self._peer(read.peer, "read")
        active = sum(len(peer.runs) for peer in self._peers.values())
        if active >= MAX_ACTIVE_READS or self._fabric.script.refuses_read(active):
            raise TransportFull(
                f"{active} reads run already; read again after a completion", peer=read.peer, stage="read"
            )
        if read.attempt in known.runs:
            raise TransportError(f"attempt {read.attempt} is being read already", peer=read.peer, stage="read")
        theirs = by_region({region: key.length for region, key in known.keys.items()}, 0)
        plan = checked_plan(read.plan, {_kvlink.SOURCE: theirs, _kvlink.TARGET: self._lengths()}, read.peer, "read")
        known.end.settle_leases()
        op = self._next_op()
        known.runs[read.attempt] = ReadRun(read, op, self._fabric.script.read_accepted(), plan)
        self._alarm.ring()
        return op

    def cut_off(self, peer: str, attempt: int) -> int:
        """See `Transport.cut_off`. What is in flight may land until the CUT_OFF completion."""
        self._check_open()
        op = self._next_op()
        known = self._peers.get(peer)
        run = None if known is None else known.runs.get(attempt)
        if known is not None and attempt in known.lingering:
            known.end.settle_leases()
            del known.lingering[attempt]
        if known is None or run is None:
            self._report_cut_off(op, peer, attempt)
            return op
        run.cut_off_ops.append(op)
        run.end(Outcome.CUT_OFF, "cut off")
        if run.finished:
            self._complete(known, run)
        elif run.force_at is None:
            run.force_at = self._fabric.clock() + self._fabric.cut_off_grace_seconds
            self._alarm.ring()
        return op

    # --- progress ---------------------------------------------------------------------------------------------------

    def poll(self, limit: int = 256) -> list[Completion]:
        """Move the reads of this end by a few chunks; see `Transport.poll`."""
        if self._closed or self._stopped_at is not None:
            return []
        self.settle_leases()
        self._stop_lingering()
        self._lose_silent_peers()
        self._fabric.step += 1
        for _ in range(self._fabric.chunks_per_poll):
            if not self._advance_one() or self._stopped_at is not None:
                break
        self._force_cut_offs()
        return [self._completions.popleft() for _ in range(min(limit, len(self._completions)))]

    def fileno(self) -> int:
        """See `Transport.fileno`."""
        return self._alarm.fileno()

    def arm(self) -> bool:
        """See `Transport.arm`. False, too, while a read can move: only `poll` moves it."""
        if self._closed:
            return True
        if self._stopped_at is not None:
            self._alarm.set(None)
            return True
        if self._completions or any(self._movable(peer, run) for peer, run in self._runs()):
            self._alarm.ring()
            return False
        deadline = min(self._deadlines(), default=math.inf)
        self._alarm.set(None if math.isinf(deadline) else deadline - self._fabric.clock())
        return True

    def close(self) -> None:
        """See `Transport.close`. Every peer loses this end; operations still running are dropped with it."""
        if self._closed:
            return
        self.die("the peer closed")
        self._closed = True
        self._completions.clear()
        self._alarm.close()

    # --- what the fabric and the other ends do to this one ------------------------------------------------------------

    def regions(self) -> Regions:
        """See `End.regions`."""
        return by_region(self._memory, (0, 0))

    def lease_for(self, reader: End, attempt: int) -> SourceLease | None:
        """See `End.lease_for`."""
        self.settle_leases()
        for peer in self._peers.values():
            if peer.end is reader and attempt in peer.leases:
                return peer.leases[attempt]
        return None

    @property
    def stopped_at(self) -> float | None:
        """See `End.stopped_at`."""
        return self._stopped_at

    def wake(self) -> None:
        """See `End.wake`."""
        self._alarm.ring()

    def freeze(self) -> None:
        """See `End.freeze`."""
        self._settle_around()
        if self._stopped_at is None:
            self._stopped_at = self._fabric.clock()
        for peer in self._peers.values():
            peer.end.wake()

    def thaw(self) -> None:
        """See `End.thaw`."""
        self._settle_around()
        self._stopped_at = None
        self._alarm.ring()
        now = self._fabric.clock()
        for peer in self._peers.values():
            peer.heard_at = now
            peer.end.wake()

    def die(self, detail: str) -> None:
        """See `End.die`."""
        self._settle_around()
        self._fabric.leave(self._address)
        peers, self._peers = self._peers, {}
        self._memory.clear()
        self._stopped_at = self._fabric.clock()  # a dead end says nothing more
        for peer in peers.values():
            peer.end.lose_end(self, detail)

    def lose_end(self, end: End, detail: str) -> None:
        """See `End.lose_end`."""
        for peer in [peer for peer in self._peers.values() if peer.end is end]:
            del self._peers[peer.name]
            self._end_all(peer, Outcome.PEER_LOST, detail)
            self._report(
                Completion(kind=CompletionKind.PEER_LOST, peer=peer.name, outcome=Outcome.PEER_LOST, detail=detail)
            )

    # --- inside -----------------------------------------------------------------------------------------------------

    def _advance_one(self) -> bool:
        """Post for one read and land one of its chunks; False if no read can move."""
        movable = [(peer, run) for peer, run in self._runs() if self._movable(peer, run)]
        if not movable:
            return False
        peer, run = self._fabric.random.choice(movable)
        stopped = peer.end.stopped_at is not None
        if not stopped:
            self._lease_of(peer, run)
        while run.may_post and len(run.in_flight) < self._fabric.chunks_per_poll:
            chunk = run.next_to_post(self._fabric.clock())
            delay = self._fabric.script.delay(run.number, chunk)
            run.in_flight.append(Flight(chunk, self._fabric.step + 1 + delay))
        due = [] if stopped else [flight for flight in run.in_flight if flight.due_step <= self._fabric.step]
        if due:
            flight = self._fabric.random.choice(due)
            run.in_flight.remove(flight)
            self._land(peer, run, flight.chunk)
        if run.finished and run.read.attempt in peer.runs:
            self._complete(peer, run)
        return True

    def _lease_of(self, peer: _Peer, run: ReadRun) -> SourceLease | None:
        """The lease under which a run reads; without one the run ends."""
        lease = peer.end.lease_for(self, run.read.attempt)
        if lease is None:
            run.end(Outcome.SOURCE_FAILED, "the source does not expose this attempt")
        elif lease.lapsed:
            run.end(Outcome.SOURCE_FAILED, "the lease lapsed at the source")
        elif run.read.integrity and not lease.exposure.integrity:
            run.end(Outcome.SOURCE_FAILED, "the source exposes this attempt without digests")
        elif lease.exposure.plan.total_bytes != run.read.plan.total_bytes:
            theirs, ours = lease.exposure.plan.total_bytes, run.read.plan.total_bytes
            run.end(Outcome.SOURCE_FAILED, f"the source exposes {theirs} bytes, the target reads {ours}")
        elif self._fabric.script.read_fails(run.number, run.chunks_landed):
            run.end(Outcome.FAILED, "fault injected")
        return None if run.outcome is not None else lease

    def _land(self, peer: _Peer, run: ReadRun, chunk: int) -> None:
        """Move one chunk into local memory, converted where the plan does.

        Flip what the script flips, compare digests, then let peers stop or die.
        """
        begin, end = run.span(chunk)
        theirs, ours = peer.end.regions(), self.regions()
        lease = self._lease_of(peer, run)
        try:
            wire = _kvlink.gather(run.plan, theirs, begin, end)
            if self._fabric.script.flips(run.number, chunk, run.tries(chunk)):
                wire[self._fabric.random.randrange(end - begin)] ^= 1
            _kvlink.scatter(run.plan, wire, ours, begin)
        except ValueError as error:  # the plan fitted when the read was accepted: a region went meanwhile
            run.end(Outcome.SOURCE_FAILED, str(error))
            return
        run.landed(chunk, self._fabric.clock())
        if lease is not None and run.read.integrity:
            started = self._fabric.clock()
            first, count = chunk * run.read.chunk_leaves, leaf_count(end - begin)
            run.compare(chunk, _kvlink.digest_packed(wire), lease.leaves(theirs, first, count))
            run.verify_seconds += self._fabric.clock() - started
        for fault in self._fabric.script.chunk_landed():
            if isinstance(fault, StopPeer):
                self._fabric.stop(fault.end)
            else:
                self._fabric.kill(fault.end)

    def _complete(self, peer: _Peer, run: ReadRun) -> None:
        """Report a finished run, then the cut-offs that waited for it."""
        peer.end.settle_leases()
        del peer.runs[run.read.attempt]
        end = run.completion()
        if end.outcome is Outcome.OK:
            peer.lingering[end.attempt] = self._fabric.clock() + RENEWAL_LINGER_SECONDS  # its commit may be that late
        self._report(end)
        for op in run.cut_off_ops:
            self._report_cut_off(op, peer.name, end.attempt)

    def _end_all(self, peer: _Peer, outcome: Outcome, detail: str) -> None:
        """End every run and lease with a peer at once; what is in flight never lands."""
        for run in list(peer.runs.values()):
            run.in_flight.clear()
            run.end(outcome, detail)
            self._complete(peer, run)
        for attempt, lease in peer.leases.items():
            if lease.lapse():
                self._report(Completion(kind=CompletionKind.LEASE_LAPSED, peer=peer.name, attempt=attempt))
        peer.leases.clear()

    def _stop_lingering(self) -> None:
        """Forget renewals that are over, once the source has counted them."""
        now = self._fabric.clock()
        for peer in self._peers.values():
            over = [attempt for attempt, until in peer.lingering.items() if now >= until]
            if over:
                peer.end.settle_leases()
            for attempt in over:
                del peer.lingering[attempt]

    def _lose_silent_peers(self) -> None:
        now = self._fabric.clock()
        for peer in list(self._peers.values()):
            if now >= self._silent_until(peer):
                self.lose_end(peer.end, f"silent for {self._fabric.peer_lost_seconds} s")
                peer.end.lose_end(self, "the peer closed the channel")

    def _force_cut_offs(self) -> None:
        """Past a cut-off's grace, close the endpoint: every run with that peer ends, and nothing of it lands."""
        now = self._fabric.clock()
        for peer in self._peers.values():
            late = [run for run in peer.runs.values() if run.force_at is not None and now >= run.force_at]
            if not late:
                continue
            for run in list(peer.runs.values()):
                run.in_flight.clear()
                run.end(Outcome.FAILED, f"the endpoint was closed to cut off attempt {late[0].read.attempt}")
                self._complete(peer, run)

    def _runs(self) -> Iterator[tuple[_Peer, ReadRun]]:
        for peer in self._peers.values():
            for run in peer.runs.values():
                yield peer, run

    def _movable(self, peer: _Peer, run: ReadRun) -> bool:
        """Whether a poll can change this run. A stopped source's memory gives nothing, but gets can be posted to it."""
        if peer.end.stopped_at is None:
            return True
        return run.may_post and len(run.in_flight) < self._fabric.chunks_per_poll

    def _hears_until(self, peer: _Peer, attempt: int) -> float:
        """Until when renewals of an exposed attempt reach this end, as things are."""
        if self._stopped_at is not None or peer.end.stopped_at is not None:
            return -math.inf
        return peer.end.renews_until(self, attempt)

    def _silent_until(self, peer: _Peer) -> float:
        """When a peer is lost if it goes on as it is."""
        if peer.end.stopped_at is None:
            return math.inf
        return max(peer.heard_at, peer.end.stopped_at) + self._fabric.peer_lost_seconds

    def _deadlines(self) -> Iterator[float]:
        """Times at which something happens without anybody's call."""
        for peer in self._peers.values():
            if peer.end.stopped_at is not None:
                yield self._silent_until(peer)
            for attempt, lease in peer.leases.items():
                if not lease.lapsed:
                    yield lease.lapses_at(self._hears_until(peer, attempt))
            for run in peer.runs.values():
                if run.force_at is not None:
                    yield run.force_at

    def _settle_around(self) -> None:
        """Judge every lease that this end gives or takes, before the end changes."""
        self.settle_leases()
        for peer in self._peers.values():
            peer.end.settle_leases()

    def _lengths(self) -> list[int]:
        return [length for _, length in self.regions()]

    def _peer(self, name: str, stage: str) -> _Peer:
        self._check_open()
        if name not in self._peers:
            raise TransportError("not connected; connect first", peer=name, stage=stage)
        return self._peers[name]

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"loopback end {self.name!r} is closed")

    def _next_op(self) -> int:
        self._last_op += 1
        return self._last_op

    def _report(self, completion: Completion) -> None:
        self._completions.append(completion)
        self._alarm.ring()

    def _report_connected(self, op: int, peer: str, outcome: Outcome, detail: str) -> None:
        self._report(Completion(kind=CompletionKind.CONNECTED, op=op, peer=peer, outcome=outcome, detail=detail))

    def _report_cut_off(self, op: int, peer: str, attempt: int) -> None:
        self._report(Completion(kind=CompletionKind.CUT_OFF, op=op, peer=peer, attempt=attempt))
