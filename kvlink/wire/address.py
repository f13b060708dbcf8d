"""Where a rank listens, as text: ``tcp://host:port``, ``tcp://[v6]:port`` (RFC 3986), ``unix:///path``."""

from __future__ import annotations

import re
from ipaddress import AddressValueError, IPv4Address, IPv6Address
from typing import Final

import msgspec

from kvlink import limits
from kvlink.errors import SchemaError
from kvlink.wire.codec import clip

_TCP: Final = re.compile(
    r"tcp://(?:\[(?P<v6>[0-9A-Fa-f:.]+)(?P<zone>%[0-9A-Za-z]{1,15})?\]|(?P<host>[0-9A-Za-z._-]{1,253})):(?P<port>[0-9]{1,5})"
)
_UNIX: Final = re.compile(r"unix://(?P<path>/[ -~]+)")
_ACCEPTED: Final = "tcp://HOST:PORT, tcp://[IPV6]:PORT or unix:///ABSOLUTE/PATH"

_MAX_LABEL: Final = 63


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed address. ``path`` is set for Unix sockets, ``host`` (IPv6 without brackets) and ``port`` for TCP."""

    host: str = ""
    port: int = 0
    path: str = ""

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read an address.

        Raises:
            SchemaError: not one of the accepted forms, or out of range; the text says which are.
        """
        if match := _UNIX.fullmatch(text):
            if len(match["path"]) > limits.MAX_UNIX_PATH_BYTES:
                msg = f"the path of a Unix socket has at most {limits.MAX_UNIX_PATH_BYTES} bytes: {clip(text)}"
                raise SchemaError(msg)
            return cls(path=match["path"])
        match = _TCP.fullmatch(text)
        if match is None or int(match["port"]) > 65_535:
            msg = f"{clip(text)!r} is not an address; accepted are {_ACCEPTED}"
            raise SchemaError(msg)
        if match["v6"] is None:
            _check_host(match["host"], text)
            return cls(host=match["host"], port=int(match["port"]))
        try:
            host = str(IPv6Address(match["v6"]))
        except AddressValueError:
            msg = f"{clip(text)!r} has no valid IPv6 address between its brackets"
            raise SchemaError(msg) from None
        return cls(host=host + (match["zone"] or ""), port=int(match["port"]))

    def __str__(self) -> str:
        if self.path:
            return f"unix://{self.path}"
        return f"tcp://[{self.host}]:{self.port}" if ":" in self.host else f"tcp://{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        ip = _ip(self.host)
        return bool(self.path) or self.host == "localhost" or (ip is not None and ip.is_loopback)

    @property
    def is_wildcard(self) -> bool:
        """Whether it means every interface: good to listen on, not to be dialled."""
        ip = _ip(self.host)
        return ip is not None and ip.is_unspecified


def _check_host(host: str, text: str) -> None:
    """What a resolver would trip over: a name's labels have 1 to 63 characters each (RFC 1035)."""
    if any(not 1 <= len(label) <= _MAX_LABEL for label in host.removesuffix(".").split(".")):
        msg = f"{clip(text)!r} has no valid host name; accepted are {_ACCEPTED}"
        raise SchemaError(msg)


def _ip(host: str) -> IPv4Address | IPv6Address | None:
    try:
        return IPv6Address(host) if ":" in host else IPv4Address(host)
    except AddressValueError:
        return None
