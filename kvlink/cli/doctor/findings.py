"""What the doctor finds: one typed line each, with what to do about it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from kvlink.version import VERSION

SCHEMA = "kvlink.doctor/1"

Severity = Literal["ok", "note", "slow", "fatal"]
"""``ok``: as it should be. ``note``: worth knowing. ``slow``: KVLink works and is slower than it could be. ``fatal``:
KVLink cannot work as it is configured."""
Fact = str | int | float | bool | None


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing looked at.

    ``check`` names it for scripts (``topic.name``), ``text`` says it, ``remedy`` is what to do, ``facts`` are its
    figures with their units in their names.
    """

    check: str
    severity: Severity
    text: str
    remedy: str | None = None
    facts: Mapping[str, Fact] = {}

    @property
    def topic(self) -> str:
        """The part of ``check`` before the dot."""
        return self.check.split(".")[0]


class DoctorReport(msgspec.Struct, frozen=True, kw_only=True):
    """``kvlink.doctor/1``. ``works``: nothing is fatal."""

    schema: str
    kvlink: str
    works: bool
    seconds: float
    findings: tuple[Finding, ...]


def make_report(findings: list[Finding], seconds: float) -> DoctorReport:
    """All findings, in the order in which they were made."""
    works = all(finding.severity != "fatal" for finding in findings)
    return DoctorReport(schema=SCHEMA, kvlink=VERSION, works=works, seconds=seconds, findings=tuple(findings))
