"""flash-mixed-schedule: full graphs of prompts and decodes together, on FlashAttention 3.

Real: vLLM's metadata builder and FlashAttention layer. Stand-ins: the kernel and its scheduler.
"""

from __future__ import annotations

from vllm.config import CUDAGraphMode

from vllm_graphfix.verify.double.flash_attention import Batch, attend, flash_attention_stand_ins, metadata_builder
from vllm_graphfix.verify.double.graph import cpu_cuda_graphs
from vllm_graphfix.verify.double.model_runners import wrappers_on_the_double
from vllm_graphfix.verify.measurement import Measurement

REQUESTS, TOKENS = 4, 8
STEPS: list[Batch] = [([1, 1, 1], [9, 23, 14]), ([1, 5, 1], [10, 9, 15]), ([1, 1, 4, 1], [11, 10, 4, 16])]
"""Query tokens and lengths of the requests, step by step: decodes, some with prompts among them."""
ALONE: list[Batch] = [([TOKENS], [TOKENS + length]) for length in (0, 6, 13)]
"""Steps like the capture's: one request, whose query fills the graph."""


def run(*, trigger: bool = True) -> Measurement:
    """Serve queries of at most five tokens in a graph for eight. Without *trigger*, one of eight tokens."""
    steps = STEPS if trigger else ALONE
    eager = _serve(steps, captured=False)
    with cpu_cuda_graphs():
        graphed = _serve(steps, captured=True)
    return Measurement(
        f"attention of {sum(len(queries) for queries, _ in steps)} requests in {len(steps)} steps of a graph for "
        f"{TOKENS} tokens",
        tuple(eager),
        tuple(graphed),
        counted={"schedules-made-for-the-graph": len(steps) if trigger else 0},
    )


def watched(*, trigger: bool = True) -> None:
    """Replay the graphs of `run` in vLLM's wrapper of full graphs, for the shadow check."""
    with wrappers_on_the_double():
        _serve(STEPS if trigger else ALONE, captured=True, wrapped=True)


def _serve(steps: list[Batch], *, captured: bool, wrapped: bool = False) -> list[float]:
    with flash_attention_stand_ins(3):
        builder = metadata_builder(CUDAGraphMode.FULL if captured else CUDAGraphMode.NONE, REQUESTS, [TOKENS])
        # Model runner V1 captures one request of all tokens.
        return attend(builder, ([TOKENS], [TOKENS]), steps, REQUESTS, TOKENS, wrapped=wrapped)
