"""Brings a transport's completions into the loop: one file descriptor, batches, one handler an operation."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvlink.transports.base import CompletionKind

if TYPE_CHECKING:
    from kvlink.transports.base import Completion, RegionKey, Transport

_log = logging.getLogger("kvlink.link")
_BATCH = 256

Handler = Callable[["Completion"], None]


class Pump:
    """Watches one transport and hands each completion to whoever started the operation.

    Events that no operation started (PEER_LOST, LEASE_LAPSED) go to ``on_event``.

    Attributes:
        transport: what it watches; closed by its owner.
        descriptor: readable when there are completions.
        region_keys: keys of the cache's regions, once registered.
    """

    def __init__(self, transport: Transport, on_event: Handler) -> None:
        self.transport = transport
        self.region_keys: tuple[RegionKey, ...] = ()
        self._on_event = on_event
        self._handlers: dict[int, Handler] = {}
        self._loop = asyncio.get_running_loop()
        self.descriptor = transport.fileno()
        self._loop.add_reader(self.descriptor, self.readable)

    def on(self, op: int, handler: Handler) -> None:
        """Call ``handler`` with the completion of ``op``, once."""
        self._handlers[op] = handler

    def ended(self, op: int) -> asyncio.Future[Completion]:
        """The completion of ``op``, to be awaited. A wait that is cancelled leaves the operation running.

        Call it before the loop runs again: a completion that nobody waits for is dropped.
        """
        done: asyncio.Future[Completion] = self._loop.create_future()
        self.on(op, lambda completion: None if done.done() else done.set_result(completion))
        return done

    def close(self) -> None:
        """Stop watching. The transport is closed by its owner."""
        self._loop.remove_reader(self.descriptor)
        self._handlers.clear()

    def readable(self) -> None:
        """Hand over what has completed; nothing happens if that is nothing."""
        while batch := self.transport.poll(_BATCH):
            for completion in batch:
                self._dispatch(completion)
            if len(batch) < _BATCH:
                break
        self.transport.arm()  # if that cannot be, the descriptor stays readable, and the loop comes back

    def _dispatch(self, completion: Completion) -> None:
        handler = self._handlers.pop(completion.op, None) if completion.op else None
        if handler is not None:
            handler(completion)
        elif completion.kind in (CompletionKind.PEER_LOST, CompletionKind.LEASE_LAPSED):
            self._on_event(completion)
        else:
            _log.debug("a completion nobody waits for: %s", completion)
