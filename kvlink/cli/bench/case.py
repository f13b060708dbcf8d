"""What a bench runs: geometry, the two sides, the prompts, and how they are grouped into rounds."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, Literal

import msgspec

from kvlink import limits
from kvlink.cli.bench.numbers import CONVERTED
from kvlink.cli.models import Geometry
from kvlink.errors import ConfigError
from kvlink.layout import DType

Flow = Literal["push", "fetch"]
TransportName = Literal["ucx", "stream", "shared", "loopback"]
PathName = Literal["auto", "direct", "packed", "mapped", "pulled", "ring"]
PATHS: Final[dict[TransportName, tuple[PathName, ...]]] = {
    "ucx": ("auto", "direct", "packed"),
    "stream": ("auto",),
    "shared": ("auto", "mapped", "pulled", "ring"),
    "loopback": ("auto",),
}
"""What ``--path`` may say, by transport."""
SideName = Literal["source", "target"]

HOST: Final = "host"
"""Where caches lie, if not on a GPU such as ``cuda:0``."""
_DEVICE: Final = re.compile(r"host|cuda:\d{1,4}")
_LEAST_GBPS: Final = limits.MIN_CAP_BYTES_PER_SECOND * 8 / 1e9
_MOST_GBPS: Final = limits.MAX_CAP_BYTES_PER_SECOND * 8 / 1e9
ROUND_BYTES: Final = 2 * 1024**3
"""KV of one round, when requests run concurrently: what bounds the pools."""
MAX_ENGINES: Final = 64
"""Of a side; each has a process and a pool."""
ROUND_DEPTH: Final = 4
"""Requests of a round for each one in flight: enough that a round's ends do not count."""


