"""What ranks that have collectives in a forward pass agree about, and how those of a further run stay paired.

They agree through vLLM's own CPU group: the tensor-parallel one or, for a mixture of experts with data parallelism,
that of all ranks which share the experts. In the engines that are checked, each other group with collectives in a
forward pass (decode context parallelism, say) is a part of it. The stages of a pipeline are at different steps, and the
forward pass of one has no collective with another. What they tell each other goes through a store (`stages`).

A rank that fails in the middle of a run has queued fewer collectives than the others. It must queue no other one: a
later one would pair with those, and every sum from there on would be of two different things. So a run begins when all
ranks are ready, which may take as long as vLLM lets a step take, and where it has failed on one of them, every rank
waits until its GPU is idle before it goes on. If one does not come to that, its process ends (`watchdog`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

from vllm_graphfix.log import logger
from vllm_graphfix.shadow import watchdog
from vllm_graphfix.shadow.failures import Attempt, FailedElsewhereError, StepError, description

T = TypeVar("T")
_TO_BEGIN = 300.0
"""vLLM's default."""
_STEP, _OTHER = 1.0, 2.0
"""Kinds of failures; of several the largest is what the group goes by."""


def group() -> Any:
    """All ranks with which this one has collectives in a forward pass, as vLLM's group."""
    from vllm.distributed import parallel_state

    tensor_parallel: Any = parallel_state.get_tp_group()
    # There is one of experts for each mixture of them. Without data parallelism it is the tensor-parallel one.
    experts: Any = getattr(parallel_state, "_EP", None)
    return experts if experts is not None and experts.world_size > tensor_parallel.world_size else tensor_parallel


def alone() -> bool:
    """Whether this rank's group has no other one.

    It waits for nobody then, and whatever fails in it concerns nobody else.
    """
    try:
        return bool(group().world_size == 1)
    except Exception:  # there is no group
        return True


def to_begin() -> float:
    """Seconds for all ranks to come to a step, which has nothing queued that vLLM would not have.

    As many as vLLM's executor has: one rank may encode images, load an adapter or a cache, or compile before it is
    there.
    """
    try:
        from vllm import envs

        return max(watchdog.LIMIT, float(envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS))
    except Exception:  # no number
        return _TO_BEGIN


def limited(seconds: float | None = None) -> Any:
    """A context manager for what ranks do together: from one agreement to the next no longer than *seconds*.

    The default is that of the block around it, or `watchdog.LIMIT`.
    """
    if alone():
        return nullcontext()
    return watchdog.limit(
        "it waits for its GPU, or for a run of a step without its graph; another rank of the group may have failed",
        seconds,
    )


def largest(*values: float) -> tuple[float, ...]:
    """The largest of each of *values* that a rank gave.

    Every rank of the group has to call it; a rank alone gets its own. Where a rank does not come, or is gone, this
    process ends: it cannot know what the other one does instead.
    """
    others = group()
    if others.world_size == 1:
        return values
    import torch

    given = torch.tensor(values, dtype=torch.float64)
    with watchdog.limit("it waits for another rank of its group"):
        try:
            torch.distributed.all_reduce(given, torch.distributed.ReduceOp.MAX, group=others.cpu_group)
        except Exception as error:
            watchdog.end(f"the ranks of its group cannot agree any more: {description(error)}")
    return tuple(given.tolist())


def paired(prepare: Callable[[], object], run: Callable[[], T], seconds: float | None = None) -> T:
    """What *run* returns, a forward pass with its collectives: every rank of the group begins it, or none does.

    Within *seconds*, by default `watchdog.LIMIT`; the run is given that limit. *prepare* may fail on any rank, and
    queues no collective. Raises what failed here, or FailedElsewhereError; StepError if nothing worse has failed on
    another rank. Then as many collectives were queued on every rank, or this process has ended.
    """
    if alone():
        prepare()
        return run()
    with limited(seconds):
        with Attempt() as attempt:
            prepare()
        (anywhere,) = largest(attempt.error is not None)
    if anywhere:
        raise attempt.error or FailedElsewhereError
    with limited(), Attempt() as attempt:
        output = run()
    if (failed := attempt.error) is not None:
        logger.warning("graphfix: a run of a step without its graph has failed on this rank: %s", description(failed))
    (worst,) = largest(0.0 if failed is None else _STEP if isinstance(failed, StepError) else _OTHER)
    if worst:
        _wait_for_collectives(failed)
        raise failed or (StepError(str(FailedElsewhereError())) if worst == _STEP else FailedElsewhereError())
    return output


def _wait_for_collectives(failed: Exception | None) -> None:
    """Returns if all that the ranks have queued has come to its end. On a CPU a collective has when it returns."""
    where = (
        f"here: {description(failed)}" if failed is not None else "on another rank of the group, whose log says more"
    )
    what = f"a run of a step without its graph failed {where}. The collectives of the other ranks have found no partner"
    with watchdog.limit(what, watchdog.DRAIN):
        try:
            _synchronize()
        except Exception as error:
            watchdog.end(f"{what}: {description(error)}")
    largest(0.0)


def _synchronize() -> None:
    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def place_in_pipeline() -> tuple[int, int, str, bool]:
    """This rank's stage; how many there are; the name of their pipeline; and whether this rank tells the others.

    A rank that does tells them for its tensor-parallel group. Those that do are the first ranks of their groups, one
    pipeline among themselves, with a name that no other one has.
    """
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    pipeline: Any = get_pp_group()
    return (
        int(pipeline.rank_in_group),
        int(pipeline.world_size),
        str(pipeline.ranks[0]),
        get_tp_group().rank_in_group == 0,
    )
