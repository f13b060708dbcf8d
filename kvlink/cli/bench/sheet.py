"""Reports as CSV: one row a run, one column a figure, units in the columns' names."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from kvlink.cli.bench.report import Report


def rows(reports: Sequence[Report]) -> str:
    """A header and a row for each report; columns are the report's fields, nested names joined by dots."""
    table = [dict(_flat(msgspec.to_builtins(report))) for report in reports]
    columns = list(dict.fromkeys(column for row in table for column in row))  # a report without a limit has fewer
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    return text.getvalue()


def _flat(value: Mapping[str, object], before: str = "") -> Iterator[tuple[str, object]]:
    for name, inner in value.items():
        if isinstance(inner, dict):
            yield from _flat(inner, f"{before}{name}.")
        else:
            yield before + name, inner
