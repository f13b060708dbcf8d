"""What one rank's cache means: identity and geometry, frozen. No addresses, no I/O.

`geometry` holds the types, `check` says whether a spec can be true, `identity` whether two sides mean the same model,
`shares` who holds which layers and heads, `standard` builds the common orders by name.
"""

from kvlink.layout.check import check_spec, touched_blocks
from kvlink.layout.geometry import (
    CacheSpec,
    DType,
    Group,
    GroupShare,
    Identity,
    Place,
    Plane,
    PlaneKind,
    RankShare,
    Rope,
)
from kvlink.layout.identity import compare_identity, compare_stated, fingerprint
from kvlink.layout.shares import heads_of_rank, layers_of_stage, share_of
from kvlink.layout.standard import STANDARD_LAYOUTS, standard_spec

__all__ = [
    "STANDARD_LAYOUTS",
    "CacheSpec",
    "DType",
    "Group",
    "GroupShare",
    "Identity",
    "Place",
    "Plane",
    "PlaneKind",
    "RankShare",
    "Rope",
    "check_spec",
    "compare_identity",
    "compare_stated",
    "fingerprint",
    "heads_of_rank",
    "layers_of_stage",
    "share_of",
    "standard_spec",
    "touched_blocks",
]
