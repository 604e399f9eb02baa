"""Values of a JSON object that somebody else has written, each what it has to be."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import NoReturn

from vllm_graphfix.text import printable

LONGEST_TEXT = 1500
"""Characters: nine texts of so many, of four bytes each, fit in a record."""
_NAMES = 64
"""Fixes of a record, events of a fix."""
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")


class RecordError(ValueError):
    """What is not a status record, and why."""


class Checked:
    """A JSON object whose values are what they have to be, or RecordError says which is not."""

    __slots__ = ("_place", "_value")

    def __init__(self, value: object, place: str) -> None:
        if not isinstance(value, dict):
            raise RecordError(f"{place} is {_shown(value)}, not an object")
        self._value: dict[str, object] = value
        self._place = "" if place == "the record" else f"{place}."

    def refuse(self, key: str, wanted: str = "") -> NoReturn:
        if key not in self._value:
            raise RecordError(f"{self._place}{key} is missing")
        raise RecordError(f"{self._place}{key} is {_shown(self._value[key])}" + (wanted and f", not {wanted}"))

    def get(self, key: str) -> object:
        if key not in self._value:
            self.refuse(key)
        return self._value[key]

    def has(self, key: str) -> bool:
        return self._value.get(key) is not None

    def maybe(self, key: str) -> Checked | None:
        return Checked(self._value[key], f"{self._place}{key}") if self.has(key) else None

    def names(self) -> Collection[str]:
        if len(self._value) > _NAMES:
            raise RecordError(f"{self._place[:-1]} has {len(self._value)} entries; at most {_NAMES} are allowed")
        for name in self._value:
            if not _NAME.fullmatch(name):
                raise RecordError(f"{self._place[:-1]} has an entry named {_shown(name)}")
        return self._value.keys()

    def named(self, key: str) -> Collection[tuple[str, object]]:
        inner = Checked(self.get(key), f"{self._place}{key}")
        inner.names()
        return inner._value.items()

    def table(self, fits: Callable[[str, object], bool]) -> dict[str, str]:
        """All of it, if every name and value *fits*."""
        if len(self._value) > _NAMES:
            raise RecordError(f"{self._place[:-1]} has {len(self._value)} entries; at most {_NAMES} are allowed")
        for name, value in self._value.items():
            if not fits(name, value):
                raise RecordError(f"{self._place[:-1]} has an entry {_shown(name)}: {_shown(value)}")
        return {name: str(value) for name, value in self._value.items()}

    def whole(self, key: str) -> int:
        value = self._value.get(key)
        if type(value) is not int or not 0 <= value < 2**63:
            self.refuse(key, "a whole number from 0 on")
        return value

    def number(self, key: str, most: float) -> float:
        value = self._value.get(key)
        if type(value) not in (int, float) or not 0 <= value <= most:  # type: ignore[operator]  # NaN compares as false
            self.refuse(key, f"a number from 0 to {most:g}")
        return float(value)  # type: ignore[arg-type]

    def truth(self, key: str) -> bool:
        value = self._value.get(key)
        if not isinstance(value, bool):
            self.refuse(key, "true or false")
        return value

    def text(self, key: str) -> str:
        value = self._value.get(key)
        if not isinstance(value, str) or len(value) > LONGEST_TEXT:
            self.refuse(key, f"a text of at most {LONGEST_TEXT} characters")
        return printable(value)

    def name(self, key: str, pattern: re.Pattern[str]) -> str:
        value = self._value.get(key)
        if not isinstance(value, str) or not pattern.fullmatch(value):
            self.refuse(key, f"of the form {pattern.pattern}")
        return value

    def one_of(self, key: str, values: Collection[str]) -> str:
        value = self._value.get(key)
        if not isinstance(value, str) or value not in values:
            self.refuse(key, f"one of {', '.join(sorted(values))}")
        return value


def _shown(value: object) -> str:
    if isinstance(value, (dict, list)):
        return f"a JSON {'object' if isinstance(value, dict) else 'array'}"
    told = ascii(value)
    return told if len(told) <= 50 else f"{told[:49]}…"
