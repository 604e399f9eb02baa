"""Dataclasses to and from values that JSON has.

msgspec converts them, which vLLM requires. It is imported on use, since a part of `verify` also runs where there is no
vLLM. Text is the standard library's: msgspec's JSON would turn numbers that are not finite into null.
"""

from __future__ import annotations

from typing import Any, TypeVar

_T = TypeVar("_T")


def to_builtins(value: object) -> Any:
    import msgspec

    return msgspec.to_builtins(value, str_keys=True)


def from_builtins(written: object, kind: type[_T]) -> _T:
    """Raises `msgspec.ValidationError` if *written* is no *kind*; keys that it has no field for are ignored."""
    import msgspec

    return msgspec.convert(written, kind, str_keys=True)
