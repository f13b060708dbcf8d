"""What one rank's cache means: identity and geometry, frozen. No addresses, no I/O.

`geometry` holds the types, `check` (with `kinds`) says whether a spec can be true, `identity` whether two sides mean
the same model, `shares` who holds which layers and heads, `blocks` which blocks a request touches, `frontier` how
far it has been computed, `extent` and `alias` where planes lie and which share memory, `standard` builds the common
orders by name.
"""

from kvlink.layout.alias import Alias, alias_classes, aliases
from kvlink.layout.blocks import (
    payload_bytes,
    sample_blocks,
    sample_capacity,
    starts_of_groups,
    touched_blocks,
    touched_ids,
)
from kvlink.layout.check import check_spec
from kvlink.layout.frontier import NOTHING, Frontier, Rectangle, end_layer_of
from kvlink.layout.geometry import (
    CacheSpec,
    DType,
    Group,
    GroupShare,
    Identity,
    IndexedBy,
    Place,
    Plane,
    PlaneKind,
    RankShare,
    Rope,
    Row,
)
from kvlink.layout.identity import compare_identity, compare_stated, fingerprint
from kvlink.layout.shares import heads_of_rank, layers_of_stage, share_of
from kvlink.layout.standard import STANDARD_LAYOUTS, standard_spec

__all__ = [
    "NOTHING",
    "STANDARD_LAYOUTS",
    "Alias",
    "CacheSpec",
    "DType",
    "Frontier",
    "Group",
    "GroupShare",
    "Identity",
    "IndexedBy",
    "Place",
    "Plane",
    "PlaneKind",
    "RankShare",
    "Rectangle",
    "Rope",
    "Row",
    "alias_classes",
    "aliases",
    "check_spec",
    "compare_identity",
    "compare_stated",
    "end_layer_of",
    "fingerprint",
    "heads_of_rank",
    "layers_of_stage",
    "payload_bytes",
    "sample_blocks",
    "sample_capacity",
    "share_of",
    "standard_spec",
    "starts_of_groups",
    "touched_blocks",
    "touched_ids",
]
