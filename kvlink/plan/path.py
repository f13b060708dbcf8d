"""How a plan's bytes best cross: what each way costs on a machine of given speeds, and which is the cheapest.

Pure: the speeds are measured elsewhere (`kvlink.transports.calibration`), or those of `TYPICAL`. A prediction is for
ranking, not a promise: it knows what a core has to do for a byte, a run and an operation, and which cores share the
work, and nothing of what else the machine does.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from kvlink import limits
from kvlink.plan.copyplan import CopyPlan

DIRECT: Final = "direct"
"""Gets from source blocks into target blocks: where runs are long and nothing is converted."""
PACKED: Final = "packed"
"""Short runs gathered into chunks by the source, scattered by the target."""
MAPPED: Final = "mapped"
"""The target copies out of the source's memory, which it has mapped."""
PULLED: Final = "pulled"
"""The target has the kernel copy out of the source's memory, which it has not mapped."""
RING: Final = "ring"
"""The source gathers into memory that both have mapped, the target scatters."""
STREAM: Final = "stream"
"""The source gathers into sockets, the target scatters out of them."""


@dataclass(frozen=True, slots=True)
class Rate:
    """What one core takes for bytes that lie in runs."""

    byte_seconds: float
    run_seconds: float

    def of(self, shape: Shape) -> float:
        """Seconds for a shape."""
        return shape.total_bytes * self.byte_seconds + shape.runs * self.run_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """Of one machine, one core each.

    Attributes:
        copy: from cold memory to cold memory, run by run.
        gather: from cold memory into a slot of `limits.SLOT_BYTES` that is in the cache.
        scatter: out of such a slot.
        digest: hashing what lies in cold memory.
        digest_byte_seconds: hashing what is in the cache.
        pull: from another process's cold memory to cold memory, by the kernel.
        get: one-sided gets between two ranks of one host over UCX, the gets' own cost in ``run_seconds``.
        slot_get_byte_seconds: the same out of a slot into a slot.
        send, receive: through a TCP connection of the host with itself.
        cpus: that this process may use.
        measured: whether they are this machine's own.
    """

    copy: Rate
    gather: Rate
    scatter: Rate
    digest: Rate
    digest_byte_seconds: float
    pull: Rate
    get: Rate
    slot_get_byte_seconds: float
    send: Rate
    receive: Rate
    cpus: int
    measured: bool


TYPICAL: Final = Speeds(
    copy=Rate(0.06e-9, 0.2e-6),
    gather=Rate(0.045e-9, 0.15e-6),
    scatter=Rate(0.03e-9, 0.1e-6),
    digest=Rate(0.025e-9, 0.05e-6),
    digest_byte_seconds=0.011e-9,
    pull=Rate(0.055e-9, 0.9e-6),
    get=Rate(0.055e-9, 1.9e-6),
    slot_get_byte_seconds=0.035e-9,
    send=Rate(0.1e-9, 0.15e-6),
    receive=Rate(0.1e-9, 0.15e-6),
    cpus=8,
    measured=False,
)
"""Of a server of 2023, as measured on one; for where nothing is measured. Between hosts, the tools that only plan."""

_FAR_GET: Final = {True: Rate(0.08e-9, 1e-6), False: Rate(0.6e-9, 10e-6)}
"""Gets between hosts, by whether there is RDMA: 100 Gbit/s; and what UCX makes of TCP. Not measured at start-up: that
takes the other host."""

