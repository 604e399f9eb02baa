"""Wraps the functions of vLLM that may move tensors whose addresses graphs hold.

`rank_addresses.py`, which compares the addresses, is imported once a rank has captured graphs, and in no other process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_graphfix.log import logger
from vllm_graphfix.patching.hooks import when_imported, wrap
from vllm_graphfix.settings.environment import Addresses

if TYPE_CHECKING:
    from vllm_graphfix.engine.rank_addresses import RankAddresses

NAME = "addresses"
"""Its name in records and metrics, which hold its counts like those of a fix."""
_ON_ALL_RANKS = (
    ("vllm.v1.worker.gpu_worker", "Worker", "reload_weights"),
    ("vllm.v1.worker.gpu_worker", "Worker", "update_weights"),
    ("vllm.v1.worker.gpu_worker", "Worker", "start_weight_update"),
    ("vllm.v1.worker.gpu_worker", "Worker", "start_draft_weight_update"),
    ("vllm.v1.worker.gpu_worker", "Worker", "finish_weight_update"),
    ("vllm.v1.worker.gpu_worker", "Worker", "sleep"),
    ("vllm.v1.worker.gpu_worker", "Worker", "discard"),
    ("vllm.v1.worker.gpu_worker", "Worker", "wake_up"),
    ("vllm.v1.worker.gpu_worker", "Worker", "add_lora"),
    ("vllm.v1.worker.gpu_worker", "Worker", "reinitialize_distributed"),
    ("vllm.v1.worker.gpu_worker", "Worker", "elastic_ep_execute"),
    ("vllm.v1.worker.worker_base", "WorkerBase", "apply_model"),
)
"""Methods that an executor calls on all ranks, by module, class and name; each release has some of them."""
_ON_ONE = (
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner", "reload_weights"),
    ("vllm.v1.worker.gpu.model_runner", "GPUModelRunner", "reload_weights"),
    ("vllm.model_executor.model_loader.utils", None, "process_weights_after_loading"),
)
"""Functions that programs also call themselves, perhaps not on all ranks."""
WATCHED = (*_ON_ALL_RANKS, *_ON_ONE)


class AddressWatch:
    """Watches the addresses of one process."""

    def __init__(self, publish: Callable[[], None] = lambda: None) -> None:
        """*publish* is called when a tensor has moved."""
        self._publish = publish
        self._action = Addresses.OFF
        self._hooked = False
        self._failures = 0
        self.of_rank: RankAddresses | None = None
        """None before a rank of this process has captured."""

    def begin(self, action: Addresses) -> None:
        """Watch from the next capture on; with `off` not at all, and without wrapping functions of vLLM."""
        self._action = action
        if self.of_rank is not None:
            self.of_rank.begin(action)
        if action is Addresses.OFF or self._hooked:
            return
        self._hooked = True
        try:
            for module, owner, name in WATCHED:
                together = (module, owner, name) in _ON_ALL_RANKS
                when_imported(module, functools.partial(self._hook, owner, name, together))
        except Exception:
            self._failures += 1  # some of the functions may be wrapped
            raise

    def _hook(self, owner: str | None, name: str, together: bool, module: Any) -> None:
        target = getattr(module, owner, None) if owner is not None else module
        if target is not None and name in vars(target):
            wrap(target, name, functools.partial(self._around, name, together))

    def _around(self, name: str, together: bool, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.of_rank is None:
            return stock(*args, **kwargs)
        return self.of_rank.around(name, together, stock, *args, **kwargs)

    def on_captured(self, worker: Any) -> None:
        """Record the addresses of the tensors of *worker*, which has captured its graphs."""
        if self._action is Addresses.OFF:
            return
        if self.of_rank is None:
            try:
                from vllm_graphfix.engine.rank_addresses import RankAddresses

                made = RankAddresses(self._publish)
                made.begin(self._action)
            except Exception as error:  # the package is being replaced, or no descriptor is free
                self._failures += 1
                logger.warning("graphfix: addresses are not compared on this rank: %s: %s", type(error).__name__, error)
                return
            self.of_rank = made
        self.of_rank.on_captured(worker)

    def poll(self) -> None:
        """Compare the tensors that no step moves; called by the heartbeat's thread."""
        if self.of_rank is not None:
            self.of_rank.poll()

    def counts(self) -> dict[str, dict[str, int]]:
        """Return the events for a record; empty before a capture."""
        counts = self.of_rank.counts() if self.of_rank is not None else {}
        if self._failures:
            counts = {"failures": self._failures} | counts
        return {NAME: counts} if counts else {}

    def moved(self) -> tuple[Any, ...]:
        """Return the first tensors that have moved, for a record."""
        return self.of_rank.moved() if self.of_rank is not None else ()

    def forked(self) -> None:
        """Discard the parent's capture; called in a forked child, which has no graphs yet."""
        self._failures = 0
        if self.of_rank is not None:
            self.of_rank.forked()
