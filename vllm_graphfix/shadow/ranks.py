"""Agreement among the ranks that have collectives in a forward pass, and the pairing of a further run's collectives.

The ranks agree through vLLM's own CPU group: the tensor-parallel one or, for a mixture of experts with data
parallelism, that of all ranks that share the experts. In the engines that are checked, every other group with
collectives in a forward pass (decode context parallelism, say) is a part of it. Stages of a pipeline are at different
steps and share no collective; they communicate through a store (`stages`).

A rank that fails in the middle of a run has queued fewer collectives than the others. It must queue no other one: a
later collective would pair with theirs, and from there on every sum would mix two steps. So a run begins when all ranks
are ready, which may take as long as vLLM lets a step take. Where a run has failed on one rank, every rank waits until
its GPU is idle before it continues. A rank that does not reach that point ends its process (`watchdog`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from types import TracebackType
from typing import Any, TypeVar

from vllm_graphfix.log import logger
from vllm_graphfix.shadow import watchdog
from vllm_graphfix.shadow.failures import Attempt, FailedElsewhereError, StepError, description

T = TypeVar("T")
Stop = Callable[[Exception], None]
"""Turns the check off because of an error."""
_DEFAULT_STEP_TIMEOUT = 300.0
"""Seconds; vLLM's default."""
_STEP, _OTHER = 1.0, 2.0
"""Kinds of failures; the group acts on the largest."""


def group() -> Any:
    """Return vLLM's group of all ranks with which this one has collectives in a forward pass."""
    from vllm.distributed import parallel_state

    tensor_parallel: Any = parallel_state.get_tp_group()
    # A mixture of experts has an expert group. Without data parallelism it is the tensor-parallel one.
    experts: Any = getattr(parallel_state, "_EP", None)
    return experts if experts is not None and experts.world_size > tensor_parallel.world_size else tensor_parallel


_was_single_rank = True


def is_single_rank() -> bool:
    """Tell whether this rank has no other one in its group, so that a failure concerns nobody else.

    A group that cannot be read is as it was before: a rank that took itself for the only one would let the others wait
    for it as long as a step may take. Without any group, as before vLLM makes one, the rank is alone.
    """
    global _was_single_rank  # noqa: PLW0603 - one process is one rank
    with suppress(Exception):
        _was_single_rank = bool(group().world_size == 1)
    return _was_single_rank


def step_timeout() -> float:
    """Return the seconds that all ranks may take to arrive at a step; as many as vLLM's executor allows.

    Until then nothing is queued that stock would not queue, and a rank may encode images, load an adapter or a cache,
    or compile.
    """
    try:
        from vllm import envs

        return max(watchdog.LIMIT, float(envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS))
    except Exception:  # the variable is not a number
        return _DEFAULT_STEP_TIMEOUT


def deadline(seconds: float | None = None) -> Any:
    """Return a context manager that lets *seconds* pass between two agreements of the ranks, and no more.

    The default is the limit of the enclosing block, or `watchdog.LIMIT`.
    """
    if is_single_rank():
        return nullcontext()
    return watchdog.limit(
        "it waits for its GPU, or for a run of a step without its graph; another rank of the group may have failed",
        seconds,
    )


def all_reduce_max(*values: float) -> tuple[float, ...]:
    """Return the maximum of each of *values* over the ranks of the group, each of which has to call this.

    If a rank does not come, this process ends: it cannot know what the other one does instead.
    """
    try:
        others = group()
        if others.world_size == 1:
            return values
        import torch

        tensor = torch.tensor(values, dtype=torch.float64)
        with watchdog.limit("it waits for another rank of its group"):
            torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.MAX, group=others.cpu_group)
        return tuple(tensor.tolist())
    except Exception as error:
        if is_single_rank():
            raise
        # Also for an error before the collective: the others would wait there for as long as a step may take.
        watchdog.end(f"the ranks of its group cannot agree any more: {description(error)}")


class GroupAttempt(Attempt):
    """A ``with`` block at whose end the ranks of the group agree, even if the block fails on one of them.

    Afterwards `values` are the maxima over the ranks. If the block failed anywhere, `failed` is true, and *stop* was
    called on every rank.
    """

    def __init__(self, stop: Stop, *values: float, error: Exception | None = None) -> None:
        """Start with *values*, which the block may replace, and with an earlier *error* of this rank."""
        super().__init__()
        self._stop, self.values, self.error = stop, values, error
        self.failed = True

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> bool:
        if not super().__exit__(kind, error, trace) and error is not None:
            return False  # an interrupt ends this process, and the others notice that
        try:
            anywhere, *values = all_reduce_max(self.error is not None, *self.values)
            self.values = tuple(values)
        except Exception as failure:
            anywhere, self.error = 1.0, self.error or failure
        self.failed = bool(anywhere)
        if self.failed:
            self._stop(self.error or FailedElsewhereError())
        return True


def run_collectively(prepare: Callable[[], object], run: Callable[[], T], seconds: float | None = None) -> T:
    """Return the result of *run*, a forward pass that every rank of the group begins, or none does.

    *prepare* may fail on any rank, and queues no collective. Ranks have *seconds* to arrive, by default
    `watchdog.LIMIT`, which also limits the run. Raises this rank's own error; or StepError if nothing worse than that
    failed on another rank, else FailedElsewhereError. Then every rank has queued as many collectives as the others;
    where that is not so, this process ends.
    """
    if is_single_rank():
        prepare()
        return run()
    with deadline(seconds):
        with Attempt() as attempt:
            prepare()
        (anywhere,) = all_reduce_max(attempt.error is not None)
    if anywhere:
        raise attempt.error or FailedElsewhereError
    with deadline(), Attempt() as attempt:
        output = run()
    if (failed := attempt.error) is not None:
        logger.warning("graphfix: a run of a step without its graph has failed on this rank: %s", description(failed))
    (worst,) = all_reduce_max(0.0 if failed is None else _STEP if isinstance(failed, StepError) else _OTHER)
    if worst:
        _wait_for_collectives(failed)
        raise failed or (StepError(str(FailedElsewhereError())) if worst == _STEP else FailedElsewhereError())
    return output


def _wait_for_collectives(failed: Exception | None) -> None:
    """Wait until every collective that the ranks have queued is complete; on a CPU it is when its call returns."""
    where = (
        f"here: {description(failed)}" if failed is not None else "on another rank of the group, whose log says more"
    )
    what = f"a run of a step without its graph failed {where}. The collectives of the other ranks have found no partner"
    with watchdog.limit(what, watchdog.DRAIN):
        try:
            _synchronize()
        except Exception as error:
            watchdog.end(f"{what}: {description(error)}")
    all_reduce_max(0.0)


def _synchronize() -> None:
    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def place_in_pipeline() -> tuple[int, int, str, bool]:
    """Return this rank's stage, the number of stages, the name of their pipeline, and whether this rank speaks for it.

    The first rank of each tensor-parallel group speaks for its stage. These ranks form one pipeline, whose name no
    other pipeline has.
    """
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    pipeline: Any = get_pp_group()
    return (
        int(pipeline.rank_in_group),
        int(pipeline.world_size),
        str(pipeline.ranks[0]),
        get_tp_group().rank_in_group == 0,
    )
