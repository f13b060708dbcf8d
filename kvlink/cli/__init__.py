"""The ``kvlink`` command.

Exit codes of every command: 0 done and verified, 1 ran and failed, 2 bad arguments, 3 the machine lacks something.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from kvlink.cli import bench, doctor, layout
from kvlink.cli.bench import options
from kvlink.errors import ConfigError, KVLinkError, LayoutError, UnavailableError

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_UNAVAILABLE = 3


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (the process's own by default) and return its exit code."""
    parser = argparse.ArgumentParser(prog="kvlink", description="Moves LLM KV cache between workers.")
    commands = parser.add_subparsers(dest="command", required=True)
    options.add_parser(commands)
    doctor.add_parser(commands)
    layout.add_parser(commands)
    arguments = parser.parse_args(argv)
    try:
        return EXIT_DONE if _run(arguments) else EXIT_FAILED
    except KVLinkError as error:
        sys.stderr.write(f"kvlink {arguments.command}: {error}\n")
        return exit_code(error)
    except KeyboardInterrupt:
        sys.stderr.write(f"kvlink {arguments.command}: interrupted\n")
        return EXIT_FAILED


def _run(arguments: argparse.Namespace) -> bool:
    if arguments.command == "layout":
        return layout.run(arguments)
    if arguments.command == "doctor":
        return doctor.run(arguments)
    return bench.run(arguments)


def exit_code(error: KVLinkError) -> int:
    """The exit code that tells a script what kind of ``error`` ended the command."""
    if isinstance(error, ConfigError | LayoutError):
        return EXIT_USAGE
    if isinstance(error, UnavailableError):
        return EXIT_UNAVAILABLE
    return EXIT_FAILED