_FAR_SOCKET_BYTE_SECONDS: Final = 0.1e-9
"""The least that a byte takes through sockets between hosts, whatever their cores can: 80 of 100 Gbit/s."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What of a plan decides its cost."""

    total_bytes: int
    runs: int

    @classmethod
    def of(cls, plan: CopyPlan) -> Shape:
        """A plan's."""
        return cls(plan.total_bytes, plan.run_count)

    @property
    def run_bytes(self) -> int:
        """Mean length of a run."""
        return self.total_bytes // max(1, self.runs)

    def scaled_to(self, total_bytes: int) -> Shape:
        """The same runs, more or fewer of them."""
        return Shape(total_bytes, max(1, round(self.runs * total_bytes / max(1, self.total_bytes))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Between whom bytes move, and how.

    Attributes:
        near: both ranks are of one host, and so share its cores.
        rdma: both have it.
        integrity: bytes are digested on both sides.
        lanes: sockets, each with a thread at either end.
        copy_threads: that copy beside the target's own, where it copies by itself.
    """

    near: bool = True
    rdma: bool = False
    integrity: bool = True
    lanes: int = limits.STREAM_LANES
    copy_threads: int = 0


def predict(path: str, shape: Shape, speeds: Speeds, setting: Setting) -> float:
    """Seconds that a transfer of ``shape`` takes by ``path``, between ranks that do nothing else.

    Each side's work is spread over its threads; two ranks of one host share its cores.

    Raises:
        KeyError: no such path.
    """
    held_up = _HELD_UP.get(path, 1.0) if setting.near else 1.0
    source, target = (seconds * held_up for seconds in _WORK[path](shape, speeds, setting))
    longest = max(source, target) / _threads(path, setting)
    if setting.near:
        return max(longest, (source + target) / speeds.cpus)
    return max(longest, shape.total_bytes * _FAR_SOCKET_BYTE_SECONDS) if path == STREAM else longest


def _threads(path: str, setting: Setting) -> float:
    if path == STREAM:
        return setting.lanes
    return 1 + _COPY_THREAD_GAIN * setting.copy_threads if path in (MAPPED, PULLED) and not setting.integrity else 1


def _direct(shape: Shape, speeds: Speeds, setting: Setting) -> tuple[float, float]:
    digest = speeds.digest.of(shape) if setting.integrity else 0.0
    get = speeds.get if setting.near else _FAR_GET[setting.rdma]
    return digest, get.of(shape) + digest


def _packed(shape: Shape, speeds: Speeds, setting: Setting) -> tuple[float, float]:
    digest = _digest(shape, speeds, setting)
    far = _FAR_GET[setting.rdma]
    byte_seconds = speeds.slot_get_byte_seconds if setting.near else far.byte_seconds
    get_seconds = (speeds.get if setting.near else far).run_seconds
    gets = shape.total_bytes * byte_seconds + get_seconds * -(-shape.total_bytes // limits.SLOT_BYTES)
    return speeds.gather.of(shape) + digest, gets + speeds.scatter.of(shape) + digest


def _ring(shape: Shape, speeds: Speeds, _setting: Setting) -> tuple[float, float]:
    """Digests hide in what either end waits for the other: measured, they cost nothing more."""
    return speeds.gather.of(shape), speeds.scatter.of(shape)


def _mapped(shape: Shape, speeds: Speeds, setting: Setting) -> tuple[float, float]:
    """One pass, and no byte lies in between; a run costs what it costs either end of a slot."""
    run_seconds = speeds.gather.run_seconds + speeds.scatter.run_seconds
    copy = shape.total_bytes * speeds.copy.byte_seconds + shape.runs * run_seconds
    return speeds.digest.of(shape) if setting.integrity else 0.0, copy + _digest(shape, speeds, setting)


def _pulled(shape: Shape, speeds: Speeds, setting: Setting) -> tuple[float, float]:
    """With digests the bytes stop at a slot on their way, which costs no more: the other step is out of the cache."""
    source = speeds.digest.of(shape) if setting.integrity else 0.0
    return source, speeds.pull.of(shape) + _digest(shape, speeds, setting)


def _stream(shape: Shape, speeds: Speeds, setting: Setting) -> tuple[float, float]:
    cold = speeds.digest.of(shape) if setting.integrity else 0.0
    return speeds.send.of(shape) + cold, speeds.receive.of(shape) + _digest(shape, speeds, setting)


def _digest(shape: Shape, speeds: Speeds, setting: Setting) -> float:
    return shape.total_bytes * speeds.digest_byte_seconds if setting.integrity else 0.0


_WORK: Final = {DIRECT: _direct, PACKED: _packed, RING: _ring, MAPPED: _mapped, PULLED: _pulled, STREAM: _stream}
"""Seconds of one core at the source and at the target, by path."""

_HELD_UP: Final = {MAPPED: 1.4, PACKED: 1.45, RING: 1.5}
"""How much longer copies take in earnest than in the short measurement: two cores at once share one memory, and the
slots' bytes cross between them. From transfers of 256 MiB and more in runs of 2 KiB to 1 MiB: docs/performance.md."""

_COPY_THREAD_GAIN: Final = 0.5
"""What another thread adds that copies out of the same memory: two took 1.1 to 1.8 times one's speed, as two virtual
CPUs shared a core complex or did not."""


def choose_path(
    plan: CopyPlan, offered: Collection[str], speeds: Speeds = TYPICAL, setting: Setting | None = None
) -> tuple[str | None, str]:
    """Choose between a get a run and gathered chunks.

    Args:
        plan: of one leg.
        offered: names of paths, such as ``{"direct"}``.
        speeds: of this machine.
        setting: between whom; two ranks of one host if not told.

    Returns:
        The path, or ``None`` if none can move the plan; and why, in words.
    """
    if plan.converts:
        if PACKED in offered:
            return PACKED, "elements are converted on their way"
        return None, "elements must be converted, and a direct get moves bytes as they are"
    shape = Shape.of(plan)
    if shape.runs == 0:
        return DIRECT, "nothing is moved"
    if PACKED not in offered:
        return DIRECT, "no transport offers gathered chunks"
    if DIRECT not in offered:
        return PACKED, "no transport offers a get a run"
    return faster(DIRECT, PACKED, shape, speeds, setting or Setting())


def faster(first: str, second: str, shape: Shape, speeds: Speeds, setting: Setting) -> tuple[str, str]:
    """Which of two paths is predicted to take less, the first if neither; and the figures, in words."""
    seconds = {path: predict(path, shape, speeds, setting) for path in (first, second)}
    chosen, other = (first, second) if seconds[first] <= seconds[second] else (second, first)
    figures = f"{seconds_text(seconds[chosen])} predicted against {seconds_text(seconds[other])} {other}"
    stated = f"{figures}, runs of {bytes_text(shape.run_bytes)}"
    return chosen, stated if speeds.measured else f"{stated}, on a typical machine"


def seconds_text(seconds: float) -> str:
    """Short, for people: ``3.1 ms``."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def bytes_text(count: int) -> str:
    """Short, for people: ``64 KiB``."""
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count} B"
