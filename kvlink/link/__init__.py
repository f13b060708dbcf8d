"""The asyncio driver: the only room that waits.

`link` is what an embedder awaits, over `driver`, which opens, closes and holds the two halves; `target_half` and
`source_half` carry out the protocol's actions; `sessions` keeps one live connection per peer over `control`,
`handshake` and `listener`; `pump` brings completions in.
"""

from kvlink.link.driver import CloseReport, Stats
from kvlink.link.link import Link, open_link
from kvlink.link.part import Part, Result, State

__all__ = ["CloseReport", "Link", "Part", "Result", "State", "Stats", "open_link"]
