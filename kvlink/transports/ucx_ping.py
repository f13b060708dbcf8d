"""A UCX message there and back, both ends asleep until it comes: what latencies are compared with."""

from __future__ import annotations

import os
from typing import Final, NamedTuple

from kvlink._native import _kvlink
from kvlink.errors import UnavailableError
from kvlink.transports.engine import as_transport_error
from kvlink.transports.ucx_library import choose

_VARIABLE_PREFIX: Final = "UCX_"


class UcxSetting(NamedTuple):
    """One UCX setting that KVLink has a view on.

    Attributes:
        name: as UCX's environment variable, ``UCX_`` included.
        value: what is in force: the environment's where it says anything, else KVLink's.
        why: what KVLink's value is good for.
        from_environment: the user set it, and KVLink left it alone.
    """

    name: str
    value: str
    why: str
    from_environment: bool


def ucx_settings() -> list[UcxSetting]:
    """What KVLink sets in UCX, and what the environment overrules."""
    return [
        UcxSetting(variable, os.environ.get(variable, value), why, variable in os.environ)
        for variable, value, why in ((_VARIABLE_PREFIX + name, value, why) for name, value, why in _kvlink.ucx_tuning())
    ]


class UcxPing:
    """One end of a round trip: one serves, the other connects and asks. For benchmarks only.

    Raises:
        UnavailableError: there is no such UCX, or it cannot start here.
    """

    def __init__(self, *, ucx_origin: str = "auto", ucx_tls: str | None = None) -> None:
        """As for `kvlink.transports.ucx.UcxTransport`."""
        try:
            self._ping = _kvlink.UcxPing(choose(ucx_origin).name, ucx_tls)
        except RuntimeError as error:
            raise UnavailableError(str(error)) from error

    def address(self) -> bytes:
        """For the other end's `connect`."""
        return self._ping.address()

    def serve(self) -> None:
        """Answer in a thread, until `close`."""
        self._ping.serve()

    def connect(self, address: bytes) -> None:
        """Make the endpoint to a serving end."""
        with as_transport_error("connect"):
            self._ping.connect(address)

    def round_trips(self, count: int) -> list[float]:
        """Seconds of each of ``count`` messages of 64 bytes and their answers, one after the other; blocks.

        Raises:
            TransportError: the other end is gone.
        """
        with as_transport_error("ping"):
            return self._ping.round_trips(count)

    def close(self) -> None:
        """Stop serving, or drop the connection. Idempotent."""
        self._ping.close()
