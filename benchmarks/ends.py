"""The two ends of a benchmark over the public API: one rank each, in a process of its own that is told what to do."""

from __future__ import annotations

import argparse
import math
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import kvlink
from kvlink.layout import standard_spec

TRANSPORTS = ("stream", "shared", "ucx", "auto")
HEAD_CHANNELS = 128
TOKEN_BYTES_OF_HEAD = 2 * HEAD_CHANNELS * 2
"""K and V of one token, layer and KV head in float16."""


@dataclass(frozen=True, kw_only=True)
class Cache:
    """The shape of either end's cache: ``layers`` of ``heads`` KV heads, in NHD, in blocks of ``slots`` tokens."""

    model: str
    layers: int
    heads: int
    slots: int
    blocks: int

    @property
    def block_bytes(self) -> int:
        return self.layers * self.heads * self.slots * TOKEN_BYTES_OF_HEAD

    def allocate(self, engine: str, *, shareable: bool = False) -> kvlink.Caches:
        """One engine's; ``shareable``: in memory that the other end can map."""
        spec = standard_spec(
            "nhd",
            identity=kvlink.Identity(
                model=self.model, num_layers=self.layers, num_kv_heads=self.heads, head_dim=HEAD_CHANNELS
            ),
            place=kvlink.Place(engine=engine, incarnation="1"),
            layers=range(self.layers), heads=range(self.heads), block_size=self.slots, num_blocks=self.blocks,
            dtype=kvlink.DType.FLOAT16,
        )  # fmt: skip
        return kvlink.Caches.standard(spec, shareable=shareable)


def count(text: str) -> int:
    """An argument of 1 or more."""
    if not text.isdecimal() or (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 on")
    return number


def duration(text: str) -> float:
    """An argument in seconds, more than none."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return seconds


def add_link_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--transport", choices=TRANSPORTS, default="stream")
    parser.add_argument("--integrity", choices=("on", "off"), default="on")


def link_flags(options: argparse.Namespace) -> list[str]:
    """The same options, for a child's command line."""
    return ["--transport", options.transport, "--integrity", options.integrity]


def config(options: argparse.Namespace) -> kvlink.Config:
    return kvlink.Config(transports=(options.transport,), integrity=options.integrity == "on")


class Source:
    """A link whose rank is all of a source engine."""

    def __init__(self, link: kvlink.Link, slots: int) -> None:
        self.link = link
        self._slots = slots
        self._roster = kvlink.Roster.of([link.card])

    def publish(self, name: str, blocks: tuple[int, ...]) -> tuple[kvlink.Offer, kvlink.Part]:
        """Offer ``blocks``, all of their tokens."""
        offer = kvlink.Offer(
            key=kvlink.request_key("1", name), roster=self._roster, blocks=(blocks,), tokens=len(blocks) * self._slots
        )
        return offer, self.link.publish(offer)


@asynccontextmanager
async def open_target(options: argparse.Namespace, caches: kvlink.Caches) -> AsyncIterator[kvlink.Link]:
    """A link whose rank is all of a target engine."""
    async with kvlink.open_link(config(options), caches) as link:
        link.set_siblings(kvlink.Roster.of([link.card]))
        yield link


class Told:
    """A child process that answers lines with lines; what it says on standard error is shown."""

    def __init__(self, command: list[str], environment: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def ask(self, line: str) -> str:
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.hear()

    def hear(self) -> str:
        if not (line := self.process.stdout.readline()):
            raise SystemExit("a process ended; its own words are above")
        return line.strip()
