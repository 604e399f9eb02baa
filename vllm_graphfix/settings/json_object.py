"""A JSON object from another process, whose values are checked one by one."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import NoReturn

from vllm_graphfix.text import printable

LONGEST_TEXT = 1500
"""Characters of a text. A record has room for ten of four bytes a character, and shortens them if it has more."""
_ENTRIES = 64
"""Entries of a table, such as the fixes of a record or the events of a fix."""
_NAME = r"[a-z0-9][a-z0-9-]{0,63}"


class JsonError(ValueError):
    """A value of a JSON object is missing, or is not what it has to be."""


class JsonObject:
    """A JSON object whose methods return a value if it has the form asked for, and raise JsonError if not.

    *place* names the object in messages.
    """

    __slots__ = ("_place", "_value")

    def __init__(self, value: object, place: str) -> None:
        if not isinstance(value, dict):
            raise JsonError(f"{place} is {_brief_ascii(value)}, not an object")
        self._value: dict[str, object] = value
        self._place = "" if place == "the record" else f"{place}."

    def refuse(self, key: str, wanted: str = "") -> NoReturn:
        """Raise JsonError about the value at *key*; *wanted* names the valid ones."""
        if key not in self._value:
            raise JsonError(f"{self._place}{key} is missing")
        raise JsonError(f"{self._place}{key} is {_brief_ascii(self._value[key])}" + (wanted and f", not {wanted}"))

    def get(self, key: str) -> object:
        if key not in self._value:
            self.refuse(key)
        return self._value[key]

    def has(self, key: str) -> bool:
        """Return True if *key* has a value other than null."""
        return self._value.get(key) is not None

    def maybe(self, key: str) -> JsonObject | None:
        """Return the object at *key*; None if it is missing or null."""
        return JsonObject(self._value[key], f"{self._place}{key}") if self.has(key) else None

    def _check_size(self) -> None:
        if len(self._value) > _ENTRIES:
            raise JsonError(f"{self._place[:-1]} has {len(self._value)} entries; at most {_ENTRIES} are allowed")

    def names(self) -> Collection[str]:
        """Return the keys, at most 64, each in the form of a name."""
        self._check_size()
        for name in self._value:
            if not re.fullmatch(_NAME, name):
                raise JsonError(f"{self._place[:-1]} has an entry named {_brief_ascii(name)}")
        return self._value.keys()

    def named(self, key: str) -> Collection[tuple[str, object]]:
        """Return the entries of the object at *key*, whose keys have the form of names."""
        inner = JsonObject(self.get(key), f"{self._place}{key}")
        inner.names()
        return inner._value.items()

    def table(self, key: str, fits: Callable[[str, object], bool]) -> dict[str, str]:
        """Return the object at *key*, if every name and value in it *fits*."""
        inner = JsonObject(self.get(key), f"{self._place}{key}")
        inner._check_size()
        for name, value in inner._value.items():
            if not fits(name, value):
                raise JsonError(f"{inner._place[:-1]} has an entry {_brief_ascii(name)}: {_brief_ascii(value)}")
        return {name: str(value) for name, value in inner._value.items()}

    def keys(self) -> Collection[str]:
        return self._value.keys()

    def __contains__(self, key: str) -> bool:
        return key in self._value

    def whole(self, key: str, below: int = 2**63) -> int:
        value = self._value.get(key)
        # Compare the type, not by isinstance: a bool is an int, and JSON's true is no number.
        if type(value) is not int or not 0 <= value < below:
            self.refuse(key, "a whole number from 0 on")
        return value

    def number(self, key: str, most: float, least: float = 0.0) -> float:
        value = self._value.get(key)
        # NaN is refused, since it compares as false.
        if type(value) not in (int, float) or not least <= value <= most:  # type: ignore[operator]
            self.refuse(key, f"a number from {least:g} to {most:g}")
        return float(value)  # type: ignore[arg-type]

    def truth(self, key: str) -> bool:
        value = self._value.get(key)
        if not isinstance(value, bool):
            self.refuse(key, "true or false")
        return value

    def text(self, key: str, longest: int = LONGEST_TEXT) -> str:
        """Return a text, made printable."""
        value = self._value.get(key)
        if not isinstance(value, str) or len(value) > longest:
            self.refuse(key, f"a text of at most {longest} characters")
        return printable(value)

    def line(self, key: str, longest: int = LONGEST_TEXT) -> str:
        """Return a text of printable characters only."""
        value = self._value.get(key)
        if not isinstance(value, str) or len(value) > longest or not value.isprintable():
            self.refuse(key, f"a printable text of at most {longest} characters")
        return value

    def name(self, key: str, pattern: str) -> str:
        value = self._value.get(key)
        if not isinstance(value, str) or not re.fullmatch(pattern, value):
            self.refuse(key, f"of the form {pattern}")
        return value

    def one_of(self, key: str, values: Collection[str]) -> str:
        value = self._value.get(key)
        if not isinstance(value, str) or value not in values:
            self.refuse(key, f"one of {', '.join(sorted(values))}")
        return value


def _brief_ascii(value: object) -> str:
    if isinstance(value, (dict, list)):
        return f"a JSON {'object' if isinstance(value, dict) else 'array'}"
    escaped = ascii(value)
    return escaped if len(escaped) <= 50 else f"{escaped[:49]}…"
