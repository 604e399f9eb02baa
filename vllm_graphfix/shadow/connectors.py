"""KV connectors, which take and give each layer's cache in a forward pass, and must not in one without its graph.

A replayed graph calls none of them: it runs no Python. What a connector does for a step it does before and after the
model is called, and that is left as it is. In the model only the attention operators ask for it, through
`maybe_transfer_kv_layer`; while a check's own run, or one in quarantine, lasts, they are told that there is none.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
_HOOKS = ("vllm.model_executor.layers.attention.kv_transfer_utils", "vllm.attention.utils.kv_transfer_utils")
"""Where the operators ask: from 0.16.0 on, and before."""
_ASKS = "has_kv_transfer_group"


def _hooks() -> Any:
    return next((module for name in _HOOKS if hasattr(module := sys.modules.get(name), _ASKS)), None)


def can_be_silenced() -> bool:
    """Whether the operators of this vLLM ask where it is known; a model has been made, so that it is imported."""
    return _hooks() is not None


def silenced(run: Callable[[], T]) -> Callable[[], T]:
    """What *run* does, without a KV connector in it."""

    @functools.wraps(run)
    def call() -> T:
        hooks = _hooks()
        if hooks is None:  # there is no connector either, or the engine would have been refused
            return run()
        # Not the connector itself is taken away: its threads, and vLLM's other code, ask for it elsewhere.
        asks = getattr(hooks, _ASKS)
        setattr(hooks, _ASKS, _is_there_none)
        try:
            return run()
        finally:
            setattr(hooks, _ASKS, asks)

    return call


def _is_there_none() -> bool:
    return False
