"""One frozen `Config`: arguments, then environment, then file, then defaults; and where each value came from."""

from __future__ import annotations

import logging
import os
import stat
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from kvlink import limits
from kvlink.errors import ConfigError, SchemaError
from kvlink.wire import Address

log: Final = logging.getLogger("kvlink.config")

PREFIX: Final = "KVLINK_"
FILE_VARIABLE: Final = "KVLINK_CONFIG"
CACHE_VARIABLE: Final = "KVLINK_KERNEL_CACHE"
"""Where compiled kernels are kept (`kvlink.relayout.kernel_cache`): a matter of the machine, not of a link."""
TABLE: Final = "kvlink"
"""The table of a TOML file that is read."""

AUTO: Final = "auto"
"""What a setting is that is decided for each pair, or each plan."""

_PATHS: Final = ("direct", "packed", "mapped", "pulled", "ring")
"""Of all transports. Not imported from `kvlink.plan`: who only reads a configuration needs no numpy."""

_DEFAULT: Final = "default"
_LOOPBACK: Final = "default where only this machine can connect"


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything a link can be told. Checked as a whole when made; never holds a value that is out of range.

    Attributes:
        listen: where control connections come in: ``tcp://host:port`` (port 0: any free one), ``tcp://[v6]:port`` or
            ``unix:///path``. A bare ``host:port`` is taken for TCP.
        advertise: host that peers are told to connect to, where it is not the one listened on.
        secret: what all ranks of a cluster share, at least `limits.MIN_SECRET_BYTES` long. Never shown.
        open_mode: let in whoever reaches ``listen``. Without a secret it must be asked for by name, except where only
            this machine can connect.
        transports: ``auto``: all that this machine has, and of those that a pair has in common the one that is
            predicted to be fastest; or names, best first, of which a pair takes the first that can work between the
            two. The target chooses, by its own setting.
        ucx_origin: which UCX: ``auto``, ``wheel``, ``system``, or the path of its ``libucp.so.0``.
        ucx_tls: UCX transports to use, in UCX's own words, or ``None`` for its choice.
        path: how reads move where a transport has several ways: over UCX ``direct`` or ``packed``, in memory shared
            within a host ``mapped``, ``pulled`` or ``ring``; or ``auto``, which is predicted for each plan. A transport
            that has no way of that name chooses as by ``auto``.
        calibrate: measure this machine when the first link opens, for these predictions; else they are made from
            typical speeds.
        cuda_library: the CUDA driver, by name or path, for caches on a GPU.
        gpu_staging: what packed bytes of a GPU's cache pass through: ``host``, pinned memory, or ``device``, the GPU's
            own, for a UCX that was built to reach it.
        stream_lanes: sockets for payload, and threads, of the stream transport; a pair has the smaller end's number.
        copy_threads: threads that copy beside the shared transport's own, on CPUs that nobody else wants; ``None``: as
            many as `kvlink.transports.shared.default_copy_threads` says for the CPUs that this process may use.
        max_bytes_per_second: cap on what the link reads, over all peers and transports; ``None`` for none.
        numa: keep threads that move bytes to the NUMA node of the cache, where there are several nodes.
        integrity: digest every byte that moves.
        chunk_leaves: leaves of 16 KiB in a chunk, the unit of pipelining and re-read.
        max_rereads_per_chunk: re-reads of a chunk whose digest differs, before the attempt fails.
        lease_seconds: a lease unrenewed for this long is lapsed.
        heartbeat_seconds: between heartbeats, which renew leases.
        peer_lost_seconds: silence after which a peer is lost.
        commit_ttl_seconds: how long a target may take from prepared to installed.
        park_seconds: how long an ask waits for its source to be ready.
        claim_ttl_seconds: how long an offer or ticket waits to be used.
        handshake_seconds: bound on connecting and on being connected to.
        close_seconds: bound on closing.
        max_legs: legs that a source leases at a time; more are told that it is busy.
        max_leased_blocks: blocks that a source leases at a time.
    """

    listen: str = "tcp://127.0.0.1:0"
    advertise: str | None = None
    secret: bytes | None = field(default=None, repr=False)
    open_mode: bool = False
    transports: tuple[str, ...] = (AUTO,)
    ucx_origin: str = "auto"
    ucx_tls: str | None = None
    path: str = AUTO
    calibrate: bool = True
    cuda_library: str = "libcuda.so.1"
    gpu_staging: str = "host"
    stream_lanes: int = limits.STREAM_LANES
    copy_threads: int | None = None
    max_bytes_per_second: float | None = None
    numa: bool = True
    integrity: bool = True
    chunk_leaves: int = limits.DEFAULT_CHUNK_LEAVES
    max_rereads_per_chunk: int = limits.MAX_REREADS_PER_CHUNK
    lease_seconds: float = limits.LEASE_SECONDS
    heartbeat_seconds: float = limits.HEARTBEAT_SECONDS
    peer_lost_seconds: float = limits.PEER_LOST_SECONDS
    commit_ttl_seconds: float = limits.COMMIT_TTL_SECONDS
    park_seconds: float = limits.PARK_SECONDS
    claim_ttl_seconds: float = limits.CLAIM_TTL_SECONDS
    handshake_seconds: float = limits.HANDSHAKE_TIMEOUT_SECONDS
    close_seconds: float = limits.CLOSE_TIMEOUT_SECONDS
    max_legs: int = limits.MAX_LEGS
    max_leased_blocks: int = limits.MAX_LEASED_BLOCKS
    _origins: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        origins = dict(self._origins)
        for name, (convert, accepted) in _SETTINGS.items():
            value = getattr(self, name)
            origins.setdefault(name, _DEFAULT if value == _DEFAULTS[name] else "argument")
            object.__setattr__(self, name, _converted(name, value, origins[name], convert, accepted))
        if self.secret is None and not self.open_mode:
            self._default_to_open(origins)
        object.__setattr__(self, "_origins", MappingProxyType(origins))
        self._check_relations()

    @classmethod
    def load(
        cls,
        arguments: Mapping[str, object] | None = None,
        environ: Mapping[str, str] | None = None,
        file: Path | None = None,
    ) -> Config:
        """Put a configuration together; the first of these that states a setting decides it.

        Args:
            arguments: by field name, or ``secret_file`` for a file that holds the secret; ``None`` states nothing.
            environ: ``KVLINK_`` and the field's name in capitals; ``os.environ`` by default. Lists are comma-separated.
            file: TOML with one table ``[kvlink]``; by default what ``KVLINK_CONFIG`` names, if it is set.

        Raises:
            ConfigError: unknown, out of range, contradictory or unreadable; names the setting, its origin, and what is
                accepted.
        """
        environ = os.environ if environ is None else environ
        if file is None and environ.get(FILE_VARIABLE):
            file = Path(environ[FILE_VARIABLE])
        layers = [("argument", dict(arguments or {})), ("environment", _from_environ(environ))]
        if file is not None:
            layers.append((f"file {file}", _from_file(file)))
        values: dict[str, Any] = {}
        origins: dict[str, str] = {}
        for origin, layer in layers:
            for name, value in _resolve_secret(origin, layer).items():
                if name not in _SETTINGS:
                    msg = f"unknown setting {name!r} (from {origin}); known are {', '.join(_SETTINGS)}, secret_file"
                    raise ConfigError(msg)
                if value is not None:
                    values.setdefault(name, value)
                    origins.setdefault(name, origin)
        _let_open_mode_win(values, origins, [origin for origin, _ in layers])
        return cls(**values, _origins=origins)

    def origins(self) -> Mapping[str, str]:
        """Where each setting came from, by field name: ``argument``, ``environment``, ``file PATH`` or ``default``."""
        return self._origins

    def _default_to_open(self, origins: dict[str, str]) -> None:
        stated = origins["open_mode"] != _DEFAULT
        if stated or not Address.parse(self.listen).is_loopback:
            why = f"open_mode is off (from {origins['open_mode']})" if stated else f"others can reach {self.listen}"
            msg = (
                f"no secret, and {why}: set secret_file, {PREFIX}SECRET_FILE or {PREFIX}SECRET to what all ranks "
                "share, or ask for open_mode by name"
            )
            raise ConfigError(msg)
        object.__setattr__(self, "open_mode", True)
        origins["open_mode"] = _LOOPBACK

    def _check_relations(self) -> None:
        if self.secret is not None and self.open_mode:
            self._refuse("open_mode", "is on, and there is a secret", "set one of the two", "secret")
        if Address.parse(self.listen).is_wildcard and self.advertise is None:
            self._refuse("listen", f"is {self.listen}, which nobody can connect to", "state advertise", "advertise")
        for other in ("lease_seconds", "peer_lost_seconds"):
            if 3 * self.heartbeat_seconds > getattr(self, other) * (1 + 1e-9):  # 3 x 0.1 is a little more than 0.3
                what = f"is {self.heartbeat_seconds:g}, {other} is {getattr(self, other):g}"
                self._refuse("heartbeat_seconds", what, "three heartbeats must fit, so that two may be lost", other)

    def _refuse(self, name: str, what: str, mend: str, other: str) -> None:
        origins = f"{name} from {self._origins[name]}, {other} from {self._origins[other]}"
        msg = f"{name} {what} ({origins}): {mend}"
        raise ConfigError(msg)


def _flag(value: object) -> bool:
    if isinstance(value, str):
        return {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}[value.lower()]
    if not isinstance(value, bool):
        raise TypeError
    return value


def _whole(low: int, high: int) -> _Setting:
    def convert(value: object) -> int:
        number = int(value) if isinstance(value, str) else value
        if not isinstance(number, int) or isinstance(number, bool) or not low <= number <= high:
            raise ValueError
        return number

    return convert, f"a whole number from {low} to {high}"


def _optional_whole(low: int, high: int) -> _Setting:
    convert, accepted = _whole(low, high)
    return lambda value: None if value is None or value == "" else convert(value), f"{accepted}, or nothing"


def _seconds(low: float, high: float = 86_400.0) -> _Setting:
    def convert(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise TypeError
        number = float(value)
        if not low <= number <= high:  # NaN is in no range
            raise ValueError
        return number

    return convert, f"seconds from {low:g} to {high:g}"


def _optional_rate(value: object) -> float | None:
    if value is None or value == "":
        return None
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise TypeError
    rate = float(value)
    if not limits.MIN_CAP_BYTES_PER_SECOND <= rate <= limits.MAX_CAP_BYTES_PER_SECOND:
        raise ValueError
    return rate


def _text(value: object) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= limits.MAX_TEXT_BYTES:
        raise ValueError
    return value


def _optional(convert: Callable[[object], str]) -> Callable[[object], str | None]:
    return lambda value: None if value is None else convert(value)


def _address(value: object) -> str:
    text = _text(value)
    return str(Address.parse(text if "://" in text else f"tcp://{text}"))


def _host(value: object) -> str:
    host = _text(value).removeprefix("[").removesuffix("]")
    address = Address.parse(f"tcp://[{host}]:0" if ":" in host else f"tcp://{host}:0")
    if address.is_wildcard:
        raise ValueError
    return address.host


def _names(value: object) -> tuple[str, ...]:
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not 0 < len(names) <= limits.MAX_TRANSPORTS:
        raise ValueError
    stripped = tuple(_text(name).strip() for name in names)
    if len(set(stripped)) != len(stripped) or not all(name.isidentifier() for name in stripped):
        raise ValueError
    if AUTO in stripped and len(stripped) > 1:
        raise ValueError
    return stripped


def _origin(value: object) -> str:
    text = _text(value)
    if text not in {"auto", "wheel", "system"} and not text.startswith("/"):
        raise ValueError
    return text


def _one_of(*accepted: str) -> Callable[[object], str]:
    def convert(value: object) -> str:
        text = _text(value)
        if text not in accepted:
            raise ValueError
        return text

    return convert


def _secret(value: object) -> bytes | None:
    if value is None:
        return None
    secret = value.encode() if isinstance(value, str) else value
    if not isinstance(secret, bytes) or not limits.MIN_SECRET_BYTES <= len(secret) <= limits.MAX_SECRET_BYTES:
        raise ValueError
    return secret


_Setting = tuple[Callable[[object], object], str]

_SETTINGS: Final[dict[str, _Setting]] = {
    "listen": (_address, "tcp://HOST:PORT, tcp://[IPV6]:PORT or unix:///ABSOLUTE/PATH"),
    "advertise": (_optional(_host), "a host name or IP address that peers can reach"),
    "secret": (_secret, f"{limits.MIN_SECRET_BYTES} to {limits.MAX_SECRET_BYTES} bytes"),
    "open_mode": (_flag, "on or off, true or false, 1 or 0"),
    "transports": (_names, "auto, or a list of different transport names, such as ucx,stream"),
    "ucx_origin": (_origin, "auto, wheel, system, or an absolute path of libucp.so.0"),
    "ucx_tls": (_optional(_text), "UCX transport names, as UCX_TLS takes them"),
    "path": (_one_of(AUTO, *_PATHS), f"{AUTO}, {', '.join(_PATHS)}"),
    "cuda_library": (_text, "a library's name, or its path"),
    "gpu_staging": (_one_of("host", "device"), "host or device"),
    "stream_lanes": _whole(1, limits.MAX_LANES),
    "copy_threads": _optional_whole(0, limits.MAX_COPY_THREADS),
    "calibrate": (_flag, "on or off, true or false, 1 or 0"),
    "max_bytes_per_second": (_optional_rate, "bytes a second from 1e6 to 1e13, or nothing for no cap"),
    "numa": (_flag, "on or off, true or false, 1 or 0"),
    "integrity": (_flag, "on or off, true or false, 1 or 0"),
    "chunk_leaves": _whole(1, limits.MAX_CHUNK_LEAVES),
    "max_rereads_per_chunk": _whole(0, 1000),
    "lease_seconds": _seconds(0.05),
    "heartbeat_seconds": _seconds(0.01),
    "peer_lost_seconds": _seconds(0.05),
    "commit_ttl_seconds": _seconds(0.05),
    "park_seconds": _seconds(0.0),
    "claim_ttl_seconds": _seconds(0.05),
    "handshake_seconds": _seconds(0.05),
    "close_seconds": _seconds(0.0),
    "max_legs": _whole(1, limits.MAX_BLOCKS_PER_REQUEST),
    "max_leased_blocks": _whole(1, limits.MAX_OFFSET_BYTES),
}
_DEFAULTS: Final = {setting.name: setting.default for setting in fields(Config) if setting.name in _SETTINGS}
assert _SETTINGS.keys() == {setting.name for setting in fields(Config)} - {"_origins"}


def _converted(name: str, value: object, origin: str, convert: Callable[[object], object], accepted: str) -> object:
    try:
        return convert(value)
    except (ValueError, TypeError, KeyError, SchemaError):
        shown = "a value" if name == "secret" else repr(value)[: limits.MAX_ECHO_CHARS]
        msg = f"{name} cannot be {shown} (from {origin}); accepted: {accepted}"
        raise ConfigError(msg) from None


def _from_environ(environ: Mapping[str, str]) -> dict[str, object]:
    """``KVLINK_*`` by field name. Other names under the prefix are only warned of: not all are meant for us."""
    layer: dict[str, object] = {}
    for variable, value in environ.items():
        name = variable.removeprefix(PREFIX).lower()
        if not variable.startswith(PREFIX) or variable in {FILE_VARIABLE, CACHE_VARIABLE}:
            continue
        if name in _SETTINGS or name == "secret_file":
            layer[name] = value
        else:
            log.warning("%s is no setting of KVLink, and is ignored", variable)
    return layer


def _from_file(file: Path) -> dict[str, object]:
    try:
        content = tomllib.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        msg = f"cannot read the configuration file {file}: {error}"
        raise ConfigError(msg) from None
    table = content.get(TABLE)
    if not isinstance(table, dict):
        msg = f"the configuration file {file} has no table [{TABLE}]"
        raise ConfigError(msg)
    return table


def _resolve_secret(origin: str, layer: dict[str, object]) -> dict[str, object]:
    """The layer with ``secret_file`` replaced by what the file holds, less its last line's end."""
    if layer.get("secret_file") is None:
        return {name: value for name, value in layer.items() if name != "secret_file"}
    if layer.get("secret") is not None:
        msg = f"secret and secret_file are both set (from {origin}); set one of the two"
        raise ConfigError(msg)
    path = Path(str(layer["secret_file"]))
    try:
        if path.stat().st_mode & stat.S_IWOTH:
            msg = f"secret_file {path} (from {origin}) can be written by everybody; take that right away"
            raise ConfigError(msg)
        secret = path.read_bytes().rstrip(b"\r\n")
    except OSError as error:
        msg = f"secret_file {path} (from {origin}) cannot be read: {error.strerror}"
        raise ConfigError(msg) from None
    return {name: value for name, value in layer.items() if name != "secret_file"} | {"secret": secret}


def _let_open_mode_win(values: dict[str, Any], origins: dict[str, str], order: list[str]) -> None:
    """Open mode asked for in a layer above the secret's is meant: an argument ends what the environment holds."""
    if "open_mode" not in values or values.get("secret") is None:
        return
    wanted = _converted("open_mode", values["open_mode"], origins["open_mode"], *_SETTINGS["open_mode"])
    if wanted and order.index(origins["open_mode"]) < order.index(origins["secret"]):
        values["secret"] = None
        origins["secret"] = f"dropped: open_mode is an {origins['open_mode']}"
