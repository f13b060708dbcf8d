"""Compiled kernels on disk, so that a GPU's first transfer after a start costs no compilation.

One file for each recipe (`nvrtc.recipe`) under ``$XDG_CACHE_HOME/kvlink`` (``~/.cache/kvlink``), or the folder that
``KVLINK_KERNEL_CACHE`` names; ``KVLINK_KERNEL_CACHE=off`` keeps none. What lies there is run on the GPU: a folder that
others may write to is not used. A cache that cannot be read or written costs time and is no error.
"""

from __future__ import annotations

import logging
import os
import stat
import tempfile
from pathlib import Path
from typing import Final

from kvlink.relayout import nvrtc

log: Final = logging.getLogger("kvlink.relayout")

VARIABLE: Final = "KVLINK_KERNEL_CACHE"
_ELF: Final = b"\x7fELF"


def cubin(arch: str, source: str | None = None, target: str | None = None) -> bytes:
    """Machine code of the kernels, from the cache or compiled now (some 0.5 s) and kept.

    Args:
        arch: such as ``"sm_90"``.
        source: element type to convert from; ``None`` for copies.
        target: element type to convert to.

    Raises:
        UnavailableError: there is no NVRTC, or it cannot compile for this GPU.
        UnsupportedError: a type that cannot be converted.
    """
    folder = _folder()
    if folder is None:
        return nvrtc.compile_cubin(arch, source, target)
    path = folder / f"{nvrtc.recipe(arch, source, target)}.cubin"
    try:
        image = path.read_bytes()
        if image.startswith(_ELF):
            return image
    except OSError:
        pass
    image = nvrtc.compile_cubin(arch, source, target)
    _keep(path, image)
    return image


def is_kept(arch: str) -> bool:
    """Whether the kernels of plain copies are on disk for an architecture; raises as `cubin`."""
    folder = _folder()
    return folder is not None and (folder / f"{nvrtc.recipe(arch)}.cubin").exists()


def _folder() -> Path | None:
    named = os.environ.get(VARIABLE)
    if named in {"off", ""}:
        return None
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = Path(named or Path(home) / "kvlink").expanduser()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = folder.stat()
    except (OSError, RuntimeError) as error:
        log.info("compiled kernels are not kept: %s", error)
        return None
    if facts.st_uid != os.geteuid() or facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        log.warning("compiled kernels are not kept in %s: others own it or may write to it", folder)
        return None
    return folder


def _keep(path: Path, image: bytes) -> None:
    """Whole or not at all: several ranks may start at once."""
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            part = Path(file.name)
            try:
                file.write(image)
                file.flush()
                part.replace(path)
            finally:
                part.unlink(missing_ok=True)
    except OSError as error:
        log.info("compiled kernels are not kept: %s", error)
