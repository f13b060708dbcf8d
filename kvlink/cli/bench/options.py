"""The command line of ``kvlink bench``."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, get_args

import msgspec

from kvlink import limits
from kvlink.cli.bench import peers
from kvlink.cli.bench.case import Case, FaultRates, Flow, PathName, Side, TransportName
from kvlink.cli.bench.numbers import CONVERTED
from kvlink.cli.models import MODELS, Geometry
from kvlink.errors import ConfigError
from kvlink.layout import STANDARD_LAYOUTS, DType

MAX_TRACE_LINE_BYTES: Final = 1024 * 1024
TOPOLOGIES: Final = ("pairwise", "many-to-one", "one-to-many")
MAX_REQUESTS: Final = 100_000
"""Of ``--requests``, and of ``--warmup``: minutes of the smallest prompts, and a list that takes a megabyte."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """A case, and how to run and report it on this machine."""

    case: Case
    process_per_rank: bool
    json: str | None
    quiet: bool
    serve: str | None
    connect: str | None
    open_mode: bool
    stay: bool = False
    compare: tuple[str, ...] = ()
    peers_python: str = sys.executable


class _TraceLine(msgspec.Struct):
    """One request of a trace; other fields are allowed and not read."""

    input_length: int


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``bench`` to the command line."""
    parser = commands.add_parser(
        "bench",
        help="move KV between two processes (or machines), verify every byte, measure",
        description="Moves the KV of prompts from the paged cache of a source engine into that of a target engine, "
        "compares every byte of every target cache with an independent reference, and measures. "
        "Exit codes: 0 done and verified, 1 ran and failed, 2 bad arguments, 3 this machine lacks something.",
    )
    _add_workload(parser.add_argument_group("what is moved"))
    _add_sides(parser.add_argument_group("the two engines"))
    _add_run(parser.add_argument_group("how it is run"))
    _add_machines(parser.add_argument_group("two machines"))
    _add_series(parser.add_argument_group("many benches in one"))


def _add_workload(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--model", choices=sorted(MODELS), default="llama-3-8b", help="whose layers and heads (%(default)s)"
    )
    group.add_argument("--layers", type=int, metavar="N", help="cut or stretch the model to N layers")
    group.add_argument("--kv-heads", type=int, metavar="N", help="KV heads in all, instead of the model's")
    group.add_argument("--head-dim", type=int, metavar="N", help="channels of a head, instead of the model's")
    group.add_argument("--dtype", choices=[d.value for d in DType], help="element type, instead of the model's")
    group.add_argument("--tokens", type=int, default=4096, metavar="N", help="prompt length (%(default)s)")
    group.add_argument("--trace", type=Path, metavar="FILE", help="prompt lengths: JSON lines with input_length")
    group.add_argument("--requests", type=int, default=16, metavar="N", help="measured requests (%(default)s)")
    group.add_argument("--warmup", type=int, default=1, metavar="N", help="requests before them (%(default)s)")
    group.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of contents and of the choice of blocks (%(default)s)"
    )


def _add_sides(group: argparse._ArgumentGroup) -> None:
    for side in ("source", "target"):
        group.add_argument(f"--{side}-tp", type=int, default=2, metavar="N", help="tensor parallel ranks (%(default)s)")
        group.add_argument(f"--{side}-pp", type=int, default=1, metavar="N", help="pipeline stages (%(default)s)")
        group.add_argument(
            f"--{side}-block-size", type=int, default=64, metavar="N", help="tokens in a block (%(default)s)"
        )
        group.add_argument(
            f"--{side}-dtype", choices=[d.value for d in CONVERTED], help="element type, instead of --dtype's"
        )
        group.add_argument(
            f"--{side}-layout", choices=STANDARD_LAYOUTS, default="nhd", help="order of the cache (%(default)s)"
        )


