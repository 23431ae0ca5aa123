"""The fields of a JSON object, each of the type that it must have: a file may hold anything."""

import math
from collections.abc import Mapping
from typing import Any

LAST_MOMENT = 1e11
"""Seconds since the epoch; beyond it a time is none, and would be lost in the rounding of others."""


class Fields:
    """One JSON object. A method returns the value of a field that is what the method's name says, or None where it is missing
    or null; another value is a ValueError that names both."""

    def __init__(self, line: Mapping[str, Any]) -> None:
        self._line = line

    def required(self, name: str) -> Any:
        """Whatever it is, but for null."""
        value = self._line.get(name)
        if value is None:
            raise ValueError(f"{name} is missing")
        return value

    def anything(self, name: str) -> Any:
        return self._line.get(name)

    def text(self, name: str) -> str | None:
        found: str | None = self._of(name, str, "text")
        return found

    def fields(self, name: str) -> "Fields":
        """An object in this one; without fields where there is none."""
        return Fields(self._of(name, dict, "an object") or {})

    def items(self, name: str) -> list[Any]:
        """A list, which must be there."""
        self.required(name)
        found: list[Any] = self._of(name, list, "a list")
        return found

    def whole(self, name: str) -> int | None:
        """A whole number."""
        value = self._line.get(name)
        if value is not None and not is_whole(value):
            raise ValueError(f"{name} must be a whole number, got {value!r:.60}")
        return None if value is None else int(value)

    def number(self, name: str) -> float | None:
        """NaN and infinities too."""
        value = self._line.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise ValueError(f"{name} must be a number, got {value!r:.60}")
        try:
            return None if value is None else float(value)
        except OverflowError:
            raise ValueError(f"{name} must be a number, got one of {len(str(value))} digits") from None

    def seconds(self, name: str) -> float | None:
        """A moment or a length of time."""
        value = self.number(name)
        if value is not None and not (math.isfinite(value) and 0 <= value <= LAST_MOMENT):
            raise ValueError(f"{name} must be seconds from 0 to {LAST_MOMENT:g}, got {value!r}")
        return value

    def _of(self, name: str, kind: type, what: str) -> Any:
        value = self._line.get(name)
        if value is not None and not isinstance(value, kind):
            raise ValueError(f"{name} must be {what}, got {value!r:.60}")
        return value


def is_whole(value: object) -> bool:
    """Whether it is an integer, which in Python a truth value is too."""
    return isinstance(value, int) and not isinstance(value, bool)
