"""Runs a kernel's PTX on numpy: all threads of a grid side by side, those that are furthest behind first.

Arithmetic is that of the PTX ISA for the instructions that KVLink's kernels compile to; any other stops the run. What
no GPU would forgive stops it too: accesses outside allocations, misaligned ones, two threads writing one address, races
in shared memory, barriers that not all threads of a block reach. What it cannot see: ptxas, and the hardware.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
from ptx_memory import GlobalMemory, ReadOnlyMemory, SharedMemory
from ptx_program import Address, Instruction, Kernel, PtxError, UnknownPtxError

MAX_STEPS = 400_000
UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
SPACES = ("global", "shared", "param", "const")
COMPARE = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip
FP8 = {"e4m3x2": (ml_dtypes.float8_e4m3fn, 448.0), "e5m2x2": (ml_dtypes.float8_e5m2, 57344.0)}


def run(kernel: Kernel, memory: GlobalMemory, arguments: bytes, blocks: int, threads: int) -> None:
    """Launch a kernel and wait for it.

    Raises:
        PtxError: it did something undefined; the message has the instruction.
        UnknownPtxError: an instruction is not known here.
    """
    if len(arguments) != kernel.param_bytes:
        raise PtxError(f"{kernel.name} takes {kernel.param_bytes} bytes of parameters, got {len(arguments)}")
    memory.begin_kernel()
    with np.errstate(all="ignore"):
        _Machine(kernel, memory, arguments, blocks, threads).run()


def bits(kind: str) -> int:
    return int(kind[1:])


def numpy_type(kind: str) -> type:
    """The numpy type that a PTX type is computed in."""
    if kind == "pred":
        return np.bool_
    if kind[0] == "f":
        return np.float32
    return (SIGNED if kind[0] == "s" else UNSIGNED)[bits(kind)]


class _Machine:
    """Registers are uint64, one value a thread; instructions read and write them as their types say."""

    def __init__(self, kernel: Kernel, memory: GlobalMemory, arguments: bytes, blocks: int, threads: int) -> None:
        lanes = blocks * threads
        self.kernel = kernel
        self.registers: dict[str, np.ndarray] = {}
        self.lanes = lanes
        self.block = np.arange(lanes) // threads
        self.special = {
            "%tid.x": np.arange(lanes, dtype=np.uint64) % threads,
            "%ctaid.x": self.block.astype(np.uint64),
            "%ntid.x": np.full(lanes, threads, np.uint64),
            "%nctaid.x": np.full(lanes, blocks, np.uint64),
        }
        self.shared = SharedMemory(blocks, kernel.shared_bytes, self.block)
        self.spaces = {
            "global": memory,
            "shared": self.shared,
            "param": ReadOnlyMemory(arguments),
            "const": ReadOnlyMemory(kernel.constant_bytes),
        }
        self.symbols = {**kernel.params, **kernel.shared, **kernel.constants}
        self.at = np.zeros(lanes, np.int64)
        self.waits = np.zeros(lanes, bool)

    def run(self) -> None:
        code, end = self.kernel.code, len(self.kernel.code)
        for _ in range(MAX_STEPS):
            running = (self.at < end) & ~self.waits
            if not running.any():
                if not self.waits.any():
                    return
                self._release_barriers(end)
                continue
            here = int(self.at[running].min())
            active = np.flatnonzero(running & (self.at == here))
            instruction = code[here]
            self.at[active] = here + 1
            if instruction.guard is not None:
                taken = self._register(instruction.guard)[active].astype(bool) != instruction.guard_negated
                active = active[taken]
            if len(active):
                try:
                    self._execute(instruction, active, end)
                except (PtxError, UnknownPtxError) as error:
                    raise type(error)(f"{self.kernel.name}: {error}, at {instruction.text!r}") from error
        raise PtxError(f"{self.kernel.name}: still running after {MAX_STEPS} steps")

    def _release_barriers(self, end: int) -> None:
        for block in np.unique(self.block[self.waits]):
            alive = np.flatnonzero((self.block == block) & (self.at < end))
            if not self.waits[alive].all() or len(np.unique(self.at[alive])) != 1:
                raise PtxError(f"{self.kernel.name}: threads of block {block} wait at different barriers")
            self.waits[alive] = False
            self.shared.barrier(int(block))

    # --- operands -------------------------------------------------------------------------------------------------

    def _register(self, name: str) -> np.ndarray:
        if name not in self.registers:
            self.registers[name] = np.zeros(self.lanes, np.uint64)
        return self.registers[name]

    def _raw(self, operand: str, lanes: np.ndarray) -> np.ndarray:
        """64 bits a lane, whatever they mean."""
        if operand in self.special:
            return self.special[operand][lanes]
        if operand.startswith("%") or operand in self.registers:
            return self._register(operand)[lanes]
        if operand.startswith(("0f", "0F")):
            value = int("0x" + operand[2:], 0)
        elif operand in self.symbols:
            value = self.symbols[operand]
        else:
            try:
                value = int(operand, 0) % (1 << 64)
            except ValueError:
                raise UnknownPtxError(f"unknown operand {operand}") from None
        return np.full(len(lanes), value, np.uint64)

    def read(self, operand: str, kind: str, lanes: np.ndarray) -> np.ndarray:
        raw = self._raw(operand, lanes)
        if kind == "pred":
            return raw.astype(bool)
        return raw.astype(UNSIGNED[bits(kind)]).view(numpy_type(kind))

    def write(self, operand: str, values: np.ndarray, lanes: np.ndarray) -> None:
        unsigned = values.astype(np.uint64) if values.dtype == bool else values.view(UNSIGNED[8 * values.itemsize])
        self._register(operand)[lanes] = unsigned

    # --- instructions ---------------------------------------------------------------------------------------------

    def _execute(self, it: Instruction, lanes: np.ndarray, end: int) -> None:
        match it.op:
            case "bra":
                self.at[lanes] = self.kernel.labels[it.operands[0]]
            case "ret":
                self.at[lanes] = end
            case "bar":
                self.waits[lanes] = True
            case "ld" | "st":
                self._access(it, lanes)
            case "mov" if isinstance(it.operands[0], tuple):
                self._unpack(it, lanes)
            case "mov" if isinstance(it.operands[1], tuple):
                self._pack(it, lanes)
            case "mov" | "cvta":
                self.write(it.operands[0], self.read(it.operands[1], it.types[0], lanes), lanes)
            case "cvt":
                self.write(it.operands[0], self._converted(it, lanes), lanes)
            case "setp":
                one, other = (self.read(operand, it.types[0], lanes) for operand in it.operands[1:])
                self.write(it.operands[0], COMPARE[it.words[1]](one, other), lanes)
            case "selp":
                one, other = (self.read(operand, it.types[0], lanes) for operand in it.operands[1:3])
                self.write(it.operands[0], np.where(self.read(it.operands[3], "pred", lanes), one, other), lanes)
            case _:
                self.write(it.operands[0], self._computed(it, lanes), lanes)

    def _pack(self, it: Instruction, lanes: np.ndarray) -> None:
        parts = it.operands[1]
        width = bits(it.types[0]) // len(parts)
        values = [self.read(part, f"b{width}", lanes).astype(np.uint64) for part in parts]
        packed = sum((value << np.uint64(width * index) for index, value in enumerate(values)), np.uint64(0))
        self.write(it.operands[0], packed, lanes)

    def _unpack(self, it: Instruction, lanes: np.ndarray) -> None:
        parts = it.operands[0]
        width = bits(it.types[0]) // len(parts)
        value = self._raw(it.operands[1], lanes)
        for index, part in enumerate(parts):
            mask = np.uint64((1 << width) - 1)
            self.write(part, value >> np.uint64(width * index) & mask, lanes)

    def _access(self, it: Instruction, lanes: np.ndarray) -> None:
        store = it.op == "st"
        address, registers = it.operands if store else reversed(it.operands)
        registers = registers if isinstance(registers, tuple) else (registers,)
        kind = it.types[0]
        width = bits(kind) // 8
        assert isinstance(address, Address)
        at = self._raw(address.base, lanes) + np.uint64(address.offset % (1 << 64))
        space = self.spaces[next((word for word in it.words if word in SPACES), "global")]
        if store:
            values = [np.ascontiguousarray(self.read(register, kind, lanes)) for register in registers]
            space.store(at, np.stack(values, axis=1).view(np.uint8).reshape(len(lanes), -1), lanes)
            return
        found = space.load(at, width * len(registers), lanes)
        for index, register in enumerate(registers):
            part = np.ascontiguousarray(found[:, index * width : (index + 1) * width])
            self.write(register, part.view(UNSIGNED[bits(kind)]).reshape(-1), lanes)

    def _converted(self, it: Instruction, lanes: np.ndarray) -> np.ndarray:
        pair = next((word for word in it.words if word in FP8), None)
        if pair is not None:
            if it.words != ("cvt", "rn", "satfinite", pair, "f32"):
                raise UnknownPtxError("unknown rounding")
            high, low = (to_fp8(self.read(operand, "f32", lanes), pair) for operand in it.operands[1:])
            return high << np.uint16(8) | low
        target, source = it.types
        if target[0] == "f" and "rn" not in it.words:
            raise UnknownPtxError("unknown rounding")
        return self.read(it.operands[1], source, lanes).astype(numpy_type(target))

    def _computed(self, it: Instruction, lanes: np.ndarray) -> np.ndarray:
        kind = it.types[0]
        values = [self.read(operand, kind, lanes) for operand in it.operands[1:]]
        if kind == "f32" and it.op in ("add", "mul") and it.words[1] != "rn":
            raise UnknownPtxError("unknown rounding")
        match it.op:
            case "add" | "sub" | "and" | "or" | "xor" | "min" | "max":
                return ARITHMETIC[it.op](*values)
            case "mul":
                return self._product(it, *values)
            case "mad" if it.words[1] == "lo":
                return values[0] * values[1] + values[2]
            case "not":
                return ~values[0]
            case "neg":
                return -values[0]
            case "abs":
                return np.abs(values[0])
            case "shl" | "shr":
                return shifted(it.op, values[0], self.read(it.operands[2], "u32", lanes))
            case "prmt":
                return permuted(*values)
            case "bfi":
                start, length = (int(operand) for operand in it.operands[3:])
                mask = np.uint64(((1 << length) - 1) << start)
                return (values[1] & ~mask) | (values[0] << np.uint64(start) & mask)
        raise UnknownPtxError("unknown instruction")

    def _product(self, it: Instruction, one: np.ndarray, other: np.ndarray) -> np.ndarray:
        match it.words[1]:
            case "wide":
                kind = it.types[0]
                wide = (SIGNED if kind[0] == "s" else UNSIGNED)[2 * bits(kind)]
                return one.astype(wide) * other.astype(wide)
            case "hi":
                return high_product(one, other)
            case "lo" | "rn":
                return one * other
        raise UnknownPtxError("unknown instruction")


ARITHMETIC = {
    "add": np.add, "sub": np.subtract, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    "min": np.minimum, "max": np.maximum,
}  # fmt: skip


def shifted(op: str, values: np.ndarray, by: np.ndarray) -> np.ndarray:
    """Shifts by a type's width and more give 0, or the sign."""
    width = 8 * values.itemsize
    amount = np.minimum(by, width - 1).astype(values.dtype)
    result = values << amount if op == "shl" else values >> amount
    beyond = values >> values.dtype.type(width - 1) if op == "shr" and values.dtype.kind == "i" else 0
    return np.where(by >= width, beyond, result).astype(values.dtype)


