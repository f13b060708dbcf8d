"""``kvlink advise`` and ``kvlink simulate``: is splitting prefill from decode worth it for a trace?

`options` reads the command line, `command` runs it, `show` prints it.
"""

from __future__ import annotations

import argparse


def run(arguments: argparse.Namespace) -> bool:
    """See `kvlink.cli.plan.command.run`; imported late, so that a command line error is told at once."""
    from kvlink.cli.plan.command import run as run_plan  # noqa: PLC0415 - see above

    return run_plan(arguments)
