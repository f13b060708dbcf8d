"""A deterministic simulator: the real protocol in virtual time, on a network and under faults drawn from a seed.

`simulate` runs one seed; ``python -m kvlink.testing.simulator`` runs many.

What is real: both machines and their tables, the `Ledger`, the `ParkingLot`, the `BlockLedger`. What is modelled: what
carries out their actions (as `kvlink.link` does), clocks that drift, messages, leases, reads block by block into blocks
that remember who wrote them, processes that stop, die and return, and an embedder that retries, turns elsewhere,
repeats itself and changes its mind.
"""

from __future__ import annotations

from kvlink.testing.simulator.simulation import Outcome, simulate

__all__ = ["Outcome", "simulate"]
