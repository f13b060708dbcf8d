"""The answer for people: a table of figures, and a picture of which rank feeds which."""

from __future__ import annotations

from typing import Final

from rich import box
from rich.console import Console
from rich.table import Table

from kvlink.cli.layout.compare import LegReport, Report, SideReport

MAX_COLUMNS: Final = 8
"""Target ranks that a picture can hold; more are listed leg by leg."""
MAX_LISTED_LEGS: Final = 64


def show(report: Report, console: Console) -> None:
    """Print the report."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for label, text in _rows(report):
        table.add_row(label, text)
    console.print(table)
    if not report.legs:
        return
    console.print()
    if report.target.tp * report.target.pp <= MAX_COLUMNS:
        console.print(_matrix(report))
    else:
        for leg in report.legs[:MAX_LISTED_LEGS]:
            console.print(f"source {leg.source} -> target {leg.target}: {_moves(leg)}")
        if len(report.legs) > MAX_LISTED_LEGS:
            console.print(f"... and {len(report.legs) - MAX_LISTED_LEGS} more legs (--json has all)")


def _rows(report: Report) -> list[tuple[str, str]]:
    rows = [("source", _side(report.source)), ("target", _side(report.target))]
    if report.difference is not None:
        return [*rows, ("compatible", "no"), ("field", report.difference.field), ("because", report.difference.message)]
    moved = f"positions {report.first_token} to {report.tokens}"
    rows += [
        ("compatible", "yes"),
        ("request", f"{moved}: {_bytes(report.bytes)} over {len(report.legs)} legs"),
        ("runs", f"{report.runs:,} of {_bytes(report.run_bytes)} on average, before neighbouring blocks merge"),
        ("plans", f"{_bytes(sum(leg.plan_bytes for leg in report.legs))} in all"),
        ("conversion", "; ".join(report.conversions) or "none: bytes are copied"),
    ]
    paths = dict.fromkeys(f"{leg.path or 'none'} ({leg.path_reason})" for leg in report.legs)
    rows += [("path", text) for text in paths]
    if report.source.unread:
        rows.append(("unread", f"source {', '.join(report.source.unread)}: replicas that nobody needs"))
    return rows


def _side(side: SideReport) -> str:
    groups = "; ".join(
        f"{group.name}: {'+'.join(group.kinds)} {group.dtype}, {group.num_blocks} blocks of {group.block_size}"
        for group in side.groups
    )
    return f"{side.engine} ({side.model}), TP {side.tp}, PP {side.pp}; {groups}"


def _matrix(report: Report) -> Table:
    """Rows are source ranks, columns target ranks, as pp/tp; cells say what is read."""
    moves = {(leg.source, leg.target): _moves(leg) for leg in report.legs}
    columns = [f"{pp}/{tp}" for pp in range(report.target.pp) for tp in range(report.target.tp)]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption="h: heads, l: layers", caption_justify="left")
    table.add_column("source \\ target", no_wrap=True)
    for column in columns:
        table.add_column(column)
    for pp in range(report.source.pp):
        for tp in range(report.source.tp):
            rank = f"{pp}/{tp}"
            table.add_row(rank, *(moves.get((rank, column), "·") for column in columns))
    return table


def _moves(leg: LegReport) -> str:
    several = len({share.group for share in leg.shares}) > 1
    return "\n".join(f"{share.group + ': ' if several else ''}h{share.heads} l{share.layers}" for share in leg.shares)


def _bytes(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count / 1024:.4g} KiB" if count >= 1024 else f"{count} B"
