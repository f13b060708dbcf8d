"""KVLink: moves the KV cache of a request from a prefill worker into the paged cache of a decode worker.

Checked before a byte is read, reshaped to the receiver's layout, installed exactly once or not at all.

>>> import kvlink
>>> kvlink.Config(listen="tcp://127.0.0.1:0").integrity
True

Names are loaded when they are first used (PEP 562): a scheduler process that only handles offers and rosters loads
neither the native core nor UCX.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING

from kvlink.version import VERSION as __version__  # noqa: N811 - the name that packages have

if TYPE_CHECKING:
    from kvlink.bridge import Bridge
    from kvlink.config import Config
    from kvlink.conversion import convert
    from kvlink.descriptor import Facts, KVDescriptor
    from kvlink.errors import KVLinkError
    from kvlink.layout import CacheSpec, DType, Group, Identity, Place, Plane, PlaneKind, Rope
    from kvlink.link import (
        CloseReport,
        Link,
        Part,
        RecoveryPoint,
        Replica,
        ReplicaStage,
        Reservation,
        Result,
        State,
        Stats,
        open_link,
    )
    from kvlink.memory import Caches, PlaneKey, Span
    from kvlink.protocol import RetryPolicy, Standing
    from kvlink.wire import Claim, Offer, Roster, Ticket, request_key

logging.getLogger("kvlink").addHandler(logging.NullHandler())  # silent until the embedder attaches a handler

_HOMES = {
    "bridge": ("Bridge",),
    "config": ("Config",),
    "conversion": ("convert",),
    "descriptor": ("Facts", "KVDescriptor"),
    "errors": ("KVLinkError",),
    "layout": ("CacheSpec", "DType", "Group", "Identity", "Place", "Plane", "PlaneKind", "Rope"),
    "link": (
        "CloseReport",
        "Link",
        "Part",
        "RecoveryPoint",
        "Replica",
        "ReplicaStage",
        "Reservation",
        "Result",
        "State",
        "Stats",
        "open_link",
    ),
    "memory": ("Caches", "PlaneKey", "Span"),
    "protocol": ("RetryPolicy", "Standing"),
    "wire": ("Claim", "Offer", "Roster", "Ticket", "request_key"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Bridge",
    "CacheSpec",
    "Caches",
    "Claim",
    "CloseReport",
    "Config",
    "DType",
    "Facts",
    "Group",
    "Identity",
    "KVDescriptor",
    "KVLinkError",
    "Link",
    "Offer",
    "Part",
    "Place",
    "Plane",
    "PlaneKey",
    "PlaneKind",
    "RecoveryPoint",
    "Replica",
    "ReplicaStage",
    "Reservation",
    "Result",
    "RetryPolicy",
    "Rope",
    "Roster",
    "Span",
    "Standing",
    "State",
    "Stats",
    "Ticket",
    "__version__",
    "convert",
    "open_link",
    "request_key",
]


def __getattr__(name: str) -> object:
    home = _HOME_OF.get(name)
    if home is None:
        msg = f"module 'kvlink' has no attribute {name!r}"
        raise AttributeError(msg)
    value = globals()[name] = getattr(import_module(f"kvlink.{home}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