class Side(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One engine: its parallelism and the shape of its cache."""

    tp: int
    pp: int
    block_size: int
    layout: str
    dtype: DType | None = None
    """``None``: the geometry's."""

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold ``tokens``."""
        return -(-tokens // self.block_size)

    @property
    def ranks(self) -> int:
        """Worker ranks of the engine."""
        return self.tp * self.pp


MAX_LAYER_SECONDS: Final = 60.0
"""Of pretended computing, a layer."""


class Round(msgspec.Struct, frozen=True):
    """Requests that run together: their indices in the case's prompts. The first rounds are warm-up."""

    requests: tuple[int, ...]
    warmup: bool


class FaultRates(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How likely a read loses a chunk, and a chunk is altered or late, 0 to 1."""

    drop: float = 0.0
    corrupt: float = 0.0
    delay: float = 0.0


class Case(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One bench, complete: both halves need nothing else.

    ``prompts`` are token counts, warm-up first. ``tries`` are those of a request, the first included. ``device`` is
    where all caches lie. Of every ``kill_target_every`` requests one has the target's processes killed under it.
    Request i goes from source engine ``i % source_engines`` to target engine ``i % target_engines``.
    ``path`` is one of `PATHS`. A push whose source takes ``layer_seconds`` to compute each layer is streamed meanwhile.
    """

    geometry: Geometry
    source: Side
    target: Side
    prompts: tuple[int, ...]
    warmup: int
    concurrency: int
    flow: Flow
    transport: TransportName
    integrity: bool
    limit_check: bool
    ucx_tls: str | None
    ucx_origin: str
    seed: int
    stream_lanes: int = limits.STREAM_LANES
    max_gbps: float | None = None
    device: str = HOST
    path: PathName = "auto"
    tries: int = 1
    fault: FaultRates | None = None
    kill_target_every: int | None = None
    source_engines: int = 1
    target_engines: int = 1
    layer_seconds: float | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be run, by the name of its flag.

        Raises:
            ConfigError: a value is out of its bounds; the message names the flag.
        """
        if len(self.prompts) <= self.warmup:
            msg = "--requests must leave at least one request to measure"
            raise ConfigError(msg)
        _within("--tokens", min(self.prompts), 1, limits.MAX_TOKENS_PER_REQUEST)
        _within("--tokens", max(self.prompts), 1, limits.MAX_TOKENS_PER_REQUEST)
        _within("--tries", self.tries, 1, limits.MAX_RETRY_TRIES)
        if self.path not in PATHS[self.transport]:
            msg = (
                f"--path {self.path} is none of --transport {self.transport}; it has {', '.join(PATHS[self.transport])}"
            )
            raise ConfigError(msg)
        if self.layer_seconds is not None and (self.flow != "push" or self.source.pp > 1):
            raise ConfigError("--layer-ms streams what one source stage computes: give --flow push and --source-pp 1")
        if self.layer_seconds is not None and not 0 <= self.layer_seconds <= MAX_LAYER_SECONDS:
            raise ConfigError(f"--layer-ms must lie between 0 and {MAX_LAYER_SECONDS * 1e3:g}")
        if self.fault is not None and self.transport != "loopback":
            msg = "--fault is made by the loopback: give --transport loopback too"
            raise ConfigError(msg)
        if self.kill_target_every is not None:
            _within("--kill-target-every", self.kill_target_every, 1, len(self.prompts))
            _within("--tries", self.tries, 2, limits.MAX_RETRY_TRIES)
            if self.transport == "loopback" or self.concurrency > 1:
                msg = "--kill-target-every kills processes, one request at a time: drop --concurrency and loopback"
                raise ConfigError(msg)
        self._check_topology()
        self._check_device()
        self._check_conversion()
        _within("--lanes", self.stream_lanes, 1, limits.MAX_LANES)
        _within("--concurrency", self.concurrency, 1, limits.MAX_ACTIVE_READS)
        _within("--layers", self.geometry.layers, 1, limits.MAX_LAYERS)
        _within("--kv-heads", self.geometry.kv_heads, 1, limits.MAX_HEADS)
        _within("--head-dim", self.geometry.head_dim, 1, limits.MAX_CHANNELS)
        for name in ("source", "target"):
            side = self.side(name)
            _within(f"--{name}-tp", side.tp, 1, limits.MAX_WORLD_RANKS)
            _within(f"--{name}-pp", side.pp, 1, self.geometry.layers)
            _within(f"--{name}-block-size", side.block_size, 1, limits.MAX_BLOCK_SLOTS)
            if side.blocks_for(max(self.prompts)) > limits.MAX_BLOCKS_PER_REQUEST:
                msg = f"--{name}-block-size {side.block_size} cuts the longest prompt into too many blocks"
                raise ConfigError(msg)

    def _check_cap(self) -> None:
        if self.max_gbps is None:
            return
        if self.transport == "loopback" or not _LEAST_GBPS <= self.max_gbps <= _MOST_GBPS:
            msg = f"--max-gbps is {self.max_gbps:g}; give {_LEAST_GBPS:g} to {_MOST_GBPS:g}, and no loopback"
            raise ConfigError(msg)

    def _check_device(self) -> None:
        self._check_cap()
        if not _DEVICE.fullmatch(self.device):
            msg = f"--device is {self.device!r}; it is host, cuda, or cuda:N with a GPU's number"
            raise ConfigError(msg)
        if self.device != HOST and self.transport != "ucx":
            msg = f"--device {self.device} is reached by ucx only: drop --transport {self.transport}"
            raise ConfigError(msg)
        if self.device != HOST and self.path == "direct":
            msg = f"--path direct gets from caches themselves, and those of {self.device} are always packed: drop it"
            raise ConfigError(msg)

    def _check_topology(self) -> None:
        if self.engines == 1:
            return
        _within("--topology", self.engines, 1, MAX_ENGINES)
        if self.flow != "fetch" or self.transport == "loopback" or self.kill_target_every is not None:
            msg = "--topology runs fetches between processes: drop --flow push, --transport loopback and kills"
            raise ConfigError(msg)

    @property
    def engines(self) -> int:
        """Engines of the side that has more: pairs that requests are dealt to in turn."""
        return max(self.source_engines, self.target_engines)

    def engines_of(self, name: SideName) -> int:
        """Engines of one side."""
        return self.source_engines if name == "source" else self.target_engines

    def _check_conversion(self) -> None:
        types = [self.dtype("source"), self.dtype("target")]
        strange = [dtype.value for dtype in types if dtype not in CONVERTED]
        if self.converts and strange:
            msg = f"--source-dtype and --target-dtype are {types[0].value} and {types[1].value}; {strange[0]} is opaque"
            raise ConfigError(msg)
        if self.converts and self.path == "direct":
            msg = "--path direct moves bytes as they are, and the dtypes differ: drop --path"
            raise ConfigError(msg)
        if self.converts and self.limit_check:
            msg = "--limit-check moves the same bytes raw, and the dtypes differ: give --no-limit-check"
            raise ConfigError(msg)

    def dtype(self, name: SideName) -> DType:
        """Element type of a side's cache."""
        return self.side(name).dtype or self.geometry.dtype

    @property
    def converts(self) -> bool:
        """Whether elements change on their way."""
        return self.dtype("source") is not self.dtype("target")

    def side(self, name: SideName) -> Side:
        """The side called ``name``."""
        return self.source if name == "source" else self.target

    @property
    def requests(self) -> int:
        """Measured requests: all but the warm-up."""
        return len(self.prompts) - self.warmup

    def request_bytes(self, index: int) -> int:
        """Payload of request ``index``, which is the source's bytes of what all target ranks receive, replicas too."""
        return self.prompts[index] * self.payload_token_bytes

    @property
    def payload_token_bytes(self) -> int:
        """Payload of a token."""
        return self.side_token_bytes("target") // self.dtype("target").itemsize * self.dtype("source").itemsize

    def side_token_bytes(self, name: SideName) -> int:
        """Bytes that a token has over all ranks of a side: with more TP ranks than KV heads, each rank holds one."""
        heads = max(self.geometry.kv_heads, self.side(name).tp)
        return heads * self.geometry.head_elements * self.dtype(name).itemsize

    def rounds(self) -> Iterator[Round]:
        """Cut the prompts into rounds: single requests, or as many as keep ``concurrency`` busy within the bound."""
        for index in range(self.warmup):
            yield Round((index,), warmup=True)
        batch: list[int] = []
        for index in range(self.warmup, len(self.prompts)):
            if batch and not self._may_join(batch, index):
                yield Round(tuple(batch), warmup=False)
                batch = []
            batch.append(index)
        yield Round(tuple(batch), warmup=False)

    def _may_join(self, batch: list[int], index: int) -> bool:
        if len(batch) < self.concurrency:
            return True
        if self.concurrency == 1 or len(batch) == self.concurrency * ROUND_DEPTH:
            return False
        return sum(map(self.request_bytes, [*batch, index])) <= ROUND_BYTES


def _within(flag: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        msg = f"{flag} is {value}; it must lie between {low} and {high}"
        raise ConfigError(msg)
