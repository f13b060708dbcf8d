"""Wrote digest.json, once: the scheme is frozen, so rerunning it must change nothing.

Digests come from the PyPI package xxhash, an implementation independent of the native core.
"""

import json
from pathlib import Path

import xxhash

LEAF_BYTES = 16_384
HASH_LENGTHS = (0, 1, 3, 4, 8, 9, 16, 17, 128, 129, 240, 241, 255, 256, 512, 1024, 1025, 4096)
TRANSFER_LENGTHS = (0, 1, 16_383, 16_384, 16_385, 32_768, 41 * 16_384 + 7)


def input_bytes(length: int) -> bytes:
    """Byte i is the top byte of ``(i + 1) * 2654435761 mod 2**32``."""
    return bytes(((i + 1) * 2_654_435_761 >> 24) & 0xFF for i in range(length))


def transfer(length: int) -> dict:
    data = input_bytes(length)
    leaves = [xxhash.xxh3_64_intdigest(data[i : i + LEAF_BYTES]) for i in range(0, length, LEAF_BYTES)]
    root = xxhash.xxh3_64_intdigest(b"".join(leaf.to_bytes(8, "little") for leaf in leaves))
    return {"bytes": length, "leaves": [f"{leaf:016x}" for leaf in leaves], "root": f"{root:016x}"}


def vectors() -> dict:
    return {
        "scheme": "xxh3-64-leaf16k",
        "input": input_bytes.__doc__,
        "xxh3_64": {str(n): f"{xxhash.xxh3_64_intdigest(input_bytes(n)):016x}" for n in HASH_LENGTHS},
        "transfers": [transfer(n) for n in TRANSFER_LENGTHS],
    }


if __name__ == "__main__":
    Path(__file__).with_name("digest.json").write_text(json.dumps(vectors(), indent=1) + "\n")
