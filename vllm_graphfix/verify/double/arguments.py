"""Arguments for vLLM's functions, whose parameters differ between releases."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

KERNEL_CONFIG = SimpleNamespace(ir_op_priority=SimpleNamespace(set_priority=nullcontext))
"""The part of a KernelConfig that forward contexts read in later releases."""


def supported_kwargs(function: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of *values* that *function* has a parameter for, in the order of its parameters."""
    return {name: values[name] for name in inspect.signature(function).parameters if name in values}


def input_batch(
    requests: int, longest: int, tokens: int, block_sizes: Sequence[int], device: Any, vocabulary: int = 8
) -> Any:
    """Return model runner V1's empty batch for up to *requests* requests of *longest* tokens each.

    It has one group of layers for each of *block_sizes*.
    """
    from vllm.v1.worker.gpu_input_batch import InputBatch

    values = {
        "max_num_reqs": requests,
        "max_model_len": longest,
        "max_num_batched_tokens": tokens,
        "device": device,
        "pin_memory": False,
        "vocab_size": vocabulary,
        "block_sizes": list(block_sizes),
        "kernel_block_sizes": list(block_sizes),
        "max_num_blocks_per_req": [-(-longest // size) for size in block_sizes],
    }
    return InputBatch(**supported_kwargs(InputBatch, values))


def cached_request(
    name: str, prompt: Sequence[int], blocks: tuple[list[int], ...], computed: int = 0, **further: Any
) -> Any:
    """Return a request of model runner V1's batch, sampled greedily unless *further* holds other `sampling_params`.

    *blocks* are its block ids, one list for each group of layers; *computed* of its tokens are in the cache.
    """
    from vllm.sampling_params import SamplingParams
    from vllm.v1.worker.gpu_input_batch import CachedRequestState

    values = {
        "req_id": name,
        "prompt_token_ids": list(prompt),
        "mm_features": [],
        "sampling_params": SamplingParams(temperature=0.0),
        "generator": None,
        "block_ids": blocks,
        "num_computed_tokens": computed,
        "output_token_ids": [],
    }
    return CachedRequestState(**values | further)
