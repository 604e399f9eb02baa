"""draft-stale-views (PR 48261): metadata of another batch in the warm-ups of the draft's prefill graphs."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import torch

from vllm_graphfix.verify.double.flashmla import install_flashmla_stand_ins
from vllm_graphfix.verify.double.graph import cpu_cuda_graphs
from vllm_graphfix.verify.measurement import Measurement

install_flashmla_stand_ins()

from vllm.config.compilation import CUDAGraphMode  # noqa: E402 - FlashMLA is looked for when vLLM is imported
from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager  # noqa: E402
from vllm.v1.worker.gpu.spec_decode.autoregressive.speculator import AutoRegressiveSpeculator  # noqa: E402

from vllm_graphfix.verify.double.decoding import (  # noqa: E402
    DEVICE,
    MAX_REQUESTS,
    ModelStandIn,
    RunnerStandIn,
    configuration,
    measure,
)

DRAFT_TOKENS = 1
QUERY_TOKENS = DRAFT_TOKENS + 1
SIZES = tuple(QUERY_TOKENS * requests for requests in (1, 2, MAX_REQUESTS))
LAYER = "attention"
"""Name of the target's attention layer and of the draft's: they are in one group, so that one builder makes the
metadata of both."""


def run(*, trigger: bool = True) -> Measurement:
    """Measure the starts and lengths of requests that each warm-up sees. Without *trigger*, there is one graph."""
    sizes = SIZES if trigger else SIZES[-1:]
    numbers = f"starts and lengths of requests in the draft's warm-ups for {len(sizes)} graphs"
    return measure(
        numbers,
        lambda: [_as_they_are(size // QUERY_TOKENS) for size in reversed(sizes)],
        lambda: _seen(sizes),
        {"views-of-another-batch": len(sizes) - 1},
    )


def _as_they_are(requests: int) -> torch.Tensor:
    starts = torch.arange(requests + 1) * QUERY_TOKENS
    return torch.cat([starts, starts.diff()])  # in a dummy batch no request has more tokens than are computed


def _seen(sizes: tuple[int, ...]) -> list[torch.Tensor]:
    seen: list[torch.Tensor] = []

    def draft(requests: int, tokens: int, metadata: Any, *_: Any) -> None:
        """Stand in for the speculator's prefill, which runs the draft model on *metadata*."""
        if not torch.cuda.is_current_stream_capturing():
            metadata_of_layer = metadata[LAYER]
            seen.append(torch.cat([metadata_of_layer.query_start_loc, metadata_of_layer.decode.seq_lens]).clone())

    with cpu_cuda_graphs():
        capture(sizes, draft)
    return seen


def capture(
    sizes: tuple[int, ...], draft: Any, mode: CUDAGraphMode = CUDAGraphMode.FULL_DECODE_ONLY, **further: Any
) -> Any:
    """Return the manager of the draft's graphs of *sizes* tokens, captured after the target's.

    *further* are arguments of the target's capture.
    """
    config = configuration(mode, sizes, DRAFT_TOKENS)
    runner = RunnerStandIn(config, [LAYER])
    target: Any = ModelCudaGraphManager(config, DEVICE, mode, QUERY_TOKENS)
    pairs = target.capture(model=ModelStandIn([LAYER]), intermediate_tensors=None, **runner.capture_inputs(), **further)
    drafting = SimpleNamespace(vllm_config=config, device=DEVICE, num_speculative_steps=DRAFT_TOKENS)
    AutoRegressiveSpeculator.init_cudagraph_manager(drafting, mode)
    manager: Any = drafting.prefill_cudagraph_manager
    if "attn_states" in inspect.signature(manager.capture).parameters:
        manager.capture(draft, pairs)
    else:  # upstream's remedy: one manager for all of the draft's graphs builds what it needs
        manager.capture(draft, **runner.capture_inputs())
    return manager
