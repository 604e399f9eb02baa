"""The watch over the addresses that graphs hold: when it begins, and what may move tensors.

What compares them (`rank_addresses.py`) is loaded once a rank has captured graphs; no other process pays for it.
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
"""Under which records and metrics have its counts, as those of a fix."""
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
"""What an executor has all ranks do, by module, class and method; which of them are there, is a matter of release."""
_ON_ONE = (
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner", "reload_weights"),
    ("vllm.v1.worker.gpu.model_runner", "GPUModelRunner", "reload_weights"),
    ("vllm.model_executor.model_loader.utils", None, "process_weights_after_loading"),
)
"""What programs also call themselves, perhaps not on all ranks."""
WATCHED = (*_ON_ALL_RANKS, *_ON_ONE)


class AddressWatch:
    """The watch of one process."""

    def __init__(self, tell: Callable[[], None] = lambda: None) -> None:
        """*tell* is called when a tensor has moved."""
        self._tell = tell
        self._action = Addresses.OFF
        self._hooked = False
        self._failures = 0
        self.of_rank: RankAddresses | None = None
        """None where no rank of this process has captured yet."""

    def begin(self, action: Addresses) -> None:
        """Watches from the next capture on; with `off` not at all, and puts nothing around functions of vLLM."""
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
            self._failures += 1  # it may be on some of them only
            raise

    def _hook(self, owner: str | None, name: str, together: bool, module: Any) -> None:
        found = getattr(module, owner, None) if owner is not None else module
        if found is not None and name in vars(found):
            wrap(found, name, functools.partial(self._around, name, together))

    def _around(self, name: str, together: bool, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.of_rank is None:
            return stock(*args, **kwargs)
        return self.of_rank.around(name, together, stock, *args, **kwargs)

    def serve(self, worker: Any) -> None:
        """Writes down where everything lies: *worker* has captured its graphs."""
        if self._action is Addresses.OFF:
            return
        if self.of_rank is None:
            try:
                from vllm_graphfix.engine.rank_addresses import RankAddresses

                made = RankAddresses(self._tell)
                made.begin(self._action)
            except Exception as error:  # a package that is being replaced, no more descriptors
                self._failures += 1
                logger.warning("graphfix: addresses are not compared on this rank: %s: %s", type(error).__name__, error)
                return
            self.of_rank = made
        self.of_rank.serve(worker)

    def look(self) -> None:
        """Compares what no step moves, for the heartbeat, in a thread of its own."""
        if self.of_rank is not None:
            self.of_rank.look()

    def counts(self) -> dict[str, dict[str, int]]:
        """For the events of a record; nothing where no graph was captured."""
        found = self.of_rank.counts() if self.of_rank is not None else {}
        if self._failures:
            found = {"failures": self._failures} | found
        return {NAME: found} if found else {}

    def moved(self) -> tuple[Any, ...]:
        """For a record: the first tensors that have moved."""
        return self.of_rank.moved() if self.of_rank is not None else ()

    def forked(self) -> None:
        """Forgets, in a forked child, what the parent has captured: the child has no graphs yet."""
        self._failures = 0
        if self.of_rank is not None:
            self.of_rank.forked()
