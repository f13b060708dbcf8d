"""Is splitting prefill from decode worth it? The ledger, the plan, the simulation and the reports.

`summarize_request_mix`, `plan_pd_split` and `evaluate_pd_decision` stand alone; `make_plan` simulates a workload
co-located and split on the same devices and judges. Simulations need SimPy and plots matplotlib (the extra ``plan``);
both are loaded when they are used.
"""

from kvlink.planning.advice import Plan, Reason, ReasonName, Rules, Verdict, make_plan
from kvlink.planning.decision import PDDecision, evaluate_pd_decision
from kvlink.planning.ledger import LedgerEntry
from kvlink.planning.mix import RequestMix, summarize_request_mix
from kvlink.planning.models import DEVICES, MODELS, Device, Model
from kvlink.planning.simulation.results import SimulationResult
from kvlink.planning.simulation.run import simulate
from kvlink.planning.simulation.scenario import Elastic, Failure, Objectives, Scenario, Switch
from kvlink.planning.split import PoolSplit, plan_pd_split
from kvlink.planning.trace import Arrival, Trace, read_trace, synthetic_trace
from kvlink.planning.transfer import BenchRecord, TransferModel, assumed_transfer, fit_transfer
from kvlink.planning.volume import Capacity, capacity, kv_bytes, kv_bytes_per_token, shard_bytes, transfer_bound_seconds

__all__ = [
    "DEVICES",
    "MODELS",
    "Arrival",
    "BenchRecord",
    "Capacity",
    "Device",
    "Elastic",
    "Failure",
    "LedgerEntry",
    "Model",
    "Objectives",
    "PDDecision",
    "Plan",
    "PoolSplit",
    "Reason",
    "ReasonName",
    "RequestMix",
    "Rules",
    "Scenario",
    "SimulationResult",
    "Switch",
    "Trace",
    "TransferModel",
    "Verdict",
    "assumed_transfer",
    "capacity",
    "evaluate_pd_decision",
    "fit_transfer",
    "kv_bytes",
    "kv_bytes_per_token",
    "make_plan",
    "plan_pd_split",
    "read_trace",
    "shard_bytes",
    "simulate",
    "summarize_request_mix",
    "synthetic_trace",
    "transfer_bound_seconds",
]
