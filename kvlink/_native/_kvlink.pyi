# Written by scripts/stubs from the built extension; do not edit.
"""Native core of KVLink."""

from collections.abc import Sequence
from typing import Annotated

import numpy
from numpy.typing import NDArray

SOURCE: int = 0

TARGET: int = 1

MAX_NEST_DIMS: int = 8

MAX_OFFSET_BYTES: int = 70368744177664

MAX_TRANSFER_BYTES: int = 17592186044416

MAX_REGIONS: int = 4096

def element_types() -> list[tuple[str, int, str]]:
    """
    What a plan may convert: name, bytes, and the type's name in the kernels' sources.
    """

class Plan:
    """
    A validated copy plan, walked in wire order. Immutable; any thread may use it.
    """

    def __init__(
        self,
        segments: Sequence[
            tuple[
                Annotated[NDArray[numpy.int64], dict(shape=(None, 4), order="C", device="cpu", writable=False)],
                Annotated[NDArray[numpy.int64], dict(shape=(None, 2), order="C", device="cpu", writable=False)],
                Annotated[NDArray[numpy.int64], dict(shape=(None, 3), order="C", device="cpu", writable=False)],
                int,
                tuple[
                    str,
                    str,
                    Annotated[NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu", writable=False)]
                    | None,
                    Annotated[NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu", writable=False)]
                    | None,
                    int,
                    int,
                ]
                | None,
            ]
        ],
    ) -> None:
        """
        Each segment is (bases [P, 4], pieces [N, 2], nest [K, 3], run_bytes, conversion or None), tables of
        int64. A conversion is (source element, target element, source scales [P, S] or None, target factors
        [P, S] or None, S, index into nest of the dimension that walks S or -1), scales of float32.

        Raises:
            ValueError: a term is out of its bounds; the message names the segment.
        """

    @property
    def total_bytes(self) -> int:
        """Of the wire, which carries the source's elements."""

    @property
    def converts(self) -> bool:
        """Whether elements change type; the target then has no digests."""

    def check_bounds(self, side: int, region_lengths: Sequence[int]) -> None:
        """
        Raises:
            ValueError: a byte of this side (0 source, 1 target) is outside its region.
        """

    def count_runs(self) -> int:
        """Maximal runs of the whole plan, with neighbours that touch merged."""

    def runs(
        self, begin: int = 0, end: int | None = None, max_run_bytes: int | None = None
    ) -> Annotated[NDArray[numpy.int64], dict(shape=(None, 5))]:
        """
        Maximal runs of wire bytes [begin, end), int64 [n, 5]: source region, source offset, target region,
        target offset, bytes.
        """

LEAF_BYTES: int = 16384

SLOT_BYTES: int = 524288

def hash_variants() -> list[str]:
    """Instruction sets this CPU can hash with, fastest (the default) first."""

def xxh3_64(data: bytes | bytearray | memoryview, variant: str | None = None) -> int:
    """XXH3-64, seed 0."""

def digest_leaves(
    plan: Plan,
    side: int,
    regions: Sequence[tuple[int, int]],
    first_leaf: int = 0,
    count: int | None = None,
    variant: str | None = None,
) -> bytes:
    """
    Leaf digests of one side (0 source, 1 target), 8 little-endian bytes each. Regions are (address, length);
    they must stay mapped, and at rest, until the call returns.

    Raises:
        ValueError: the plan leaves a region, or the leaves are outside the plan.
    """

def digest_root(leaves: bytes) -> int:
    """Root digest over all leaf digests, in order."""

def move_variants() -> list[str]:
    """
    Instruction sets this CPU can move and convert with, fastest (the default) first.
    """

def move(
    plan: Plan,
    source_regions: Sequence[tuple[int, int]],
    target_regions: Sequence[tuple[int, int]],
    begin: int = 0,
    end: int | None = None,
    threads: int = 1,
    variant: str | None = None,
) -> None:
    """
    Move, and convert where the plan says so, wire bytes [begin, end) between this process's regions,
    (address, length) each. No run may overlap its own target. An element that the range cuts belongs to the
    range that has its first byte.

    Raises:
        ValueError: the plan leaves a region, or the range the plan; nothing was moved.
    """

def move_and_digest(
    plan: Plan,
    source_regions: Sequence[tuple[int, int]],
    target_regions: Sequence[tuple[int, int]],
    first_leaf: int = 0,
    count: int | None = None,
    threads: int = 1,
    variant: str | None = None,
) -> bytes:
    """
    `move` of whole leaves, and the digests of their wire bytes, 8 little-endian bytes each.

    Raises:
        ValueError: the plan leaves a region, or the leaves are outside the plan; nothing was moved.
    """

def gather(
    plan: Plan, source_regions: list[tuple[int, int]], begin: int, end: int, variant: str | None = None
) -> bytearray:
    """
    Wire bytes [begin, end), copied from this process's source regions, (address, length) each.

    Raises:
        ValueError: the plan leaves a region, or the range the plan.
    """

def scatter(
    plan: Plan,
    packed: bytes | bytearray | memoryview,
    target_regions: list[tuple[int, int]],
    begin: int,
    variant: str | None = None,
) -> None:
    """
    The reverse: `packed` is the wire's bytes from `begin` on; converts where the plan does.

    Raises:
        ValueError: the plan leaves a region, the range the plan, or leaves cut elements; nothing was moved.
    """

def digest_packed(packed: bytes | bytearray | memoryview) -> bytes:
    """
    Leaf digests of wire bytes that lie packed from the first byte of a leaf on.
    """

JOB_BYTES: int = 360

class PartJobs:
    """
    One segment of a plan as jobs of the kernels, with their tables as bytes.
    """

    @property
    def bases(self) -> bytes: ...
    @property
    def pieces(self) -> bytes: ...
    @property
    def source_scales(self) -> bytes: ...
    @property
    def target_factors(self) -> bytes: ...
    def place(self, bases: int, pieces: int, source_scales: int, target_factors: int) -> bytes:
        """
        The jobs' structs, JOB_BYTES each, for tables at these addresses; 0 for a table that is empty.
        """

def kernel_jobs(
    plan: Plan,
    source_addresses: Sequence[int],
    target_addresses: Sequence[int],
    digest: bool = False,
    max_items: int = 2147483647,
    elements: int | None = None,
) -> list[tuple[int, PartJobs]]:
    """
    For each segment: elements of an item, and the jobs. Addresses are of regions; the caller has checked bounds.
    `elements` may be given if it divides what would be chosen, so that segments are digested together.

    Raises:
        ValueError: elements are not at multiples of their size.
    """

class CudaError(RuntimeError):
    pass

def cuda_device_of(library: str, address: int) -> int:
    """Ordinal of the GPU whose memory this is; -1 for the host's."""

class CudaGpu:
    """
    One GPU's primary context, held; and the kernels loaded. See kvlink.relayout.cuda.
    """

    def __init__(self, library: str, ordinal: int) -> None:
        """
        Raises:
            Unavailable: no driver, or no such GPU.
            CudaError: the driver's own word.
        """

    @property
    def ordinal(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def arch(self) -> str:
        """Such as sm_90."""

    @property
    def driver_version(self) -> int:
        """13000 for CUDA 13.0."""

    @property
    def stand_in(self) -> bool:
        """Whether the driver is a library for tests, and no GPU."""

    def load(self, types: tuple[str, str] | None, image: bytes) -> None:
        """Kernels of a conversion (source, target), or of copies."""

    def loaded(self, types: tuple[str, str] | None) -> bool: ...

class CudaMemory:
    """Memory of a GPU; freed with the object."""

    def __init__(self, gpu: CudaGpu, nbytes: int) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

class CudaHostMemory:
    """Pinned memory of the host; freed with the object."""

    def __init__(self, gpu: CudaGpu, nbytes: int) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

class CudaEvent:
    """A point in a stream's work."""

    def __init__(self, gpu: CudaGpu, timed: bool = False) -> None: ...
    @property
    def handle(self) -> int: ...
    def done(self) -> bool: ...
    def synchronize(self) -> None: ...
    def seconds_since(self, start: CudaEvent) -> float: ...

class CudaStream:
    """
    A stream that waits for no other unless told to. Handles are CUstream and
    CUevent, which are cudaStream_t and cudaEvent_t.
    """

    def __init__(self, gpu: CudaGpu) -> None: ...
    @property
    def handle(self) -> int: ...
    def record(self, event: CudaEvent) -> None: ...
    def wait_event(self, event: int) -> None: ...
    def wait_stream(self, stream: int) -> None:
        """
        What is queued here from now on comes after all that is queued there now.
        """

    def fence(self, stream: int) -> None:
        """
        What is queued there from now on comes after all that is queued here now.
        """

    def fill(self, address: int, value: int, nbytes: int) -> None: ...
    def copy_to_device(
        self,
        address: int,
        data: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu", writable=False)],
    ) -> None:
        """The caller keeps `data` as it is until the stream is done."""

    def copy_to_host(
        self, data: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu")], address: int
    ) -> None: ...
    def copy_on_device(self, target: int, source: int, nbytes: int) -> None: ...
    def synchronize(self) -> None: ...

class CudaMoment:
    """
    A moment of an engine's own GPU work, and an eventfd that tells when it has come.
    """

    def __init__(self, gpu: CudaGpu, event: int | None, stream: int | None, fd: int) -> None: ...
    def passed(self) -> bool: ...

def kernel_types(plan: Plan) -> list[tuple[str, str] | None]:
    """
    What a plan needs loaded: conversions (source, target), None for copies.
    """

class CudaPlan:
    """A plan made ready for a GPU; kept until what it launched is done."""

    @staticmethod
    def relayout(
        stream: CudaStream,
        plan: Plan,
        source_regions: Sequence[tuple[int, int]],
        target_regions: Sequence[tuple[int, int]],
        in_leaves: bool = False,
    ) -> CudaPlan:
        """
        From region to region; launched whole unless made in leaves.

        Raises:
            ValueError: the plan leaves a region, or elements are not aligned.
            CudaError: kernels are not loaded, or the driver's own word.
        """

    @staticmethod
    def packed(stream: CudaStream, plan: Plan, side: int, regions: Sequence[tuple[int, int]]) -> CudaPlan:
        """
        Between one side's regions (0 source, 1 target) and packed wire bytes. Raises as `relayout`.
        """

    def launch(self, stream: CudaStream, begin: int, end: int, packed: int = 0, digests: int = 0) -> None:
        """
        Wire bytes [begin, end), whole leaves; `packed` is where byte `begin` lies, `digests` receives 8 bytes a
        leaf. Queued, not waited for.
        """

class Pace:
    """A bandwidth cap that engines share, in payload bytes."""

    def __init__(self, bytes_per_second: float) -> None: ...

def memory_node(address: int) -> int:
    """
    The NUMA node of the page at an address, which is touched for it; -1 where the kernel does not say.
    """

def evict(address: int, bytes: int) -> None:
    """Drop memory from all caches."""

def pull(plan: Plan, source_regions: Sequence[tuple[int, int]], target_regions: Sequence[tuple[int, int]]) -> None:
    """
    `move`, but by the call that reads another process's memory, on this process.

    Raises:
        RuntimeError: the kernel does not allow it.
        ValueError: the plan leaves a region.
    """

def wait_awake(descriptors: Sequence[int], seconds: float) -> int:
    """
    The place of the first descriptor that is readable, -1 if none is in time, -2 if another wants this CPU.
    """

def socket_cost(
    plan: Plan, source_regions: Sequence[tuple[int, int]], target_regions: Sequence[tuple[int, int]]
) -> tuple[float, float]:
    """
    Seconds of sending a plan's source side through a TCP connection of this host with itself, and of receiving
    into its target side, call by call in one thread.

    Raises:
        RuntimeError: there is no such connection to be had.
    """

def completion_kinds() -> dict[str, int]:
    """Numbers of kvlink.transports.base.CompletionKind, by name."""

def outcomes() -> dict[str, int]:
    """Numbers of kvlink.transports.base.Outcome, by name."""

class Unavailable(RuntimeError):
    pass

class EngineFull(RuntimeError):
    pass

class Engine:
    """
    What the native transports have in common; see kvlink.transports.engine.
    """

    def late_frames(self) -> tuple[int, int, int, int]:
        """
        Frames for attempts no longer known: renewals, wants, leaves, failures.
        """

    def pace_by(self, pace: Pace) -> None:
        """Before the first peer: reads keep to the cap."""

    def keep_to(self, cpus: Sequence[int]) -> None:
        """The threads run on these CPUs only."""

    def register(self, region: int, address: int, length: int) -> None: ...
    def unregister(self, region: int) -> None: ...
    def disconnect(self, peer: str) -> int: ...
    def expose(self, peer: str, attempt: int, plan: Plan, lease_seconds: float) -> None: ...
    def lease(self, peer: str, attempt: int) -> tuple[bool, int | None]:
        """Held without a gap, root if computed."""

    def withdraw(self, peer: str, attempt: int) -> tuple[bool, int | None]:
        """As `lease`, for the last time."""

    def read(
        self,
        peer: str,
        attempt: int,
        plan: Plan,
        integrity: bool,
        chunk_leaves: int,
        max_rereads: int,
        packed: bool = False,
    ) -> int:
        """
        `packed`: the source is to pack the bytes, where the transport can do both.
        """

    def cut_off(self, peer: str, attempt: int) -> int: ...
    def forget(self, peer: str, attempt: int) -> None:
        """Of a read that has ended: renew its lease no longer."""

    def poll(
        self, limit: int
    ) -> list[tuple[int, int, str, int, int, int, int | None, int, int | None, float, float, str, str, str]]:
        """Completions as tuples of kvlink.transports.base.Completion's fields."""

    def fileno(self) -> int: ...
    def arm(self) -> bool: ...
    def close(self) -> bool:
        """
        False if some bytes could not be kept from landing: their memory must not be used again.
        """

class UcxEngine(Engine):
    """Two UCX workers and their thread; see kvlink.transports.ucx."""

    def __init__(
        self,
        libucp: str,
        tls: str | None,
        seconds: tuple[float, float, float, float],
        max_reads: int,
        cut_off_grace_seconds: float,
        max_gets_per_read: int,
        staging: tuple[int, int, int],
        gpu: CudaGpu | None = None,
        staging_on_gpu: bool = False,
    ) -> None:
        """
        Seconds: heartbeat, peer lost, close timeout, renewal linger.

        `staging` bounds the packed path: slots of one peer's ring, rings, slots that our own gets fill.
        With `gpu` the regions lie there: only the packed path touches them, by kernels that the caller has loaded.

        Raises:
            Unavailable: no UCX to load.
            RuntimeError: UCX's own word.
        """

    @property
    def ucx_version(self) -> str: ...
    @property
    def ucx_path(self) -> str: ...
    def transports(self) -> list[str]:
        """Names of the transports UCX has here, sorted."""

    def address(self) -> bytes: ...
    def export_key(self, region: int) -> tuple[int, int, bytes]:
        """Address, length, packed key."""

    def connect(self, peer: str, address: bytes, channel: int) -> int:
        """Takes the descriptor over, whatever happens."""

    def import_key(self, peer: str, region: int, address: int, length: int, key: bytes) -> None: ...

class StreamEngine(Engine):
    """Stream sockets and their threads; see kvlink.transports.stream."""

    def __init__(self, seconds: tuple[float, float, float, float], max_reads: int, lanes: int) -> None:
        """
        Seconds: heartbeat, peer lost, close timeout, renewal linger.

        `lanes` is the most that a peer has; each has a thread.
        """

    def region_length(self, region: int) -> int: ...
    def import_region(self, peer: str, region: int, length: int) -> None: ...
    def connect(self, peer: str, channel: int, lanes: Sequence[int]) -> int:
        """Takes all descriptors over, whatever happens."""

class SharedEngine(Engine):
    """Memory shared within a host; see kvlink.transports.shared."""

    def __init__(self, seconds: tuple[float, float, float, float], max_reads: int, copy_threads: int) -> None:
        """
        Seconds: heartbeat, peer lost, close timeout, renewal linger.

        `copy_threads` of them copy beside the engine's own.
        """

    def register_backed(self, region: int, address: int, length: int, descriptor: int, offset: int) -> None:
        """
        As `register`; peers may map the region, which lies at `offset` of a sealed file.
        """

    def region_length(self, region: int) -> int: ...
    def is_backed(self, region: int) -> bool: ...
    def import_region(self, peer: str, region: int, length: int, mappable: bool) -> None: ...
    def connect(self, peer: str, channel: int, lane: int) -> int:
        """Takes both descriptors over, whatever happens."""

class UcxProbe:
    """A bare loop over UCX gets: the limit that transfers are compared with."""

    def __init__(self, libucp: str, tls: str | None) -> None: ...
    def address(self) -> bytes: ...
    def register(self, region: int, address: int, length: int) -> None: ...
    def export_key(self, region: int) -> tuple[int, int, bytes]: ...
    def import_key(self, region: int, address: int, length: int, key: bytes) -> None: ...
    def serve(self) -> None: ...
    def connect(self, address: bytes) -> None: ...
    def get(self, plan: Plan, max_run_bytes: int, window: int) -> float:
        """Seconds from the first get posted to the last one landed."""

    def close(self) -> None: ...

class UcxPing:
    """A UCX message there and back, both ends asleep until it comes."""

    def __init__(self, libucp: str, tls: str | None) -> None: ...
    def address(self) -> bytes: ...
    def serve(self) -> None: ...
    def connect(self, address: bytes) -> None: ...
    def round_trips(self, count: int) -> list[float]:
        """Seconds of each, one after the other."""

    def close(self) -> None: ...

def ucx_tuning() -> list[tuple[str, str, str]]:
    """
    What KVLink sets in UCX unless the environment does: name without UCX_, value, why.
    """
