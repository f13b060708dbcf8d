"""KVLink: moves the KV cache of a request from a prefill worker into the paged cache of a decode worker.

Checked before a byte is read, reshaped to the receiver's layout, installed exactly once or not at all.

>>> import kvlink
>>> kvlink.Config(listen="tcp://127.0.0.1:0").integrity
True
"""

from kvlink.bridge import Bridge
from kvlink.config import Config
from kvlink.descriptor import Facts, KVDescriptor
from kvlink.errors import KVLinkError
from kvlink.layout import CacheSpec, DType, Group, Identity, Place, Plane, PlaneKind, Rope
from kvlink.link import CloseReport, Link, Part, Result, State, Stats, open_link
from kvlink.memory import Caches, PlaneKey, Span
from kvlink.version import VERSION as __version__  # noqa: N811 - the name that packages have
from kvlink.wire import Claim, Offer, Roster, Ticket, request_key

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
    "Result",
    "Rope",
    "Roster",
    "Span",
    "State",
    "Stats",
    "Ticket",
    "__version__",
    "open_link",
    "request_key",
]
