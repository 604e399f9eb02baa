"""Detection of foreign code on the path of a fix: an override, an attribute of the object, a patch."""

from __future__ import annotations

import sys
from collections.abc import Container, Iterable
from types import FrameType, FunctionType
from typing import Any

_TRANSPARENT = frozenset({"contextlib", "functools", "torch", "vllm", "vllm_graphfix"})
"""Packages whose wrappers pass their arguments on: stock's decorators, and the layers of fixes."""
_MOST_WRAPPERS = 100
"""An object may answer to every name, ``__wrapped__`` included, without end."""


def find_override(target: Any, module: str, stock: str, names: Iterable[str]) -> str | None:
    """Name the first method of *target* that is not written in the class *stock* of *module*; None if all are."""
    kind, owner = type(target), getattr(sys.modules.get(module), stock, None)
    # A class that replaced another one under its name has a module of its own.
    if not isinstance(owner, type) or owner.__module__ != module or not isinstance(target, owner):
        return f"{kind.__module__}.{kind.__qualname__}"
    for name in names:
        method = getattr(kind, name, None)
        if method is not getattr(owner, name) or not _is_written_in(module, method) or name in vars(target):
            return f"{kind.__qualname__}.{name}"
    return None


def is_called_from(frame: FrameType | None, callers: Container[tuple[Any, str]]) -> bool:
    """Tell if *frame*, layers of fixes aside, runs one of *callers*, each a module and the name of a function."""
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] == "vllm_graphfix":
        frame = frame.f_back
    return frame is not None and (frame.f_globals.get("__name__"), frame.f_code.co_name) in callers


def _is_written_in(module: str, function: Any) -> bool:
    for _ in range(_MOST_WRAPPERS):
        if type(function) is not FunctionType:
            return False
        written_in = function.__globals__.get("__name__", "")
        inner = getattr(function, "__wrapped__", None)
        if inner is None:
            return function.__globals__ is vars(sys.modules[module])  # `__module__` can be copied, globals cannot
        if written_in.split(".")[0] not in _TRANSPARENT:
            return False
        function = inner
    return False
