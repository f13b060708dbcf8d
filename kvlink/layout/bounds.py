"""One check, used all over the geometry: a number within its bounds, or an error that names the field."""

from __future__ import annotations

from kvlink.errors import LayoutError


def within(path: str, value: int, low: int, high: int, unit: str = "") -> None:
    """Refuse what is no whole number from ``low`` to ``high``.

    Raises:
        LayoutError: with the dotted path of the field and its value.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        stated = f"{value!r} {unit}".rstrip()
        raise LayoutError(f"{path} is {stated}; it must be a whole number from {low} to {high}")
