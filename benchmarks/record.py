"""What a record says of the machine it was taken on, and where it is put."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

from kvlink.cli.output import check_writable
from kvlink.errors import ConfigError


def taken_on() -> dict[str, object]:
    """The machine's part of a record; its load is of the minute before, so call it before anything is measured."""
    return {
        "cpus": os.cpu_count(),
        "load_before": round(os.getloadavg()[0], 2),
        "date": time.strftime("%Y-%m-%d"),
    }


def destination(text: str) -> str:
    """An argument that names where a record goes, refused before anything is measured if it cannot be written."""
    if text != "-":
        try:
            check_writable("the file", Path(text))
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
    return text


def write(record: dict[str, object], file: str) -> None:
    """As JSON; ``-`` is standard output."""
    text = json.dumps(record, indent=1) + "\n"
    if file == "-":
        sys.stdout.write(text)
    else:
        Path(file).write_text(text, encoding="utf-8")
