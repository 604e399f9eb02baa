"""Activities of the fixes in this process, for tests that run beside vLLM or call a fix's wrappers by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import vllm_graphfix
from vllm_graphfix.fix import Activity, Fix, StockFunction


class Layer(NamedTuple):
    """One patch of a fix, bound to an activity: `wrap` takes the stock function alone."""

    module: str
    name: str
    wrap: Callable[[StockFunction], Callable[..., Any]]


def layers(fix: Fix, shape: str, *, corrects: bool = True) -> tuple[Activity, tuple[Layer, ...]]:
    """A new activity of *fix*, and what it would put around vLLM's functions of *shape*.

    Without *corrects*: what it would put there to count alone.
    """
    activity = Activity(fix.events, corrects=corrects)
    offered = [patch for patch in fix.patches(shape) if corrects or patch.observes]
    return activity, tuple(_bound(patch.module, patch.name, patch.wrap, activity) for patch in offered)


def _bound(module: str, name: str, wrap: Any, activity: Activity) -> Layer:
    return Layer(module, name, lambda stock: wrap(stock, activity))


def activity_of(fix: str) -> Activity:
    """Return the activity of the fix *fix* in this process, which has registered the plugin."""
    return vllm_graphfix._this_process().manager.activity(fix)
