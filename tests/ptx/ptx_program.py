"""PTX text as instructions: what NVRTC writes for KVLink's kernels, and nothing that it does not."""

from __future__ import annotations

import re
from dataclasses import dataclass


class PtxError(Exception):
    """The program did what no GPU would forgive."""


class UnknownPtxError(Exception):
    """The program is not understood here: the emulator lacks something, and says nothing about the program."""


@dataclass(frozen=True)
class Address:
    """``[base + offset]``; the base is a register or a symbol."""

    base: str
    offset: int


Operand = str | Address | tuple[str, ...]
"""A register, symbol or literal; an address; a vector of registers."""


@dataclass(frozen=True)
class Instruction:
    """One instruction. ``words`` is all of its name: ``ld.global.u32`` is ``("ld", "global", "u32")``."""

    text: str
    guard: str | None
    guard_negated: bool
    words: tuple[str, ...]
    types: tuple[str, ...]
    operands: tuple[Operand, ...]

    @property
    def op(self) -> str:
        return self.words[0]


@dataclass(frozen=True)
class Kernel:
    """One entry. Symbols of parameters and of shared memory are offsets into their own spaces."""

    name: str
    code: tuple[Instruction, ...]
    labels: dict[str, int]
    params: dict[str, int]
    param_bytes: int
    shared: dict[str, int]
    shared_bytes: int
    constants: dict[str, int]
    constant_bytes: bytes


_TYPE = re.compile(r"[usbf](8|16|32|64)|pred")
_ENTRY = re.compile(r"\.visible \.entry (\w+)\((.*?)\)(?:\s*\.\w+ [^\n]*)*\s*\{(.*?)\n\}", re.DOTALL)
_PARAM = re.compile(r"\.param (?:\.align (\d+) )?\.(\w+) (\w+)(?:\[(\d+)\])?")
_SHARED = re.compile(r"\.shared \.align (\d+) \.b8 (\w+)\[(\d+)\]")
_CONST = re.compile(r"\.const \.align (\d+) \.b8 (\w+)\[(\d+)\] = \{([^}]*)\}")
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+")
_LINE = re.compile(r"(?:@(!?)(%\w+)\s+)?([a-z][\w.:]*)\s*(.*)")


def kernels_of(ptx: str) -> dict[str, Kernel]:
    """All entries of a module, by name."""
    constants, constant_bytes = {}, b""
    for align, name, size, values in _CONST.findall(ptx):
        constant_bytes += bytes(-len(constant_bytes) % int(align))
        constants[name] = len(constant_bytes)
        constant_bytes += bytes(int(value) for value in values.split(",")).ljust(int(size), b"\0")
    return {name: _kernel(name, params, body, constants, constant_bytes) for name, params, body in _ENTRY.findall(ptx)}


def _kernel(name: str, params: str, body: str, constants: dict[str, int], constant_bytes: bytes) -> Kernel:
    code, labels = _instructions(re.sub(r"//[^\n]*", "", body))
    offsets, end = _lay_out(
        (param, int(align or _width(kind)), int(count or 1) * _width(kind))
        for align, kind, param, count in _PARAM.findall(params)
    )
    shared, shared_end = _lay_out((symbol, int(align), int(size)) for align, symbol, size in _SHARED.findall(body))
    return Kernel(name, code, labels, offsets, end, shared, shared_end, constants, constant_bytes)


def _lay_out(symbols) -> tuple[dict[str, int], int]:
    offsets, end = {}, 0
    for symbol, align, size in symbols:
        offsets[symbol] = -(-end // align) * align
        end = offsets[symbol] + size
    return offsets, end


def _width(kind: str) -> int:
    return int(kind[1:]) // 8


def _instructions(body: str) -> tuple[tuple[Instruction, ...], dict[str, int]]:
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    for piece in re.split(r"[;\n]", body):
        line = piece.strip(" \t{")  # an inline assembly's scope opens on the line of its first word
        if line.startswith("$"):
            labels[line.rstrip(":")] = len(code)
        elif line and not line.startswith((".", "}")):  # no declaration
            code.append(_instruction(line))
    return tuple(code), labels


def _instruction(line: str) -> Instruction:
    found = _LINE.fullmatch(line)
    if found is None:
        raise UnknownPtxError(f"not an instruction: {line!r}")
    negated, guard, name, rest = found.groups()
    words = tuple(name.split("."))
    return Instruction(
        text=line,
        guard=guard,
        guard_negated=negated == "!",
        words=words,
        types=tuple(word for word in words[1:] if _TYPE.fullmatch(word)),
        operands=tuple(_operand(text) for text in _OPERAND.findall(rest)),
    )


def _operand(text: str) -> Operand:
    if text.startswith("{"):
        return tuple(part.strip() for part in text.strip("{}").split(","))
    if text.startswith("["):
        base, _, offset = text.strip("[]").partition("+")
        return Address(base, int(offset or 0))
    return text
