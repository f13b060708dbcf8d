"""Numbers out of records that others wrote: present, of the right kind, not negative, or an error that names them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from kvlink.errors import ConfigError

_MISSING: Final = object()


def value_of(record: object, field: str) -> object:
    """Field ``field`` of a mapping or of an object with attributes.

    Raises:
        ConfigError: it is missing, or ``None``.
    """
    value = record.get(field, _MISSING) if isinstance(record, Mapping) else getattr(record, field, _MISSING)
    if value is _MISSING or value is None:
        raise ConfigError(f"{field} is missing{_of(record)}; give a number that is not negative")
    return value


def number(record: object, field: str) -> float:
    """A finite number of 0 or more.

    Raises:
        ConfigError: it is missing, no number, not finite, or negative; the message names the field.
    """
    value = value_of(record, field)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"{field} is {value!r}{_of(record)}; it must be a finite number")
    if value < 0:
        raise ConfigError(f"{field} is {value!r}{_of(record)}; it must not be negative")
    return value


def count(record: object, field: str) -> int:
    """A whole number of 0 or more; raises as `number` does."""
    value = number(record, field)
    if value != int(value):
        raise ConfigError(f"{field} is {value!r}{_of(record)}; it must be a whole number")
    return int(value)


def threshold(name: str, value: object) -> int:
    """An argument in tokens; raises as `count` does, naming the argument."""
    return count({name: value}, name)


def _of(record: object) -> str:
    name = record.get("name") if isinstance(record, Mapping) else getattr(record, "name", None)
    return f" in request {name!r}" if isinstance(name, str) else ""