def _add_run(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--flow", choices=get_args(Flow), default="fetch", help="fetch: decode asks; push: prefill does (%(default)s)"
    )
    group.add_argument(
        "--transport", choices=get_args(TransportName), default="ucx", help="what carries it (%(default)s)"
    )
    group.add_argument("--device", default="host", metavar="WHERE", help="host, cuda or cuda:N (%(default)s)")
    group.add_argument(
        "--path",
        choices=get_args(PathName),
        default="auto",
        help="ucx: direct, packed; shared: mapped, pulled, ring (%(default)s)",
    )
    group.add_argument("--concurrency", type=int, default=1, metavar="N", help="requests in flight (%(default)s)")
    group.add_argument("--tries", type=int, default=3, metavar="N", help="tries of a request that fails (%(default)s)")
    group.add_argument(
        "--layer-ms", type=float, metavar="MS", help="push: pretend to compute so long a layer; stream it meanwhile"
    )
    group.add_argument(
        "--fault",
        metavar="LIST",
        help="loopback: what happens to reads and chunks by chance, as drop=0.01,corrupt=0.01,delay=0.1",
    )
    group.add_argument(
        "--kill-target-every", type=int, metavar="N", help="kill the target's processes under every N-th request"
    )
    group.add_argument("--integrity", choices=("on", "off"), default="on", help="digests on the way (%(default)s)")
    group.add_argument("--ucx-tls", metavar="LIST", help="UCX transports, as UCX_TLS (UCX decides)")
    group.add_argument("--ucx-origin", default="auto", metavar="ORIGIN", help="auto, wheel, system or a path")
    group.add_argument(
        "--lanes", type=int, default=limits.STREAM_LANES, metavar="N", help="stream's sockets a pair (%(default)s)"
    )
    group.add_argument(
        "--max-gbps", type=float, metavar="N", help="cap on what each target link reads, in Gbit/s (none)"
    )
    group.add_argument(
        "--topology",
        metavar="NAME:N",
        default="pairwise:1",
        help="engines in processes of their own: pairwise:N, many-to-one:N or one-to-many:N (%(default)s)",
    )
    group.add_argument("--process-per-rank", action="store_true", help="every rank in its own process")
    group.add_argument(
        "--limit-check",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="measure the raw limit, by turns with the transfers",
    )
    group.add_argument(
        "--compare", metavar="LIST", help="nixl,mooncake: run them at the bench's run length, too (from a checkout)"
    )
    group.add_argument(
        "--peers-python", metavar="FILE", help="the interpreter of an environment that has them (this one)"
    )
    group.add_argument("--json", metavar="FILE", help="write the result as JSON; - is standard output")
    group.add_argument("--quiet", action="store_true", help="no progress on standard error")


def _add_machines(group: argparse._ArgumentGroup) -> None:
    exclusive = group.add_mutually_exclusive_group()
    exclusive.add_argument("--serve", metavar="HOST:PORT", help="run the source half for one target half, then end")
    exclusive.add_argument("--connect", metavar="HOST:PORT", help="run the target half against a serving source half")
    group.add_argument(
        "--stay", action="store_true", help="serve one bench after the other, as --sweep and --repeat need it"
    )
    group.add_argument(
        "--open",
        action="store_true",
        help="no secret: whoever reaches the port is let in (else KVLINK_SECRET or KVLINK_SECRET_FILE)",
    )


def _add_series(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--sweep",
        metavar="NAME=LOW:HIGH",
        help="run at LOW and its doublings up to HIGH: tokens, run-bytes (by the block size) or concurrency",
    )
    group.add_argument("--repeat", type=int, default=1, metavar="N", help="run everything N times (%(default)s)")
    group.add_argument("--csv", metavar="FILE", help="write one row a run; - is standard output")
    group.add_argument("--html", metavar="FILE", help="write a page that needs nothing else: tables, chart, machine")
    group.add_argument(
        "--plot", metavar="FILE.png", help="draw bandwidth against size, with the limit (pip install kvlink[plot])"
    )


def parse(arguments: argparse.Namespace) -> Options:
    """Make options of parsed arguments.

    Raises:
        ConfigError: a value is out of its bounds, a combination makes no sense, or the trace cannot be read.
    """
    if not (1 <= arguments.requests <= MAX_REQUESTS and 0 <= arguments.warmup <= MAX_REQUESTS):
        msg = (
            f"--requests is {arguments.requests} and --warmup {arguments.warmup}; "
            f"they must lie between 1 and {MAX_REQUESTS}, and between 0 and {MAX_REQUESTS}"
        )
        raise ConfigError(msg)
    if arguments.transport == "loopback" and (arguments.process_per_rank or arguments.serve or arguments.connect):
        msg = "--transport loopback runs in one process: drop --process-per-rank, --serve and --connect"
        raise ConfigError(msg)
    if arguments.kill_target_every is not None and (arguments.serve or arguments.connect):
        msg = "--kill-target-every kills processes of this machine: drop --serve and --connect"
        raise ConfigError(msg)
    if arguments.stay and not arguments.serve:
        raise ConfigError("--stay keeps a serving half: give --serve too")
    if arguments.compare is not None and arguments.transport == "loopback":
        raise ConfigError("--compare is between processes: drop --transport loopback")
    prompts = _prompts(arguments)
    source_engines, target_engines = _topology(arguments.topology)
    pairs = max(source_engines, target_engines)
    if pairs > 1 and arguments.connect:
        raise ConfigError("--topology starts all engines on this machine: drop --connect")
    warmup = max(arguments.warmup, pairs if pairs > 1 else 0)  # every pair connects before it is measured
    geometry, source, target = _geometry(arguments), _side(arguments, "source"), _side(arguments, "target")
    # Raw moves of bytes are no limit of what is converted.
    alike = (source.dtype or geometry.dtype) is (target.dtype or geometry.dtype)
    case = Case(
        geometry=geometry,
        source=source,
        target=target,
        prompts=(*prompts[:1] * warmup, *prompts),
        warmup=warmup,
        concurrency=arguments.concurrency,
        flow=arguments.flow,
        transport=arguments.transport,
        integrity=arguments.integrity == "on",
        limit_check=arguments.limit_check
        and alike
        and arguments.concurrency == 1
        and pairs == 1
        and arguments.kill_target_every is None,
        ucx_tls=arguments.ucx_tls,
        ucx_origin=arguments.ucx_origin,
        seed=arguments.seed,
        stream_lanes=arguments.lanes,
        max_gbps=arguments.max_gbps,
        device="cuda:0" if arguments.device == "cuda" else arguments.device,
        tries=arguments.tries,
        kill_target_every=arguments.kill_target_every,
        path=arguments.path,
        fault=None if arguments.fault is None else _fault(arguments.fault),
        source_engines=source_engines,
        target_engines=target_engines,
        layer_seconds=None if arguments.layer_ms is None else arguments.layer_ms / 1e3,
    )
    return Options(
        case=case,
        process_per_rank=arguments.process_per_rank,
        json=arguments.json,
        quiet=arguments.quiet,
        serve=arguments.serve,
        connect=arguments.connect,
        open_mode=arguments.open,
        stay=arguments.stay,
        compare=peers.parse(arguments.compare),
        peers_python=arguments.peers_python or sys.executable,
    )


