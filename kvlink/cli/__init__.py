"""The ``kvlink`` command.

Exit codes of every command: 0 done and verified, 1 ran and failed, 2 bad arguments, 3 the machine lacks something.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Final

from kvlink.cli import bench, doctor, layout, plan, preflight, report
from kvlink.cli.bench import options
from kvlink.cli.plan import options as plan_options
from kvlink.errors import ConfigError, KVLinkError, LayoutError, UnavailableError
from kvlink.version import VERSION

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_UNAVAILABLE = 3


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (the process's own by default) and return its exit code."""
    arguments = command_line().parse_args(argv)
    try:
        return EXIT_DONE if _run(arguments) else EXIT_FAILED
    except KVLinkError as error:
        sys.stderr.write(f"kvlink {arguments.command}: {error}\n")
        return exit_code(error)
    except KeyboardInterrupt:
        sys.stderr.write(f"kvlink {arguments.command}: interrupted\n")
        return EXIT_FAILED


def command_line() -> argparse.ArgumentParser:
    """The grammar of every command."""
    parser = argparse.ArgumentParser(prog="kvlink", description="Moves LLM KV cache between workers.")
    parser.add_argument("--version", action="version", version=f"kvlink {VERSION}")
    commands = parser.add_subparsers(dest="command", required=True)
    options.add_parser(commands)
    doctor.add_parser(commands)
    layout.add_parser(commands)
    plan_options.add_parsers(commands)
    report.add_parser(commands)
    preflight.add_parser(commands)
    return parser


def _run(arguments: argparse.Namespace) -> bool:
    return _COMMANDS[arguments.command](arguments)


_COMMANDS: Final[dict[str, Callable[[argparse.Namespace], bool]]] = {
    "bench": bench.run,
    "doctor": doctor.run,
    "layout": layout.run,
    "advise": plan.run,
    "simulate": plan.run,
    "report": report.run,
    "preflight": preflight.run,
}


def exit_code(error: KVLinkError) -> int:
    """The exit code that tells a script what kind of ``error`` ended the command."""
    if isinstance(error, ConfigError | LayoutError):
        return EXIT_USAGE
    if isinstance(error, UnavailableError):
        return EXIT_UNAVAILABLE
    return EXIT_FAILED
