"""Progress of a simulation on standard error: a line that moves where someone watches, nothing where nobody does."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar


class Progress:
    """Counts simulated requests over all runs of a command.

    Args:
        total: requests of all runs.
        quiet: show nothing, terminal or not.
    """

    def __init__(self, total: int, *, quiet: bool) -> None:
        console = Console(stderr=True)
        self._bar = Bar(
            TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(),
            console=console, transient=True, disable=quiet or not console.is_terminal,
        )  # fmt: skip
        self._task = self._bar.add_task("reading", total=total)
        self._doing = ""
        self._before = 0
        self._arrived = 0

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def step(self, doing: str, arrived: int) -> None:
        """A run is at its ``arrived``-th request."""
        if doing != self._doing:
            self._before += self._arrived
            self._doing = doing
        self._arrived = arrived
        self._bar.update(self._task, description=doing, completed=self._before + arrived)

    def say(self, doing: str) -> None:
        """Something else is being done."""
        self._bar.update(self._task, description=doing)
