"""What is simulated: the fleet, its rules, and what happens to it. Frozen data, complete but for the workload."""

from __future__ import annotations

from typing import Final

import msgspec

from kvlink import limits
from kvlink.errors import ConfigError
from kvlink.planning.cost import Assumptions
from kvlink.planning.models import DEVICES, MODELS, Device, Model
from kvlink.planning.transfer import TransferModel, assumed_transfer
from kvlink.planning.volume import capacity

DEFAULT_LINK_BYTES_PER_SECOND: Final = 50e9
"""One 400 Gb/s adapter a worker."""


class Objectives(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What users were promised: a request is good if it meets both bounds.

    Attributes:
        ttft_seconds: arrival to first token.
        tpot_seconds: mean time of each token after it.
        attainment: part of the requests, 0 to 1, that must be good.
    """

    ttft_seconds: float = 10.0
    tpot_seconds: float = 0.1
    attainment: float = 0.95


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """A worker dies with all it has, and comes back empty. ``worker`` counts from 0, prefill workers first."""

    worker: int
    at_seconds: float
    down_seconds: float


class Switch(msgspec.Struct, frozen=True, kw_only=True):
    """All workers go over to a new revision, in waves; each is drained first and is away for ``restart_seconds``."""

    at_seconds: float
    restart_seconds: float = 60.0


class Elastic(msgspec.Struct, frozen=True, kw_only=True):
    """Every ``period_seconds`` a worker may change pools; once drained it takes ``switch_seconds``."""

    period_seconds: float = 30.0
    switch_seconds: float = 5.0


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """A fleet and its rules.

    Attributes:
        workers: engines in all.
        prefill_workers: of them that only prefill; 0: all are co-located.
        devices: of one worker (tensor parallel).
        token_budget: of one step: prompt chunks and decoding tokens together.
        max_running: requests of one step.
        growth_tokens: of room that a request is promised beyond its prompt before anything is computed.
        growth_step: tokens that a request gets at a time once it has filled that.
        expected_decode: tokens that routing expects a request to generate.
        cancelled: part of the requests, 0 to 1, whose user leaves: within ``patience_seconds``, at a random moment.
        seed: of what happens by chance.
    """

    workers: int
    prefill_workers: int = 0
    model: Model = MODELS["llama-3-70b"]
    device: Device = DEVICES["h100-sxm"]
    devices: int = 4
    assumptions: Assumptions = Assumptions()
    transfer: TransferModel = assumed_transfer(DEFAULT_LINK_BYTES_PER_SECOND)
    objectives: Objectives = Objectives()
    token_budget: int = 2048
    max_running: int = 256
    growth_tokens: int = 512
    growth_step: int = 256
    expected_decode: int = 256
    failures: tuple[Failure, ...] = ()
    switch: Switch | None = None
    elastic: Elastic | None = None
    cancelled: float = 0.0
    patience_seconds: float = 30.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot be simulated.

        Raises:
            ConfigError: (a ValueError) a number is out of its bounds; the message names it.
        """
        if not 1 <= self.workers <= limits.MAX_SIMULATED_WORKERS:
            raise ConfigError(f"workers is {self.workers}; it must lie between 1 and {limits.MAX_SIMULATED_WORKERS}")
        if not 0 <= self.prefill_workers < self.workers:
            raise ConfigError(f"prefill_workers is {self.prefill_workers}; of {self.workers} workers one must decode")
        for name in ("devices", "token_budget", "max_running", "growth_tokens", "growth_step", "expected_decode"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        if not 0 <= self.cancelled <= 1:
            raise ConfigError(f"cancelled is {self.cancelled}; it is a part, 0 to 1")
        self._check_happenings()

    def _check_happenings(self) -> None:
        for failure in self.failures:
            if not 0 <= failure.worker < self.workers:
                raise ConfigError(f"failure of worker {failure.worker}: there are workers 0 to {self.workers - 1}")
            if failure.at_seconds < 0 or failure.down_seconds <= 0:
                raise ConfigError(f"failure of worker {failure.worker}: give a time of 0 or more, and a length above 0")
        if self.switch is not None and not (self.switch.at_seconds >= 0 and self.switch.restart_seconds >= 0):
            raise ConfigError("switch: give a time and a length of 0 or more")
        if self.elastic is not None and (self.elastic.period_seconds <= 0 or not self.prefill_workers):
            raise ConfigError("elastic pools need a period above 0 and prefill_workers above 0")

    @property
    def room_tokens(self) -> int:
        """KV room of one worker."""
        return capacity(
            self.model,
            self.device,
            devices=self.devices,
            request_tokens=self.growth_tokens,
            memory_fraction=self.assumptions.usable_memory,
        ).tokens

    def split(self, prefill_workers: int) -> Scenario:
        """The same fleet with so many prefill workers; 0 is the co-located baseline, which has no elastic pools."""
        elastic = self.elastic if prefill_workers else None
        return msgspec.structs.replace(self, prefill_workers=prefill_workers, elastic=elastic)
