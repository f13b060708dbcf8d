"""The doctor's findings for people: one table, worst last where it catches the eye."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvlink.cli.doctor.findings import DoctorReport, Finding

_STYLES = {"ok": "green", "note": "cyan", "slow": "yellow", "fatal": "bold red"}


def show(report: DoctorReport, console: Console) -> None:
    """Print the findings, then what to do."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    topic = ""
    for finding in report.findings:
        table.add_row(
            Text(finding.severity, style=_STYLES[finding.severity]),
            finding.topic if finding.topic != topic else "",
            Text(finding.text),
        )
        topic = finding.topic
    console.print(table)
    advised = [finding for finding in report.findings if finding.remedy is not None]
    if advised:
        console.print(Text("\nWhat to do", style="bold"))
    for finding in advised:
        console.print(_advice(finding))
    console.print(Text(f"\n{_verdict(report)} ({report.seconds:.1f} s)", style="bold"))


def _advice(finding: Finding) -> Text:
    return Text.assemble((finding.check, _STYLES[finding.severity]), f": {finding.remedy}")


def _verdict(report: DoctorReport) -> str:
    if not report.works:
        return "KVLink cannot work here as it is configured"
    slow = sum(finding.severity == "slow" for finding in report.findings)
    if slow:
        return f"KVLink works here, slower than it could: {slow} finding{'s' if slow > 1 else ''} to mend"
    return "KVLink works here"
