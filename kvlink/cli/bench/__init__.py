"""``kvlink bench``: two engines in miniature, a transfer between them, and the proof that it was right.

`options` reads the command line into a `case`; `conductor` runs it over `workers`, each of which hosts a `half` (the
ranks of one side); `content` is what the caches hold and the independent check; `tally` and `report` are the result.
`series` runs many cases, which `sheet`, `plot` and `page` show.
"""

from __future__ import annotations

import argparse

from kvlink.cli.bench import options, sweeps


def run(arguments: argparse.Namespace) -> bool:
    """Run a bench, or a series of them; whether all was done and verified. See `command.run` and `series.run`.

    What runs is imported late, so that a command line error is told at once.

    Raises:
        ConfigError: an argument is wrong.
        UnavailableError: the machine lacks something.
        KVLinkError: it could not be run to its end.
    """
    wanted = sweeps.parse(arguments)
    if wanted is None:
        from kvlink.cli.bench.command import run as run_one  # noqa: PLC0415 - see above

        return run_one(options.parse(arguments))
    from kvlink.cli.bench.series import run as run_series  # noqa: PLC0415 - see above

    return run_series(wanted)
