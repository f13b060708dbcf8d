"""``kvlink bench``: two engines in miniature, a transfer between them, and the proof that it was right.

`options` reads the command line into a `case`; `conductor` runs it over `workers`, each of which hosts a `half` (the
ranks of one side); `content` is what the caches hold and the independent check; `tally` and `report` are the result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvlink.cli.bench.options import Options


def run(options: Options) -> bool:
    """See `kvlink.cli.bench.command.run`; imported late, so that a command line error is told at once."""
    from kvlink.cli.bench.command import run as run_bench  # noqa: PLC0415 - see above

    return run_bench(options)
