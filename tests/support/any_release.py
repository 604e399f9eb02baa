"""The imported vLLM's release, and its modules, for tests in it that run on all releases."""

from __future__ import annotations

import importlib
from typing import Any

from vllm.version import __version__

RELEASE = tuple(map(int, __version__.split(".")[:3]))


def module(name: str) -> Any:
    """A module that not every release has."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
