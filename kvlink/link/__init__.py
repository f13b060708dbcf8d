"""The asyncio driver: the only room that waits.

`link` opens, closes and holds the verbs; `target_half` and `source_half` carry out the protocol's actions; `sessions`
keeps one live connection per peer over `control`, `handshake` and `listener`; `pump` brings completions in.
"""

from kvlink.link.link import CloseReport, Link, Stats, open_link
from kvlink.link.part import Part, Result, State

__all__ = ["CloseReport", "Link", "Part", "Result", "State", "Stats", "open_link"]
