"""What a record says of the machine it was taken on, and where it is put."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path


def taken_on() -> dict[str, object]:
    """The machine's part of a record; its load is of the minute before, so call it before anything is measured."""
    return {
        "cpus": os.cpu_count(),
        "load_before": round(os.getloadavg()[0], 2),
        "date": time.strftime("%Y-%m-%d"),
    }


def write(record: dict[str, object], file: str) -> None:
    """As JSON; ``-`` is standard output."""
    text = json.dumps(record, indent=1) + "\n"
    if file == "-":
        sys.stdout.write(text)
    else:
        Path(file).write_text(text, encoding="utf-8")
