"""What a command leaves: files that can be written before the work begins, and standard output to the last byte."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console
from rich.table import Table

from kvlink.errors import ConfigError, KVLinkError

_STANDARD_OUTPUT: Final = 1
_STANDARD_ERROR: Final = 2
PIPED_COLUMNS: Final = 120
"""Width of tables where no terminal says how wide it is."""


def check_writable(flag: str, path: Path) -> None:
    """Refuse a result file that cannot be written now rather than after the work.

    Args:
        flag: that named it.
        path: the file; where there is none, none is left either.

    Raises:
        ConfigError: it cannot be opened for writing.
    """
    try:
        new = not path.exists()
        path.open("ab").close()
        if new:
            path.resolve().unlink()  # a run that is refused later leaves nothing; a link to a file to come stays
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be written: {error.strerror}") from error


def check_outputs(arguments: argparse.Namespace) -> None:
    """Refuse files (``--json``, ``--html``) and a folder (``--png``) that cannot be written, of those a command has.

    Raises:
        ConfigError: the first that cannot be.
    """
    for name in ("json", "html"):
        file = getattr(arguments, name, None)
        if file is not None and str(file) != "-":
            check_writable(f"--{name}", Path(file))
    folder = getattr(arguments, "png", None)
    if folder is not None:
        _check_folder("--png", folder)


def _check_folder(flag: str, folder: Path) -> None:
    """Refuse a folder that is none, or that cannot be made or written into; none is made yet."""
    there = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    if not there.is_dir():
        raise ConfigError(f"{flag} {folder} cannot be a folder: {there} is something else; name another")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"{flag} {folder} cannot be written: {there} is not writable for this user")


def write_file(flag: str, path: Path, data: bytes) -> None:
    """Write a result.

    Raises:
        KVLinkError: the work is done, and its result could not be written.
    """
    try:
        path.write_bytes(data)
    except OSError as error:
        raise KVLinkError(f"the result could not be written to {flag} {path}: {error.strerror}") from error


def write_pictures(folder: Path, pictures: Mapping[str, bytes]) -> None:
    """Write pictures into the folder that ``--png`` names, by their names; the folder is made where there is none.

    Raises:
        KVLinkError: the work is done, and its result could not be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise KVLinkError(f"the folder --png {folder} could not be made: {error.strerror}") from error
    for name, png in pictures.items():
        write_file("--png", folder / f"{name}.png", png)


def write_result(result: msgspec.Struct, destination: str | None, show: Callable[[Console], None]) -> None:
    """Write a result as JSON to ``destination``, and for people to standard output unless ``destination`` is it.

    The file comes first: it is wanted whatever becomes of standard output.

    Args:
        result: as JSON.
        destination: a file, ``-`` for standard output, ``None`` for no JSON.
        show: prints it for people.

    Raises:
        KVLinkError: the work is done, and its result could not be written.
    """
    text = msgspec.json.format(msgspec.json.encode(result)).decode() + "\n"
    if destination == "-":
        with standard_output():
            sys.stdout.write(text)
        return
    if destination is not None:
        write_file("--json", Path(destination), text.encode())
    with standard_output():
        console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else PIPED_COLUMNS)
        with console.capture() as shown:  # a console that writes itself ends the process when its pipe breaks
            show(console)
        sys.stdout.write(shown.get())


def print_table(titles: Sequence[str], rows: Iterable[Sequence[str]], console: Console) -> None:
    """Print text cells as a table, without lines that a terminal cannot afford."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in titles:
        table.add_column(title)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    console.print()


@contextlib.contextmanager
def standard_output() -> Iterator[None]:
    """Write to standard output, to the last byte.

    Raises:
        KVLinkError: it is closed, full, or nobody reads it.
    """
    if sys.stdout is None:  # what Python makes of a descriptor that was closed at its start
        raise KVLinkError("the result could not be written to standard output: it is closed")
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        _discard_output()
        raise KVLinkError(f"the result could not be written to standard output: {error.strerror}") from error


@contextlib.contextmanager
def native_words_aside() -> Iterator[None]:
    """Inside, what native code prints to standard output goes to standard error: UCX logs there, amid a result."""
    try:
        os.fstat(_STANDARD_ERROR)
        kept = os.dup(_STANDARD_OUTPUT)
    except OSError:  # one of them is closed: there is nothing to keep apart
        yield
        return
    try:
        os.dup2(_STANDARD_ERROR, _STANDARD_OUTPUT)
        yield
    finally:
        ctypes.CDLL(None).fflush(None)  # what C still holds back of it
        os.dup2(kept, _STANDARD_OUTPUT)
        os.close(kept)


def _discard_output() -> None:
    """Let what is left in the buffer go nowhere, or the interpreter fails on it again as it exits."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
