"""Converts dataclasses to and from values that JSON has.

msgspec converts them, which vLLM requires. It is imported on use, since a part of `verify` also runs where there is no
vLLM. Text is the standard library's: msgspec's JSON would turn numbers that are not finite into null.
"""

from __future__ import annotations

from typing import Any, TypeVar

_T = TypeVar("_T")


def to_builtins(value: object) -> Any:
    """Convert *value* for `json.dumps`; tuples become lists, and keys that are numbers text."""
    import msgspec

    return msgspec.to_builtins(value, str_keys=True)


def from_builtins(written: object, kind: type[_T]) -> _T:
    """Convert *written* to the dataclass *kind*; keys without a field are ignored.

    Raises `msgspec.ValidationError` if a field is missing or has another type.
    """
    import msgspec

    value: _T = msgspec.convert(written, kind, str_keys=True)
    return value
