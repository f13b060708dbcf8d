"""``kvlink layout A.json B.json``: can A's cache become B's, and how? Reads two files; touches no cache and no network.

`compare` answers, `picture` shows it.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from kvlink import limits
from kvlink.cli.engine_file import read_engine
from kvlink.cli.layout.compare import compare
from kvlink.cli.layout.picture import show
from kvlink.cli.output import check_outputs, write_result
from kvlink.errors import ConfigError


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``layout`` to the command line."""
    parser = commands.add_parser(
        "layout",
        help="are two engines' caches compatible, and how would a transfer run",
        description="Compares the caches of a source engine and a target engine, field by field, and plans a request "
        "between them: runs, bytes, path, and which rank feeds which. Exit codes: 0 compatible, 1 not compatible, "
        "2 bad arguments or a malformed file.",
    )
    parser.add_argument("source", type=Path, metavar="SOURCE.json", help="engine that has the KV")
    parser.add_argument("target", type=Path, metavar="TARGET.json", help="engine that wants it")
    parser.add_argument("--tokens", type=int, metavar="N", help="prompt length (4096, or what both caches hold)")
    parser.add_argument(
        "--first-token", type=int, default=0, metavar="N", help="the target has the tokens before it (%(default)s)"
    )
    parser.add_argument("--json", metavar="FILE", help="write the answer as JSON; - is standard output")


def run(arguments: argparse.Namespace) -> bool:
    """Compare, show and write; whether the two are compatible.

    Raises:
        ConfigError: an argument or a file is wrong.
        LayoutError: a spec is impossible.
    """
    source, target = read_engine(arguments.source), read_engine(arguments.target)
    tokens = arguments.tokens
    if tokens is not None and not 1 <= tokens <= limits.MAX_TOKENS_PER_REQUEST:
        raise ConfigError(f"--tokens is {tokens}; it must lie between 1 and {limits.MAX_TOKENS_PER_REQUEST}")
    check_outputs(arguments)
    report = compare(source, target, tokens, arguments.first_token)
    write_result(report, arguments.json, partial(show, report))
    return report.compatible
