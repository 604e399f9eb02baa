"""What the ranks of a tensor-parallel group agree about, through vLLM's own CPU group: a check runs their collectives once more.

No more than that group: the stages of a pipeline are at different steps, and the forward pass of one has no collective with another. What
they tell each other goes through a store (`stages`).
"""

from __future__ import annotations

from typing import Any


def largest(*values: float) -> tuple[float, ...]:
    """Of each of *values* the largest that a rank gave. Every rank of the group has to call it; a rank alone gets its own."""
    from vllm.distributed.parallel_state import get_tp_group

    group: Any = get_tp_group()
    if group.world_size == 1:
        return values
    import torch

    told = torch.tensor(values, dtype=torch.float64)
    torch.distributed.all_reduce(told, torch.distributed.ReduceOp.MAX, group=group.cpu_group)
    return tuple(told.tolist())


def place_in_pipeline() -> tuple[int, int, str, bool]:
    """This rank's stage; how many there are; the name of their pipeline; and whether this rank tells the others, for its tensor-parallel group.

    Those that do are the first ranks of their groups, one pipeline among themselves, with a name that no other one has.
    """
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    pipeline: Any = get_pp_group()
    return (
        int(pipeline.rank_in_group),
        int(pipeline.world_size),
        str(pipeline.ranks[0]),
        get_tp_group().rank_in_group == 0,
    )
