"""Who holds which layers and heads. Global ids throughout: a local count cannot be taken for the global one."""

from __future__ import annotations

from kvlink.errors import LayoutError
from kvlink.layout.geometry import CacheSpec, GroupShare, RankShare


def share_of(spec: CacheSpec) -> RankShare:
    """What a rank holds, without geometry; layers and heads ascending."""
    return RankShare(
        pp_rank=spec.place.pp_rank,
        tp_rank=spec.place.tp_rank,
        groups=tuple(
            GroupShare(
                name=group.name,
                layers=tuple(sorted({plane.layer for plane in group.planes})),
                heads=tuple(sorted(group.heads)),
            )
            for group in spec.groups
        ),
    )


def heads_of_rank(num_kv_heads: int, tp_size: int, tp_rank: int) -> tuple[int, ...]:
    """Global KV heads of one TP rank, as engines cut them.

    Contiguous stretches, the first ranks one head longer where it does not come out even (6 heads on 4 ranks: 2, 2,
    1, 1). With more ranks than heads each head is replicated on a contiguous stretch of ranks (2 heads on 8 ranks:
    ranks 0 to 3 hold head 0).

    Raises:
        LayoutError: no heads, no ranks, or a rank outside ``[0, tp_size)``.
    """
    _check_part("tp_rank", tp_rank, "tp_size", tp_size)
    if num_kv_heads < 1:
        raise LayoutError(f"num_kv_heads is {num_kv_heads}; a model has at least one KV head")
    if tp_size > num_kv_heads:
        return (tp_rank * num_kv_heads // tp_size,)
    return _stretch(num_kv_heads, tp_size, tp_rank)


def layers_of_stage(num_layers: int, pp_size: int, pp_rank: int) -> tuple[int, ...]:
    """Global layers of one pipeline stage: contiguous, the first stages one layer longer where it is uneven.

    Raises:
        LayoutError: fewer layers than stages, or a stage outside ``[0, pp_size)``.
    """
    _check_part("pp_rank", pp_rank, "pp_size", pp_size)
    if num_layers < pp_size:
        raise LayoutError(f"num_layers is {num_layers}, fewer than pp_size {pp_size}; use at most a stage per layer")
    return _stretch(num_layers, pp_size, pp_rank)


def _stretch(total: int, parts: int, part: int) -> tuple[int, ...]:
    size, longer = divmod(total, parts)
    start = part * size + min(part, longer)
    return tuple(range(start, start + size + (part < longer)))


def _check_part(rank_name: str, rank: int, size_name: str, size: int) -> None:
    if size < 1 or not 0 <= rank < size:
        raise LayoutError(f"{rank_name} is {rank} with {size_name} {size}; ranks count from 0 to {size_name} - 1")