def _topology(text: str) -> tuple[int, int]:
    """Engines of the source side and of the target side.

    Raises:
        ConfigError: an unknown name, or no number.
    """
    name, _, number = text.partition(":")
    if not number.isdecimal() or len(number) > 3 or int(number) < 1 or name not in TOPOLOGIES:
        raise ConfigError(f"--topology is {text!r}; give one of {', '.join(TOPOLOGIES)} and a number, as pairwise:2")
    many = int(number)
    return (1 if name == "one-to-many" else many), (1 if name == "many-to-one" else many)


def _fault(text: str) -> FaultRates:
    """Read the value of ``--fault``.

    Raises:
        ConfigError: an unknown name, or a rate that is none.
    """
    rates: dict[str, float] = {}
    for item in text.split(","):
        name, _, rate = item.partition("=")
        try:
            rates[name] = float(rate)
        except ValueError:
            rates[name] = -1.0
    if not rates.keys() <= set(FaultRates.__struct_fields__) or not all(0 <= rate <= 1 for rate in rates.values()):
        msg = f"--fault is {text!r}; give {', '.join(FaultRates.__struct_fields__)}, each with a rate from 0 to 1"
        raise ConfigError(msg)
    return FaultRates(**rates)


def _geometry(arguments: argparse.Namespace) -> Geometry:
    given = {"layers": arguments.layers, "kv_heads": arguments.kv_heads, "head_dim": arguments.head_dim}
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if arguments.dtype is not None:
        changes["dtype"] = DType(arguments.dtype)
    return msgspec.structs.replace(MODELS[arguments.model], **changes)


def _side(arguments: argparse.Namespace, name: str) -> Side:
    return Side(
        tp=getattr(arguments, f"{name}_tp"),
        pp=getattr(arguments, f"{name}_pp"),
        block_size=getattr(arguments, f"{name}_block_size"),
        layout=getattr(arguments, f"{name}_layout"),
        dtype=None if getattr(arguments, f"{name}_dtype") is None else DType(getattr(arguments, f"{name}_dtype")),
    )


def _prompts(arguments: argparse.Namespace) -> tuple[int, ...]:
    if arguments.trace is None:
        tokens: int = arguments.tokens
        return tuple([tokens] * arguments.requests)
    lengths: tuple[int, ...] = tuple(itertools.islice(_trace_lengths(arguments.trace), arguments.requests))
    if not lengths:
        msg = f"--trace {arguments.trace} holds no request"
        raise ConfigError(msg)
    return lengths


def _trace_lengths(path: Path) -> Iterator[int]:
    """Prompt lengths of a trace, in its order, read as they are asked for.

    Raises:
        ConfigError: the file cannot be read, or a line is not an object with an integer ``input_length``.
    """
    decoder = msgspec.json.Decoder(_TraceLine)
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_TRACE_LINE_BYTES), b""), start=1):
                if line.strip():
                    yield _length(decoder, line, f"{path} line {number}")
    except OSError as error:
        msg = f"--trace {path} cannot be read: {error.strerror}"
        raise ConfigError(msg) from error


def _length(decoder: msgspec.json.Decoder[_TraceLine], line: bytes, where: str) -> int:
    try:
        return decoder.decode(line).input_length
    except (msgspec.DecodeError, RecursionError) as error:  # nested too deeply even to be skipped
        msg = f"{where} is not an object with an integer input_length: {error}"
        raise ConfigError(msg) from error
