"""What an operator says in ``kv_connector_extra_config``: KVLink's own settings by name, and these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, Literal, cast

from kvlink.config import Config
from kvlink.errors import ConfigError
from kvlink.limits import FETCH_DEADLINE_SECONDS, PUSH_DEADLINE_SECONDS, RETRY_HORIZON_SECONDS

Flow = Literal["fetch", "push"]
FLOWS: Final = ("fetch", "push")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The adapter's settings.

    Attributes:
        link: every other key of the extra config is one of `kvlink.Config`'s; environment and file count too.
        model: the name that both engines give the model, where their paths differ.
        weights_revision: of the weights, where ``--revision`` does not say it.
        fetch_seconds: bound on one transfer, from its first ask.
        flow: with ``push``, the KV of requests that are to be pushed is streamed layer by layer while it is computed;
            otherwise step by step.
        push_seconds: bound on one push, from its blocks to its install: prefill's queue and compute are part of it.
    """

    link: Config
    model: str | None = None
    weights_revision: str | None = None
    fetch_seconds: float = FETCH_DEADLINE_SECONDS
    flow: Flow = "fetch"
    push_seconds: float = PUSH_DEADLINE_SECONDS

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
            fetch_seconds=_seconds(extra, "fetch_seconds", FETCH_DEADLINE_SECONDS, 86_400),
            flow=flow_of(extra),
            push_seconds=_seconds(extra, "push_seconds", PUSH_DEADLINE_SECONDS, RETRY_HORIZON_SECONDS),
        )


def flow_of(extra: Mapping[str, Any]) -> Flow:
    """The flow that the extra config states; vLLM asks for it before there is a connector.

    Raises:
        ConfigError: it is none.
    """
    flow = extra.get("flow", "fetch")
    if flow not in FLOWS:
        raise ConfigError(f"flow cannot be {flow!r} (from kv_connector_extra_config); accepted: {', '.join(FLOWS)}")
    return cast("Flow", flow)


def _text(extra: Mapping[str, Any], name: str) -> str | None:
    value = extra.get(name)
    if value is not None and not (isinstance(value, str) and value):
        raise ConfigError(f"{name} cannot be {value!r} (from kv_connector_extra_config); accepted: some text")
    return value


def _seconds(extra: Mapping[str, Any], name: str, default: float, most: float) -> float:
    value = extra.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= most:
        raise ConfigError(
            f"{name} cannot be {value!r} (from kv_connector_extra_config); accepted: seconds up to {most:g}"
        )
    return float(value)
