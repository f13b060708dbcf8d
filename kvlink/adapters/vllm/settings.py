"""What an operator says in ``kv_connector_extra_config``: KVLink's own settings by name, and these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvlink.config import Config
from kvlink.errors import ConfigError
from kvlink.limits import FETCH_DEADLINE_SECONDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The adapter's settings.

    Attributes:
        link: every other key of the extra config is one of `kvlink.Config`'s; environment and file count too.
        model: the name that both engines give the model, where their paths differ.
        weights_revision: of the weights, where ``--revision`` does not say it.
        fetch_seconds: bound on one transfer, from its first ask.
    """

    link: Config
    model: str | None = None
    weights_revision: str | None = None
    fetch_seconds: float = FETCH_DEADLINE_SECONDS

    @classmethod
    def read(cls, extra: Mapping[str, Any]) -> Settings:
        """Read the extra config.

        Raises:
            ConfigError: a key is unknown, or a value out of range; it is named.
        """
        own = {setting.name for setting in fields(cls)} - {"link"}
        link = Config.load({name: value for name, value in extra.items() if name not in own})
        return cls(
            link=link,
            model=_text(extra, "model"),
            weights_revision=_text(extra, "weights_revision"),
            fetch_seconds=_seconds(extra.get("fetch_seconds", FETCH_DEADLINE_SECONDS)),
        )


def _text(extra: Mapping[str, Any], name: str) -> str | None:
    value = extra.get(name)
    if value is not None and not (isinstance(value, str) and value):
        raise ConfigError(f"{name} cannot be {value!r} (from kv_connector_extra_config); accepted: some text")
    return value


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 86_400:
        raise ConfigError(
            f"fetch_seconds cannot be {value!r} (from kv_connector_extra_config); accepted: seconds up to 86400"
        )
    return float(value)
