"""What a group says of its kinds: rows, scales, and that every layer has each kind with all of its channels."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from kvlink import limits
from kvlink.errors import LayoutError
from kvlink.layout.bounds import within
from kvlink.layout.geometry import Group, Plane, PlaneKind


def check_rows(group: Group, path: str) -> None:
    """Refuse impossible or repeated rows, and inline scales of a kind that is not there or not quantised.

    Raises:
        LayoutError: with the dotted path of the field.
    """
    stated = [row.kind for row in group.rows]
    if len(set(stated)) != len(stated):
        raise LayoutError(f"{path}.rows states a kind twice: {[kind.value for kind in stated]}; one row a kind")
    for row in group.rows:
        within(f"{path}.rows.{row.kind}.channels", row.channels, 1, limits.MAX_CHANNELS)
    present = {plane.kind for plane in group.planes}
    for kind in sorted(present):
        if kind.scaled is None:
            continue
        if kind.scaled not in present or not group.row_of(kind.scaled).dtype.quantised:
            raise LayoutError(
                f"{path}.planes has {kind}, but {kind.scaled} is not there in a quantised dtype; inline scales belong "
                "to the kind that they scale, in its group"
            )


def check_scales(group: Group, path: str) -> None:
    """Refuse scales of another shape than ``[1 or planes, 1 or heads]``, or that are no positive float32.

    Raises:
        LayoutError: with the dotted path of the field.
    """
    if not group.scales or not group.planes:
        return
    if len(group.scales) not in (1, len(group.planes)):
        raise LayoutError(
            f"{path}.scales has {len(group.scales)} rows for {len(group.planes)} planes; state one row for all planes, "
            "or one each, in the order of planes"
        )
    width = len(group.scales[0])
    if width not in (1, len(group.heads)) or any(len(row) != width for row in group.scales):
        widths = sorted({len(row) for row in group.scales})
        raise LayoutError(
            f"{path}.scales has rows of {widths} scales for {len(group.heads)} heads; state one scale for all heads, "
            "or one each, in the order of heads"
        )
    within(f"{path}.scales", len(group.planes) * len(group.heads), 1, limits.MAX_SCALES, "planes times heads")
    values = np.array(group.scales, dtype=np.float64)
    with np.errstate(over="ignore", under="ignore"):
        wrong = ~((values > 0) & np.isfinite(values) & (values.astype(np.float32) == values))
    if wrong.any():
        row, column = (int(index) for index in np.argwhere(wrong)[0])
        raise LayoutError(
            f"{path}.scales[{row}][{column}] is {float(values[row, column])!r}; state a scale as the positive float32 "
            "that it is, exactly"
        )


def check_kinds(group: Group, path: str) -> None:
    """Refuse layers of different kinds, and channels that are stated twice or not at all.

    Raises:
        LayoutError: with the dotted path of the field.
    """
    planes: dict[tuple[int, PlaneKind], list[Plane]] = defaultdict(list)
    kinds: dict[int, set[PlaneKind]] = defaultdict(set)
    for plane in group.planes:
        planes[plane.layer, plane.kind].append(plane)
        kinds[plane.layer].add(plane.kind)
    for (layer, kind), parts in planes.items():
        _check_tiling(group, parts, f"{path}.planes: layer {layer} {kind}")
    if not kinds:
        return
    first_layer, first = next(iter(kinds.items()))
    for layer, have in kinds.items():
        if have != first:
            raise LayoutError(
                f"{path}.planes: layer {layer} has {sorted(have)}, layer {first_layer} has {sorted(first)}; "
                "layers of one group have the same kinds, put others into a group of their own"
            )


def _check_tiling(group: Group, parts: list[Plane], where: str) -> None:
    covered = 0
    for plane in sorted(parts, key=lambda plane: plane.first_channel):
        if plane.first_channel < covered:
            raise LayoutError(f"{where} states channel {plane.first_channel} twice; one plane for each channel")
        if plane.first_channel > covered:
            break
        covered += group.row_of_plane(plane).channels
    total = group.row_of(parts[0].kind).channels
    if covered != total:
        raise LayoutError(f"{where} lacks channels [{covered}, ...) of {total}; state where all of them lie")
