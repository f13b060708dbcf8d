"""A transport under test, and every completion that it has reported."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvlink.transports.base import Completion, CompletionKind, Transport


class Watching:
    """Keeps what ``transport``, which whoever derives from it makes, reports; waits up to 5 s for more."""

    transport: Transport

    def __init__(self) -> None:
        self.seen: list[Completion] = []

    def wait(self, wanted: Callable[[Completion], bool]) -> Completion:
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            self.seen += self.transport.poll()
            for completion in self.seen:
                if wanted(completion):
                    return completion
            time.sleep(0.002)
        raise AssertionError(f"not seen: {self.seen}")

    def completion(self, kind: CompletionKind) -> Completion:
        return self.wait(lambda completion: completion.kind is kind)

    def end_of(self, op: int) -> Completion:
        return self.wait(lambda completion: completion.op == op)
