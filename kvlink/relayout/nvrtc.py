"""Compiles the kernels for a GPU at run time, by NVRTC: no compiler at install time, and no GPU to compile.

The sources lie beside the native core (native/src/kernels in a checkout). NVRTC comes with a CUDA toolkit, with torch,
or alone with ``pip install kvlink[cuda]``; it is opened by name when first used.
"""

from __future__ import annotations

import ctypes
import hashlib
from functools import cache
from importlib import util
from pathlib import Path
from typing import Final

from kvlink import _native
from kvlink._native import _kvlink
from kvlink.errors import UnavailableError, UnsupportedError

_SOURCES: Final = Path(_native.__file__).parent / "kernels"
_MAIN: Final = "kernels.cu"
_MAJORS: Final = (13, 12)
_SUCCESS: Final = 0


def compile_kernels(arch: str, source: str | None = None, target: str | None = None) -> bytes:
    """PTX of the kernels for one architecture.

    Args:
        arch: such as ``"sm_90"``.
        source: element type to convert from, by its `kvlink.layout.DType` name; ``None`` for copies.
        target: element type to convert to.

    Returns:
        PTX text. Entries are ``kvlink_move_N`` for items of N elements (bytes, in copies), ``kvlink_move_and_digest``,
        and for copies ``kvlink_digest``.

    Raises:
        UnavailableError: there is no NVRTC, or it does not know the architecture or is too old for the sources.
        UnsupportedError: a type that cannot be converted.
    """
    nvrtc = _library()
    return _compile(nvrtc, _options(f"compute_{arch.removeprefix('sm_')}", source, target), "PTX")


def compile_cubin(arch: str, source: str | None = None, target: str | None = None) -> bytes:
    """Machine code of the kernels for one architecture, as `compile_kernels` else."""
    return _compile(_library(), _options(arch, source, target), "CUBIN")


def recipe(arch: str, source: str | None = None, target: str | None = None) -> str:
    """A digest of all that decides what `compile_cubin` gives: the sources, the options, and which NVRTC it is.

    Raises:
        UnavailableError, UnsupportedError: as `compile_cubin`.
    """
    parts = [_version(_library()), *_options(arch, source, target)]
    parts += [path.read_text() for path in (*sorted(_SOURCES.glob("*.hpp")), _SOURCES / _MAIN)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _options(arch: str, source: str | None, target: str | None) -> list[str]:
    options = [f"--gpu-architecture={arch}", "--std=c++20", "--fmad=false"]
    if source is not None and target is not None:
        types = {name: in_kernels for name, _, in_kernels in _kvlink.element_types()}
        for name in (source, target):
            if name not in types:
                raise UnsupportedError(f"{name} cannot be converted; element types are {', '.join(types)}")
        options += [f"-DKVLINK_SOURCE={types[source]}", f"-DKVLINK_TARGET={types[target]}"]
    return options


def nvrtc_version() -> str:
    """Version of the NVRTC that would compile, as ``"12.9"``.

    Raises:
        UnavailableError: there is none.
    """
    return _version(_library())


@cache
def _library() -> ctypes.CDLL:
    tried = []
    for major in _MAJORS:
        for path in (*_wheel_libraries(major), f"libnvrtc.so.{major}"):
            try:
                return ctypes.CDLL(str(path))
            except OSError as error:
                tried.append(str(error))
    raise UnavailableError(f"no NVRTC to compile GPU kernels with ({tried[-1]}); `pip install kvlink[cuda]` brings it")


def _wheel_libraries(major: int) -> list[Path]:
    """Where NVIDIA's wheels put it: one folder for each library up to CUDA 12, one for all since."""
    found = []
    for package in ("nvidia.cuda_nvrtc", f"nvidia.cu{major}"):
        try:
            spec = util.find_spec(package)
        except ModuleNotFoundError:  # no `nvidia` at all
            continue
        for home in (spec.submodule_search_locations or []) if spec is not None else []:
            found += sorted((Path(home) / "lib").glob(f"libnvrtc.so.{major}"))
    return found


def _compile(nvrtc: ctypes.CDLL, options: list[str], form: str) -> bytes:
    headers = sorted(_SOURCES.glob("*.hpp"))
    texts = (ctypes.c_char_p * len(headers))(*[header.read_bytes() for header in headers])
    names = (ctypes.c_char_p * len(headers))(*[header.name.encode() for header in headers])
    main = (_SOURCES / _MAIN).read_bytes()
    program = ctypes.c_void_p()
    _check(nvrtc, nvrtc.nvrtcCreateProgram(ctypes.byref(program), main, _MAIN.encode(), len(headers), texts, names))
    try:
        flags = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
        if nvrtc.nvrtcCompileProgram(program, len(options), flags) != _SUCCESS:
            log = _text(nvrtc, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
            raise UnavailableError(
                f"NVRTC {_version(nvrtc)} cannot compile the kernels with {' '.join(options)}; use a CUDA that knows "
                f"this GPU. It says: {log.decode(errors='replace').strip()}"
            )
        return _text(nvrtc, getattr(nvrtc, f"nvrtcGet{form}Size"), getattr(nvrtc, f"nvrtcGet{form}"), program)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _text(
    nvrtc: ctypes.CDLL, size_of: ctypes._NamedFuncPointer, read: ctypes._NamedFuncPointer, program: ctypes.c_void_p
) -> bytes:
    size = ctypes.c_size_t()
    _check(nvrtc, size_of(program, ctypes.byref(size)))
    text = ctypes.create_string_buffer(size.value)
    _check(nvrtc, read(program, text))
    return text.raw.rstrip(b"\0") if text.raw[:4] != b"\x7fELF" else text.raw


def _version(nvrtc: ctypes.CDLL) -> str:
    major, minor = ctypes.c_int(), ctypes.c_int()
    nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


def _check(nvrtc: ctypes.CDLL, result: int) -> None:
    if result != _SUCCESS:
        nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise UnavailableError(f"NVRTC {_version(nvrtc)} failed: {nvrtc.nvrtcGetErrorString(result).decode()}")
