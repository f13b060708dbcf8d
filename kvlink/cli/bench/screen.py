"""Progress on standard error: a line that moves where someone watches, nothing where nobody does."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class Screen:
    """What a bench shows while it runs. Faults are always written; progress only to a terminal, unless ``quiet``."""

    def __init__(self, requests: int, *, quiet: bool) -> None:
        self._console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            console=self._console, transient=True, disable=quiet or not self._console.is_terminal,
        )  # fmt: skip
        self._task = self._progress.add_task("starting", total=requests)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def stage(self, doing: str, finished: int) -> None:
        """What is being done now, and how many requests are finished."""
        self._progress.update(self._task, description=doing, completed=finished)

    def fault(self, words: str) -> None:
        """Something is wrong; the bench goes on and will fail."""
        self._console.print(f"fault: {words}", markup=False, highlight=False, soft_wrap=True)

    def say(self, words: str) -> None:
        """Something the user waits for."""
        self._console.print(words, markup=False, highlight=False, soft_wrap=True)
