"""A line chart as SVG text: sizes doubling to the right, rates upward from zero."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

_WIDTH, _HEIGHT = 860, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 20, 20, 60
_COLOURS: Final = ("#1f77b4", "#333333", "#d62728", "#2ca02c")
_STEPS: Final = 5
"""Lines of the grid above zero, about."""

Line = Sequence[tuple[float, float]]


def chart(lines: Mapping[str, Line], *, x_title: str, y_title: str, x_tick: Callable[[float], str]) -> str:
    """Draw named lines of (size, rate); all but the first are dashed. Sizes are positive; ``x_tick`` says them."""
    sizes = sorted({x for line in lines.values() for x, _ in line})
    top = _nice(max((y for line in lines.values() for _, y in line), default=1.0) or 1.0)
    low, high = math.log2(sizes[0]), math.log2(sizes[-1])

    def x_of(size: float) -> float:
        share = 0.5 if high == low else (math.log2(size) - low) / (high - low)
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def y_of(rate: float) -> float:
        return _HEIGHT - _BOTTOM - rate / top * (_HEIGHT - _TOP - _BOTTOM)

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-size="12">']
    for step in range(_STEPS + 1):
        rate = top * step / _STEPS
        y = y_of(rate)
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(_text(_LEFT - 8, y + 4, f"{rate:g}", "end"))
    parts += [_text(x_of(size), _HEIGHT - _BOTTOM + 18, x_tick(size), "middle") for size in sizes]
    parts.append(_text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 12, x_title, "middle"))
    parts.append(f'<g transform="rotate(-90 16 {_HEIGHT / 2})">{_text(16, _HEIGHT / 2, y_title, "middle")}</g>')
    for index, (name, line) in enumerate(lines.items()):
        colour, dash = _COLOURS[index % len(_COLOURS)], "" if index == 0 else ' stroke-dasharray="6 4"'
        path = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in line)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        parts += [f'<circle cx="{x_of(x):.1f}" cy="{y_of(y):.1f}" r="3" fill="{colour}"/>' for x, y in line]
        y = _TOP + 16 * (index + 1)
        parts.append(f'<line x1="{_LEFT + 12}" x2="{_LEFT + 42}" y1="{y - 4}" y2="{y - 4}" stroke="{colour}"{dash}/>')
        parts.append(_text(_LEFT + 50, y, name, "start"))
    return "\n".join([*parts, "</svg>"])


def _text(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(words)}</text>'


def _nice(value: float) -> float:
    """The next round number that is not below, a fifth of which is round, too."""
    scale = 10.0 ** math.floor(math.log10(value))
    return next(step * scale for step in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10) if step * scale >= value)


def size_label(value: float) -> str:
    """``4 KiB`` for 4096."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if value >= size:
            return f"{value / size:.4g} {unit}"
    return f"{value:g} B"
