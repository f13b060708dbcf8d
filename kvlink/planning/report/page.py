"""One HTML page that needs nothing beside it: styles and plots are inside, scripts there are none."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Final

_STYLE: Final = """
:root { color-scheme: light }
body { font: 15px/1.5 system-ui, sans-serif; color: #111827; max-width: 1120px; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem; margin-bottom: .2rem } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem }
table { border-collapse: collapse; font-size: 13.5px; font-variant-numeric: tabular-nums }
th, td { padding: .3rem .7rem; border-bottom: 1px solid #e5e7eb; text-align: left; vertical-align: top }
body.wide { max-width: 1640px } .wide td:first-child { min-width: 13em }
th { background: #f9fafb } td.number, th.number { text-align: right }
.scroll { overflow-x: auto } img { max-width: 100%; height: auto; margin: .5rem 0 }
.level { display: inline-block; padding: .05rem .6rem; border-radius: 1rem; background: #fef3c7; font-size: 13px }
.verdict { font-size: 1.15rem; padding: .8rem 1rem; border-left: 5px solid #6b7280; background: #f9fafb }
.accept { border-color: #16a34a } .tune { border-color: #d97706 } .reject { border-color: #dc2626 }
li { margin: .15rem 0 } pre { background: #f9fafb; padding: .7rem; overflow-x: auto; font-size: 12.5px }
"""

_NUMBERS: Final = re.compile(r"[-+\d.,%/ ]+(/s|GB/s)?")

Table = tuple[Sequence[str], Iterable[Sequence[str]]]
"""Column titles, and rows of as many cells."""


class Page:
    """A page that grows from top to bottom. All text is escaped here; callers give plain text.

    Args:
        title: of the page.
        level: the evidence level of everything on it, or what else qualifies it.
        wide: for tables of many columns.
    """

    def __init__(self, title: str, level: str, *, wide: bool = False) -> None:
        self._title = title
        self._class = ' class="wide"' if wide else ""
        self._parts = [f'<h1>{escape(title)}</h1><span class="level">{escape(level)}</span>']

    def heading(self, text: str) -> None:
        """Begin a section."""
        self._parts.append(f"<h2>{escape(text)}</h2>")

    def paragraph(self, text: str) -> None:
        """Say something."""
        self._parts.append(f"<p>{escape(text)}</p>")

    def verdict(self, word: str, text: str) -> None:
        """Say what it comes to; ``word`` is accept, tune or reject."""
        self._parts.append(f'<p class="verdict {escape(word)}"><b>{escape(word.upper())}</b> {escape(text)}</p>')

    def bullets(self, items: Iterable[str]) -> None:
        """List things."""
        self._parts.append("<ul>" + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>")

    def verbatim(self, text: str) -> None:
        """Show lines as they are."""
        self._parts.append(f"<pre>{escape(text)}</pre>")

    def table(self, table: Table) -> None:
        """Show a table; columns of numbers stand to the right."""
        titles, rows = table[0], [tuple(row) for row in table[1]]
        kinds = [_kind([row[index] for row in rows]) for index in range(len(titles))]
        head = "".join(f"<th{kind}>{escape(title)}</th>" for title, kind in zip(titles, kinds, strict=True))
        body = "".join(
            "<tr>" + "".join(f"<td{kind}>{escape(cell)}</td>" for cell, kind in zip(row, kinds, strict=True)) + "</tr>"
            for row in rows
        )
        self._parts.append(f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>')

    def plots(self, plots: Mapping[str, bytes]) -> None:
        """Show PNG plots."""
        for name, png in plots.items():
            data = base64.b64encode(png).decode()
            self._parts.append(f'<img alt="plot: {escape(name)}" src="data:image/png;base64,{data}">')

    def render(self) -> bytes:
        """The page, UTF-8."""
        head = f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(self._title)}</title>'
        return f"{head}<style>{_STYLE}</style></head><body{self._class}>{''.join(self._parts)}</body></html>\n".encode()


def _kind(cells: Sequence[str]) -> str:
    """The class of a column: of numbers, if nothing else is in it."""
    return ' class="number"' if all(_NUMBERS.fullmatch(cell) for cell in cells if cell) else ""
