"""Agreement of data-parallel ranks of a mixture of experts on which of their common steps they check.

Their forward passes have collectives of all of them, so each rank makes as many passes as the others: a rank without
requests runs a dummy batch. From the end of their start on they count alike: on model runner V1 calls of the model, on
V2 calls of `sync_cudagraph_and_dp_padding` for it.

At the end of its start each rank publishes a key in torch.distributed's store, and in the first common step it reads
who has. One rank's process may be steps ahead of another's there, so the first one to read settles the answer in the
store for all: nobody waits, all have the same answer, and if a rank is missing, nobody checks. After that a step that
is due is checked if every rank replays a graph of one shape in it. A rank whose check is over still joins that
agreement and says so; a rank whose store did not answer reads again there.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from vllm_graphfix.ranks import common_store
from vllm_graphfix.shadow import ranks
from vllm_graphfix.shadow.coordinator import Coordinator, engine_numbers

AGREEMENT_MODULE, AGREEMENT = "vllm.v1.worker.gpu.dp_utils", "sync_cudagraph_and_dp_padding"
"""The function that data-parallel ranks call together in each step of the target model and of drafts, on V2."""
_MAX_PAUSE = 64
"""Steps between two agreements while the ranks replay different shapes."""


class Shape(NamedTuple):
    """The part of a graph's descriptor that is the same on all ranks that replay together."""

    num_tokens: int
    uniform: bool
    """True if all requests of the batch have the same number of tokens in it."""

    @property
    def number(self) -> int:
        """A number above 0, another one for each shape."""
        return 2 * self.num_tokens + self.uniform + 1


def shape_of(descriptor: Any) -> Shape:
    """Return the shape of the graph that has this descriptor of model runner V1 or V2."""
    uniform = getattr(descriptor, "uniform", False) or getattr(descriptor, "uniform_token_count", None) is not None
    return Shape(int(descriptor.num_tokens), bool(uniform))


class DataParallelCoordinator(Coordinator):
    """This rank's part in the agreement."""

    def __init__(self, rank: int, ranks: list[int], first: int, store: Callable[[], Any] = common_store) -> None:
        """*ranks*: all of them, *rank* included, which is this one, as torch.distributed numbers them."""
        super().__init__(f"lockstep/{next(engine_numbers)}", store)
        self._rank, self._ranks = rank, ranks
        self.first = max(first, 2)
        """The first step that is due; before it every rank has read who takes part."""
        self.all_take_part: bool | None = None
        """True if each rank waits for the others at a step that is due; None: not known yet."""
        self.common_shape: Shape | None = None
        """The shape of the graph that all ranks replay in this step, on model runner V2."""
        self._pause = 1

    def introduce(self) -> None:
        """Publish that this rank takes part.

        Raises TimeoutError, and the store's errors; the key may arrive there all the same, later.
        """
        self._with_store(lambda store: store.set(str(self._rank), "1"))

    def missing(self) -> list[int]:
        """Return the ranks that do not take part, as the first rank that asked has seen it.

        Raises TimeoutError, and the store's errors.
        """

        def settle(store: Any) -> list[int]:
            complete = store.check([str(rank) for rank in self._ranks])
            missing = [] if complete else [str(rank) for rank in self._ranks if not store.check([str(rank)])]
            settled = store.compare_set("settled", "", " ".join(["missing", *missing])).decode()
            return [int(rank) for rank in settled.split()[1:]]

        return self._with_store(settle)

    def pause(self) -> int:
        """Return the steps to wait after one with different shapes; more each time, as in a long phase of prompts."""
        self._pause = min(2 * self._pause, _MAX_PAUSE)
        return self._pause // 2

    def resume(self) -> None:
        """Reset the pause: all ranks replay one shape again."""
        self._pause = 1


def of_this_rank(first: int) -> DataParallelCoordinator:
    group = ranks.group()
    return DataParallelCoordinator(int(group.rank), [int(rank) for rank in group.ranks], first)


def is_in_lockstep(config: Any) -> bool:
    """Tell whether forward passes under this `VllmConfig` have collectives of the data-parallel ranks."""
    parallel = config.parallel_config
    return getattr(parallel, "data_parallel_size", 1) > 1 and getattr(parallel, "is_moe_model", True) is not False


def can_count() -> bool:
    """Tell whether this rank counts the steps on which data-parallel ranks of model runner V2 agree."""
    return hasattr(getattr(sys.modules.get(AGREEMENT_MODULE), AGREEMENT, None), "__wrapped__")


_BACKENDS = ("allgather_reducescatter", "naive")
"""Backends that use NCCL's collectives alone, which pair in the order in which they are queued."""

_EXCHANGES_ITSELF = re.compile("mega_moe|moe_ep")
"""Names of expert kernels that exchange tokens themselves, whatever backend is set. vLLM's own list of them lacks one
in some releases."""


def why_not(config: Any) -> str | None:
    """Return why steps of such an engine must not run twice; None if nothing is known against it."""
    parallel = config.parallel_config
    if (backend := getattr(parallel, "all2all_backend", None)) not in _BACKENDS:
        return f"data-parallel ranks exchange tokens by {backend}, whose buffers were not examined"
    of_experts = str(getattr(getattr(config, "kernel_config", None), "moe_backend", None))
    if _EXCHANGES_ITSELF.search(of_experts):
        return f"experts of {of_experts} exchange tokens themselves, by buffers that were not examined"
    if getattr(parallel, "pipeline_parallel_size", 1) > 1:
        return "data-parallel ranks of a mixture of experts in a pipeline are at different steps"
    if getattr(parallel, "enable_fault_tolerance", False):
        return "data-parallel ranks may be replaced while the others go on"
    return None
