"""What data-parallel ranks of a mixture of experts agree on: in which of their common steps they check.

A forward pass of theirs has collectives of all of them, so that each makes as many passes as the others: a rank without
work runs a dummy batch. From the end of their start on all count alike, then: on model runner V1 calls of the model, on
V2 what `sync_cudagraph_and_dp_padding` agrees for it.

At the end of its start each leaves word in torch.distributed's store, and in the first common step it looks who has. A
rank's process may be a step or more ahead of another's there, so what the first one sees is settled in the store, for
all: nobody waits, all have the same answer, and where one is missing, nobody asks it anything. After that a step that
is due is checked if every rank replays a graph of one shape in it. A rank whose check is over comes to that, and says
so; a rank whose store did not answer looks again there.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from vllm_graphfix.ranks import common_store
from vllm_graphfix.shadow import ranks
from vllm_graphfix.shadow.watchdog import within

AGREEMENT_MODULE, AGREEMENT = "vllm.v1.worker.gpu.dp_utils", "sync_cudagraph_and_dp_padding"
"""What data-parallel ranks call together in each step of the target model and of drafts, on model runner V2."""
_STORE = 5.0
"""Seconds for what is done in the store at one time."""
_LONGEST_PAUSE = 64
"""Steps from one that not all replay to the next at which they ask again."""
_ENGINES = itertools.count(1)
"""Numbers the engines of this process: the next one may find the store of the one before, and the words in it."""


class Shape(NamedTuple):
    """What is the same on all ranks of the graphs that they replay together; one rank may name its own otherwise."""

    num_tokens: int
    uniform: bool
    """Whether all requests of the batch have the same number of tokens in it."""

    @property
    def number(self) -> int:
        """One above 0 for each shape."""
        return 2 * self.num_tokens + self.uniform + 1


def shape_of(descriptor: Any) -> Shape:
    """The shape of a graph, by its descriptor on model runner V1 or V2."""
    uniform = getattr(descriptor, "uniform", False) or getattr(descriptor, "uniform_token_count", None) is not None
    return Shape(int(descriptor.num_tokens), bool(uniform))


class Lockstep:
    """What this rank knows of the others, and they of it."""

    def __init__(self, rank: int, ranks: list[int], first: int, store: Callable[[], Any] = common_store) -> None:
        """*ranks*: all of them, *rank*, which is this one, too, as torch.distributed numbers them."""
        self._rank, self._ranks, self._store = rank, ranks, store
        self.first = max(first, 2)
        """The first step that is due; before it all have looked who takes part."""
        self._engine = next(_ENGINES)
        self.met: bool | None = None
        """Whether all ranks take part, so that each waits for the others at a step that is due; None: not known yet."""
        self.common: Shape | None = None
        """The shape of the graph that all ranks replay in this step, on model runner V2."""
        self._pause = 1

    def introduce(self) -> None:
        """Raises TimeoutError, and what the store raises; the word may come there all the same, later."""
        within(_STORE, lambda: self._in_store().set(str(self._rank), "1"))

    def missing(self) -> list[int]:
        """The ranks that do not take part: what the first one saw that asked.

        Raises TimeoutError, and what the store raises.
        """

        def look() -> list[int]:
            store = self._in_store()
            here = store.check([str(rank) for rank in self._ranks])
            missing = [] if here else [str(rank) for rank in self._ranks if not store.check([str(rank)])]
            settled = store.compare_set("settled", "", " ".join(["missing", *missing])).decode()
            return [int(rank) for rank in settled.split()[1:]]

        return within(_STORE, look)

    def _in_store(self) -> Any:
        from torch.distributed.distributed_c10d import PrefixStore

        return PrefixStore(f"shadow/lockstep/{self._engine}", self._store())

    def pause(self) -> int:
        """Steps to wait, since not all replay the same; more each time, as in a long phase of prompts."""
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        return self._pause // 2

    def resume(self) -> None:
        """All replay the same again."""
        self._pause = 1


def of_this_rank(first: int) -> Lockstep:
    group = ranks.group()
    return Lockstep(int(group.rank), [int(rank) for rank in group.ranks], first)


def is_in_lockstep(config: Any) -> bool:
    """Whether the forward passes of an engine with this `VllmConfig` have collectives of its data-parallel ranks."""
    parallel = config.parallel_config
    return getattr(parallel, "data_parallel_size", 1) > 1 and getattr(parallel, "is_moe_model", True) is not False


def can_count() -> bool:
    """Whether this rank counts the steps on which data-parallel ranks of model runner V2 agree."""
    return hasattr(getattr(sys.modules.get(AGREEMENT_MODULE), AGREEMENT, None), "__wrapped__")


_BACKENDS = ("allgather_reducescatter", "naive")
"""Between the ranks there are NCCL's collectives alone, which find each other in the order in which they are queued."""

_EXCHANGES_ITSELF = re.compile("mega_moe|moe_ep")
"""Names of kernels of experts that do, whatever exchange is configured. vLLM's list of them, in some releases, lacks
one."""


def why_not(config: Any) -> str | None:
    """Why steps of such an engine must not be run twice; None if nothing is known against it."""
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
