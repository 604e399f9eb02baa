"""KV connectors, which load and save each layer's cache in a forward pass, and must not do so in a further one.

A replayed graph calls no connector: it runs no Python. What a connector does for a step before and after the model is
called stays as it is. Inside the model only the attention operators ask for a connector, through
`maybe_transfer_kv_layer`; during a run of the check, or one in quarantine, the answer is that there is none.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
_HOOKS = ("vllm.model_executor.layers.attention.kv_transfer_utils", "vllm.attention.utils.kv_transfer_utils")
"""Modules in which the operators ask: from 0.16.0 on, and before."""
_QUESTION = "has_kv_transfer_group"


def _hooks() -> Any:
    return next((module for name in _HOOKS if hasattr(module := sys.modules.get(name), _QUESTION)), None)


def can_be_silenced() -> bool:
    """Tell whether the operators of this vLLM ask in a known module; call it once a model has imported that."""
    return _hooks() is not None


def silenced(run: Callable[[], T]) -> Callable[[], T]:
    """Wrap *run* so that no KV connector acts in it."""

    @functools.wraps(run)
    def call() -> T:
        hooks = _hooks()
        if hooks is None:  # there is no connector either, or the engine would have been refused
            return run()
        # The connector itself stays: its threads, and vLLM's other code, ask for it elsewhere.
        stock = getattr(hooks, _QUESTION)
        setattr(hooks, _QUESTION, _no_connector)
        try:
            return run()
        finally:
            setattr(hooks, _QUESTION, stock)

    return call


def _no_connector() -> bool:
    return False