def permuted(low: np.ndarray, high: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """``prmt`` in its plain mode: four bytes of the eight, by nibbles; a nibble's top bit spreads the byte's sign."""
    both = high.astype(np.uint64) << np.uint64(32) | low.astype(np.uint64)
    result = np.zeros(len(low), np.uint32)
    for index in range(4):
        nibble = selector >> np.uint32(4 * index) & np.uint32(0xF)
        byte = (both >> (8 * (nibble & np.uint32(7)).astype(np.uint64)) & np.uint64(0xFF)).astype(np.uint32)
        sign = np.where(byte >= 0x80, 0xFF, 0).astype(np.uint32)
        result |= np.where(nibble >= 8, sign, byte).astype(np.uint32) << np.uint32(8 * index)
    return result


def high_product(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    half = 4 * one.itemsize
    if one.dtype.kind != "u":
        raise UnknownPtxError("unknown instruction")
    mask, shift = one.dtype.type((1 << half) - 1), one.dtype.type(half)
    low, high = one & mask, one >> shift
    other_low, other_high = other & mask, other >> shift
    middle = high * other_low + (low * other_low >> shift)
    cross = low * other_high + (middle & mask)
    return high * other_high + (middle >> shift) + (cross >> shift)


def to_fp8(values: np.ndarray, pair: str) -> np.ndarray:
    """To nearest even, saturating, NaN 7f. Not by KVLink's own code."""
    kind, largest = FP8[pair]
    encoded = np.clip(values, -largest, largest).astype(kind).view(np.uint8)
    return np.where(np.isnan(values), 0x7F, encoded).astype(np.uint16)
