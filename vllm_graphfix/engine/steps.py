"""The step that this process is in, and since when.

A heartbeat is a thread of its own: it goes on where the thread that runs the model waits for ever.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

from vllm_graphfix.patching.hooks import when_imported, wrap

STUCK_AFTER = 120.0
"""Seconds in one step after which a record says so. vLLM's executor ends an engine whose step takes 300 s
(VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS): heartbeat, scrape and alert have to come before."""
STEPS = (
    # An engine core, too: where a rank's result is awaited in another thread, as with asynchronous scheduling, the
    # rank itself has left its step.
    ("vllm.v1.engine.core", "EngineCore", ("step", "step_with_batch_queue", "execute_dummy_batch")),
    ("vllm.v1.worker.gpu_worker", "Worker", ("execute_model", "sample_tokens")),
    ("vllm.v1.worker.cpu_worker", "CPUWorker", ("execute_model", "sample_tokens")),
)
"""Methods that run a step, by module and class. A method that a class only inherits is wrapped in its base."""


class StepClock:
    """The step of this process. Outside of a step a process is idle, asleep, or loads weights: all may take hours."""

    def __init__(self) -> None:
        self._began: float | None = None
        """When the outermost step began, by the monotonic clock; None outside of one."""
        self._reported: tuple[float, float] | None = None
        """The step that was reported last: when it began by the monotonic clock, and in seconds of the epoch."""

    def watch(self) -> None:
        """Hook the imports of the modules whose functions run a step."""
        for module, owner, names in STEPS:
            when_imported(module, functools.partial(self._hook, owner, names))

    def _hook(self, owner: str, names: tuple[str, ...], module: Any) -> None:
        stepping = getattr(module, owner)
        for name in names:
            if name in vars(stepping):
                wrap(stepping, name, self._around)

    def _around(self, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._began is not None:  # an engine core that runs the model itself: the outermost call is the step
            return stock(*args, **kwargs)
        # No lock: one thread runs steps, and the heartbeat reads one reference. Two clock readings would cost twice.
        self._began = time.monotonic()
        try:
            return stock(*args, **kwargs)
        finally:
            self._began = None

    def stuck_since(self) -> float | None:
        """Return when the present step began, in seconds of the epoch, if it lasts longer than `STUCK_AFTER`."""
        began = self._began
        if began is None or (lasted := time.monotonic() - began) < STUCK_AFTER:
            return None
        if self._reported is None or self._reported[0] != began:
            # Once for each step: a number that wobbles would be another record at each heartbeat.
            self._reported = began, time.time() - lasted
        return self._reported[1]

    def forked(self) -> None:
        """Reset this in a forked child, which is in no step of its parent's."""
        self._began = self._reported = None
